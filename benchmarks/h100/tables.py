"""The rooflines against the operator database they were fitted to, kernel by kernel: whole steps, and what K hangs on,
t(q) / t(1). Sums of measured kernels, not measured steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import extracts
import numpy as np
from extracts import Step

from specctl.schemas.profile import Constants

from .figures import Errors

QS = (2, 3, 4, 6, 9, 16)


@dataclass(frozen=True)
class Compared:
    """A step by the database and by the roofline."""

    step: Step
    predicted: float

    @property
    def lane(self) -> str:
        place = self.step.place
        devices = f"tp{place.tp}" + (f" ep{place.ep}" if place.ep > 1 else "")
        return f"{self.step.system} {self.step.model} {place.weights} {devices} {self.step.engine}"


def compare(data: Path, constants: dict[str, Constants]) -> list[Compared]:
    """Without what the roofline adds between nodes, which the database has not."""
    groups: dict[Any, list[Step]] = {}
    for step in extracts.steps(data):
        groups.setdefault((step.system, step.engine, step.model, step.place), []).append(step)
    found = []
    for (system, engine, model, place), steps in groups.items():
        roofline = constants[system].roofline
        lane = roofline.lanes[engine].model_copy(update={"across_us": 0.0})
        passes = extracts.passes_of(model, place, lane, roofline.peaks)
        arrays = (np.array([getattr(step, key) for step in steps]) for key in ("batch", "q", "context"))
        predicted = passes.step(*arrays).total.tolist()
        found += [Compared(step, ms) for step, ms in zip(steps, predicted, strict=True)]
    return found


def by_lane(compared: Sequence[Compared], *, nodes: int) -> Iterator[tuple[str, Errors]]:
    chosen = [each for each in compared if each.step.place.nodes == nodes and each.step.q <= 9]
    for lane in sorted({each.lane for each in chosen}):
        rows = [each for each in chosen if each.lane == lane]
        yield lane, Errors.of((each.predicted for each in rows), (each.step.ms for each in rows))


def ratios(compared: Sequence[Compared], *, sparse: bool) -> Iterator[tuple[str, Errors]]:
    """t(q) / t(1) at the same batch and context on one node, for models with experts or without."""
    for q in QS:
        yield f"q = {q}", ratio(compared, sparse=sparse, rows=range(q, q + 1))


def ratio(compared: Sequence[Compared], *, sparse: bool, rows: range) -> Errors:
    chosen = [
        each for each in compared if (each.step.place.weights == "fp8-block") == sparse and each.step.place.nodes == 1
    ]
    ones = {_place(each.step): each for each in chosen if each.step.q == 1}
    pairs = [(each, ones[_place(each.step)]) for each in chosen if each.step.q in rows]
    predicted = (each.predicted / one.predicted for each, one in pairs)
    return Errors.of(predicted, (each.step.ms / one.step.ms for each, one in pairs))


def _place(step: Step) -> tuple[Any, ...]:
    return step.system, step.engine, step.model, step.place, step.batch, step.context
