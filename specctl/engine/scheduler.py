"""Scheduler: who runs in the next step, with which rows, on which pages. It knows lengths only, no tensors or logits.

Rules. A prefill step takes up to `chunk` prompt tokens, carries the decoding sequences as plain rows, and never
speculates. Between two prefill steps there is a decode-only step while anything is decoding, so that a busy
server still speculates. When pages run out the newest sequence gives way and is recomputed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specctl.engine.sequence import Sequence, Status
from specctl.kv.pages import PageTable


@dataclass(frozen=True)
class PrefillStep:
    """Rows cached..stop - 1 of each (sequence, stop); `riders` decode one plain token beside them."""

    chunks: list[tuple[Sequence, int]]
    riders: list[Sequence]


@dataclass(frozen=True)
class DecodeStep:
    """Decode-only. k[i]: how many tokens may be drafted for sequences[i]; min_confidence: the policy's stop, if any."""

    sequences: list[Sequence]
    k: list[int]
    min_confidence: float | None


@dataclass(frozen=True)
class DraftLength:
    """What a policy says for one step: the draft length, and the confidence below which drafting stops. detach: at
    k = 0, a draft that would have to follow every step is given up for the texts in this one."""

    k: int
    min_confidence: float | None = None
    detach: bool = False


Policy = Callable[[int, float], DraftLength]
"""(number of decoding sequences, their mean cached length) -> DraftLength, asked for every decode-only step, and in
prefill for each sequence whether the draft should follow."""


class Scheduler:
    """draft_max_length: the longest text the draft can be run on (None: no draft, or no limit of its own). draft_lags:
    whether the draft may be left behind and catch up later, so that there is never a reason to give it up."""

    def __init__(
        self,
        table: PageTable,
        max_sequences: int,
        max_length: int,
        chunk: int,
        policy: Policy,
        max_k: int,
        draft_max_length: int | None,
        draft_lags: bool = True,
    ) -> None:
        self.table = table
        self.max_length = max_length
        self.chunk = chunk
        self.policy = policy
        self.max_k = max_k
        self.draft_max_length = max_length if draft_max_length is None else min(max_length, draft_max_length)
        self.draft_lags = draft_lags
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._free_lanes = list(range(max_sequences))[::-1]
        self._last_was_prefill = False

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> PrefillStep | DecodeStep | None:
        """The next step, its pages reserved; None when there is nothing to do."""
        decoding = any(s.status is Status.DECODING for s in self.running)
        if not (self._last_was_prefill and decoding):
            step = self._prefill_step()
            if step is not None:
                self._last_was_prefill = True
                return step
        self._last_was_prefill = False
        return self._decode_step()

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give back its pages and lane."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def check(self) -> None:
        """Assert that pages and lanes are conserved."""
        self.table.check(s.pages for s in self.running)
        assert not any(s.pages for s in self.waiting), "a waiting sequence holds pages"
        lanes = sorted([s.lane for s in self.running] + self._free_lanes)
        assert lanes == list(range(len(lanes))), "a lane is lost or shared"

    def _prefill_step(self) -> PrefillStep | None:
        if not any(s.status is Status.PREFILLING for s in self.running) and not self._can_admit():
            return None
        # Riders first and oldest first: a sequence that decodes is not made to wait for one that only arrives.
        for sequence in list(self.running):
            if sequence.status is Status.DECODING:
                self._reserve(sequence, len(sequence) + 1)
        budget = self.chunk
        chunks: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            if sequence.status is Status.PREFILLING and budget > 0:
                budget -= self._add_chunk(chunks, sequence, budget)
        while budget > 0 and self._can_admit():
            sequence = self.waiting.popleft()
            sequence.lane = self._free_lanes.pop()
            sequence.status = Status.PREFILLING
            self.running.append(sequence)
            budget -= self._add_chunk(chunks, sequence, budget)
        chunks = [(s, stop) for s, stop in chunks if s.status is Status.PREFILLING]
        riders = [s for s in self.running if s.status is Status.DECODING]
        return PrefillStep(chunks, riders) if chunks else None

    def _can_admit(self) -> bool:
        """Whether the next in line has a lane, and room for its whole text and one decode step: admitting it on less
        would only preempt it again."""
        if not self.waiting or not self._free_lanes:
            return False
        needed = min(len(self.waiting[0]) + self.max_k + 2, self.max_length)
        return self.table.pages_for(needed) <= self.table.num_free

    def _add_chunk(self, chunks: list[tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
        stop = min(len(sequence), sequence.cached + budget)
        if not self._reserve(sequence, stop + 1):
            return 0
        chunks.append((sequence, stop))
        return stop - sequence.cached

    def _decode_step(self) -> DecodeStep | None:
        decoding = [s for s in self.running if s.status is Status.DECODING]
        if not decoding:
            return None
        mean_cached = sum(s.cached for s in decoding) / len(decoding)
        choice = self.policy(len(decoding), mean_cached)
        if choice.k == 0 and choice.detach and not self.draft_lags:
            for sequence in decoding:
                sequence.detached |= sequence.params.k is None  # a request's own length is not the policy's to say
        wanted = {id(s): self._draft_length(s, choice.k) for s in decoding}
        # Every sequence gets as many rows as the longest draft, so as many slots (those past the limit are scratch).
        longest = max(wanted.values())
        for sequence in decoding:
            if sequence.status is Status.DECODING:
                self._reserve(sequence, min(len(sequence) + longest + 1, self.max_length))
        running = [s for s in decoding if s.status is Status.DECODING]
        return DecodeStep(running, [wanted[id(s)] for s in running], choice.min_confidence) if running else None

    def wants_draft(self, sequence: Sequence) -> bool:
        """Whether the draft is worth running over the sequence's prompt now: it has room for the text and more, and the
        request or, by the present load, the policy would have it draft."""
        return self._draft_length(sequence, self.policy(len(self.running), float(sequence.cached)).k) > 0

    def _draft_length(self, sequence: Sequence, policy_k: int) -> int:
        """k shortened by the context limits only: the block and the token after it must fit target and draft. 0 where
        the draft was given up."""
        if sequence.detached:
            return 0
        k = policy_k if sequence.params.k is None else sequence.params.k
        return max(0, min(k, self.max_k, self.draft_max_length - len(sequence) - 1))

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve slots, making newer sequences give way while there are too few. False: `sequence` itself gave way."""
        while not self.table.reserve(sequence.pages, num_tokens):
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = Status.PREEMPTED
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.table.release(sequence.pages)
        if sequence.lane >= 0:
            self._free_lanes.append(sequence.lane)
        sequence.lane = -1
        sequence.cached = sequence.draft_cached = 0
