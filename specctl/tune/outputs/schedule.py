"""What an engine can be told of a policy: a K for each range of batches, or one K for all. Contexts and confidence
stops are more than any of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.schemas.policy import PolicyFile
from specctl.tune.choice import Decision, Key
from specctl.tune.compare import Served, best_fixed
from specctl.tune.places import known
from specctl.tune.ranges import LOSS, common_blocks, keeps_most, shared_keys
from specctl.tune.run import Tuning

IN_TARGET = ("mtp", "ngram")
"""Kinds that need no model of their own."""


@dataclass(frozen=True)
class Tier:
    """Batches from low to high, both included; None: and all above."""

    low: int
    high: int | None
    k: int


@dataclass(frozen=True)
class Schedule:
    """tiers: the K of every batch. static: the one K that is best for all that is served. largest: batch that was
    looked at. kind: of the draft, None where it is not known. draft: where its weights are, None likewise.
    data_parallel: engines side by side that share the work. lost: by having one K for all contexts, and by having one K
    at all, at most and over all that is served. not_said: what of the policy no engine takes."""

    tiers: tuple[Tier, ...]
    static: int
    largest: int
    kind: str | None
    draft: str | None
    data_parallel: int
    lost: float
    static_gain: float
    policy_gain: float
    not_said: tuple[str, ...]

    @property
    def longest(self) -> int:
        return max(tier.k for tier in self.tiers)

    @property
    def speculates(self) -> bool:
        return self.longest > 0

    @property
    def off_above(self) -> int | None:
        """The last batch that speculates, where all above it do not."""
        last = self.tiers[-1]
        return last.low - 1 if last.k == 0 and last.low > 1 else None

    @property
    def static_words(self) -> str:
        return (
            f"one K for all batches: {self.static} is the best, {self.static_gain:.2f} x over all that is served where "
            f"the policy has {self.policy_gain:.2f} x"
        )


@dataclass(frozen=True)
class Engine:
    """files: by name, for one engine. notes: what it does not take, or does otherwise."""

    name: str
    files: dict[str, str]
    notes: tuple[str, ...]


def schedule(tuning: Tuning, served: Served, policy_gain: float, draft: str | None, data_parallel: int) -> Schedule:
    tiers = _tiers(tuning)
    static = best_fixed(served)
    return Schedule(
        tiers=tiers,
        static=static,
        largest=tuning.grid.batches[-1],
        kind=tuning.policy.draft.kind,
        draft=draft,
        data_parallel=data_parallel,
        lost=_lost(tuning, tiers) if any(cell.context != [1, None] for cell in tuning.policy.k) else 0.0,
        static_gain=served.gain(lambda decision: decision.candidates[static].speedup),
        policy_gain=policy_gain,
        not_said=tuple(_not_said(tuning.policy)),
    )


def _tiers(tuning: Tuning) -> tuple[Tier, ...]:
    """The policy's own, where it has one K at all contexts; else the K that is best over them, all alike."""
    cells = tuning.policy.k
    if all(cell.context == [1, None] for cell in cells):
        return _joined([Tier(cell.batch[0] or 1, cell.batch[1], cell.k) for cell in cells])
    tops = known(tuning)
    rows = [[d for d in row if d.batch <= tops[d.context]] or row for row in tuning.grid.rows]
    fits = [_fits(row) for row in rows]
    batches, found = tuning.grid.batches, []
    spans = common_blocks([[fit] for fit in fits])
    for (low, high), following in zip(spans, [*spans[1:], None], strict=True):
        key = keeps_most(shared_keys(fits[low:high]))
        found.append(Tier(batches[low], None if following is None else batches[following[0]] - 1, key[0]))
    return _joined(found)


def _fits(row: Sequence[Decision]) -> dict[Key, float]:
    """What one K keeps of the best one K, all contexts alike; off where it is off at every context."""
    if all(decision.chosen.k == 0 for decision in row):
        return {(0, None): 1.0}
    speeds: dict[Key, float] = {}
    for k in range(len(row[0].candidates)):
        if k == 0 or any(decision.lows[k] > 1 - LOSS for decision in row):
            speeds[k, None] = len(row) / sum(1 / decision.candidates[k].speedup for decision in row)
    chosen = len(row) / sum(1 / _without_stop(decision) for decision in row)
    least = min(chosen, max(speeds.values()))
    return {key: min(1.0, speed / least) for key, speed in speeds.items() if speed >= (1 - LOSS) * least}


def _joined(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    joined: list[Tier] = []
    for tier in tiers:
        if joined and joined[-1].k == tier.k:
            joined[-1] = Tier(joined[-1].low, tier.high, tier.k)
        else:
            joined.append(tier)
    return tuple(joined)


def _lost(tuning: Tuning, tiers: Sequence[Tier]) -> float:
    """Where it is most."""
    worst, tops = 0.0, known(tuning)
    for row in ([d for d in row if d.batch <= tops[d.context]] for row in tuning.grid.rows):
        if not row:
            continue
        k = next(tier.k for tier in tiers if tier.high is None or row[0].batch <= tier.high)
        worst = max(worst, *(1 - decision.candidates[k].speedup / _without_stop(decision) for decision in row))
    return worst


def _without_stop(decision: Decision) -> float:
    return (decision.chosen if decision.chosen in decision.candidates else decision.best).speedup


def _not_said(policy: PolicyFile) -> list[str]:
    said = []
    if any(cell.confidence is not None for cell in policy.k):
        said.append("confidence stops: none of these engines stops a draft by its confidence, so blocks are whole")
    if policy.accept.method in ("typical", "threshold"):
        said.append(f"lossy acceptance ({policy.accept.method}): these files leave the engine's own lossless rule")
    if policy.at_k0 == "detach":
        said.append("at_k0 detach: an engine that has a draft keeps it in step, which costs something at K = 0")
    return said
