"""One place of the grid on a running engine: requests of the right size, again and again. It decides no grid.

An answer has to be as long as to leave enough steps in which all of the batch decode, and its prompt as long as to make
the mean context of these steps the one that is asked for. Both follow from a first run, which warms up as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from specctl.errors import UsageError
from specctl.profile.served.engine import Served
from specctl.profile.served.metrics import scrape
from specctl.profile.served.steps import Round, read_round
from specctl.profile.served.streams import answer_all, prompt

TRIES = 5
ENOUGH = 0.75
"""Of the steps that are wanted."""


@dataclass(frozen=True)
class Spot:
    """A batch and its mean context."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt and of its answer."""

    prompt: int
    answer: int


@dataclass
class Meter:
    """steps: of each stream that are to be timed. Keeps the sizes that were found right for each spot."""

    served: Served
    steps: int
    random: random.Random = field(default_factory=random.Random)  # another run must not meet the prompts of this one
    sizes: dict[Spot, Sizes] = field(default_factory=dict)

    def settle(self, spot: Spot) -> Round:
        """Find the sizes for a spot. Raises UsageError where the engine does not run so many at a time."""
        self.sizes[spot] = self._fitting(Sizes(max(1, spot.context - self.steps // 2), self.steps + spot.batch))
        for _ in range(TRIES):
            tried, found = self.sizes[spot], self.measure(spot)
            self.sizes[spot] = self._fitting(self._next(spot, tried, found))
            if found is not None and found.steps >= ENOUGH * self.steps:
                return found
        raise UsageError(
            f"{self.served.wire.url}: never decoded {spot.batch} requests of context {spot.context} at a time for "
            f"{self.steps} steps; it runs fewer sequences, or its cache holds fewer: leave the batch or the context "
            "out, or ask for fewer --steps"
        )

    def measure(self, spot: Spot) -> Round | None:
        """One round of a settled spot. None where the batch was never all decoding."""
        sizes = self.sizes[spot]
        prompts = [prompt(sizes.prompt, self.random) for _ in range(spot.batch)]
        before = scrape(self.served.wire)
        streams = answer_all(self.served.wire, self.served.model, prompts, sizes.answer)
        return read_round(self.served, streams, before, scrape(self.served.wire))

    def first_token_ms(self, tokens: int) -> float:
        """Of a prompt by itself."""
        prompts = [prompt(tokens, self.random)]
        (stream,) = answer_all(self.served.wire, self.served.model, prompts, 1)
        return 1000 * (stream.moments[0] - stream.sent)

    def _next(self, spot: Spot, tried: Sizes, found: Round | None) -> Sizes:
        if found is None:
            return replace(tried, answer=2 * tried.answer)
        answer = found.lead + round((self.steps + 1) * found.per_step) + 1
        # What the middle of the answer will be, if the next round goes like this one.
        middle = found.lead + (answer - found.lead) / 2
        return Sizes(max(1, round(spot.context - middle)), answer)

    def _fitting(self, sizes: Sizes) -> Sizes:
        return replace(sizes, answer=max(2, min(sizes.answer, self.served.max_length - sizes.prompt)))
