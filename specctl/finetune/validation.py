"""Validation: the engine decodes held-out prompts with the draft as it is now. What it says is what serving will be
like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specctl.drafts.llama import LlamaDrafter
from specctl.engine.engine import MAX_K
from specctl.engine.stats import SpeculationCounters
from specctl.errors import RequestError, UsageError
from specctl.finetune.decoding import make_engine
from specctl.options import DecodingOptions
from specctl.pair import Target
from specctl.prompts import Prompt
from specctl.schemas import recipe as schema
from specctl.schemas.draft import Acceptance

BATCH = 8


@dataclass(frozen=True)
class Measured:
    """What verification counted at one temperature."""

    temperature: float
    k: int
    counters: SpeculationCounters

    @property
    def length(self) -> float:
        """Mean acceptance length, the definite token counted; 1 when nothing was drafted."""
        return self.counters.mean_acceptance_length or 1.0

    @property
    def survival(self) -> list[float]:
        """For each position, of the drafts that had it, the share whose tokens up to it were all accepted."""
        pairs = zip(self.counters.accepted_per_position, self.counters.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    def as_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "k": self.k,
            "accepted_per_position": self.survival,
            "mean_acceptance_length": self.length,
        }

    def as_acceptance(self) -> Acceptance:
        return Acceptance.model_validate({"class": "held-out", **self.as_dict()})


@dataclass(frozen=True)
class Validator:
    """work: held-out prompts as token ids. Every call decodes the same with the same noise."""

    target: Target
    work: tuple[tuple[int, ...], ...]
    settings: schema.Validation
    seed: int

    @classmethod
    def of(
        cls,
        target: Target,
        held_out: Sequence[Prompt],
        settings: schema.Validation,
        seed: int,
        say: Callable[[str], None],
    ) -> Validator | None:
        """None when there is nothing to decode. Prompts without room for an answer are left out, and it is said."""
        work: list[tuple[int, ...]] = []
        long = 0
        for prompt in held_out:
            if len(work) == settings.prompts:
                break
            try:
                ids = target.encode(prompt)
            except RequestError as error:
                raise UsageError(f"held-out prompt {prompt.id}: {error}") from None
            if len(ids) + settings.max_tokens <= target.max_length:
                work.append(tuple(ids))
            else:
                long += 1
        if long:
            say(f"{long} held-out prompts are left out: with an answer they are longer than {target.max_length} tokens")
        return cls(target, tuple(work), settings, seed) if work else None

    def measure(self, drafter: LlamaDrafter, between: Callable[[], None] = lambda: None) -> list[Measured]:
        """Decode at every temperature. `between` is called between the engine's steps; it may raise."""
        return [self._at(temperature, drafter, between) for temperature in self.settings.temperatures]

    def _at(self, temperature: float, drafter: LlamaDrafter, between: Callable[[], None]) -> Measured:
        batch = min(BATCH, len(self.work))
        longest = max(map(len, self.work)) + self.settings.max_tokens
        engine = make_engine(
            self.target, longest + MAX_K + 1, batch, drafter=drafter, k=self.settings.k, seed=self.seed
        )
        params = DecodingOptions(temperature=temperature, max_tokens=self.settings.max_tokens).params()
        for ids in self.work:
            engine.add(list(ids), params)
        while engine.has_work:
            between()
            engine.step()
        return Measured(temperature, self.settings.k, engine.stats.speculation)


def score(measured: Sequence[Measured]) -> float:
    """What the best checkpoint is the best by: the mean acceptance length, averaged over temperatures."""
    return fmean(each.length for each in measured)
