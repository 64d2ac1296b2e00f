"""Goodput of every draft length at one batch and context: tokens a step over the time a step takes.

Legend: S draws of acceptance and cell noise (the first without any), K draft lengths from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.tune.acceptance import Outlook
from specctl.tune.costs import StepTimes


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run. confidence: its stop. Per sequence: tokens_S a step, step_S its milliseconds. speedup_S: against
    plain decoding without a draft. drafting: the share of a sequence's steps that have a block; drafted: tokens of one,
    over all steps."""

    k: int
    confidence: float | None
    tokens_S: np.ndarray
    step_S: np.ndarray
    speedup_S: np.ndarray
    drafting: float
    drafted: float

    @property
    def accepted(self) -> float:
        """Drafted tokens that a step keeps."""
        return float(self.tokens_S[0]) - 1

    @property
    def speedup(self) -> float:
        return float(self.speedup_S[0])

    @property
    def tok_s(self) -> float:
        """Of one sequence."""
        return float(1000 * self.tokens_S[0] / self.step_S[0])

    @property
    def band(self) -> tuple[float, float, float]:
        """2.5 %, the prediction, 97.5 %."""
        low, high = np.quantile(self.speedup_S[1:], [0.025, 0.975]) if len(self.speedup_S) > 1 else (np.inf, -np.inf)
        return min(float(low), self.speedup), self.speedup, max(float(high), self.speedup)


def without_draft(times: StepTimes) -> Candidate:
    """K = 0."""
    return Candidate(0, None, np.ones_like(times.plain_S), times.without_S, times.plain_S / times.without_S, 0.0, 0.0)


def with_draft(times: StepTimes, outlook: Outlook, batch: int) -> Candidate:
    """All sequences of a step get as many rows as the longest block among them needs; blocks of different sequences are
    taken to be independent. A step in which nobody has one is a plain step."""
    k = outlook.k
    longest_SK = 1 - (1 - np.clip(outlook.reach_SK, 0, 1)) ** batch  # the chance that somebody has k tokens
    step_S = (1 - longest_SK[:, 0]) * times.drafting_S(k, 0)
    for longest in range(1, k + 1):
        beyond_S = longest_SK[:, longest] if longest < k else 0.0
        step_S = step_S + (longest_SK[:, longest - 1] - beyond_S) * times.drafting_S(k, longest)
    return Candidate(
        k=k,
        confidence=outlook.confidence,
        tokens_S=outlook.tokens_S,
        step_S=step_S,
        speedup_S=outlook.tokens_S * times.plain_S / step_S,
        drafting=float(outlook.reach_SK[0, 0]),
        drafted=float(outlook.reach_SK[0].sum()),
    )
