"""Output: what one step adds to one choice. Whoever drives the engine gets these and needs nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.engine.sequence import Logprob
from specctl.engine.stats import SpeculationCounters


@dataclass(frozen=True)
class Output:
    """What a step adds to one choice: token ids, the text that is final by now, logprobs. The last one has a reason.

    offsets: where the text of each token starts in the choice's decoded text, in characters."""

    request_id: int
    choice: int
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...]
    finish_reason: str | None
    counters: SpeculationCounters
