"""The regression gate: this report against an earlier one, like with like. Unlike things are not compared, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.schemas import gates
from specctl.schemas.validation import Check, GateResult
from specctl.text.shown import shown
from specctl.validate import figures
from specctl.validate.evidence import Evidence, NoData, Run, number
from specctl.validate.figures import Figure
from specctl.validate.intervals import of_difference, overlap
from specctl.validate.verdicts import ROUNDING, absent, held, result, told

Measure = Callable[[Evidence, Run], Figure]


@dataclass(frozen=True)
class _Metric:
    """measure: of a run in its report. falls: whether less is worse. timed: it depends on the machine."""

    name: str
    measure: Measure
    falls: bool
    timed: bool


_LENGTH = _Metric("mean_acceptance_length", lambda _, run: figures.acceptance_length(run), True, False)
_RATE = _Metric("acceptance_rate", lambda _, run: figures.acceptance_rate(run), True, False)
_SPEEDUP = _Metric("speedup", lambda report, run: figures.speedup(report.against_plain(run)), True, True)
_TTFT = _Metric("ttft_p95_ms", lambda _, run: figures.percentile_95(run, "ttft_ms"), False, True)
_TPOT = _Metric("tpot_p95_ms", lambda _, run: figures.percentile_95(run, "tpot_ms"), False, True)


def regression(gate: gates.Regression, asked: gates.GatesFile, evidence: Evidence, baseline: Evidence) -> GateResult:
    """Acceptance always; speed-up and latency where the gates file has gates for them, and the machine is the same."""
    metrics = [_LENGTH, _RATE]
    metrics += [_SPEEDUP] if asked.speedup is not None else []
    metrics += [_TTFT] if asked.latency is not None and asked.latency.ttft_p95_ms is not None else []
    metrics += [_TPOT] if asked.latency is not None and asked.latency.tpot_p95_ms is not None else []
    try:
        pairs = _pairs(evidence, baseline)
    except NoData as why:
        return result("regression", [absent("baseline", str(why))])
    checks = []
    for mine, theirs in pairs:
        for metric in metrics:
            try:
                checks.append(_compare(metric, gate, (evidence, mine), (baseline, theirs)))
            except NoData as why:
                checks.append(absent(metric.name, str(why), mine.name))
    return result("regression", checks)


def _pairs(evidence: Evidence, baseline: Evidence) -> list[tuple[Run, Run]]:
    """Every run that drafts with the baseline's of the same name, or the same K, or with the only one there is."""
    theirs = baseline.drafting()
    pairs = []
    for run in evidence.drafting():
        same = [each for each in theirs if each.name == run.name] or [each for each in theirs if each.k == run.k]
        found = same or theirs
        if len(found) != 1:
            names = ", ".join(each.name for each in theirs)
            raise NoData(
                f"{run.name} is not comparable: which of the baseline's runs ({names}) is its own is not known"
            )
        pairs.append((run, found[0]))
    return pairs


def _compare(
    metric: _Metric, gate: gates.Regression, mine: tuple[Evidence, Run], theirs: tuple[Evidence, Run]
) -> Check:
    for field, of in _FIELDS:
        _same(field, of(mine[1]), of(theirs[1]))
    if metric.timed:
        for field in ("device", "threads"):
            _same(f"provenance.{field}", *(report.provenance.get(field, _MISSING) for report, _ in (mine, theirs)))
        _same("batch", *(run.values.get("batch", _MISSING) for _, run in (mine, theirs)))
    found = metric.measure(*mine)
    try:
        before = metric.measure(*theirs)
    except NoData as why:
        raise NoData(f"not comparable: in the baseline, {why}") from None
    return _judge(metric, gate.max_drop, (mine[1], found), (theirs[1], before))


def _judge(metric: _Metric, max_drop: float, mine: tuple[Run, Figure], theirs: tuple[Run, Figure]) -> Check:
    (run, found), (base, before) = mine, theirs
    sign = 1 if metric.falls else -1
    limit = before.value * (1 - sign * max_drop)
    worse = sign * (limit - found.value) > ROUNDING * abs(limit)
    # Two times differ a little whenever they are taken; what their own spread explains is no regression.
    noise = metric.timed and (
        overlap(found.interval, before.interval) or _within_spread(metric, found, limit, run, base)
    )
    half = of_difference(found.interval, before.interval)
    says = f"{told(found)}, in the baseline {told(before)}: "
    says += f"a change of {(found.value - before.value) / before.value:+.1%}" if before.value else "no part of it"
    says += "" if half is None or not before.value else f" (95 % +/- {half / before.value:.1%})"
    says += f", allowed {-sign * max_drop:+.1%}" + (
        ", which the spread of the repeats explains" if worse and noise else ""
    )
    return held(
        metric.name,
        run.name,
        noise or not worse,
        says,
        measured=found.value,
        interval=found.interval,
        limit=limit,
    )


def _within_spread(metric: _Metric, found: Figure, limit: float, *runs: Run) -> bool:
    """Percentiles come without intervals; the slowest over the fastest repeat says how far times can be trusted."""
    if metric.falls:
        return False
    spread = 1.0
    for run in runs:
        seconds = run.values.get("seconds")
        times = [number(each, "seconds", 1e-12) for each in seconds] if isinstance(seconds, list) else []
        spread *= max(times) / min(times) if times else 1.0
    return found.value <= limit * spread


_MISSING = object()


def _counter(name: str) -> Callable[[Run], Any]:
    return lambda run: (run.speculation or {}).get(name, _MISSING)


_ESSENTIAL = ("work.prompts_sha", "k")
"""What has to be known; of the others it is enough that they do not differ."""

_FIELDS: tuple[tuple[str, Callable[[Run], Any]], ...] = (
    ("work.prompts_sha", lambda run: run.work.get("prompts_sha", _MISSING)),
    ("work.temperature", lambda run: run.work.get("temperature", _MISSING)),
    ("k", lambda run: run.values.get("k", _MISSING)),
    ("speculation.accept", _counter("accept")),
)


def _same(field: str, mine: Any, theirs: Any) -> None:
    if mine is theirs is _MISSING and field not in _ESSENTIAL:
        return
    for value, where in ((mine, "here"), (theirs, "in the baseline")):
        if value is _MISSING or (value is None and field not in ("k", "provenance.threads")):
            raise NoData(f"not comparable: {field} is missing {where}")
        if isinstance(value, Mapping):
            raise NoData(f"not comparable: {field} is {shown(value)} {where}")
    if mine != theirs:
        raise NoData(f"not comparable: {field} is {shown(mine)} here and {shown(theirs)} in the baseline")
