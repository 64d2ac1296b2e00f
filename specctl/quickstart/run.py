"""quickstart from a name (or none) to a directory with a report. What is measured, and how, is bench's business."""

from __future__ import annotations

import shlex
import sys
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path

from specctl.bench.command import first_fault, say
from specctl.bench.options import BenchOptions
from specctl.bench.run import measure
from specctl.errors import GateFailed
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import new_directory, to_json
from specctl.pair import Target, free_memory, open_draft, open_target
from specctl.quickstart.model import NAME, small_model
from specctl.quickstart.page import Commands, Facts, page
from specctl.quickstart.plan import ANSWERS, LENGTHS, Plan, choose, own_prompts, trial
from specctl.quickstart.verdict import COLUMNS, Row, Verdict, judge, table
from specctl.schemas.report import Report
from specctl.schemas.trace import Trace

HTML, REPORT, TRACE = "REPORT.html", "REPORT.json", "TRACE.json"


@dataclass(frozen=True)
class Wishes:
    """What the user settles: where to, how many minutes to measure for, and if wished answer length and prompts."""

    output: Path
    force: bool = False
    minutes: float = 7.0
    max_tokens: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class _Outcome:
    report: Report
    trace: Trace
    verdict: Verdict
    rows: list[Row]
    commands: Commands


def quickstart(target_name: str | None, model: ModelOptions, wishes: Wishes, *, as_json: bool) -> None:
    """Measure and write the report. The closing table (or with as_json one object) goes to stdout, all else to stderr.

    Raises UsageError before any work when the output is there, and GateFailed, after everything is written, when
    answers differ that have to be the same.
    """
    with new_directory(wishes.output, force=wishes.force) as directory:
        say("[1/4] model: " + (target_name or f"{NAME}, from its package"))
        path = target_name or str(small_model(say))
        target = open_target(path, model)
        plan = _plan(target, wishes)
        say(f"[3/4] measuring, about {_minutes(plan.seconds)}")
        outcome = _measure(target, target_name or NAME, plan, model)
        say("[4/4] writing the report, some seconds")
        _write(directory, outcome, Facts.of(target, target_name or NAME), plan)
    _show(outcome, wishes.output, as_json)
    if fault := first_fault(outcome.report):
        raise GateFailed(f"{wishes.output / REPORT}: {fault}")


def _plan(target: Target, wishes: Wishes) -> Plan:
    prompts = own_prompts(target, wishes.max_tokens or ANSWERS[0])
    say("[2/4] trial: one plain answer, to see how much can be measured in the time")
    pace = trial(target, prompts[0])
    plan = choose(
        prompts,
        pace,
        60 * wishes.minutes,
        transformers=_fits_twice(target),
        max_tokens=wishes.max_tokens,
        limit=wishes.limit,
    )
    say(
        f"      {1000 * pace.token:.0f} ms a token, {pace.first:.1f} s to the first; for {wishes.minutes:g} minutes "
        f"(--minutes): {len(plan.prompts)} of {len(prompts)} prompts, answers of at most {plan.max_tokens} tokens, "
        f"measured {'once' if plan.repeats == 1 else f'{plan.repeats} times'}"
    )
    if plan.seconds > 1.5 * 60 * wishes.minutes:
        say("      that is more than fits: the machine is slow or busy; Ctrl-C ends the run and leaves nothing behind")
    if not plan.transformers:
        say("      transformers is left out: there is no memory for a second copy of the model")
    return plan


def _fits_twice(target: Target) -> bool:
    """Whether transformers can load the model once more beside ours."""
    weights = sum(target.checkpoint.info(name).num_parameters for name in target.checkpoint.names())
    return free_memory(target.device) > 1.2 * weights * target.dtype.itemsize


def _measure(target: Target, name: str, plan: Plan, model: ModelOptions) -> _Outcome:
    baselines = ("plain", "transformers") if plan.transformers else ("plain",)
    options = BenchOptions(baselines, repeats=plan.repeats, sweep_k=LENGTHS, trace=True)
    decoding = DecodingOptions(drafts=("ngram",), max_tokens=plan.max_tokens)
    measured = measure(
        target, [open_draft("ngram", target)], plan.prompts, options, decoding, lambda s: say(f"      {s}")
    )
    assert measured.trace is not None
    report, verdict = measured.report, judge(measured.report, name)
    commands = _commands(target.name, verdict.k, model)
    return _Outcome(report, measured.trace, verdict, table(report, verdict.k), commands)


def _commands(target: str, k: int, model: ModelOptions) -> Commands:
    """The lines to go on with, with whatever was said here on how to run the model."""
    changed = [f for f in fields(ModelOptions) if getattr(model, f.name) != f.default]
    flags = [word for f in changed for word in (f"--{f.name.replace('_', '-')}", str(getattr(model, f.name)))]
    serve = ["specctl", "serve", "--target", target, *(["--draft", "ngram", "--k", str(k)] if k else []), *flags]
    lengths = ",".join(map(str, LENGTHS))
    bench = ["specctl", "bench", "--target", target, "--draft", "ngram", "--sweep-k", lengths, *flags]
    return Commands(shlex.join(serve), shlex.join([*bench, "--prompts", "mine.jsonl", "--output", "mine.json"]))


def _write(directory: Path, outcome: _Outcome, facts: Facts, plan: Plan) -> None:
    report, trace = outcome.report, outcome.trace
    files = {
        REPORT: to_json(report.model_dump(mode="json", by_alias=True)) + "\n",
        TRACE: to_json(trace.model_dump(mode="json", by_alias=True)) + "\n",
        HTML: page(report, trace, plan.prompts, facts, outcome.verdict, outcome.rows, outcome.commands),
    }
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def _show(outcome: _Outcome, output: Path, as_json: bool) -> None:
    verdict, commands = outcome.verdict, outcome.commands
    if as_json:
        value = {
            "output": str(output),
            "k": verdict.k,
            "verdict": verdict.headline,
            "serve": commands.serve,
            "report": outcome.report.model_dump(mode="json", by_alias=True),
        }
        sys.stdout.write(to_json(value) + "\n")
        return
    lines = [
        "",
        _aligned([COLUMNS, *(row.cells for row in outcome.rows)]),
        "",
        *(textwrap.fill(sentence, 100) for sentence in (verdict.headline, verdict.because, verdict.text)),
        "",
        f"report:  {output / HTML}",
        f"go on:   {commands.serve}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = (0, len(widths) - 1)
    return "\n".join(
        "  ".join(
            c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds))} seconds" if seconds < 90 else f"{round(seconds / 60)} minutes"
