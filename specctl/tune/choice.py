"""The choice at one batch and context: the length with the best goodput, or a smaller one that cannot be told from it,
and a confidence stop where one pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.tune.acceptance import Acceptance, Outlook
from specctl.tune.costs import StepCosts, StepTimes
from specctl.tune.goodput import Candidate, with_draft, without_draft

SAMPLES = 400
LEAST_REQUESTS = 8
"""Fewer cannot be divided into those that choose a stop and those that judge it."""

EQUAL = 1e-9


@dataclass(frozen=True)
class Decision:
    """candidates: K = 0 first, then every length under the least stop there is, by K. best: the fastest of them by
    prediction. chosen: the one to run, of the candidates or one with a stop of its own."""

    batch: int
    context: int
    times: StepTimes
    candidates: list[Candidate]
    best: Candidate
    chosen: Candidate


class Chooser:
    """Decides for any batch and context up to one k_max. What drafting brings does not depend on either, so it is
    worked out once: for all requests, and for the two halves that choose a stop and judge it."""

    def __init__(self, costs: StepCosts, acceptance: Acceptance, k_max: int) -> None:
        self.costs = costs
        self.acceptance = acceptance
        self.k_max = k_max
        all_SR = acceptance.weights(SAMPLES)
        first_R = np.arange(acceptance.num_requests) % 2 == 0
        self._all = self._outlooks(all_SR)
        self._first: list[list[Outlook]] = []
        self._second: list[list[Outlook]] = []
        # A draw may leave one half without a request, which happens where there are few.
        if acceptance.num_requests >= LEAST_REQUESTS and (all_SR @ ~first_R).all():
            self._first, self._second = self._outlooks(all_SR[:1] * first_R), self._outlooks(all_SR * ~first_R)

    def decide(self, batch: int, context: int) -> Decision:
        times = self.costs.at(batch, context, self.k_max, SAMPLES)
        candidates = [without_draft(times), *(with_draft(times, outlook, batch) for outlook in self._all[0])]
        best = max(candidates, key=lambda candidate: candidate.speedup)
        chosen = smallest_like(best, candidates)
        return Decision(batch, context, times, candidates, best, self._with_stop(times, batch, chosen) or chosen)

    def _outlooks(self, weight_SR: np.ndarray) -> list[list[Outlook]]:
        """By stop and length."""
        lengths = range(1, self.k_max + 1)
        return [[self.acceptance.outlook(blocks, k, weight_SR) for k in lengths] for blocks in self.acceptance.stops]

    def _with_stop(self, times: StepTimes, batch: int, without: Candidate) -> Candidate | None:
        """The best stop, if it pays. It is chosen by one half of the requests and judged by the other: the best of many
        looks better than it is on whatever it was chosen by."""
        options = [(stop, index) for stop in range(1, len(self._first)) for index in range(self.k_max)]
        if not options:
            return None
        first = times.first()
        stop, index = max(options, key=lambda at: with_draft(first, self._first[at[0]][at[1]], batch).speedup)
        judged = with_draft(times, self._second[stop][index], batch)
        base = with_draft(times, self._second[0][without.k - 1], batch) if without.k else without
        if np.quantile(judged.speedup_S / base.speedup_S, 0.025) <= 1:
            return None
        return with_draft(times, self._all[stop][index], batch)


def smallest_like(best: Candidate, candidates: Sequence[Candidate]) -> Candidate:
    """The smallest K whose loss against the best is within one standard deviation of that loss, draws paired."""
    for candidate in sorted(candidates, key=lambda candidate: candidate.k):
        ratio_S = candidate.speedup_S / best.speedup_S
        doubt = float(ratio_S[1:].std()) if len(ratio_S) > 1 else 0.0
        if 1 - ratio_S[0] <= max(doubt, EQUAL):
            return candidate
    return best
