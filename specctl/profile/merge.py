"""Measured cells put into a profile in place of its own: `profile --merge`. It measures nothing and writes nothing.

Every cell keeps its class, and `sources` tell which run measured which. What a replaced cell had said is kept beside
what was measured, in validated_against. Where cells that were not measured are said to share an error (shared_spread),
the measured ones tell how large it is, and it is taken out of the rest; see docs/decisions/engine-profiles.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from specctl.errors import UsageError
from specctl.profile.same import Identity, check_same
from specctl.profile.whole import whole
from specctl.schemas.profile import (
    Measured,
    Overheads,
    PrefillCell,
    Profile,
    StepCell,
    TargetCell,
    Validation,
)
from specctl.schemas.roofline import Source


def merge(base: Profile, where: str, found: Profile, same_model: bool = False) -> tuple[Profile, list[str]]:
    """found: what was measured. where: names `base` in errors. same_model: the user's word that names alone differ.

    The profile, and what should be known of it. Raises UsageError for another model, hardware, engine or draft, and for
    places that base has no cells for.
    """
    check_same(Identity.of(base), where, Identity.of(found), same_model)
    if base.whole_steps or found.whole_steps:
        base, found = whole(base, where), whole(found, "what was measured")
    check_places(base, where, ((cell.batch, cell.context) for cell in found.steps))
    validated = list(_validated(base, found))
    notices: list[str] = []
    base = _without_shared(base, found, notices)
    merged = base.model_copy(
        update={
            "provenance": found.provenance,
            "hardware": base.hardware.model_copy(update=_known(found.hardware)),
            "engine": base.engine.model_copy(update=_known(found.engine)),
            "model": _model(base, found),
            "drafter": base.drafter if found.drafter is None else found.drafter,
            "steps": _cells(base.steps, found.steps),
            "draft": _cells(base.draft, found.draft),
            "draft_follow": _cells(base.draft_follow, found.draft_follow),
            "prefill": list(_prefill(base, found)),
            "overheads_ms": _overheads(base, found),
            "sources": [*_sources(base, where), *found.sources],
            "notes": list(dict.fromkeys([*base.notes, *found.notes, *notices])),
            "validated_against": validated,
        }
    )
    return Profile.model_validate(merged.model_dump(by_alias=True)), [*notices, *gaps(merged)]


def gaps(profile: Profile) -> Iterator[str]:
    """What keeps `tune` from using a profile, or makes it guess."""
    rows: dict[tuple[int, int], list[int]] = {}
    for cell in profile.steps:
        rows.setdefault((cell.batch, cell.context), []).append(cell.q)
    no_plain = [place for place, found in rows.items() if 1 not in found]
    if no_plain:
        yield (
            f"{_places(no_plain)}: has no plain step yet, so tune cannot use it; profile the same places of the engine "
            "without speculation, with --merge"
        )
    no_block = [place for place, found in rows.items() if max(found) == 1]
    if no_block:
        yield (
            f"{_places(no_block)}: has no step that drafts yet, so tune cannot use it; profile the same places of the "
            "engine with speculation, with --merge"
        )
    first = sorted({sorted(found)[1] for found in rows.values() if 1 in found and len(found) > 1})
    if profile.whole_steps and first and first[-1] > 2:
        yield (
            f"K below {first[-1] - 1} was not measured everywhere: a plain step does not tell what drafting costs at "
            "any K, so where that is missing tune takes shorter drafts to cost as much as the shortest that was "
            "measured, the most they can; measure K = 1 too"
        )


def check_places(base: Profile, where: str, places: Iterable[tuple[int, int]]) -> None:
    """places: batches and contexts. One of its own among computed ones would have fewer rows than they, and bound the
    draft length of all: UsageError."""
    if all(cell.source == "measured" for cell in base.steps):
        return
    known = {(cell.batch, cell.context) for cell in base.steps}
    strange = sorted(set(places) - known)
    if strange:
        batches, contexts = (sorted({place[i] for place in known}) for i in (0, 1))
        raise UsageError(
            f"{where}: has no cells for batch {strange[0][0]}, context {strange[0][1]}; it has --batches "
            f"{','.join(map(str, batches))} and --contexts {','.join(map(str, contexts))}"
        )


def _cells(base: Sequence[StepCell], found: Sequence[StepCell]) -> list[StepCell]:
    cells = {cell.place: cell for cell in base} | {cell.place: cell for cell in found}
    return [cells[place] for place in sorted(cells, key=lambda place: (place[0], place[2], place[1]))]


def _pairs(base: Profile, found: Profile) -> Iterator[tuple[TargetCell, TargetCell]]:
    """Cells that nobody had measured, each with the one that takes its place."""
    measured = {cell.place: cell for cell in found.steps}
    for cell in base.steps:
        if cell.source != "measured" and cell.place in measured:
            yield cell, measured[cell.place]


def _validated(base: Profile, found: Profile) -> Iterator[Validation]:
    new = {
        _point(cell): Validation(point=_point(cell), measured_ms=other.ms, predicted_ms=cell.ms)
        for cell, other in _pairs(base, found)
    }
    yield from (each for each in base.validated_against if each.point not in new)
    yield from new.values()


def _point(cell: TargetCell) -> str:
    return f"step of batch {cell.batch}, q {cell.q}, context {cell.context}"


def _without_shared(base: Profile, found: Profile, notices: list[str]) -> Profile:
    """The share that all computed cells are off by together is what the measured ones show on average. What is left of
    a cell's spread is its own, and not less than how differently the measured ones were off."""
    logs = [math.log(other.ms / cell.ms) for cell, other in _pairs(base, found)]
    if not base.shared_spread or not logs:
        return base
    factor = math.exp(float(np.mean(logs)))
    apart = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0

    def mended(cell: StepCell) -> StepCell:
        if cell.source == "measured":
            return cell
        own = math.sqrt(max(0.0, (cell.spread / cell.ms) ** 2 - base.shared_spread**2))
        ms = cell.ms * factor
        return cell.model_copy(update={"ms": ms, "spread": ms * min(0.99, max(own, apart))})

    notices.append(
        f"steps that were not measured are multiplied by {factor:.3f}, which {len(logs)} measured ones show of the "
        "error they share"
    )
    cells = {key: [mended(cell) for cell in getattr(base, key)] for key in ("steps", "draft", "draft_follow")}
    return base.model_copy(update=cells | {"shared_spread": 0.0})


