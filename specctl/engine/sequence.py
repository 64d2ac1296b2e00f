"""Sequence: one choice of one request, from arrival to its last token. It knows its tokens, pages and watermarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from specctl.engine.stats import SpeculationCounters
from specctl.kv.batch import Span
from specctl.sampling.batch import SequenceState
from specctl.sampling.params import Accept, SamplingParams
from specctl.text.output import TextOutput


class Status(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True)
class Logprob:
    """log-softmax of the target's raw logits: of the chosen token, and of the `top` (id, logprob) pairs, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sequence:
    """cached: positions whose keys and values the target has. draft_cached: the same for the draft. detached: the draft
    has been given up for this text and does not follow it any more.

    A decoding sequence has cached == len(tokens) - 1: the newest token is fed by the next step.
    """

    request_id: int
    choice: int
    params: SamplingParams
    accept: Accept
    prompt: list[int]
    key: int
    text: TextOutput | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    lane: int = -1
    cached: int = 0
    draft_cached: int = 0
    detached: bool = False
    status: Status = Status.WAITING
    finish_reason: str | None = None
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions start..stop - 1."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - split, 0) : max(stop - split, 0)]

    def span(self, start: int, stop: int) -> Span:
        return Span(self.tokens(start, stop), start, self.pages, self.lane)

    def sampling_state(self) -> SequenceState:
        return SequenceState(self.params, self.key, self.prompt, self.output, self.accept)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
