"""Counters of speculation, one request's or a whole run's. What they mean: docs/design.md, "Counters"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class SpeculationCounters:
    """What verification decided, before any stop cut; `emitted_tokens` counts what was delivered, after it.

    A draft is one block of at least one token for one sequence. accepted_per_position[k - 1] counts drafts whose first
    k tokens were all accepted, drafted_per_position[k - 1] those that had a k-th token.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    emitted_tokens: int = 0

    def add_block(self, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for counts, reached in ((self.drafted_per_position, drafted), (self.accepted_per_position, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for k in range(reached):
                counts[k] += 1

    def add(self, other: SpeculationCounters) -> None:
        """Count what another has counted, too."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.emitted_tokens += other.emitted_tokens
        for mine, theirs in (
            (self.drafted_per_position, other.drafted_per_position),
            (self.accepted_per_position, other.accepted_per_position),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for k, count in enumerate(theirs):
                mine[k] += count

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts: the definite token is counted. None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def as_dict(self) -> dict[str, object]:
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "drafted_per_position": list(self.drafted_per_position),
            "accepted_per_position": list(self.accepted_per_position),
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "counts_bonus": True,
            "emitted_tokens": self.emitted_tokens,
        }


PHASES = ("prefill", "draft", "verify", "sample", "catch_up", "host")


@dataclass
class EngineStats:
    """A run of the engine. steps_by_k[k]: decode-only steps with draft length k. seconds: wall time by phase."""

    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    prefill_steps: int = 0
    steps_by_k: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    aborts: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _phase: str | None = None
    _since: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count wall time to `phase`, taking it off the phase around it."""
        outer = self._phase
        self._turn_to(phase)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
