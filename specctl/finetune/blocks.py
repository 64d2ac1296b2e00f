"""Blocks: where an engine's drafts began and how many of their tokens were accepted, noted while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

from specctl.drafts import Draft
from specctl.engine.engine import Engine
from specctl.engine.sequence import Sequence as Text
from specctl.engine.stats import SpeculationCounters
from specctl.engine.verify import Verdict

BOUNDS = (0, 256, 1024, 4096, 16384, 65536)  # tokens before a block


@dataclass(frozen=True)
class Block:
    """start: tokens before it, which is where its first token stands. length: drafted tokens."""

    text: Text
    start: int
    length: int
    accepted: int


@dataclass(frozen=True)
class Bucket:
    """What verification counted where so many tokens stood before a block. context: [lo, hi], hi None for the last."""

    context: tuple[int, int | None]
    counters: SpeculationCounters

    @property
    def words(self) -> str:
        low, high = self.context
        return f"after {low} tokens and more" if high is None else f"after {low} to {high} tokens"

    @property
    def length(self) -> float:
        """Mean acceptance length, the definite token counted."""
        return self.counters.mean_acceptance_length or 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "context": list(self.context),
            "num_drafts": self.counters.num_drafts,
            "accepted_per_position": survival(self.counters),
            "mean_acceptance_length": self.length,
        }


@dataclass
class Blocks:
    """Notes every block that an engine verifies."""

    found: list[Block] = field(default_factory=list)

    def watch(self, engine: Engine) -> None:
        engine.observer = self._note

    def by_context(self) -> tuple[Bucket, ...]:
        """Every range that has a block, in order."""
        counters: dict[int, SpeculationCounters] = {}
        for block in self.found:
            low = max(bound for bound in BOUNDS if bound <= block.start)
            counters.setdefault(low, SpeculationCounters()).add_block(block.length, block.accepted)
        ends = {low: following - 1 for low, following in pairwise(BOUNDS)}
        return tuple(Bucket((low, ends.get(low)), counters[low]) for low in sorted(counters))

    def _note(self, texts: list[Text], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        for text, length, accepted in zip(texts, draft.length, verdict.num_accepted_B.tolist(), strict=True):
            if length:
                self.found.append(Block(text, len(text), length, accepted))


def survival(counters: SpeculationCounters) -> list[float]:
    """For each position, of the drafts that had it, the share whose tokens up to it were all accepted."""
    pairs = zip(counters.accepted_per_position, counters.drafted_per_position, strict=True)
    return [accepted / drafted for accepted, drafted in pairs]
