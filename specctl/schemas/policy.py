"""POLICY.yaml: the draft length by number of decoding sequences and context length, and how drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.sampling.params import Accept
from specctl.schemas.base import Checked, Document, read_document

SCHEMA = "specctl.policy/1"

Range = Annotated[list[int | None], Field(min_length=2, max_length=2)]
Positive = Annotated[float, Field(gt=0)]


class Bound(Checked):
    """What the policy was made for. digest: its tensors_sha, or null when it is bound to nothing."""

    name: str | None = None
    digest: str | None = None


class BoundDraft(Checked):
    """kind, digest: null when it is bound to none. max_k: the most it can draft."""

    kind: str | None
    digest: str | None = None
    max_k: Annotated[int, Field(ge=1)] | None = None


class AcceptRule(Checked):
    method: Literal["exact", "coupled", "typical", "threshold"]
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    epsilon: Positive | None = None
    delta: Positive | None = None
    divergence_kl: float | None = None
    interval: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _fits_method(self) -> Self:
        if (self.method == "threshold") != (self.threshold is not None):
            raise ValueError(
                f"method {self.method} goes {'with' if self.method == 'threshold' else 'without'} a threshold"
            )
        if self.method != "typical" and (self.epsilon is not None or self.delta is not None):
            raise ValueError(f"method {self.method} goes without epsilon and delta")
        return self

    def as_accept(self) -> Accept:
        given = {key: value for key in ("threshold", "epsilon", "delta") if (value := getattr(self, key)) is not None}
        return Accept(self.method, **given)


class Cell(Checked):
    """batch, context: inclusive ranges [lo, hi], hi null for "and all above". confidence: the stop, or null."""

    batch: Range
    context: Range
    k: Annotated[int, Field(ge=0)]
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    speedup: Annotated[list[Positive], Field(min_length=3, max_length=3)] | None = None

    def holds(self, batch: int, context: int) -> bool:
        return _inside(self.batch, batch) and _inside(self.context, context)


class PolicyFile(Document):
    target: Bound
    draft: BoundDraft
    accept: AcceptRule
    at_k0: Literal["follow", "detach"] = "follow"
    k: Annotated[list[Cell], Field(min_length=1)]

    @model_validator(mode="after")
    def _covers_everything(self) -> Self:
        if self.schema_ != SCHEMA:
            raise ValueError(f"schema is {self.schema_!r}, expected {SCHEMA!r}")
        batches = sorted({tuple(cell.batch) for cell in self.k}, key=lambda r: r[0] or 0)
        _check_ranges("batch", batches)
        for batch in batches:
            _check_ranges(
                f"context (batch {list(batch)})", [tuple(c.context) for c in self.k if tuple(c.batch) == batch]
            )
        top = max(cell.k for cell in self.k)
        if self.draft.max_k is not None and top > self.draft.max_k:
            raise ValueError(f"k {top} is more than the draft's max_k {self.draft.max_k}")
        return self

    @property
    def max_k(self) -> int:
        return max(cell.k for cell in self.k)

    def lookup(self, batch: int, context: float) -> Cell:
        """The cell for a step: batch = decoding sequences, context = their mean cached length (rounded, from 1 up)."""
        at = max(1, round(context))
        return next(cell for cell in self.k if cell.holds(max(batch, 1), at))


def read_policy(path: Path) -> PolicyFile:
    return read_document(path, PolicyFile)


def check_bound(policy: PolicyFile, path: Path, kind: str, draft_sha: str | None, target_sha: str | None) -> list[str]:
    """Notices about a policy's use with this pair. Raises UsageError when it was made for another draft or target."""
    notices = []
    if policy.draft.kind is None:
        notices.append(f"{path}: is bound to no kind of draft; whether its lengths suit this one is not known")
    elif policy.draft.kind != kind:
        raise UsageError(f"{path}: is a policy for a draft of kind {policy.draft.kind}, this draft is of kind {kind}")
    for what, bound, found in (
        ("draft", policy.draft.digest, draft_sha),
        ("target", policy.target.digest, target_sha),
    ):
        if bound is None:
            if not (what == "draft" and kind == "ngram"):
                notices.append(f"{path}: is bound to no {what} (digest null); whether it fits this one is not known")
        elif found is not None and bound != found:
            raise UsageError(
                f"{path}: was made for a {what} with tensors_sha {bound[:12]}, this {what}'s is {found[:12]}; "
                "run tune for this pair"
            )
    return notices


def _inside(bounds: Iterable[int | None], value: int) -> bool:
    low, high = bounds
    return (low or 1) <= value and (high is None or value <= high)


def _check_ranges(what: str, ranges: list[tuple[int | None, ...]]) -> None:
    """Inclusive ranges from 1 without gaps or overlaps, the last without an end."""
    expected: int | None = 1
    for low, high in sorted(ranges, key=lambda r: r[0] or 0):
        if expected is None or low != expected:
            raise ValueError(
                f"{what} ranges must follow each other from 1: found {[low, high]} where {expected} should start"
            )
        if high is not None and high < low:
            raise ValueError(f"{what} range {[low, high]} is empty")
        expected = None if high is None else high + 1
    if expected is not None:
        raise ValueError(f"{what} ranges end at {expected - 1}, the last hi must be null")
