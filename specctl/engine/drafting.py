"""Drafting: the draft's side of an engine. It proposes, follows the target or catches up with it, or is left behind.

It knows the drafter by its interface only. A draft that reads hidden states follows every pass of the target over the
same rows, before the host knows what was decided; another one runs over what was committed, now or later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specctl import attention
from specctl.drafts import Draft, Drafter, OneHot
from specctl.engine.scheduler import DecodeStep
from specctl.engine.sequence import Sequence
from specctl.engine.verify import Verdict
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import Hidden
from specctl.sampling.batch import SamplingBatch


class Drafting:
    """drafter: None for an engine that does not draft. chunk: rows of a text that it catches up with at a time.
    max_length: the longest text that the drafter is run on. timed: the engine's clock."""

    def __init__(
        self,
        drafter: Drafter | None,
        cache: KVCache,
        *,
        backend: str,
        num_lanes: int,
        chunk: int,
        max_length: int,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.drafter = drafter
        self.carry: Any = None
        self._timed = timed
        self._device = cache.device
        self._chunk = chunk
        self._max_length = max_length
        self._ahead: tuple[list[Sequence], Draft] | None = None
        if drafter is not None:
            if drafter.kv_layers:
                drafter.attn = attention.choose(backend, cache, "draft", cache.device)
            self.carry = drafter.new_carry(num_lanes)

    @property
    def reads_hidden(self) -> bool:
        return self.drafter is not None and self.drafter.reads_hidden

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps

    # -- proposing ----------------------------------------------------------------------------------------------------

    def propose(self, step: DecodeStep, sampling: SamplingBatch) -> Draft:
        """The block of every sequence, cut to the longest one really proposed."""
        sequences, k = step.sequences, step.k
        ahead, self._ahead = self._ahead, None
        if self.drafter is None or max(k) == 0:
            return self.nothing(len(k))
        if ahead is not None and ahead[0] == sequences and _is_single(step):
            return ahead[1]
        shift = self.drafter.shift
        self.catch_up([s for s, limit in zip(sequences, k, strict=True) if limit and s.draft_cached < len(s) - shift])
        with self._timed("draft"):
            draft = self.drafter.draft(self._next_rows(sequences), self.carry, k, sampling)
        longest = max(draft.length)
        return draft if longest == draft.token_BK.shape[1] else draft.cut(longest)

    def nothing(self, num_sequences: int) -> Draft:
        tokens = torch.zeros(num_sequences, 0, dtype=torch.int64, device=self._device)
        return Draft(tokens, [0] * num_sequences, OneHot())

    def look_ahead(
        self, step: DecodeStep, sampling: SamplingBatch, verdict: Verdict, following: list[Sequence]
    ) -> None:
        """One token a step needs nothing but what the pass over the last block has carried over. So it is drawn at
        once, while the host still waits to hear what was decided; if the next step is another one than expected, it is
        drawn again, and the noise is keyed, so it is the same token."""
        if not _is_single(step) or following != step.sequences or not sampling.foreseeable:
            return
        assert self.drafter is not None
        with self._timed("draft"):
            rows = self._next_rows(step.sequences)  # of a first token, only the lanes matter
            later = sampling.after(verdict.num_accepted_B + 1)
            self._ahead = step.sequences, self.drafter.draft(rows, self.carry, step.k, later)

    def _next_rows(self, sequences: list[Sequence]) -> Batch:
        return Batch.pack([Span((0,), len(s), s.pages, s.lane) for s in sequences], PAGE_SIZE, self._device)

    # -- following ----------------------------------------------------------------------------------------------------

    def follow_block(self, batch: Batch, sequences: list[Sequence], hidden: Hidden, verdict: Verdict) -> list[Sequence]:
        """Run over a block that was just judged, in the target's own rows. Waits for no length: what comes after the
        accepted tokens is in the rows, too, and the next block is written over it."""
        first_B = batch.qo_indptr[:-1].to(self._device, torch.int64)
        token_T = verdict.token_BM.clamp(min=0).flatten()
        return self.follow(batch, sequences, hidden, token_T, first_B + verdict.num_accepted_B)

    def follow(
        self, batch: Batch, sequences: list[Sequence], hidden: Hidden, token_T: Tensor, end_B: Tensor
    ) -> list[Sequence]:
        """Run over rows of the target's with the tokens that follow theirs, if the draft reads hidden states; the
        sequences for which it did. end_B: see Batch."""
        self._ahead = None
        if self.drafter is None or not self.drafter.reads_hidden:
            return []
        index = [b for b, s in enumerate(sequences) if not s.detached and len(s) < self._max_length]
        if not index:
            return []
        rows = batch.holding(token_T, end_B)
        if len(index) < len(sequences):
            rows, row_T = rows.only(index)
            taps = hidden.taps_ATD
            hidden = replace(hidden, final_TD=hidden.final_TD[row_T], taps_ATD=None if taps is None else taps[:, row_T])
        with self._timed("catch_up"):
            self.drafter.catch_up(rows, hidden, self.carry)
        return [sequences[b] for b in index]

    # -- catching up --------------------------------------------------------------------------------------------------

    def after_block(self, step: DecodeStep) -> None:
        """Run over what was committed for those that drafted, if that can be done without hidden states."""
        if self.drafter is None or self.drafter.reads_hidden:
            return
        drafting = [s for s, k in zip(step.sequences, step.k, strict=True) if k]
        if self.drafter.window is not None:
            for sequence in drafting:  # drafting has run over what was accepted of the block
                sequence.draft_cached = max(sequence.draft_cached, len(sequence) - self.drafter.window)
        self.catch_up([s for s in drafting if not s.finished])

    def catch_up(self, sequences: list[Sequence]) -> None:
        """Let the draft run over what was committed since it last did (and over its window again)."""
        if self.drafter is None or not sequences:
            return
        assert not self.drafter.reads_hidden, "a draft that reads hidden states was left behind"
        rows = []
        for sequence in sequences:
            stop = min(len(sequence), sequence.cached + 1) - self.drafter.shift
            start = sequence.draft_cached
            if self.drafter.window is not None:
                start = max(0, min(start, stop - self.drafter.window))
            if stop <= self._max_length:
                rows.append((sequence, start, stop))
        with self._timed("catch_up"):
            while rows:
                # A draft left far behind comes on by a chunk of the prompt (and the token after it) at a time.
                ends = [min(start + self._chunk + 1, stop) for _, start, stop in rows]
                now = [(sequence, start, end) for (sequence, start, _), end in zip(rows, ends, strict=True)]
                spans = [s.span(start, end) for s, start, end in now]
                self.drafter.catch_up(Batch.pack(spans, PAGE_SIZE, self._device), None, self.carry)
                for sequence, _, end in now:
                    sequence.draft_cached = end
                rows = [
                    (sequence, end, stop) for (sequence, _, stop), end in zip(rows, ends, strict=True) if end < stop
                ]


def _is_single(step: DecodeStep) -> bool:
    """Whether every sequence drafts one token, with no condition on it."""
    return set(step.k) == {1} and step.min_confidence is None
