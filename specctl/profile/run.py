"""A profile from a loaded pair: every cell of the grid measured, none made up. It prints and writes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import specctl
from specctl.digest import tensors_sha
from specctl.pair import OpenedDraft, Target, identify
from specctl.profile.clockwork import time_all
from specctl.profile.grid import Grid
from specctl.profile.overheads import measure_overheads
from specctl.profile.passes import Kind, Passes, Place, places
from specctl.profile.same import Identity
from specctl.profile.timing import Timing
from specctl.schemas.base import Provenance
from specctl.schemas.profile import (
    SCHEMA,
    Hardware,
    Measured,
    PrefillCell,
    Profile,
    Serving,
    StepCell,
    TargetCell,
)

ENGINE = "specctl"


def measure(
    target: Target,
    draft: OpenedDraft | None,
    grid: Grid,
    repeats: int,
    progress: Callable[[str], None] = lambda sentence: None,
) -> Profile:
    """Time all cells in turn, then the engine's own part of a step."""
    with Passes.over(target, draft, grid.num_tokens, max(grid.batches)) as passes:
        runs = {place: passes.at(place) for place in places(grid, passes)}
        progress(f"timing {len(runs)} passes, {repeats} times each")
        timings = time_all(runs, repeats, target.device, progress)
        attention = type(passes.bare.attn).__name__
        del runs
    overheads = measure_overheads(target, draft, grid, repeats, progress)
    provenance = Provenance.here(str(target.device), target.num_threads)
    return Profile(
        schema=SCHEMA,
        provenance=provenance,
        hardware=Hardware(name=provenance.device, threads=target.num_threads, devices=1, nodes=1),
        engine=Serving(name=ENGINE, version=specctl.__version__, attention=attention, cuda_graphs=False),
        model=_model(target),
        drafter=None if draft is None else identify(target, draft)[1],
        steps=[TargetCell(**_cell(place, timing)) for place, timing in _of("steps", timings)],
        draft=[StepCell(**_cell(place, timing)) for place, timing in _of("draft", timings)],
        draft_follow=[StepCell(**_cell(place, timing)) for place, timing in _of("draft_follow", timings)],
        prefill=list(_prefill(timings)),
        overheads_ms=overheads,
    )


def identity(target: Target, draft: OpenedDraft | None) -> Identity:
    """What is measured, before it is."""
    hardware = Provenance.here(str(target.device), target.num_threads).device
    return Identity(hardware, ENGINE, _model(target), None if draft is None else identify(target, draft)[1])


def _model(target: Target) -> Measured:
    return Measured(
        name=target.name,
        config_sha=hashlib.sha256((target.checkpoint.path / "config.json").read_bytes()).hexdigest(),
        dtype=str(target.dtype).removeprefix("torch."),
        digest=tensors_sha(target.checkpoint),
    )


def _of(kind: Kind, timings: dict[Place, Timing]) -> Iterator[tuple[Place, Timing]]:
    return ((place, timing) for place, timing in timings.items() if place.kind == kind)


def _cell(place: Place, timing: Timing) -> dict[str, Any]:
    return {
        "batch": place.batch,
        "q": place.q,
        "context": place.context,
        "ms": timing.ms,
        "spread": timing.spread,
        "source": "measured",
    }


def _prefill(timings: dict[Place, Timing]) -> Iterator[PrefillCell]:
    draft_ms = {place.q: timing.ms for place, timing in _of("prefill_draft", timings)}
    for place, timing in _of("prefill_target", timings):
        yield PrefillCell(tokens=place.q, target_ms=timing.ms, draft_ms=draft_ms.get(place.q))
