"""What a step costs at any batch and context, from a profile's cells. It knows nothing about acceptance.

Legend: N batches, if there are many; S samples of the cells' uncertainty, the first without noise; K draft lengths
from 1; Q rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from specctl.errors import UsageError
from specctl.schemas.profile import Profile
from specctl.tune.cells import Cells, Values

SEED = 0


@dataclass(frozen=True)
class StepTimes:
    """At one batch and context, in milliseconds; or at N batches, which are the first axis of every array then.

    target_SQ: a pass over q + 1 rows, at index q. draft_S: a draft step. follow_SK: the draft's pass after a block of
    k + 1, at index k; follow_plain_S: after a plain step. runs_draft: whether the draft has passes at all;
    follows_plain: also after plain steps; detaches: but not at K = 0, where the draft is given up."""

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
        return self._picked((..., slice(1)), (..., slice(1), slice(None)))

    def of(self, which: int | Sequence[int]) -> StepTimes:
        """At one of the N batches, or at several of them."""
        return self._picked(which, which)

    def _picked(self, one: object, two: object) -> StepTimes:
        return replace(
            self,
            target_SQ=self.target_SQ[two],  # type: ignore[call-overload]
            draft_S=self.draft_S[one],  # type: ignore[call-overload]
            follow_SK=self.follow_SK[two],  # type: ignore[call-overload]
            follow_plain_S=self.follow_plain_S[one],  # type: ignore[call-overload]
        )

    @property
    def plain_S(self) -> np.ndarray:
        """A step of decoding without any draft: what speed-ups are against."""
        plain_S: np.ndarray = self.target_SQ[..., 0] + self.base
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
            after_S = self.follow_plain_S if self.follows_plain else self.follow_SK[..., 0]
            return self.plain_S + (after_S + self.per_draft_step if self.runs_draft else 0.0)
        drafting_S: np.ndarray = self.target_SQ[..., longest] + self.spec + self.drafts_S(k, longest)
        return drafting_S

    def drafts_S(self, k: int, longest: int) -> np.ndarray:
        """The draft's part of such a step, with what the engine adds to its passes."""
        after_S = self.follow_SK[..., longest - 1] + self.per_draft_step
        drafts_S: np.ndarray = min(longest, k - 1) * (self.draft_S + self.per_draft_step) + after_S
        return drafts_S


class StepCosts:
    """A profile made ready to be asked. detaches: at K = 0 a draft that would have to follow is given up. Raises
    UsageError naming the place that has no plain step."""

    def __init__(self, profile: Profile, where: str) -> None:
        self.detaches = False
        self.steps, self.draft = Cells(profile.steps, profile.whole_steps), Cells(profile.draft)
        self.follow_plain = Cells([cell for cell in profile.draft_follow if cell.q == 1])
        self.follow_block = Cells([cell for cell in profile.draft_follow if cell.q > 1])
        self.overheads = profile.overheads_ms
        self.shared = profile.shared_spread
        for batch, context, rows in self.steps.rows():
            if rows[0] != 1:
                raise UsageError(f"{where}: steps has no q 1 for batch {batch}, context {context}: the plain step")
        self.max_k = min(rows[-1] for _, _, rows in self.steps.rows()) - 1
        if self.max_k < 1:
            raise UsageError(f"{where}: steps has no q above 1 somewhere, so what verification costs is not known")

    def giving_up(self) -> StepCosts:
        """The same, but at K = 0 a draft that would have to follow is given up."""
        other = copy(self)
        other.detaches = True
        return other

    @property
    def runs_draft(self) -> bool:
        return bool(self.draft or self.follow_block or self.follow_plain)

    def at(self, batch: int, context: float, k_max: int, samples: int) -> StepTimes:
        """`samples` draws of every cell within its spread after the first, which is the profile as it stands. The same
        noise everywhere, so that neighbours differ by what they cost alone."""
        return self.at_all([batch], context, k_max, samples).of(0)

    def at_all(self, batches: Sequence[int], context: float, k_max: int, samples: int) -> StepTimes:
        """The same for N batches."""
        noise = _Noise(np.random.default_rng(SEED), samples, self.shared)
        target_NSQ = noise(self.steps.at_all(batches, context, np.arange(1, k_max + 2)))
        draft_NS1 = self._of(self.draft, batches, context, np.ones(1), noise)
        after_NSK = np.repeat(draft_NS1, k_max, axis=2)
        if self.follow_block:
            widths = [rows for _, _, rows in self.follow_block.rows()]
            low, high = max(rows[0] for rows in widths), min(rows[-1] for rows in widths)
            rows_K = np.clip(np.arange(2, k_max + 2), low, high)
            after_NSK = noise(self.follow_block.at_all(batches, context, rows_K))
        return StepTimes(
            target_SQ=target_NSQ,
            draft_S=draft_NS1[..., 0],
            follow_SK=after_NSK,
            follow_plain_S=self._of(self.follow_plain, batches, context, np.ones(1), noise)[..., 0],
            base=self.overheads.base,
            spec=self.overheads.spec,
            per_draft_step=self.overheads.per_draft_step,
            runs_draft=self.runs_draft,
            follows_plain=bool(self.follow_plain),
            detaches=self.detaches,
        )

    def _of(self, cells: Cells, batches: Sequence[int], context: float, rows: np.ndarray, noise: _Noise) -> np.ndarray:
        if not cells:
            return np.zeros((len(batches), noise.samples + 1, len(rows)))
        return noise(cells.at_all(batches, context, rows))


class _Noise:
    """shared: the part of every spread that all cells have in common, as a share of the cell; it cancels where steps
    are compared."""

    def __init__(self, random: np.random.Generator, samples: int, shared: float) -> None:
        self.random, self.samples, self.shared = random, samples, shared
        self.common_S = np.random.default_rng(SEED + 1).standard_normal(samples) if shared else np.zeros(samples)

    def __call__(self, values: Values) -> np.ndarray:
        """[N, S, Q]: the values, then draws around them that stay above a tenth of each."""
        ms_NQ, spread_NQ = values
        own_NQ = np.sqrt(np.maximum(spread_NQ**2 - (self.shared * ms_NQ) ** 2, 0.0))
        draws_SQ = self.random.standard_normal((self.samples, ms_NQ.shape[1]))
        draws_NSQ = ms_NQ[:, None] * (1 + self.shared * self.common_S)[:, None] + own_NQ[:, None] * draws_SQ
        return np.concatenate([ms_NQ[:, None], np.maximum(draws_NSQ, ms_NQ[:, None] / 10)], axis=1)
