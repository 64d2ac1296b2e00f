"""Verdicts: a figure held against a limit, and the checks of a gate as its result. Nothing measured is never a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specctl.schemas.validation import Check, GateResult, Status
from specctl.validate.evidence import NoData, Run
from specctl.validate.figures import Figure
from specctl.validate.intervals import Interval

ROUNDING = 1e-9
"""What a limit may be missed by, in parts of itself: 0.4 is 0.4 however it was computed."""

# What to do when a gate failed, and when it had nothing to judge.
REMEDIES = {
    "compatible": (
        "use the draft, policy and tokenizer that were made for this target, or fetch, train or tune them again",
        "name a draft that is there",
    ),
    "greedy_exact": (
        "do not serve with this draft; see the first difference with `specctl generate`, and report it: lossless "
        "acceptance must not change a text",
        "measure at temperature 0 with exact or coupled acceptance, and give max_gap for 16-bit weights",
    ),
    "distribution": (
        "do not serve sampled requests with this acceptance; use --accept exact or coupled, and report it if it was",
        "give more samples, or a draft that proposes something for these prompts",
    ),
    "draft_cache": (
        "acceptance suffers from a draft that reads wrong keys and values: try --attention torch and float32, and "
        "report it",
        "give prompts and a draft length for which the draft has something to do",
    ),
    "acceptance_length": (
        "see that the draft's weights are those that were trained, and read as they were (`specctl inspect`), on data "
        "like these prompts; train on, or tune K",
        "measure with a draft and K above 0, with `specctl bench` or with --target, --draft and --prompts",
    ),
    "acceptance_rate": (
        "see that the draft's weights are those that were trained, on data like these prompts; train on, or lower K",
        "measure with a draft and K above 0, with `specctl bench` or with --target, --draft and --prompts",
    ),
    "latency": (
        "measure on an idle machine, then lower --batch or K, or tune a policy for this load",
        "measure answers of two tokens or more with `specctl bench`",
    ),
    "speedup": (
        "tune K for this machine (K = 0 where it does not pay), or measure more repeats if the interval is wide",
        "measure several repeats or groups of prompts with `specctl bench`",
    ),
    "regression": (
        "find what changed since the baseline (weights, data, K, versions), or take a new baseline on purpose",
        "measure this and the baseline in the same way: same prompts, K, temperature and acceptance",
    ),
}


def result(name: str, checks: Sequence[Check]) -> GateResult:
    statuses = [check.status for check in checks]
    status: Status = "fail" if "fail" in statuses else "pass" if set(statuses) == {"pass"} else "no-data"
    remedy = None if status == "pass" else REMEDIES[name][status == "no-data"]
    return GateResult(name=name, status=status, remedy=remedy, checks=list(checks))


def absent(figure: str, why: str, run: str | None = None) -> Check:
    """A check without a figure."""
    return Check(figure=figure, run=run, status="no-data", measured=None, ci95=None, limit=None, says=why)


def held(
    figure: str,
    run: str | None,
    found: bool,
    says: str,
    *,
    measured: float | None = None,
    interval: Interval | None = None,
    limit: float | None = None,
) -> Check:
    """A check that was made; found: whether what must hold holds."""
    return Check(
        figure=figure,
        run=run,
        status="pass" if found else "fail",
        measured=measured,
        ci95=None if interval is None else list(interval),
        limit=limit,
        says=says,
    )


def at_least(name: str, run: str, figure: Figure, limit: float) -> Check:
    found = figure.value >= limit * (1 - ROUNDING)
    says = f"{told(figure)}, expected at least {limit:.4g}"
    return held(name, run, found, says, measured=figure.value, interval=figure.interval, limit=limit)


def at_most(name: str, run: str, figure: Figure, limit: float) -> Check:
    found = figure.value <= limit * (1 + ROUNDING)
    says = f"{told(figure)}, expected at most {limit:.4g}"
    return held(name, run, found, says, measured=figure.value, interval=figure.interval, limit=limit)


def for_each(name: str, runs: Callable[[], Iterable[Run]], judge: Callable[[Run], Check]) -> list[Check]:
    """A check of every run; one without a figure says why, and so does one check for all when there are no runs."""
    checks = []
    try:
        for run in runs():
            try:
                checks.append(judge(run))
            except NoData as why:
                checks.append(absent(name, str(why), run.name))
    except NoData as why:
        return [absent(name, str(why))]
    return checks


def told(figure: Figure) -> str:
    """0.4286 (95 % 0.31 - 0.55)"""
    interval = "" if figure.interval is None else " (95 % {:.4g} - {:.4g})".format(*figure.interval)
    return f"{figure.value:.5g}{interval}"
