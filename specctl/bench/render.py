"""A report as people read it: markdown for a file, a table for the terminal. Only here are numbers rounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from specctl.bench.anatomy import PARTS, Anatomy
from specctl.bench.steps import step_costs
from specctl.engine.stats import PHASES
from specctl.schemas.report import Comparison, Percentiles, Report, Run

Rows = list[list[str]]

NOTES = """\
Speed-up: tokens a second over tokens a second; its interval is a paired bootstrap over groups of prompts and repeats.
c, v and u are the draft pass, the verify pass of K + 1 rows and the catch-up pass, in plain passes, timed bare.
Implied: length / (v + (K - 1) c + u), where length is the mean acceptance length: 1 + accepted tokens / drafts, so that
the token after the accepted ones is counted. Efficiency: speed-up / implied. Both take every step for one that drafts;
"What a step costs" does not, which matters for a draft that often proposes nothing, as ngram does. TTFT and TPOT are of
single requests: time to the first token, and (last - first) / (tokens - 1). transformers runs one prompt at a time,
whatever --batch says. Counters and tokens are of one repeat."""


def markdown(report: Report, anatomy: Anatomy | None = None, plots: Sequence[str] = ()) -> str:
    """The whole report. plots: paths of pictures, as seen from where the text will lie."""
    return "\n".join(_sections(report, anatomy, plots))


def terminal(report: Report, anatomy: Anatomy | None = None) -> str:
    """The closing table, what else was compared, and the anatomy if there is one."""
    lines = [aligned(_closing_rows(report)), "", *_undrafted(report)]
    for comparison in report.comparisons:
        if comparison.against != "plain":
            lines.append(
                f"{comparison.run} against {comparison.against}: {_speedup(comparison)}, answers "
                f"{answers(report, comparison)}"
            )
    if anatomy is not None:
        lines += ["", "milliseconds a token, by phase", aligned(_phase_rows(anatomy))]
        lines += ["", "milliseconds a pass, by part of the model", aligned(_part_rows(anatomy))]
    return "\n".join(lines).rstrip() + "\n"


def answers(report: Report, comparison: Comparison) -> str:
    """What the comparison of answers came to, in a few words."""
    count = len(comparison.near_ties)
    if comparison.identical is False:
        return f"DIFFERENT in {_some(count, 'place')}"
    if comparison.identical:
        return "the same" + (f" but for {_some(count, 'near-tie')}" if count else "")
    if count:
        return f"differ in {_some(count, 'place')}, in 16 bits not judged"
    lossy = any(_is_lossy(report.run(name)) for name in (comparison.run, comparison.against))
    return "not compared (lossy)" if lossy else "not compared (sampled)"


def _sections(report: Report, anatomy: Anatomy | None, plots: Sequence[str]) -> Iterator[str]:
    work, origin = report.work, report.provenance
    threads = "" if origin.threads is None else f", {_some(origin.threads, 'thread')}"
    seed = "" if work.seed is None else f", seed {work.seed}"
    yield "# Benchmark\n"
    prompts = _some(work.n, "prompt")
    yield f"{prompts}, answers of at most {work.max_tokens} tokens, temperature {work.temperature:g}{seed}.\n"
    versions = f"specctl {origin.specctl}, torch {origin.torch}, transformers {origin.transformers}"
    yield f"{versions}, {origin.device}{threads}, {origin.date}"
    yield f"\n    {origin.command}\n"
    yield _piped(_closing_rows(report))
    for sentence in _undrafted(report):
        yield f"\n{sentence}"
    for path in plots:
        yield f"\n![{path.rpartition('/')[2].removesuffix('.png')}]({path})"
    yield "\n## Runs\n"
    yield _piped(_run_rows(report))
    if report.comparisons:
        yield "\n## Comparisons\n"
        yield _piped(_comparison_rows(report))
    if rows := _speculation_rows(report):
        yield "\n## Acceptance\n"
        yield _piped(rows)
    if rows := _step_rows(report):
        yield "\n## What a step costs\n\nIn plain steps, of one sequence:\n"
        yield _piped(rows)
    if rows := _tie_rows(report):
        yield "\n## First differences\n"
        yield _piped(rows)
    if anatomy is not None:
        yield "\n## Anatomy\n\nMilliseconds a token, by phase of the engine:\n"
        yield _piped(_phase_rows(anatomy))
        yield "\nMilliseconds a pass, by part of the model:\n"
        yield _piped(_part_rows(anatomy))
    yield f"\n## How to read this\n\n{NOTES}\n"


def _undrafted(report: Report) -> Iterator[str]:
    """Of each run that had a draft and no use for it."""
    for run in report.runs:
        if run.k and run.speculation is not None and not run.speculation.num_drafts:
            yield f"{run.name}: nothing was drafted, so its speed-up is chance; give longer answers or other prompts"


def _closing_rows(report: Report) -> Rows:
    against_plain = {c.run: c for c in report.comparisons if c.against == "plain"}
    rows = [["run", "tok/s", "speed-up", "95 %", "accepted", "length", "implied", "efficiency", "answers"]]
    for run in report.runs:
        comparison, counters = against_plain.get(run.name), run.speculation
        rows.append(
            [
                _name(run),
                f"{run.tok_s:.1f}",
                *(["", ""] if comparison is None else [f"{comparison.speedup:.2f}", _interval(comparison)]),
                "" if counters is None else _number(counters.acceptance_rate, "{:.0%}"),
                "" if counters is None else _number(counters.mean_acceptance_length, "{:.2f}"),
                "" if comparison is None else _number(comparison.implied, "{:.2f}"),
                "" if comparison is None else _number(comparison.efficiency, "{:.2f}"),
                "" if comparison is None else answers(report, comparison),
            ]
        )
    return rows


def _run_rows(report: Report) -> Rows:
    rows = [["run", "K", "batch", "tokens", "tok/s", "seconds", "TTFT ms p50 / p95", "TPOT ms p50 / p95"]]
    for run in report.runs:
        k = "policy" if run.k is None else str(run.k)
        seconds = ", ".join(f"{value:.2f}" for value in run.seconds)
        times = [_percentiles(run.ttft_ms), _percentiles(run.tpot_ms)]
        rows.append([_name(run), k, str(run.batch), str(run.tokens), f"{run.tok_s:.1f}", seconds, *times])
    return rows


def _comparison_rows(report: Report) -> Rows:
    rows = [["run", "against", "speed-up", "95 %", "c", "v", "u", "implied", "efficiency", "answers"]]
    for each in report.comparisons:
        figures = [_number(value, "{:.2f}") for value in (each.c, each.v, each.u, each.implied, each.efficiency)]
        verdict = answers(report, each)
        rows.append([each.run, each.against, f"{each.speedup:.2f}", _interval(each), *figures, verdict])
    return rows


def _speculation_rows(report: Report) -> Rows:
    rows = [["run", "accept", "drafts", "drafted", "accepted", "rate", "length", "accepted by position"]]
    for run in report.runs:
        if (counters := run.speculation) is None:
            continue
        pairs = zip(counters.accepted_per_position, counters.drafted_per_position, strict=True)
        rows.append(
            [
                _name(run),
                counters.accept,
                str(counters.num_drafts),
                str(counters.num_draft_tokens),
                str(counters.num_accepted_tokens),
                _number(counters.acceptance_rate, "{:.1%}"),
                _number(counters.mean_acceptance_length, "{:.2f}"),
                ", ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs),
            ]
        )
    return rows if len(rows) > 1 else []


def _step_rows(report: Report) -> Rows:
    rows = [["run", "tokens", "drafting", "verify", "draft", "catch-up", "else", "share in passes"]]
    for step in step_costs(report):
        costs = [f"{value:.2f}" for value in (step.verify, step.draft, step.catch_up, step.rest)]
        rows.append([step.run, f"{step.tokens:.2f}", f"{step.drafting:.0%}", *costs, f"{step.in_passes:.0%}"])
    return rows if len(rows) > 1 else []


def _tie_rows(report: Report) -> Rows:
    rows = [["run", "against", "prompt", "token", "gap"]]
    for each in report.comparisons:
        for tie in each.near_ties:
            rows.append([each.run, each.against, tie.prompt, str(tie.position), _number(tie.gap, "{:.1e}")])
    return rows if len(rows) > 1 else []


def _phase_rows(anatomy: Anatomy) -> Rows:
    return _timed_rows("run", PHASES, anatomy.phases, "{:.2f}")


def _part_rows(anatomy: Anatomy) -> Rows:
    return _timed_rows("pass", PARTS, anatomy.passes, "{:.2f}")


def _timed_rows(what: str, columns: Iterable[str], table: dict[str, dict[str, float]], shown: str) -> Rows:
    rows = [[what, *(column.replace("_", " ") for column in columns), "all"]]
    for name, times in table.items():
        rows.append([name, *(shown.format(times[column]) for column in columns), shown.format(sum(times.values()))])
    return rows


def _speedup(comparison: Comparison) -> str:
    interval = _interval(comparison)
    return f"{comparison.speedup:.2f} x" + (f" ({interval})" if interval else "")


def _interval(comparison: Comparison) -> str:
    return "" if comparison.ci95 is None else "{:.2f} - {:.2f}".format(*comparison.ci95)


def _percentiles(value: Percentiles | None) -> str:
    return "" if value is None else f"{value.p50:.1f} / {value.p95:.1f}"


def _number(value: float | None, shown: str) -> str:
    return "-" if value is None else shown.format(value)


def _some(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _name(run: Run) -> str:
    return f"{run.name} (lossy)" if _is_lossy(run) else run.name


def _is_lossy(run: Run) -> bool:
    return run.speculation is not None and run.speculation.lossy


def aligned(rows: Rows) -> str:
    """Columns as wide as their widest cell; the first and the last column to the left, as they are words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1

    def line(row: list[str]) -> str:
        cells = (c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def _piped(rows: Rows) -> str:
    """A markdown table, aligned like `aligned`."""
    rule = ["---" if i in (0, len(rows[0]) - 1) else "---:" for i in range(len(rows[0]))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:]))
