"""The choice at one batch and context: the length with the best goodput, or a smaller one that cannot be told from it,
and a confidence stop where one pays. Speculation is on only where even the low end of what it gains is a gain.

Legend: N batches; S draws; C candidates, by K from 0; O stops and lengths together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from specctl.tune.acceptance import Acceptance, ByContext, Outlook
from specctl.tune.costs import StepCosts, StepTimes
from specctl.tune.goodput import Candidate, candidate, step_ms, with_draft, without_draft
from specctl.tune.limits import NO_LIMITS, Limits

SAMPLES = 400
LEAST_REQUESTS = 8
"""Fewer cannot be divided into those that choose a stop and those that judge it."""

EQUAL = 1e-9
LOW = 0.025

Key = tuple[int, float | None]
"""A length and its stop."""


@dataclass(frozen=True)
class Decision:
    """candidates: K = 0 first, then every length under the least stop there is, by K. best: the fastest of them by
    prediction. chosen: the one to run, of the candidates or one with a stop of its own. lows: the low end
    of what every candidate is against K = 0. within: which of them keep to the limits."""

    batch: int
    context: int
    times: StepTimes
    candidates: list[Candidate]
    best: Candidate
    chosen: Candidate
    lows: list[float]
    within: list[bool]


class Chooser:
    """Decides for any batch and context up to one k_max. What drafting brings does not depend on the batch, so it is
    worked out once for each context that acceptance is known at."""

    def __init__(
        self, costs: StepCosts, acceptance: Acceptance | ByContext, k_max: int, limits: Limits = NO_LIMITS
    ) -> None:
        self.costs = costs
        self.k_max = k_max
        self.limits = limits
        self.by_context = ByContext(((1.0, acceptance),)) if isinstance(acceptance, Acceptance) else acceptance
        self._prospects = [_Prospects.of(each, k_max) for _, each in self.by_context.entries]

    @property
    def acceptance(self) -> Acceptance:
        return self.by_context.entries[0][1]

    def decide(self, batch: int, context: int) -> Decision:
        return self.decide_all([batch], context)[0]

    def decide_all(self, batches: Sequence[int], context: int) -> list[Decision]:
        """For many batches at one context."""
        prospects = self._prospects[self.by_context.index(context)]
        times = self.costs.at_all(batches, context, self.k_max, SAMPLES)
        batch_N = np.array(batches)
        without = without_draft(times)
        drafting = [(outlook, step_ms(times, outlook, batch_N)) for outlook in prospects.all[0]]
        speed_CNS = np.stack([without.speedup_S, *(_speed(outlook, step, times) for outlook, step in drafting)])
        tpot_CN = np.stack([without.step_S[:, 0], *(step[:, 0] / outlook.tokens_S[0] for outlook, step in drafting)])
        within_CN = self.limits.within(tpot_CN, batch_N)
        picked = _pick(speed_CNS, within_CN)
        stops = self._stops(prospects, times, batch_N, picked)
        decisions = []
        for n, batch in enumerate(batches):
            here = times.of(n)
            candidates = [without_draft(here), *(candidate(o, step[n], here.plain_S) for o, step in drafting)]
            best, chosen = candidates[picked.best_N[n]], candidates[picked.chosen_N[n]]
            if n in stops:
                chosen = with_draft(here, stops[n], batch)
            lows, within = picked.low_CN[:, n].tolist(), within_CN[:, n].tolist()
            decisions.append(Decision(batch, context, here, candidates, best, chosen, lows, within))
        return decisions

    def speeds(self, batches: Sequence[int], context: int, keys: Iterable[Key], samples: int) -> dict[Key, np.ndarray]:
        """[N, 1 + samples] for each: the speed-up of these lengths and stops, whatever is chosen. samples: 0 for the
        prediction alone, else SAMPLES."""
        assert samples in (0, SAMPLES)
        prospects = self._prospects[self.by_context.index(context)]
        times = self.costs.at_all(batches, context, self.k_max, samples)
        found: dict[Key, np.ndarray] = {}
        for k, confidence in keys:
            if k == 0:
                found[k, confidence] = without_draft(times).speedup_S
                continue
            outlook = next(each[k - 1] for each in prospects.all if each[0].confidence == confidence)
            found[k, confidence] = _speed_of(times, outlook if samples else outlook.first(), np.array(batches))
        return found

    def candidate(self, decision: Decision, key: Key) -> Candidate:
        """What this length and stop would be there, where something else may have been chosen."""
        known = next((each for each in (decision.chosen, *decision.candidates) if each.key == key), None)
        if known is not None:
            return known
        prospects = self._prospects[self.by_context.index(decision.context)]
        outlook = next(each[key[0] - 1] for each in prospects.all if each[0].confidence == key[1])
        return with_draft(decision.times, outlook, decision.batch)

    def _stops(
        self, prospects: _Prospects, times: StepTimes, batch_N: np.ndarray, picked: _Picked
    ) -> dict[int, Outlook]:
        """The best stop of each batch, where it pays. It is chosen by one half of the requests and judged by the other:
        the best of many looks better than it is on whatever it was chosen by."""
        options = [(stop, index) for stop in range(1, len(prospects.first)) for index in range(self.k_max)]
        if not options:
            return {}
        first = times.first()
        speed_ON = np.stack([_speed_of(first, prospects.first[s][i], batch_N)[:, 0] for s, i in options])
        best_N = speed_ON.argmax(0)
        found: dict[int, Outlook] = {}
        order = sorted(range(len(batch_N)), key=lambda n: (best_N[n], picked.chosen_N[n]))
        for (option, chosen), group in groupby(order, key=lambda n: (best_N[n], picked.chosen_N[n])):
            some = list(group)
            stop, index = options[option]
            here, batches = times.of(some), batch_N[some]
            judged = _speed_of(here, prospects.second[stop][index], batches)
            base = here.plain_S / here.without_S
            if chosen:
                base = _speed_of(here, prospects.second[0][chosen - 1], batches)
            for n, low in zip(some, np.quantile(judged / base, LOW, axis=1), strict=True):
                if low > 1:
                    found[n] = prospects.all[stop][index]
        return found


@dataclass(frozen=True)
class _Prospects:
    """Outlooks by stop and length: for all requests, and for the two halves that choose a stop and judge it."""

    all: list[list[Outlook]]
    first: list[list[Outlook]] = field(default_factory=list)
    second: list[list[Outlook]] = field(default_factory=list)

    @classmethod
    def of(cls, acceptance: Acceptance, k_max: int) -> _Prospects:
        all_SR = acceptance.weights(SAMPLES)

        def outlooks(weight_SR: np.ndarray) -> list[list[Outlook]]:
            lengths = range(1, k_max + 1)
            return [[acceptance.outlook(blocks, k, weight_SR) for k in lengths] for blocks in acceptance.stops]

        first_R = np.arange(acceptance.num_requests) % 2 == 0
        known = acceptance.by_requests and len(acceptance.stops) > 1 and acceptance.num_requests >= LEAST_REQUESTS
        # A draw may leave one half without a request, which happens where there are few.
        if known and (all_SR @ ~first_R).all():
            return cls(outlooks(all_SR), outlooks(all_SR[:1] * first_R), outlooks(all_SR * ~first_R))
        return cls(outlooks(all_SR))


@dataclass(frozen=True)
class _Picked:
    best_N: np.ndarray
    chosen_N: np.ndarray
    low_CN: np.ndarray


def _pick(speed_CNS: np.ndarray, within_CN: np.ndarray) -> _Picked:
    """best: the fastest. chosen: the smallest K whose loss against it is within one standard deviation of that loss,
    draws paired, if even the low end of what it gains is a gain; else the fastest of those that gain; else K = 0. Where
    only some keep to the limits it is one of these."""
    first_CN = speed_CNS[..., 0]
    best_N = first_CN.argmax(0)
    column = np.arange(speed_CNS.shape[1])
    ratio_CNS = speed_CNS / speed_CNS[best_N, column]
    gain_CNS = speed_CNS / speed_CNS[0]
    if speed_CNS.shape[2] > 1:
        doubt_CN = ratio_CNS[..., 1:].std(-1)
        low_CN = np.minimum(np.quantile(gain_CNS[..., 1:], LOW, axis=-1), gain_CNS[..., 0])
    else:
        doubt_CN, low_CN = np.zeros_like(first_CN), gain_CNS[..., 0]
    forced_N = within_CN.any(0) & ~within_CN[0]  # a limit that K = 0 misses goes before doubt
    worth_CN = np.where(within_CN.any(0), within_CN, True) & ((low_CN > 1) | forced_N)
    like_CN = 1 - ratio_CNS[..., 0] <= np.maximum(doubt_CN, EQUAL)
    fit_CN = like_CN & worth_CN
    fit_CN[0] = like_CN[0] & ~forced_N
    fastest_N = np.where(worth_CN, first_CN, -np.inf).argmax(0)
    chosen_N = np.where(fit_CN.any(0), fit_CN.argmax(0), np.where(worth_CN.any(0), fastest_N, 0))
    return _Picked(best_N, chosen_N, low_CN)


def _speed(outlook: Outlook, step_NS: np.ndarray, times: StepTimes) -> np.ndarray:
    speed_NS: np.ndarray = outlook.tokens_S * times.plain_S / step_NS
    return speed_NS


def _speed_of(times: StepTimes, outlook: Outlook, batch_N: np.ndarray) -> np.ndarray:
    return _speed(outlook, step_ms(times, outlook, batch_N), times)
