"""From decisions to a policy: ranges of batch and context that have the same length, without gaps, from 1 to no end.

Neighbours are joined when one length will do for all of them, losing less than a hundredth anywhere, at the low end
too: a policy that switches at every batch costs an engine more than that. What was switched off stays off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specctl.schemas.policy import Cell
from specctl.tune.choice import SAMPLES, Chooser, Decision, Key

EVERY_BATCH = 256
"""Up to here a decision is made for every batch, beyond it for those of the profile."""

LOSS = 0.01


@dataclass(frozen=True)
class Range:
    low: int
    high: int | None


@dataclass(frozen=True)
class Grid:
    """Every batch that is decided for, at every context of the profile: rows[batch][context]. tops: the largest batch
    that is known at each context; beyond it caches do not fit."""

    batches: list[int]
    contexts: list[int]
    rows: list[list[Decision]]
    tops: dict[int, int]

    @classmethod
    def of(cls, chooser: Chooser) -> Grid:
        contexts, batches = chooser.costs.steps.contexts, tried_batches(chooser.costs.steps.batches)
        columns = [chooser.decide_all(batches, context) for context in contexts]
        tops: dict[int, int] = {}
        for batch, context, _ in chooser.costs.steps.rows():
            tops[context] = max(tops.get(context, 0), batch)
        return cls(batches, contexts, [list(row) for row in zip(*columns, strict=True)], tops)

    def knows(self, decision: Decision) -> bool:
        return decision.batch <= self.tops[decision.context]

    def at(self, batch: int, context: int) -> Decision:
        return self.rows[self.batches.index(batch)][self.contexts.index(context)]


def context_ranges(contexts: Sequence[int]) -> list[Range]:
    """The range that each context stands for; neighbours meet at their geometric mean."""
    bounds = [math.isqrt(low * high) for low, high in pairwise(contexts)]
    return [Range(low, high) for low, high in zip([1, *(b + 1 for b in bounds)], [*bounds, None], strict=True)]


def tried_batches(batches: Sequence[int]) -> list[int]:
    """Every batch that is decided for."""
    top = max(batches)
    return [*range(1, min(top, EVERY_BATCH) + 1), *(b for b in sorted(batches) if b > EVERY_BATCH)]


def cells(chooser: Chooser, grid: Grid) -> list[Cell]:
    """The policy's cells, as few as will do. speedup: the lowest, the middle and the highest over what was joined."""
    keys = {decision.chosen.key for row in grid.rows for decision in row if grid.knows(decision)}
    fits = _fits(chooser, grid, keys)
    spans = common_blocks(fits)
    found: list[Cell] = []
    for (low, high), following in zip(spans, [*spans[1:], None], strict=True):
        batch = Range(grid.batches[low], None if following is None else grid.batches[following[0]] - 1)
        columns = [shared_keys([fits[b][c] for b in range(low, high)]) for c in range(len(grid.contexts))]
        ranges = context_ranges(grid.contexts)
        for key, first, last in _joined(columns):
            context = Range(ranges[first].low, ranges[last].high)
            places = {
                c: [b for b in grid.batches[low:high] if b <= grid.tops[c]] for c in grid.contexts[first : last + 1]
            }
            speedup = _speedup(chooser, places, key)
            found.append(
                Cell(
                    batch=[batch.low, batch.high],
                    context=[context.low, context.high],
                    k=key[0],
                    confidence=key[1],
                    speedup=speedup,
                )
            )
    return found


def _fits(chooser: Chooser, grid: Grid, keys: set[Key]) -> list[list[dict[Key, float]]]:
    """By batch and context: what would do there, each with what it keeps of the chosen one's speed. Where nothing fits
    into memory anything will do."""
    columns = []
    for c, context in enumerate(grid.contexts):
        speeds = chooser.speeds(grid.batches, context, keys, 0)
        columns.append(
            [
                _fits_at(row[c], {key: float(speeds[key][b, 0]) for key in keys})
                if grid.knows(row[c])
                else dict.fromkeys(keys, 1.0)
                for b, row in enumerate(grid.rows)
            ]
        )
    return [list(row) for row in zip(*columns, strict=True)]


def _fits_at(decision: Decision, speeds: dict[Key, float]) -> dict[Key, float]:
    chosen = decision.chosen
    if chosen.k == 0:
        return {chosen.key: 1.0}
    plain_keys = {each.key: i for i, each in enumerate(decision.candidates)}
    fits = {chosen.key: 1.0}
    for key, speed in speeds.items():
        index = plain_keys.get(key)
        barred = index is not None and (
            (any(decision.within) and not decision.within[index]) or (index > 0 and decision.lows[index] < 1 - LOSS)
        )
        if not barred and speed >= (1 - LOSS) * chosen.speedup:
            fits[key] = min(1.0, speed / chosen.speedup)  # where it is as good, the shorter will do
    return fits


def common_blocks(fits: Sequence[Sequence[dict[Key, float]]]) -> list[tuple[int, int]]:
    """Batches from low to before high, each block as long as something does for all of it at every context."""
    blocks: list[tuple[int, int]] = []
    start, common = 0, [set(column) for column in fits[0]]
    for b, row in enumerate(fits):
        both = [known & set(column) for known, column in zip(common, row, strict=True)]
        if not all(both):
            blocks.append((start, b))
            start, both = b, [set(column) for column in row]
        common = both
    return [*blocks, (start, len(fits))]


def shared_keys(fits: Sequence[dict[Key, float]]) -> dict[Key, float]:
    """What does for all of them, with the sum of what it keeps."""
    keys = set.intersection(*(set(each) for each in fits))
    return {key: sum(each[key] for each in fits) for key in keys}


def _joined(shared: Sequence[dict[Key, float]]) -> list[tuple[Key, int, int]]:
    """(key, first, last) of contexts that one key does for: the one that keeps most, the shorter of equals."""
    joined: list[tuple[Key, int, int]] = []
    start, common = 0, dict(shared[0])
    for c, here in enumerate(shared):
        both = {key: common[key] + here[key] for key in common.keys() & here.keys()} if c else dict(here)
        if not both:
            joined.append((keeps_most(common), start, c - 1))
            start, both = c, dict(here)
        common = both
    return [*joined, (keeps_most(common), start, len(shared) - 1)]


def keeps_most(kept: dict[Key, float]) -> Key:
    return min(kept, key=lambda key: (-round(kept[key], 9), key[0], key[1] or 0.0))


def _speedup(chooser: Chooser, places: dict[int, list[int]], key: Key) -> list[float] | None:
    """places: batches by context. None where none of them is known."""
    low, middle, high = [], [], []
    for context, batches in places.items():
        if not batches:
            continue
        speed_NS = chooser.speeds(batches, context, [key], SAMPLES)[key]
        bounds = np.quantile(speed_NS[:, 1:], [0.025, 0.975], axis=1)
        low.append(np.minimum(bounds[0], speed_NS[:, 0]).min())
        high.append(np.maximum(bounds[1], speed_NS[:, 0]).max())
        middle += speed_NS[:, 0].tolist()
    if not middle:
        return None
    return [float(min(low)), sorted(middle)[len(middle) // 2], float(max(high))]
