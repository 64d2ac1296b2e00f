"""What `validate` found: every gate with its figures, and the measurements they were taken from. A file that `validate
--results` and `--baseline` read again."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from specctl.schemas.base import Checked, Document, Provenance

SCHEMA = "specctl.validation/1"

Status = Literal["pass", "fail", "no-data"]


class Check(Checked):
    """One figure of a gate. figure: its name. run: whose it is, null for the pair's. ci95: null where none is known.
    limit: what it was held against. says: measured, against what, in words."""

    figure: str
    run: str | None
    status: Status
    measured: float | None
    ci95: Annotated[list[float], Field(min_length=2, max_length=2)] | None
    limit: float | None
    says: str


class GateResult(Checked):
    """status: "fail" when a check failed, else "no-data" when a figure was missing or no number, else "pass". remedy:
    what to do, null when passed."""

    name: str
    status: Status
    remedy: str | None
    checks: list[Check]


class Source(Checked):
    """A file that measurements were taken from. sha256: of the file. provenance: its own, null where it has none."""

    file: str
    sha256: str
    provenance: Provenance | None


class Measurement(Checked):
    """work, runs and comparisons as in a report of bench; a number that was none is null."""

    work: dict[str, Any] | None
    runs: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]


class Validation(Document):
    """results, baseline: the files judged and compared with, null where none was given. also: further measurements: at
    another draft length that a gate names, or greedy for prompts that are sampled otherwise."""

    schema_: Literal["specctl.validation/1"] = Field(alias="schema", default="specctl.validation/1")
    provenance: Provenance
    passed: bool
    gates: list[GateResult]
    results: Source | None
    baseline: Source | None
    work: dict[str, Any] | None
    runs: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    also: list[Measurement]
