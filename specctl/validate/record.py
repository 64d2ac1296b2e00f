"""A draft's own record: the acceptance that its specctl.json has from when it was made, and a run held against it.

Other prompts are accepted more or less, and so only a part of what was accepted then is asked for, and chance is
allowed for. Where even that is missing it is not the draft that was made, it is not read as it was, or it was made for
other texts. It knows no gates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from specctl.schemas.draft import FACTS, Acceptance, recorded
from specctl.schemas.validation import Check
from specctl.validate import figures
from specctl.validate.evidence import NoData, Run
from specctl.validate.intervals import Z95
from specctl.validate.verdicts import held, told

NAME = "mean_acceptance_length"
LEFT = 0.5
"""Of the drafted tokens that were accepted then, the part that has to be accepted now."""


@dataclass(frozen=True)
class Record:
    """acceptance: at least one measurement. where: the file that it is in."""

    where: str
    acceptance: tuple[Acceptance, ...]

    def nearest(self, temperature: object, positions: int) -> Acceptance:
        """What to hold a run against: measured at its temperature if there is such, and of several the lowest."""
        same = [each for each in self.acceptance if each.temperature == temperature]
        return min(same or self.acceptance, key=lambda each: sum(each.accepted_per_position[:positions]))


def read_record(path: Path, kind: str) -> Record | None:
    """Of the draft in a directory; None where nothing is recorded of a draft of its kind."""
    said = recorded(path)
    if said is None or said.kind != kind or not said.acceptance:
        return None
    return Record(str(path / FACTS), tuple(said.acceptance))


def against_record(record: Record | None, run: Run) -> Check:
    """A run that drafts, held against what is recorded, position by position as far as both have them. Raises NoData
    for counters that cannot be."""
    figure = figures.acceptance_length(run)
    if record is None:
        says = f"{told(figure)}, held against nothing: no min is given, and no specctl.json says what it was"
        return held(NAME, run.name, True, says, measured=figure.value, interval=figure.interval)
    rates, drafts = figures.survival(run)
    said = record.nearest(run.work.get("temperature"), len(rates))
    then = _comparable(record, said, run)[: len(rates)]
    now, least = sum(rates[: len(then)]), LEFT * sum(then)
    # If every second draft were accepted as then and the others not at all.
    square = LEFT * sum((2 * k - 1) * rate for k, rate in enumerate(then, start=1))
    chance = Z95 * math.sqrt(max(0.0, square - least * least) / drafts)
    of = f"{said.class_}, T = {said.temperature:g}, K = {said.k}"
    says = f"{told(figure)}: {now:.3g} drafted tokens a draft are accepted"
    says += f" at the first {len(then)} positions" if len(then) < len(rates) or len(then) < said.k else ""
    says += f", {record.where} records {sum(then):.3g} ({of}), expected at least half of that"
    return held(
        NAME,
        run.name,
        now >= least - chance,
        says,
        measured=figure.value,
        interval=figure.interval,
        limit=1 + least,
    )


def _comparable(record: Record, said: Acceptance, run: Run) -> list[float]:
    """The recorded rates, as they would be by the run's way of acceptance."""
    rates = said.accepted_per_position
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise NoData(f"{record.where}: accepted_per_position is {rates}, expected shares of one")
    coupled = (run.speculation or {}).get("accept") == "coupled" and run.work.get("temperature") != 0
    return _coupled(rates) if coupled else list(rates)


def _coupled(rates: Sequence[float]) -> list[float]:
    """At least so much is accepted by shared noise where `rates` are accepted exactly: of a token that is accepted with
    probability a, a / (2 - a)."""
    found, reached = [], 1.0
    for before, after in pairwise([1.0, *rates]):
        a = min(1.0, after / before) if before else 0.0
        reached *= a / (2 - a)
        found.append(reached)
    return found
