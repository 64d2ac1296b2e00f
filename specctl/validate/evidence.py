"""Evidence: the measurements of a report, read so that one bad figure spoils that figure and nothing else.

A file that is no report is refused. What a run says of itself is looked at when it is used; what is missing or no
number then is NoData, with the reason. It knows no gates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specctl.errors import UsageError
from specctl.schemas import report, validation
from specctl.schemas.base import Provenance
from specctl.text.shown import shown

Values = Mapping[str, Any]

PLAIN = "plain"


class NoData(Exception):
    """Why there is no figure, in words that follow the figure's name or stand alone."""


@dataclass(frozen=True)
class Run:
    """One run of a report. work: of its report."""

    values: Values
    work: Values

    @property
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def k(self) -> Any:
        """The draft length, None for a policy's."""
        return self.values.get("k")

    @property
    def speculation(self) -> Values | None:
        found = self.values.get("speculation")
        return found if isinstance(found, Mapping) else None

    @property
    def drafts(self) -> bool:
        return self.speculation is not None and self.k != 0


@dataclass(frozen=True)
class Evidence:
    """source: where it is from, as a sentence would say it. also: further measurements that came with it."""

    source: str
    work: Values = field(default_factory=dict)
    runs: Sequence[Values] = ()
    comparisons: Sequence[Values] = ()
    provenance: Values = field(default_factory=dict)
    also: tuple[Evidence, ...] = ()

    def drafting(self, k: int | None = None) -> list[Run]:
        """The runs that draft, or those with draft length `k`, which may be among the further measurements. Raises
        NoData when there is none, or when it comes from no prompts."""
        found = [run for run in self._all() if run.drafts and k in (None, run.k)]
        if not found and k is not None:
            found = [run for more in self.also for run in more._all() if run.drafts and run.k == k]
        if not found:
            raise NoData(f"{self.source} has no run that drafts" + ("" if k is None else f" at K = {k}"))
        for run in found:
            if "n" in run.work:
                number(run.work["n"], "work.n, the number of prompts,", low=1)
        return found

    def drafting_or_plain(self) -> list[Run]:
        """What would be served: the runs that draft, else plain decoding."""
        try:
            return self.drafting()
        except NoData:
            plain = [run for run in self._all() if run.name == PLAIN]
            if not plain:
                raise
            return plain

    def against_plain(self, run: Run) -> Values:
        """The comparison of a run with plain decoding."""
        for comparison in self.comparisons:
            if comparison.get("run") == run.name and comparison.get("against") == PLAIN:
                return comparison
        raise NoData(f"{self.source} does not compare {run.name} with {PLAIN}")

    def _all(self) -> list[Run]:
        return [Run(values, self.work) for values in self.runs]


def read_evidence(path: Path) -> tuple[Evidence, validation.Source]:
    """The report of `bench` or `validate` in a file. Raises UsageError for a file that is empty, cannot be read, or is
    no such report."""
    try:
        data = path.read_bytes()
        value = json.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {error}" if path.stat().st_size else "is empty"
        raise UsageError(f"{path}: {what}; expected a report of bench or validate") from None
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{path}: has nothing in it; expected a report of bench or validate")
    models: dict[Any, type[BaseModel]] = {
        report.SCHEMA: report.Report,
        validation.SCHEMA: validation.Validation,
    }
    if not isinstance(value.get("schema"), str) or value["schema"] not in models:
        raise UsageError(
            f"{path}: schema is {shown(value.get('schema'))}, expected {' or '.join(models)}, as bench and validate "
            "write it"
        )
    _known(value, models[value["schema"]], str(path))
    evidence = _evidence(value, str(path))
    judged = value.get("results")  # a validation of a report: its figures come from there
    provenance = (judged if isinstance(judged, dict) else value).get("provenance")
    sha = hashlib.sha256(data).hexdigest()
    evidence = replace(evidence, provenance=provenance if isinstance(provenance, dict) else {})
    return evidence, validation.Source(file=str(path), sha256=sha, provenance=_provenance(provenance))


def _evidence(value: Values, source: str) -> Evidence:
    work = {} if value.get("work") is None else value["work"]
    parts = (value.get(key) for key in ("runs", "comparisons", "also"))
    runs, comparisons, also = ([] if part is None else part for part in parts)
    _known(work, report.Work, f"{source}: work")
    for each, model, where in (
        (runs, report.Run, "runs"),
        (comparisons, report.Comparison, "comparisons"),
        (also, validation.Measurement, "also"),
    ):
        if not isinstance(each, list):
            raise UsageError(f"{source}: {where} is {shown(each)}, expected a list")
        for index, item in enumerate(each):
            _known(item, model, f"{source}: {where}.{index}")
    for index, run in enumerate(runs):
        if not isinstance(run.get("name"), str):
            raise UsageError(f"{source}: runs.{index}.name is {shown(run.get('name'))}, expected a name")
        if isinstance(run.get("speculation"), dict):
            _known(run["speculation"], report.Speculation, f"{source}: runs.{index}.speculation")
    names = [run["name"] for run in runs]
    if len(set(names)) < len(names):
        raise UsageError(f"{source}: two runs have one name: {', '.join(names)}")
    return Evidence(source, work, runs, comparisons, also=tuple(_evidence(each, source) for each in also))


def _known(value: Any, model: type[BaseModel], where: str) -> None:
    """Keys and values, and no key that the model does not know; whether the values are right is seen when one is
    used."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {shown(value)}, expected keys and values")
    known = {field.alias or name for name, field in model.model_fields.items()}
    if unknown := [key for key in value if key not in known]:
        raise UsageError(f"{where}: key {unknown[0]} is unknown (known: {', '.join(sorted(known))})")


def _provenance(value: Any) -> Provenance | None:
    try:
        return Provenance.model_validate(value)
    except ValidationError:
        return None


def number(value: Any, what: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Raises NoData for what is missing, no finite number, or outside of what is possible."""
    if value is None:
        raise NoData(f"{what} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**1000:
        raise NoData(f"{what} is {shown(value)}, which is no number")
    if not low <= value <= high:
        bounds = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
        raise NoData(f"{what} is {value:g}, which is impossible: expected {bounds}")
    return float(value)
