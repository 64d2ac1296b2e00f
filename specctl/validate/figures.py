"""Figures: what a run of a report says of its acceptance, latency and speed-up, if that can be true.

A figure that contradicts the counters it is made from is impossible, and so is one that K does not allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from specctl.schemas.base import explain
from specctl.schemas.counts import PositionCounts
from specctl.text.shown import shown
from specctl.validate.evidence import NoData, Run, Values, number
from specctl.validate.intervals import Interval, mean_accepted


@dataclass(frozen=True)
class Figure:
    """interval: 95 %, None where the report does not allow one."""

    value: float
    interval: Interval | None = None


def acceptance_rate(run: Run) -> Figure:
    """Accepted over drafted tokens."""
    counters = _counters(run)
    value = number(counters.get("acceptance_rate"), "acceptance_rate", 0, 1)
    drafted, accepted = counters.get("num_draft_tokens"), counters.get("num_accepted_tokens")
    if drafted is not None and accepted is not None:
        _agree("acceptance_rate", value, accepted, drafted, 0)
    interval = _accepted_interval(counters)
    drafts = counters.get("num_drafts")
    if interval is None or not drafted or not drafts:
        return Figure(value)
    low, high = (min(1.0, max(0.0, end * drafts / drafted)) for end in interval)
    return Figure(value, (low, high))


def acceptance_length(run: Run) -> Figure:
    """Tokens a draft brings, with the one after the accepted ones counted, whether the report counts it or not."""
    counters = _counters(run)
    value = counters.get("mean_acceptance_length")
    bonus = counters.get("counts_bonus")
    if value is not None and not isinstance(bonus, bool):
        said = "missing" if bonus is None else shown(bonus)
        raise NoData(
            f"not comparable: counts_bonus is {said}, and mean_acceptance_length may count one token more or not"
        )
    least = 1 if bonus else 0
    value = number(value, "mean_acceptance_length", least, least + _most_accepted(run))
    drafts, accepted = counters.get("num_drafts"), counters.get("num_accepted_tokens")
    if drafts is not None and accepted is not None:
        _agree("mean_acceptance_length", value, accepted, drafts, least)
    interval = _accepted_interval(counters)
    return Figure(value - least + 1, None if interval is None else (1 + interval[0], 1 + interval[1]))


def survival(run: Run) -> tuple[list[float], int]:
    """For each position that most drafts had, the share of those that had it whose tokens up to it were all accepted;
    and how many had the last of these positions."""
    counters = _counters(run)
    drafts, drafted, accepted = (
        counters.get(name) for name in ("num_drafts", "drafted_per_position", "accepted_per_position")
    )
    if drafts is None or drafted is None or accepted is None:
        raise NoData("what was accepted at each position is missing")
    kept = [count for count in drafted if 2 * count >= drafts]
    return [part / count for part, count in zip(accepted, kept, strict=False)], kept[-1]


def percentile_95(run: Run, what: str) -> Figure:
    """what: ttft_ms or tpot_ms."""
    found = run.values.get(what)
    if not isinstance(found, Mapping):
        raise NoData(f"{what}.p95 is missing" if found is None else f"{what} is {shown(found)}, expected p50 and p95")
    value = number(found.get("p95"), f"{what}.p95", 0)
    if found.get("p50") is not None:
        middle = number(found["p50"], f"{what}.p50", 0)
        if middle > value:
            raise NoData(f"{what}.p95 is {value:g}, which is impossible: p50 is {middle:g}")
    return Figure(value)


def speedup(comparison: Values) -> Figure:
    value = number(comparison.get("speedup"), "speedup", math.ulp(0))
    ends = comparison.get("ci95")
    if ends is None:
        return Figure(value)
    if not isinstance(ends, list) or len(ends) != 2:
        raise NoData(f"ci95 is {shown(ends)}, expected two numbers")
    low, high = (number(end, "ci95", math.ulp(0)) for end in ends)
    if low > high:
        raise NoData(f"ci95 is {low:g} to {high:g}, which is impossible")
    return Figure(value, (low, high))


def _counters(run: Run) -> Values:
    """The counters of a run, as far as they are there, and possible together."""
    counters = run.speculation or {}
    most = _most_accepted(run)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        if counters.get(name) is not None and not number(counters[name], name, 0).is_integer():
            raise NoData(f"{name} is {shown(counters[name])}, which is no count")
    drafts, drafted, accepted = (counters.get(f"num_{name}") for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafted is not None and accepted is not None and accepted > drafted:
        raise NoData(f"num_accepted_tokens is {accepted}, which is impossible: num_draft_tokens is {drafted}")
    if drafts is not None and drafted is not None and not drafts <= drafted <= drafts * max(most, 1):
        raise NoData(f"num_draft_tokens is {drafted}, which is impossible: num_drafts is {drafts}, K is {most:g}")
    if drafts == 0:
        raise NoData("num_drafts is 0: nothing was drafted")
    _positions(counters, {"drafted": drafted, "accepted": accepted})
    return counters


def _positions(counters: Values, totals: Mapping[str, Any]) -> None:
    names = [f"{name}_per_position" for name in totals]
    if any(counters.get(name) is None for name in ("num_drafts", *names)):
        return
    try:
        counts = PositionCounts.model_validate({name: counters[name] for name in ("num_drafts", *names)})
    except ValidationError as error:
        raise NoData(f"the counters are impossible: {explain(error, PositionCounts)}") from None
    for name, total in totals.items():
        found = sum(getattr(counts, f"{name}_per_position"))
        if total is not None and found != total:
            raise NoData(f"{name}_per_position is impossible: it adds up to {found}, and {total} tokens were {name}")


def _most_accepted(run: Run) -> float:
    """The most tokens of one draft: K, or what the positions say under a policy."""
    if isinstance(run.k, int) and not isinstance(run.k, bool):
        return run.k
    positions = (run.speculation or {}).get("drafted_per_position")
    return len(positions) if isinstance(positions, list) and positions else math.inf


def _agree(name: str, said: float, above: float, below: float, more: int) -> None:
    found = more + above / below if below else math.nan
    if not math.isclose(said, found, rel_tol=1e-6, abs_tol=1e-9):
        raise NoData(f"{name} is {said:g}, which is impossible: the counters it is made from give {found:g}")


def _accepted_interval(counters: Values) -> Interval | None:
    drafts, positions = counters.get("num_drafts"), counters.get("accepted_per_position")
    return mean_accepted(drafts, positions) if drafts and isinstance(positions, list) else None
