"""Every error a user can meet, one tree. `assert` is for our bugs; these are for people.

SpecctlError                  exit 2 unless a subclass says otherwise
├── UsageError                a flag, a recipe, a policy or a prompt file is wrong
├── CheckpointError           a checkpoint's files, names, shapes or config are wrong, or what it is is not supported
├── IncompatiblePair          target and draft cannot work together
├── RequestError              one request is wrong; knows the parameter (HTTP 400)
├── MissingDependency         an optional package is not installed (exit 3)
├── CapacityError             not enough memory, pages, disk or devices (exit 3)
├── EngineUnreachable         a server that is to be asked does not answer (exit 3)
└── GateFailed                a measured value missed its gate (exit 1)

A message is one sentence: which file, key or tensor; what was expected; what to do.
"""

from __future__ import annotations


class SpecctlError(Exception):
    exit_code = 2


class UsageError(SpecctlError):
    """Raised for wrong command-line values, prompt files, recipes and policies."""


class CheckpointError(SpecctlError):
    """Raised when a checkpoint cannot be read as what it claims to be."""


class IncompatiblePair(SpecctlError):
    """Raised when a draft cannot draft for a target, before anything runs."""


class RequestError(SpecctlError):
    """Raised for one bad request; the engine and its other requests are unharmed."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NumericalError(SpecctlError):
    """Raised when a model computes no numbers any more. request_ids: the engine's requests it happened to, which are
    ended; the others are unharmed."""

    def __init__(self, message: str, request_ids: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class MissingDependency(SpecctlError):
    """Raised when an optional package is needed and absent."""

    exit_code = 3


class CapacityError(SpecctlError):
    """Raised when the machine is too small: memory, KV pages, disk, devices."""

    exit_code = 3


class EngineUnreachable(SpecctlError):
    """Raised when a running engine cannot be reached, or goes away while it is asked."""

    exit_code = 3


class GateFailed(SpecctlError):
    """Raised when a promised figure was measured and missed."""

    exit_code = 1
