"""A profile's cells as a function of batch, context and rows: exact at a cell, linear between cells, and beyond the
outermost cell what it costs there.

Between batches a step may cross a number of tokens at which kernels change and the time jumps. Such an edge is known
from the rows of the neighbouring batches, which cross it at other lengths: the jump is taken out of both, what is left
is drawn as a line, and the jump is put back where it belongs. Otherwise the cheap side of an edge would never be seen.

Whole steps have in every block, and not in a plain step, what drafting costs whatever its length. So no line is drawn
from the plain step to the least block that was timed: shorter ones are taken to cost as much as that, which is the most
they can, and the difference between the two is no edge.

Legend: N batches, Q rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from specctl.schemas.profile import StepCell

Values = tuple[np.ndarray, np.ndarray]
"""Milliseconds and their spread."""

EDGES = (64, 128, 256)
"""Tokens of a step after which kernels take another tile."""

JUMP = 0.1
"""A jump is a tenth of the step more than the rows around it explain."""


class Cells:
    """One kind of cell. whole: steps with the draft's part in them."""

    def __init__(self, cells: Sequence[StepCell], whole: bool = False) -> None:
        rows: dict[int, dict[int, list[tuple[int, float, float]]]] = {}
        for cell in sorted(cells, key=lambda cell: cell.place):
            rows.setdefault(cell.batch, {}).setdefault(cell.context, []).append((cell.q, cell.ms, cell.spread))
        self._table = {
            batch: {context: np.array(values).T for context, values in contexts.items()}
            for batch, contexts in rows.items()
        }
        self._whole = whole
        self._known: dict[tuple[tuple[int, ...], float, tuple[float, ...]], Values] = {}
        self._jumps = {
            (batch, context): jumps(batch, *values[:2, int(whole and values[0, 0] == 1) :])
            for batch, contexts in self._table.items()
            for context, values in contexts.items()
        }

    def __bool__(self) -> bool:
        return bool(self._table)

    @property
    def batches(self) -> list[int]:
        return list(self._table)

    @property
    def contexts(self) -> list[int]:
        return sorted({context for contexts in self._table.values() for context in contexts})

    def rows(self) -> list[tuple[int, int, list[int]]]:
        """(batch, context, the numbers of rows there) of every place."""
        return [
            (batch, context, [int(q) for q in values[0]])
            for batch, contexts in self._table.items()
            for context, values in contexts.items()
        ]

    def at(self, batch: int, context: float, rows: np.ndarray) -> Values:
        """Of these numbers of rows, which have to lie within those of every cell."""
        ms_NQ, spread_NQ = self.at_all([batch], context, rows)
        return ms_NQ[0], spread_NQ[0]

    def at_all(self, batches: Sequence[int], context: float, rows: np.ndarray) -> Values:
        """The same for many batches: [N, Q] each, to be read only."""
        asked = (tuple(batches), context, tuple(rows.tolist()))
        if asked not in self._known:
            self._known[asked] = self._between(batches, context, rows)
        return self._known[asked]

    def _between(self, batches: Sequence[int], context: float, rows: np.ndarray) -> Values:
        known = list(self._table)
        ms_NQ, spread_NQ = np.zeros((len(batches), len(rows))), np.zeros((len(batches), len(rows)))
        cached: dict[int, tuple[np.ndarray, np.ndarray, dict[int, float]]] = {}
        for n, batch in enumerate(batches):
            near = _around(known, batch)
            for each, _ in near:
                if each not in cached:
                    cached[each] = self._along(each, context, rows)
            jump_Q = _jump_of([cached[each][2] for each, _ in near], batch, rows) if len(near) > 1 else 0.0
            for each, share in near:
                own_Q = _jump_of([cached[b][2] for b, _ in near], each, rows) if len(near) > 1 else 0.0
                ms_NQ[n] += share * (cached[each][0] - own_Q)
                spread_NQ[n] += share * cached[each][1]
            ms_NQ[n] += jump_Q
        return ms_NQ, spread_NQ

    def _along(self, batch: int, context: float, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, float]]:
        """At a batch that was profiled: milliseconds, spread, and the jump at each edge it crosses."""
        ms_Q, spread_Q = np.zeros(len(rows)), np.zeros(len(rows))
        found: dict[int, float] = {}
        for near, part in _around(list(self._table[batch]), context):
            q, cell_ms, cell_spread = self._table[batch][near]
            asked_Q = np.where(rows > 1, np.maximum(rows, q[1]), rows) if self._whole and len(q) > 1 else rows
            ms_Q += part * np.interp(asked_Q, q, cell_ms)
            spread_Q += part * np.interp(asked_Q, q, cell_spread)
            for edge, jump in self._jumps[batch, near].items():
                found[edge] = found.get(edge, 0.0) + part * jump
        return ms_Q, spread_Q, found


def jumps(batch: int, q_Q: np.ndarray, ms_Q: np.ndarray) -> dict[int, float]:
    """What a batch's own rows say about the edges they cross: milliseconds that the slopes beside them do not explain.
    Where two edges lie between the same rows nothing can be told of either."""
    if len(q_Q) < 3:
        return {}
    slope_Q = np.diff(ms_Q) / np.diff(q_Q)
    last = {edge: int(np.searchsorted(batch * q_Q, edge, side="right")) - 1 for edge in EDGES}
    crossed = [at for at in last.values() if 0 <= at < len(slope_Q)]
    found: dict[int, float] = {}
    for edge, at in last.items():
        if crossed.count(at) != 1:
            continue
        before = [i for i in range(at) if i not in crossed][-1:]
        after = [i for i in range(at + 1, len(slope_Q)) if i not in crossed][:1]
        if not before and not after:
            continue
        usual = max(0.0, *(float(slope_Q[i]) for i in (*before, *after)))
        jump = float((slope_Q[at] - usual) * (q_Q[at + 1] - q_Q[at]))
        found[edge] = jump if jump > JUMP * ms_Q[at] else 0.0
    return found


def _jump_of(near: Sequence[dict[int, float]], batch: int, rows: np.ndarray) -> np.ndarray:
    """All jumps that a batch has passed with these rows, each as large as the batches around say on average."""
    total_Q = np.zeros(len(rows))
    for edge in {edge for jumps in near for edge in jumps}:
        said = [jumps[edge] for jumps in near if edge in jumps]
        total_Q += np.where(batch * rows > edge, sum(said) / len(said), 0.0)
    return total_Q


def _around(points: list[int], x: float) -> list[tuple[int, float]]:
    """The points next to x with their weights, for linear interpolation; the outermost one alone beyond them."""
    points = sorted(points)
    if x <= points[0]:
        return [(points[0], 1.0)]
    for low, high in pairwise(points):
        if x < high:
            share = (x - low) / (high - low)
            return [(low, 1 - share), (high, share)] if share else [(low, 1.0)]
    return [(points[-1], 1.0)]
