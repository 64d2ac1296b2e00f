"""`bench` as a command: models opened, REPORT.json, REPORT.md, plots and TRACE.json written, a table shown."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specctl.bench.options import BenchOptions
from specctl.bench.plots import draw
from specctl.bench.render import markdown, terminal
from specctl.bench.run import Measured, measure
from specctl.errors import GateFailed, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import new_directory, new_file, say, to_json
from specctl.pair import open_draft, open_target
from specctl.prompts import Prompt
from specctl.schemas.report import Report


@dataclass(frozen=True)
class Outputs:
    """report: REPORT.json, with REPORT.md and REPORT_plots/ beside it. trace: TRACE.json, if wanted."""

    report: Path
    trace: Path | None = None
    force: bool = False

    @property
    def markdown(self) -> Path:
        return self.report.with_suffix(".md")

    @property
    def plots(self) -> Path:
        return self.report.with_name(f"{self.report.stem}_plots")

    def check(self) -> None:
        for flag, path in (("--output", self.report), ("--trace", self.trace)):
            if path is not None and path.suffix != ".json":
                raise UsageError(f"{flag} {path}: expected a name that ends in .json")
        if self.trace is not None and self.trace.resolve() == self.report.resolve():
            raise UsageError(f"--trace {self.trace}: is the report's file; name another")


def bench(
    target_name: str,
    prompts: list[Prompt],
    model: ModelOptions,
    decoding: DecodingOptions,
    options: BenchOptions,
    outputs: Outputs,
    *,
    as_json: bool,
) -> None:
    """Measure and write. The closing table (or with as_json the report) goes to stdout, all else to stderr.

    Raises GateFailed, after everything is written, when answers differ that have to be the same.
    """
    outputs.check()
    with ExitStack() as files:
        # Whatever cannot be written is refused now and not after the work.
        report_file = files.enter_context(new_file(outputs.report, force=outputs.force))
        markdown_file = files.enter_context(new_file(outputs.markdown, force=outputs.force))
        plots = files.enter_context(new_directory(outputs.plots, force=outputs.force))
        trace_file = (
            None if outputs.trace is None else files.enter_context(new_file(outputs.trace, force=outputs.force))
        )
        measured = _measure(target_name, prompts, model, decoding, options)
        value = measured.report.model_dump(mode="json", by_alias=True)
        report_file.write_text(to_json(value) + "\n", encoding="utf-8")
        drawn = [f"{outputs.plots.name}/{path.name}" for path in draw(measured.report, plots, measured.anatomy)]
        text = markdown(measured.report, measured.anatomy, drawn)
        markdown_file.write_text(text, encoding="utf-8")
        if trace_file is not None and measured.trace is not None:
            trace_file.write_text(
                to_json(measured.trace.model_dump(mode="json", by_alias=True)) + "\n", encoding="utf-8"
            )
    sys.stdout.write(to_json(value) + "\n" if as_json else terminal(measured.report, measured.anatomy))
    written = (outputs.report, outputs.markdown, outputs.plots, outputs.trace)
    say(f"written: {', '.join(str(path) for path in written if path)}")
    if fault := first_fault(measured.report):
        raise GateFailed(f"{outputs.report}: {fault}")


def first_fault(report: Report) -> str | None:
    """A sentence about the first two runs that have to agree and do not."""
    for comparison in report.comparisons:
        if comparison.identical is False:
            worst = comparison.near_ties[0]
            gap = "one answer ends there" if worst.gap is None else f"the scores are {worst.gap:.2g} apart there"
            return (
                f"answers of {comparison.run} and {comparison.against} have to be the same and are not: prompt "
                f"{worst.prompt}, token {worst.position} of the answer; {gap}, which is no near-tie"
            )
    return None


def _measure(
    target_name: str, prompts: list[Prompt], model: ModelOptions, decoding: DecodingOptions, options: BenchOptions
) -> Measured:
    target = open_target(target_name, model)
    drafts = [open_draft(name, target) for name in decoding.drafts]
    return measure(target, drafts, prompts, options, decoding, say)
