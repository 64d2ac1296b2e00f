"""SamplingParams and Accept: what one request asks of sampling. Plain values, checked once; no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specctl.errors import RequestError, UsageError

MAX_K = 16
"""The longest block of a chain; it bounds the slots that an engine keeps free for a step."""

METHODS = ("exact", "coupled", "typical", "threshold")
LOSSY = ("typical", "threshold")


@dataclass(frozen=True)
class Accept:
    """How drafted tokens are accepted. exact and coupled leave the target's distribution unchanged; the others do not.

    threshold: least product of target probabilities of an accepted prefix ("threshold").
    epsilon, delta: a token needs p >= min(epsilon, delta * exp(-entropy of p)) ("typical").
    """

    method: str = "exact"
    threshold: float = 0.0
    epsilon: float = 0.09
    delta: float = 0.3

    @classmethod
    def parse(cls, text: str) -> Accept:
        """`exact`, `coupled`, `typical` or `threshold=T` with 0 < T <= 1. Raises UsageError."""
        method, _, value = text.partition("=")
        if method not in METHODS or (method == "threshold") != bool(value):
            raise UsageError(f"accept {text!r}: expected exact, coupled, typical or threshold=T with 0 < T <= 1")
        if method != "threshold":
            return cls(method)
        try:
            threshold = float(value)
        except ValueError:
            threshold = math.nan
        if not 0 < threshold <= 1:
            raise UsageError(f"accept {text!r}: the threshold must be a number above 0 and at most 1")
        return cls(method, threshold=threshold)

    @property
    def lossy(self) -> bool:
        return self.method in LOSSY

    def __str__(self) -> str:
        return f"threshold={self.threshold:g}" if self.method == "threshold" else self.method


@dataclass(frozen=True)
class SamplingParams:
    """One request. 0 or 1 mean "off" as in the field: top_k 0, top_p 1, min_p 0, penalties 1, 0 and 0.

    seed: makes the request repeatable alone and in company; with accept None and temperature > 0 it selects coupled.
    n: number of choices. logprobs: None for none, else how many alternatives beside the chosen token.
    k: draft length of this request; None leaves it to the policy. accept: None means by the rule above.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    k: int | None = None
    accept: Accept | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, param: str, expected: str) -> None:
            if not ok:
                raise RequestError(f"{param} is {getattr(self, param)!r}, expected {expected}", param)

        finite = math.isfinite
        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(finite(self.temperature) and self.temperature >= 0, "temperature", "a number from 0 up")
        need(0 <= self.top_k < 2**31, "top_k", "0 (off) or a positive 32-bit integer")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        need(self.n >= 1, "n", "at least 1")
        need(all(self.stop), "stop", "non-empty strings")
        need(self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more")
        need(self.k is None or self.k >= 0, "k", "0 or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def acceptance(self) -> Accept:
        """The method in force: the one asked for, else coupled for a seeded request that samples, else exact."""
        if self.accept is not None:
            return self.accept
        return Accept("coupled") if self.seed is not None and not self.greedy else Accept("exact")
