"""Validation: the engine decodes prompts, held out where any are, with the draft as it is now. What it says is what
serving will be like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from specctl.drafts import Drafter
from specctl.drafts.head import HeadDrafter
from specctl.engine.engine import MAX_K
from specctl.engine.stats import SpeculationCounters
from specctl.errors import CheckpointError, RequestError, UsageError
from specctl.finetune.blocks import Blocks, Bucket, survival
from specctl.finetune.decoding import make_engine
from specctl.finetune.parity import Parity, compare
from specctl.options import DecodingOptions
from specctl.pair import Target
from specctl.prompts import Prompt
from specctl.schemas import recipe as schema
from specctl.schemas.draft import FACTS, Acceptance, recorded
from specctl.train.examples import Example

BATCH = 8
LOOKED_AT = 4  # prompts of the training data, where nothing is held out
# Accepted drafted tokens a step: a claim worth holding anybody to, and the part of it that has to be left. Another
# domain may cost five sixths of it; what is read wrongly loses nearly all.
CLAIMED, LEFT = 0.2, 0.1


@dataclass(frozen=True)
class Measured:
    """What verification counted at one temperature, in all and by the tokens that stood before a block. parity: of a
    head at T = 0, with what training's own pass says."""

    temperature: float
    k: int
    counters: SpeculationCounters
    by_context: tuple[Bucket, ...] = ()
    parity: Parity | None = None

    @property
    def length(self) -> float:
        """Mean acceptance length, the definite token counted; 1 when nothing was drafted."""
        return self.counters.mean_acceptance_length or 1.0

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What to show, two columns: contexts one by one where there are several."""
        rows = [
            (f"T = {self.temperature:g}, K = {self.k}", f"mean acceptance length {self.length:.3f} (bonus counted)")
        ]
        if len(self.by_context) > 1:
            for bucket in self.by_context:
                rows.append((f"  {bucket.words}", f"{bucket.length:.3f} over {bucket.counters.num_drafts} blocks"))
        if self.token_by_token is not None:
            rows.append(self.token_by_token)
        if self.parted is not None:
            rows.append(("  they part", self.parted))
        return rows

    @property
    def token_by_token(self) -> tuple[str, str] | None:
        """Decoded acceptance and what training's own pass finds at the same places, side by side; None where the two
        were not compared."""
        if self.parity is None:
            return None
        tokens = ", ".join(str(slot + 1) for slot in range(self.k))
        decoded, found = map(in_a_row, (self.parity.accepted_shares, self.parity.found_shares))
        return f"  right up to token {tokens}", f"{decoded} decoded, {found} by training's own pass"

    @property
    def parted(self) -> str | None:
        """Where the two part, in words; None where they do not."""
        return None if self.parity is None else self.parity.words

    def as_dict(self) -> dict[str, Any]:
        return self._summary() | {"by_context": [bucket.as_dict() for bucket in self.by_context]}

    def as_line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        if self.parity is None:
            return self.as_dict()
        return self.as_dict() | {
            "found_in_training": self.parity.found_shares,
            "found_in_decoding": self.parity.accepted_shares,
            "parted_from": self.parity.first_difference,
        }

    def as_acceptance(self) -> Acceptance:
        return Acceptance.model_validate({"class": "held-out", **self._summary()})

    def _summary(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "k": self.k,
            "accepted_per_position": survival(self.counters),
            "mean_acceptance_length": self.length,
        }


def in_a_row(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


@dataclass(frozen=True)
class Validator:
    """work: prompts as token ids. Every call decodes the same with the same noise."""

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

    @classmethod
    def over_training(
        cls, target: Target, examples: Sequence[Example], settings: schema.Validation, seed: int
    ) -> Validator | None:
        """Over a few prompts of what is trained on, for a look at what a run begins with. None when none of them leaves
        room for an answer."""
        room = target.max_length - settings.max_tokens
        fit = (prompt for prompt in dict.fromkeys(example.prompt for example in examples) if 0 < len(prompt) <= room)
        work = tuple(islice(fit, min(LOOKED_AT, settings.prompts)))
        return cls(target, work, settings, seed) if work else None

    def measure(self, drafter: Drafter, between: Callable[[], None] = lambda: None) -> list[Measured]:
        """Decode at every temperature. `between` is called between the engine's steps; it may raise."""
        return [self._at(temperature, drafter, between) for temperature in self.settings.temperatures]

    def _at(self, temperature: float, drafter: Drafter, between: Callable[[], None]) -> Measured:
        batch = min(BATCH, len(self.work))
        longest = max(map(len, self.work)) + self.settings.max_tokens
        engine = make_engine(
            self.target, longest + MAX_K + 1, batch, drafter=drafter, k=self.settings.k, seed=self.seed
        )
        params = DecodingOptions(temperature=temperature, max_tokens=self.settings.max_tokens).params()
        for ids in self.work:
            engine.add(list(ids), params)
        blocks = Blocks()
        blocks.watch(engine)
        while engine.has_work:
            between()
            engine.step()
        parity = None
        if temperature == 0 and blocks.found and isinstance(drafter, HeadDrafter):
            fresh = HeadDrafter(drafter.kind, drafter.model)
            parity = compare(self.target.model, fresh, blocks, self.settings.k)
        return Measured(temperature, self.settings.k, engine.stats.speculation, blocks.by_context(), parity)


def score(measured: Sequence[Measured]) -> float:
    """What the best checkpoint is the best by: the mean acceptance length, averaged over temperatures."""
    return fmean(each.length for each in measured)


def claimed(measured: Measured, source: Path) -> float | None:
    """The mean acceptance length that the specctl.json of a draft gives for the same temperature, over as many
    positions; the largest where it gives several, None where it gives none."""
    said = recorded(source)
    claims = [] if said is None else said.acceptance or []
    found = [claim for claim in claims if claim.temperature == measured.temperature]
    return max((1 + sum(claim.accepted_per_position[: measured.k]) for claim in found), default=None)


def check_begun(measured: Sequence[Measured], source: Path) -> None:
    """What a draft that training begins with does before its first step, against what its specctl.json says it did.

    Raises CheckpointError when next to nothing of it is left: it is read otherwise than it was trained.
    """
    for each in measured:
        before = claimed(each, source)
        if before is not None and before - 1 > CLAIMED and each.length - 1 < LEFT * (before - 1):
            raise CheckpointError(
                f"{source}: has a mean acceptance length of {each.length:.2f} at T = {each.temperature:g} before "
                f"the first step, its {FACTS} says {before:.2f}: it is of another target, or "
                "is not read as it was trained (`specctl inspect` says how it is read)"
            )
