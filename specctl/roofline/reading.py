"""A profile as it is used: what noise made fall with more work is made monotone, and steps are padded as the engine
pads them. The file keeps its raw values.

The envelope is the mean of the largest value at or before a place and the smallest at or after it, over batches and
rows together; monotone values are their own. No cell is moved by more than two of its standard deviations: beyond
that a fall is taken to be real, so that an exact cell, with no spread, never moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from specctl.schemas.profile import Profile, StepCell
from specctl.schemas.roofline import Graphs

DEVIATIONS = 2
Cell = TypeVar("Cell", bound=StepCell)


def as_read(profile: Profile) -> Profile:
    """The same profile with every cell's time as a step really takes it."""
    graphs = profile.engine.graphs
    changed = {key: read_cells(getattr(profile, key), graphs) for key in ("steps", "draft", "draft_follow")}
    return profile.model_copy(update=changed)


def read_cells(cells: Sequence[Cell], graphs: Graphs | None) -> list[Cell]:
    found: list[Cell] = []
    for context in sorted({cell.context for cell in cells}):
        table = _Table([cell for cell in cells if cell.context == context])
        found += table.cells(graphs)
    return sorted(found, key=lambda cell: cell.place)


class _Table:
    """The cells of one context by batch and rows, NaN where there is none."""

    def __init__(self, cells: Sequence[Any]) -> None:
        self._of = {(cell.batch, cell.q): cell for cell in cells}
        self._batches = sorted({cell.batch for cell in cells})
        self._rows = sorted({cell.q for cell in cells})
        ms = np.full((len(self._batches), len(self._rows)), np.nan)
        spread = np.zeros_like(ms)
        for (batch, q), cell in self._of.items():
            at = self._batches.index(batch), self._rows.index(q)
            ms[at], spread[at] = cell.ms, cell.spread
        move = envelope(ms) - ms
        self._ms = ms + np.clip(move, -DEVIATIONS * spread, DEVIATIONS * spread)

    def cells(self, graphs: Graphs | None) -> list[Any]:
        found: list[Any] = []
        for (batch, q), cell in self._of.items():
            ms = self._at(batch, q)
            if graphs is not None and cell.source != "measured":  # what was measured was padded
                ms = self._padded(batch, q, graphs, ms)
            found.append(cell.model_copy(update={"ms": ms, "spread": cell.spread * ms / cell.ms}))
        return found

    def _at(self, batch: int, q: int) -> float:
        return float(self._ms[self._batches.index(batch), self._rows.index(q)])

    def _padded(self, batch: int, q: int, graphs: Graphs, ms: float) -> float:
        """What as many rows as the engine pads to would take: of a larger batch, between those that are known."""
        size = batch * q if graphs.unit == "tokens" else batch
        index = bisect_left(graphs.sizes, size)
        if index == len(graphs.sizes):
            return ms
        wide = graphs.sizes[index] / (q if graphs.unit == "tokens" else 1)
        column = self._ms[:, self._rows.index(q)]
        there = ~np.isnan(column)
        batches = np.array(self._batches)[there]
        return ms if wide > batches[-1] else float(np.interp(wide, batches, column[there]))


def envelope(ms: np.ndarray) -> np.ndarray:
    """Monotone along both axes. NaN is nothing, and stays."""
    upper, lower = ms, ms
    for axis in (0, 1):
        upper = np.fmax.accumulate(upper, axis=axis)
        lower = np.flip(np.fmin.accumulate(np.flip(lower, axis), axis=axis), axis)
    result: np.ndarray = np.where(np.isnan(ms), np.nan, (upper + lower) / 2)
    return result
