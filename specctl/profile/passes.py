"""What the cells of a profile run: passes with their heads and, for the target, the decision on their tokens.

Greedy decisions: argmax over every row. They belong to the pass, as they grow with its rows; packing, scheduling and
bookkeeping are the engine's, see overheads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from specctl.bench.passes import BareModel, draft_pass, own_attention, rows_after
from specctl.drafts import Draft, Drafter, OneHot
from specctl.engine.verify import verify
from specctl.kv.batch import Batch
from specctl.pair import OpenedDraft, Target
from specctl.profile.grid import Grid
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.params import Accept, SamplingParams

Kind = Literal["steps", "draft", "draft_follow", "prefill_target", "prefill_draft"]


@dataclass(frozen=True)
class Place:
    """A cell: `q` rows of each of `batch` sequences with `context` tokens before them; for prefill, q is the tokens of
    one prompt."""

    kind: Kind
    batch: int
    q: int
    context: int


@dataclass(frozen=True)
class Passes:
    """Callables for any place of a grid, over caches that hold its largest cell."""

    target: Target
    draft: OpenedDraft | None
    bare: BareModel
    num_tokens: int

    @classmethod
    @contextmanager
    def over(cls, target: Target, draft: OpenedDraft | None, num_tokens: int, batch: int) -> Iterator[Passes]:
        """The draft attends to a cache of its own until the end of the block."""
        bare = BareModel.of_target(target, num_tokens, batch)
        with own_attention(target, [] if draft is None else [draft], num_tokens, batch):
            yield cls(target, draft, bare, num_tokens)

    @property
    def drafter(self) -> Drafter | None:
        """The draft, if it has passes to run."""
        return None if self.draft is None or self.draft.checkpoint is None else self.draft.drafter

    def at(self, place: Place) -> Callable[[], object]:
        """A pass of this kind, ready to run."""
        if place.kind == "steps":
            return self._target_step(place)
        if place.kind == "prefill_target":
            rows = self._prompt(place.q)
            return partial(self.bare.run, rows, rows.last_row_B)
        assert self.drafter is not None
        rows = self._prompt(place.q) if place.kind == "prefill_draft" else self._rows(place)
        return draft_pass(self.drafter, rows, self.target)

    def _target_step(self, place: Place) -> Callable[[], object]:
        rows, num_slots = self._rows(place), place.q - 1
        state = SequenceState(SamplingParams(), 0, [0], [], Accept())
        sampling = SamplingBatch([state] * place.batch, self.target.device)
        token_BK = torch.zeros(place.batch, num_slots, dtype=torch.int64, device=self.target.device)
        draft = Draft(token_BK, [num_slots] * place.batch, OneHot())

        def step() -> object:
            logits_BMV = self.bare.run(rows).view(place.batch, place.q, -1)
            return verify(draft, sampling.scores(logits_BMV, token_BK), sampling).token_BM.tolist()

        return step

    def _rows(self, place: Place) -> Batch:
        return rows_after(place.context, place.q, place.batch, self.num_tokens, self.target)

    def _prompt(self, num_tokens: int) -> Batch:
        return rows_after(1, num_tokens, 1, self.num_tokens, self.target)


def places(grid: Grid, passes: Passes) -> list[Place]:
    """All cells of a grid. A draft without passes has none of its own; draft_follow is the pass after a step, of as
    many rows as it takes there."""
    cells = [(b, c) for b in grid.batches for c in grid.contexts]
    found = [Place("steps", b, q, c) for b, c in cells for q in grid.rows]
    found += [Place("prefill_target", 1, n, 1) for n in grid.prompts]
    if passes.drafter is not None:
        found += [Place("draft", b, 1, c) for b, c in cells]
        follow = sorted({passes.drafter.follow_rows(q - 1) for q in grid.rows} - {0})
        found += [Place("draft_follow", b, q, c) for b, c in cells for q in follow]
        found += [Place("prefill_draft", 1, n, 1) for n in grid.prompts]
    return found
