"""From decisions to a policy: ranges of batch and context that have the same length, without gaps, from 1 to no end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from specctl.schemas.policy import Cell
from specctl.tune.choice import Chooser, Decision

EVERY_BATCH = 256
"""Up to here a decision is made for every batch, beyond it for those of the profile."""


@dataclass(frozen=True)
class Range:
    low: int
    high: int | None


def context_ranges(contexts: Sequence[int]) -> list[Range]:
    """The range that each context stands for; neighbours meet at their geometric mean."""
    bounds = [math.isqrt(low * high) for low, high in pairwise(contexts)]
    return [Range(low, high) for low, high in zip([1, *(b + 1 for b in bounds)], [*bounds, None], strict=True)]


def tried_batches(batches: Sequence[int]) -> list[int]:
    """Every batch that is decided for."""
    top = max(batches)
    return [*range(1, min(top, EVERY_BATCH) + 1), *(b for b in sorted(batches) if b > EVERY_BATCH)]


def cells(chooser: Chooser) -> list[Cell]:
    """The policy's cells: neighbouring batches with the same lengths and stops in every context are joined, and then
    neighbouring contexts. speedup: the lowest, the middle and the highest over what was joined."""
    contexts = chooser.costs.steps.contexts
    rows = [[chooser.decide(b, c) for c in contexts] for b in tried_batches(chooser.costs.steps.batches)]
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: [_key(decision) for decision in row])]
    found: list[Cell] = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        batch = Range(block[0][0].batch, None if following is None else following[0][0].batch - 1)
        by_context = zip(context_ranges(contexts), zip(*block, strict=True), strict=True)
        for _, same in groupby(by_context, key=lambda part: _key(part[1][0])):
            joined = list(same)
            context = Range(joined[0][0].low, joined[-1][0].high)
            found.append(_cell(batch, context, [decision for _, column in joined for decision in column]))
    return found


def _key(decision: Decision) -> tuple[int, float | None]:
    return decision.chosen.k, decision.chosen.confidence


def _cell(batch: Range, context: Range, decisions: list[Decision]) -> Cell:
    bands = [decision.chosen.band for decision in decisions]
    low, middle, high = min(b[0] for b in bands), sorted(b[1] for b in bands)[len(bands) // 2], max(b[2] for b in bands)
    chosen = decisions[0].chosen
    return Cell(
        batch=[batch.low, batch.high],
        context=[context.low, context.high],
        k=chosen.k,
        confidence=chosen.confidence,
        speedup=[low, middle, high],
    )
