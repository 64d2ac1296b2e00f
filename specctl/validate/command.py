"""`validate` as a command: gates and baseline read, a pair measured or a report judged, results written and shown."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import GateFailed, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import new_file, say, to_json
from specctl.prompts import Prompt
from specctl.schemas.gates import GatesFile, Regression, find_gates, read_gates
from specctl.schemas.validation import Validation
from specctl.validate.evidence import read_evidence
from specctl.validate.render import closing, junit, markdown, verdict
from specctl.validate.run import Asked, validate_pair, validate_results

DEFAULT_GATES = "gates"


@dataclass(frozen=True)
class Pair:
    """What to measure."""

    target: str
    draft: str
    prompts: list[Prompt]
    model: ModelOptions
    decoding: DecodingOptions


@dataclass(frozen=True)
class Wishes:
    """gates: the name of a shipped file or a path; None: those of the shipped file `gates` for a pair, and for a report
    what --baseline asks. junit, markdown, report: where to write."""

    gates: str | None
    baseline: Path | None
    junit: Path | None
    markdown: Path | None
    report: Path | None
    force: bool


def validate(what: Pair | Path, wishes: Wishes, *, as_json: bool) -> None:
    """Judge a pair or a report. The table, or with as_json the report, goes to stdout.

    Raises GateFailed, after everything is written, unless every gate passed.
    """
    asked = read_asked(wishes, of_report=isinstance(what, Path))
    with ExitStack() as files:
        # Whatever cannot be written is refused now and not after the work.
        outputs = {
            render: files.enter_context(new_file(path, force=wishes.force))
            for render, path in ((junit, wishes.junit), (markdown, wishes.markdown), (report, wishes.report))
            if path is not None
        }
        if isinstance(what, Path):
            validation = validate_results(asked, *read_evidence(what))
        else:
            from specctl.pair import open_target

            target = open_target(what.target, what.model)
            validation = validate_pair(asked, target, what.draft, what.prompts, what.decoding, say)
        for render, file in outputs.items():
            file.write_text(render(validation), encoding="utf-8")
    sys.stdout.write(report(validation) if as_json else closing(validation))
    if not validation.passed:
        raise GateFailed(verdict(validation))


def read_asked(wishes: Wishes, *, of_report: bool) -> Asked:
    """The gates, and the baseline if one of them needs it. Raises UsageError when nothing would be checked, for a
    baseline without a gate, and for a gate without a baseline."""
    gates, directory = _gates(wishes, of_report)
    if gates.regression is None:
        return Asked(gates, None)
    path = wishes.baseline
    if path is None and gates.regression.baseline is not None:
        path = directory / gates.regression.baseline
    if path is None:
        raise UsageError("the gate regression has no baseline: name one with --baseline or in the gates file")
    return Asked(gates, read_evidence(path))


def _gates(wishes: Wishes, of_report: bool) -> tuple[GatesFile, Path]:
    """--baseline asks for the gate regression where the gates file does not have it."""
    if wishes.gates is None and of_report:
        if wishes.baseline is None:
            raise UsageError("--results is given without anything to hold it against; give --gates, --baseline or both")
        return GatesFile(regression=Regression()), Path()
    path = find_gates(wishes.gates or DEFAULT_GATES)
    gates = read_gates(path)
    if wishes.baseline is not None and gates.regression is None:
        gates = gates.model_copy(update={"regression": Regression()})
    return gates, path.parent


def report(validation: Validation) -> str:
    return to_json(validation.model_dump(mode="json", by_alias=True)) + "\n"
