"""Goodput of every draft length at one batch and context: tokens a step over the time a step takes.

Legend: N batches, if there are many; S draws of acceptance and cell noise (the first without any), K draft lengths
from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specctl.tune.acceptance import Outlook
from specctl.tune.costs import StepTimes

ALWAYS = 1 - 1e-12


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
    def key(self) -> tuple[int, float | None]:
        return self.k, self.confidence

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
    def tpot_ms(self) -> float:
        """Milliseconds a token of one sequence, prefill apart."""
        return float(self.step_S[0] / self.tokens_S[0])

    @property
    def band(self) -> tuple[float, float, float]:
        """2.5 %, the prediction, 97.5 %."""
        low, high = np.quantile(self.speedup_S[1:], [0.025, 0.975]) if len(self.speedup_S) > 1 else (np.inf, -np.inf)
        return min(float(low), self.speedup), self.speedup, max(float(high), self.speedup)


def without_draft(times: StepTimes) -> Candidate:
    """K = 0."""
    return Candidate(0, None, np.ones_like(times.plain_S), times.without_S, times.plain_S / times.without_S, 0.0, 0.0)


def with_draft(times: StepTimes, outlook: Outlook, batch: int) -> Candidate:
    return candidate(outlook, step_ms(times, outlook, np.array(batch)), times.plain_S)


def candidate(outlook: Outlook, step_S: np.ndarray, plain_S: np.ndarray) -> Candidate:
    return Candidate(
        k=outlook.k,
        confidence=outlook.confidence,
        tokens_S=outlook.tokens_S,
        step_S=step_S,
        speedup_S=outlook.tokens_S * plain_S / step_S,
        drafting=float(outlook.reach_SK[0, 0]),
        drafted=float(outlook.reach_SK[0].sum()),
    )


def step_ms(times: StepTimes, outlook: Outlook, batch: np.ndarray) -> np.ndarray:
    """[S], or [N, S] where times are of N batches: what a step takes on average. batch: one, or N.

    All sequences of a step get as many rows as the longest block among them needs; blocks of different sequences are
    taken to be independent. A step in which nobody has one is a plain step.
    """
    k, reach_SK = outlook.k, np.clip(outlook.reach_SK, 0, 1)
    if reach_SK.min() >= ALWAYS:
        return times.drafting_S(k, k)
    batch = batch[..., None]
    step_S: np.ndarray
    nobody_S = (1 - reach_SK[:, 0]) ** batch
    if (reach_SK == reach_SK[:, :1]).all():  # blocks are whole or there are none
        step_S = nobody_S * times.drafting_S(k, 0) + (1 - nobody_S) * times.drafting_S(k, k)
        return step_S
    step_S = nobody_S * times.drafting_S(k, 0)
    for longest in range(1, k + 1):
        shorter_S = nobody_S
        nobody_S = (1 - reach_SK[:, longest]) ** batch if longest < k else np.ones_like(shorter_S)
        step_S = step_S + (nobody_S - shorter_S) * times.drafting_S(k, longest)
    return step_S
