"""What a step costs at any batch and context, from a profile's cells: exact at a cell, linear between cells, and beyond
the outermost cell what it costs there. It knows nothing about acceptance.

Legend: S samples of the cells' uncertainty, the first without noise; K draft lengths from 1; Q rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from specctl.errors import UsageError
from specctl.schemas.profile import Profile, StepCell

SEED = 0

Values = tuple[np.ndarray, np.ndarray]
"""Milliseconds and their spread."""


class Cells:
    """One kind of cell as a function of batch, context and rows."""

    def __init__(self, cells: Sequence[StepCell]) -> None:
        rows: dict[int, dict[int, list[tuple[int, float, float]]]] = {}
        for cell in sorted(cells, key=lambda cell: cell.place):
            rows.setdefault(cell.batch, {}).setdefault(cell.context, []).append((cell.q, cell.ms, cell.spread))
        self._table = {
            batch: {context: np.array(values).T for context, values in contexts.items()}
            for batch, contexts in rows.items()
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
        ms, spread = np.zeros(len(rows)), np.zeros(len(rows))
        for near_batch, share in _around(list(self._table), batch):
            for near_context, part in _around(list(self._table[near_batch]), context):
                q, cell_ms, cell_spread = self._table[near_batch][near_context]
                ms += share * part * np.interp(rows, q, cell_ms)
                spread += share * part * np.interp(rows, q, cell_spread)
        return ms, spread


@dataclass(frozen=True)
class StepTimes:
    """At one batch and context, in milliseconds. target_SQ: a pass over q + 1 rows, at index q. draft_S: a draft step.
    follow_SK: the draft's pass after a block of k + 1, at index k; follow_plain_S: after a plain step. runs_draft:
    whether the draft has passes at all; follows_plain: also after plain steps; detaches: but not
    at K = 0, where the draft is given up."""

    target_SQ: np.ndarray
    draft_S: np.ndarray
    follow_SK: np.ndarray
    follow_plain_S: np.ndarray
    base: float
    spec: float
    per_draft_step: float
    runs_draft: bool
    follows_plain: bool
    detaches: bool

    def first(self) -> StepTimes:
        """Without the noise."""
        rows = slice(1)
        return replace(
            self,
            target_SQ=self.target_SQ[rows],
            draft_S=self.draft_S[rows],
            follow_SK=self.follow_SK[rows],
            follow_plain_S=self.follow_plain_S[rows],
        )

    @property
    def plain_S(self) -> np.ndarray:
        """A step of decoding without any draft: what speed-ups are against."""
        plain_S: np.ndarray = self.target_SQ[:, 0] + self.base
        return plain_S

    @property
    def without_S(self) -> np.ndarray:
        """A step with K = 0: a draft that reads hidden states follows it by a row, unless it is given up."""
        without_S: np.ndarray = self.plain_S + (0.0 if self.detaches else self.follow_plain_S)
        return without_S

    def drafting_S(self, k: int, longest: int) -> np.ndarray:
        """A step with draft length k in which the longest block came to have `longest` tokens.

        The first token needs no draft step, its logits were carried over by the pass after the last block; so there are
        k of them in all when the block is full. With nothing proposed the step is a plain one.
        """
        if longest == 0:
            after_S = self.follow_plain_S if self.follows_plain else self.follow_SK[:, 0]
            return self.plain_S + (after_S + self.per_draft_step if self.runs_draft else 0.0)
        after_S = self.follow_SK[:, longest - 1] + self.per_draft_step
        steps_S = min(longest, k - 1) * (self.draft_S + self.per_draft_step)
        return self.target_SQ[:, longest] + self.spec + steps_S + after_S


class StepCosts:
    """A profile made ready to be asked. detaches: at K = 0 a draft that would have to follow is given up. Raises
    UsageError naming the place that has no plain step."""

    def __init__(self, profile: Profile, where: str, detaches: bool = False) -> None:
        self.detaches = detaches
        self.steps, self.draft = Cells(profile.steps), Cells(profile.draft)
        self.follow_plain = Cells([cell for cell in profile.draft_follow if cell.q == 1])
        self.follow_block = Cells([cell for cell in profile.draft_follow if cell.q > 1])
        self.overheads = profile.overheads_ms
        for batch, context, rows in self.steps.rows():
            if rows[0] != 1:
                raise UsageError(f"{where}: steps has no q 1 for batch {batch}, context {context}: the plain step")
        self.max_k = min(rows[-1] for _, _, rows in self.steps.rows()) - 1
        if self.max_k < 1:
            raise UsageError(f"{where}: steps has no q above 1 somewhere, so what verification costs is not known")

    @property
    def runs_draft(self) -> bool:
        return bool(self.draft or self.follow_block or self.follow_plain)

    def at(self, batch: int, context: float, k_max: int, samples: int) -> StepTimes:
        """`samples` draws of every cell within its spread after the first, which is the profile as it stands. The same
        noise everywhere, so that neighbours differ by what they cost alone."""
        noise = _Noise(np.random.default_rng(SEED), samples)
        target_SQ = noise(self.steps.at(batch, context, np.arange(1, k_max + 2)))
        draft_S1 = self._of(self.draft, batch, context, np.ones(1), noise)
        after_SK = np.repeat(draft_S1, k_max, axis=1)
        if self.follow_block:
            widths = [rows for _, _, rows in self.follow_block.rows()]
            low, high = max(rows[0] for rows in widths), min(rows[-1] for rows in widths)
            after_SK = noise(self.follow_block.at(batch, context, np.clip(np.arange(2, k_max + 2), low, high)))
        return StepTimes(
            target_SQ=target_SQ,
            draft_S=draft_S1[:, 0],
            follow_SK=after_SK,
            follow_plain_S=self._of(self.follow_plain, batch, context, np.ones(1), noise)[:, 0],
            base=self.overheads.base,
            spec=self.overheads.spec,
            per_draft_step=self.overheads.per_draft_step,
            runs_draft=self.runs_draft,
            follows_plain=bool(self.follow_plain),
            detaches=self.detaches,
        )

    def _of(self, cells: Cells, batch: int, context: float, rows: np.ndarray, noise: _Noise) -> np.ndarray:
        if not cells:
            return np.zeros((noise.samples + 1, len(rows)))
        return noise(cells.at(batch, context, rows))


@dataclass(frozen=True)
class _Noise:
    random: np.random.Generator
    samples: int

    def __call__(self, values: Values) -> np.ndarray:
        """[S, ...]: the values, then draws around them that stay above a tenth of each."""
        ms, spread = values
        draws = ms + spread * self.random.standard_normal((self.samples, len(ms)))
        return np.concatenate([ms[None], np.maximum(draws, ms / 10)])


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
