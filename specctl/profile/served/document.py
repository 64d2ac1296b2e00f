"""What was read from a running engine as a Profile: whole steps, and for an engine that does not speculate the time to
the first token. What the engine does not tell is what the command line says, or the profile that it is put into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from specctl.profile.same import Identity
from specctl.profile.served.engine import Served
from specctl.profile.served.run import Plan, Readings
from specctl.schemas.base import Provenance
from specctl.schemas.policy import BoundDraft
from specctl.schemas.profile import (
    SCHEMA,
    Hardware,
    Measured,
    Overheads,
    PrefillCell,
    Profile,
    Serving,
    TargetCell,
)
from specctl.schemas.roofline import Source

DEVIATIONS = 2
WHOLE = (
    "measured steps are whole, as a stream shows them: the draft, the engine and what is between it and its client are "
    "in them, and nothing is counted beside them"
)


@dataclass(frozen=True)
class Said:
    """About the engine, by the command line; None where it says nothing."""

    hardware: str | None = None
    tp: int | None = None
    ep: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None


def identity(served: Served, said: Said, base: Profile | None) -> Identity:
    """base: the profile that it is put into, if there is one; the user has said that it is of this engine."""
    model = Measured() if base is None else base.model
    unnamed = f"not told, at {served.wire.url}" if base is None else base.hardware.name
    return Identity(
        hardware=said.hardware or unnamed,
        engine=served.engine,
        model=Measured(
            name=served.model,
            config_sha=served.config_sha,
            dtype=said.dtype or served.dtype or model.dtype,
            kv_dtype=said.kv_dtype or served.kv_dtype or model.kv_dtype,
            tp=said.tp or served.tp or model.tp,
            ep=said.ep or served.ep or model.ep,
            digest=served.digest,
        ),
        drafter=_drafter(served),
    )


def document(served: Served, plan: Plan, readings: Readings, of: Identity, base: Profile | None) -> Profile:
    provenance = Provenance.here().model_copy(update={"device": of.hardware})
    return Profile(
        schema=SCHEMA,
        provenance=provenance,
        hardware=Hardware(name=of.hardware),
        engine=Serving(name=of.engine, version=served.version),
        model=of.model,
        drafter=of.drafter,
        whole_steps=True,
        steps=[
            TargetCell(
                batch=spot.batch,
                q=reading.k + 1,
                context=spot.context,
                ms=reading.timing.ms,
                spread=reading.timing.spread,
                source="measured",
            )
            for spot, reading in readings.steps.items()
        ],
        prefill=list(_prefill(served, readings, base)),
        overheads_ms=Overheads(base=0.0, spec=0.0, per_draft_step=0.0),
        sources=[_source(served, plan, readings, provenance.date)],
        notes=[WHOLE],
    )


def measured_prefill(profile: Profile | None) -> dict[int, float]:
    """Milliseconds of the target alone, by tokens."""
    cells = [] if profile is None else profile.prefill
    return {cell.tokens: cell.target_ms for cell in cells if cell.source == "measured"}


def _prefill(served: Served, readings: Readings, base: Profile | None) -> Iterator[PrefillCell]:
    """The draft's part is what a speculating engine takes longer for the same prompt than one that does not, where that
    is more than the noise of two runs."""
    plain = measured_prefill(base)
    for tokens, timing in readings.first_token.items():
        if served.speculation is None:
            yield PrefillCell(tokens=tokens, target_ms=timing.ms, source="measured")
        else:
            target_ms = plain[tokens]
            longer, noise = timing.ms - target_ms, math.sqrt(2) * timing.spread
            draft_ms = longer if longer > DEVIATIONS * noise else 0.0
            yield PrefillCell(tokens=tokens, target_ms=target_ms, draft_ms=draft_ms, source="measured")


def _drafter(served: Served) -> BoundDraft | None:
    draft = None if served.speculation is None else served.speculation.draft
    return None if draft is None else BoundDraft(kind=draft)


def _source(served: Served, plan: Plan, readings: Readings, date: str) -> Source:
    rows = sorted({reading.k + 1 for reading in readings.steps.values()})
    spots = readings.steps
    batches, contexts = sorted({spot.batch for spot in spots}), sorted({spot.context for spot in spots})
    accepted = sum(each.per_step for each in spots.values()) / len(spots)
    forced = "" if plan.forced is None else ", as the engine was told to"
    drafted = "" if rows == [1] else f"; {accepted:.2f} tokens a step on average{forced}"
    prompts = " and time to the first token" if readings.first_token and served.speculation is None else ""
    return Source(
        numbers=f"steps: q {_listed(rows)} at batch {_listed(batches)}, context {_listed(contexts)}",
        what=f"streams of a running engine{prompts}: medians of {plan.repeats} rounds of {plan.steps} steps{drafted}",
        package=served.engine,
        version=served.version,
        url=served.wire.url,
        date=date,
    )


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