def _prefill(base: Profile, found: Profile) -> Iterator[PrefillCell]:
    """A measured prompt tells nothing about the draft's part unless it says so."""
    cells = {cell.tokens: cell for cell in base.prefill}
    for cell in found.prefill:
        before = cells.get(cell.tokens)
        draft_ms = before.draft_ms if cell.draft_ms is None and before is not None else cell.draft_ms
        cells[cell.tokens] = cell.model_copy(update={"draft_ms": draft_ms, "source": cell.source or "measured"})
    kinds = {cell.source for cell in base.steps}
    for _, cell in sorted(cells.items()):
        only = next(iter(kinds)) if len(kinds) == 1 else None
        yield cell if cell.source is not None else cell.model_copy(update={"source": only})


def _overheads(base: Profile, found: Profile) -> Overheads:
    """Of an engine that was measured without a draft only a plain step's are known."""
    if base.whole_steps or found.draft or not base.draft:
        return found.overheads_ms
    return base.overheads_ms.model_copy(update={"base": found.overheads_ms.base})


def _model(base: Profile, found: Profile) -> Measured:
    """By the name that base has: it is what its cells are of. Weights are the measured ones, if they are known."""
    sure = ("digest", "config_sha")
    known = {key: value for key, value in _known(found.model).items() if key in sure or vars(base.model)[key] is None}
    return base.model.model_copy(update=known)


def _known(part: object) -> dict[str, object]:
    """What a part of what was measured says, besides its name and what it leaves open."""
    return {key: value for key, value in vars(part).items() if value is not None and key != "name"}


def _sources(base: Profile, where: str) -> list[Source]:
    """A profile that was measured here says in its provenance where all its numbers are from."""
    if base.sources or base.provenance is None:
        return list(base.sources)
    made = base.provenance
    what = f"{where}, by {made.command or 'hand'} on {made.device}"
    return [Source(numbers="all that no later source names", what=what, date=made.date)]


def _places(places: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"batch {batch} at {context}" for batch, context in sorted(places)[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")
