"""Ways of choosing K held against each other over what is served: one K for all, the i.i.d. formula, this policy, and
the best that the same predictions allow.

All are judged by the same model, per-position survival over the profile's costs: it says what a choice costs if the
model is right, and nothing about whether it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.schemas.policy import PolicyFile
from specctl.tune.acceptance import constant
from specctl.tune.choice import Chooser, Decision
from specctl.tune.goodput import Candidate, with_draft

ALIKE = 0.005


@dataclass(frozen=True)
class Served:
    """Where time goes: places with their share of the time that plain decoding takes there. words: what that is."""

    decisions: list[Decision]
    shares: list[float]
    words: str

    def gain(self, speedup: Callable[[Decision], float]) -> float:
        """Plain time over time, all together."""
        pairs = zip(self.decisions, self.shares, strict=True)
        return 1 / sum(share / speedup(decision) for decision, share in pairs)


def evenly(decisions: Sequence[Decision], words: str = "every batch and context of the profile alike") -> Served:
    return Served(list(decisions), [1 / len(decisions)] * len(decisions), words)


def by_tokens(decisions: Sequence[Decision], tokens: Sequence[float], words: str) -> Served:
    """tokens: the share of output tokens at each place."""
    times = [share * float(d.times.plain_S[0]) / d.batch for d, share in zip(decisions, tokens, strict=True)]
    return Served(list(decisions), [time / sum(times) for time in times], words)


@dataclass(frozen=True)
class Way:
    """ks: its length at each place. gain: over plain decoding, over all that is served. loss: against the best there is
    at each place, where it is greatest."""

    name: str
    ks: list[int]
    gain: float
    loss: float


def ways(served: Served, chooser: Chooser, policy: PolicyFile) -> list[Way]:
    """Fixed lengths first, the policy and the best last. The policy as it is written: joined ranges and all."""

    def of_policy(decision: Decision) -> Candidate:
        cell = policy.lookup(decision.batch, decision.context)
        return chooser.candidate(decision, (cell.k, cell.confidence))

    most = len(served.decisions[0].candidates) - 1
    found = [_way(f"fixed K = {k}", served, _at(k)) for k in range(most + 1)]
    found.append(_way("i.i.d. formula", served, lambda decision: decision.candidates[_iid_k(decision)]))
    found.append(_way("this policy", served, of_policy))
    found.append(_way("best in the data", served, lambda decision: decision.best))
    return found


def best_fixed(served: Served) -> int:
    """The shortest of the lengths that are as good for all of it as the best one, but for half a hundredth."""
    gains = [served.gain(_speed_at(k)) for k in range(len(served.decisions[0].candidates))]
    return next(k for k, gain in enumerate(gains) if gain >= (1 - ALIKE) * max(gains))


def _speed_at(k: int) -> Callable[[Decision], float]:
    return lambda decision: decision.candidates[k].speedup


def _at(k: int) -> Callable[[Decision], Candidate]:
    return lambda decision: decision.candidates[k]


def _way(name: str, served: Served, pick: Callable[[Decision], Candidate]) -> Way:
    picked = [pick(decision) for decision in served.decisions]
    best = [max(d.best.speedup, d.chosen.speedup) for d in served.decisions]
    losses = [1 - each.speedup / top for each, top in zip(picked, best, strict=True)]
    return Way(name, [each.k for each in picked], served.gain(lambda d: pick(d).speedup), max(0.0, *losses))


def _iid_k(decision: Decision) -> int:
    """As the textbook has it: the first token's rate for every token. What it brings in truth is another matter."""
    first = decision.candidates[1]
    if first.drafting <= 0:
        return 0
    rate = min(1.0, max(0.0, first.accepted / first.drafting))
    most = len(decision.candidates) - 1
    iid, times = constant(rate, most), decision.times.first()
    speeds = [1.0 * float(times.plain_S[0] / times.without_S[0])]
    for k in range(1, most + 1):
        speeds.append(with_draft(times, iid.outlook(iid.stops[0], k, np.ones((1, 1))), decision.batch).speedup)
    return int(np.argmax(np.round(speeds, 12)))
