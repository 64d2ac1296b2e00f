"""Gates over the figures of a report: exactness, acceptance, latency, speed-up. They run nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.schemas import gates
from specctl.schemas.validation import Check, GateResult
from specctl.text.shown import shown
from specctl.validate import figures
from specctl.validate.evidence import PLAIN, Evidence, NoData, Run, Values, number
from specctl.validate.figures import Figure
from specctl.validate.record import NAME, Record, against_record
from specctl.validate.verdicts import absent, at_least, at_most, for_each, held, result, told


def acceptance_length(gate: gates.AcceptanceLength, evidence: Evidence, record: Record | None) -> GateResult:
    """record: the draft's own, for a gate without min."""

    def judge(run: Run) -> Check:
        if gate.min is None:
            return against_record(record, run)
        return at_least(NAME, run.name, figures.acceptance_length(run), gate.min)

    return result("acceptance_length", for_each(NAME, lambda: evidence.drafting(gate.k), judge))


def acceptance_rate(gate: gates.AcceptanceRate, evidence: Evidence) -> GateResult:
    name = "acceptance_rate"
    checks = for_each(
        name,
        lambda: evidence.drafting(gate.k),
        lambda run: at_least(name, run.name, figures.acceptance_rate(run), gate.min),
    )
    return result("acceptance_rate", checks)


def latency(gate: gates.Latency, evidence: Evidence) -> GateResult:
    checks: list[Check] = []
    for what, limit in (("ttft", gate.ttft_p95_ms), ("tpot", gate.tpot_p95_ms)):
        if limit is not None:
            checks += _percentile(f"{what}_p95_ms", f"{what}_ms", limit, evidence)
    return result("latency", checks)


def _percentile(name: str, field: str, limit: float, evidence: Evidence) -> list[Check]:
    return for_each(
        name,
        evidence.drafting_or_plain,
        lambda run: at_most(name, run.name, figures.percentile_95(run, field), limit),
    )


def speedup(gate: gates.Speedup, evidence: Evidence) -> GateResult:
    def judge(run: Run) -> Check:
        figure = figures.speedup(evidence.against_plain(run))
        if gate.bound == "mid":
            return at_least("speedup", run.name, figure, gate.min)
        if figure.interval is None:
            raise NoData("ci95 is missing, and the gate judges its lower end (bound: lower)")
        check = at_least("speedup", run.name, Figure(figure.interval[0]), gate.min)
        says = f"{told(figure)}, expected the lower end at {gate.min:.4g} or above"
        return check.model_copy(update={"measured": figure.value, "ci95": list(figure.interval), "says": says})

    return result("speedup", for_each("speedup", evidence.drafting, judge))


# -- greedy text ------------------------------------------------------------------------------------------------------


def greedy_exact(gate: gates.GreedyExact, evidence: Evidence) -> GateResult:
    """Over the measurement at temperature 0."""
    for found in (evidence, *evidence.also):
        if found.work.get("temperature") == 0 and any(Run(values, found.work).drafts for values in found.runs):
            checks = for_each(
                "identical",
                found.drafting,
                lambda run, found=found: _identical(gate, run, found.against_plain(run)),  # type: ignore[misc]
            )
            return result("greedy_exact", checks)
    temperature = evidence.work.get("temperature")
    why = f"{evidence.source} has no run that drafts at temperature 0 (work.temperature is {shown(temperature)})"
    return result("greedy_exact", [absent("identical", why)])


def _identical(gate: gates.GreedyExact, run: Run, comparison: Values) -> Check:
    said = comparison.get("identical")
    gaps = _gaps(comparison)
    if (run.speculation or {}).get("lossy"):
        accept = (run.speculation or {}).get("accept")
        raise NoData(f"answers are not compared: acceptance {accept} is lossy and may change them")
    if said is None and (gate.max_gap is None or not gaps):
        why = "16-bit numbers cannot tell a tie from a difference; give max_gap" if gaps else "they were not compared"
        raise NoData(f"identical is missing: {why}")
    if said is not None and not isinstance(said, bool):
        raise NoData(f"identical is {shown(said)}, expected true or false")
    worst = max(gaps, default=0.0)
    unnamed = said is False and not gaps  # they differ, and where is not said
    found = said is True if gate.max_gap is None else worst <= gate.max_gap and not unnamed
    return held("identical", run.name, found, _differences(comparison, run), measured=worst, limit=gate.max_gap)


def _gaps(comparison: Values) -> list[float]:
    """How far apart the scores are at each first difference; infinitely where that is no number."""
    ties = comparison.get("near_ties")
    if not isinstance(ties, list) or not all(isinstance(tie, Mapping) for tie in ties):
        raise NoData(f"near_ties is {'missing' if ties is None else shown(ties)}, expected a list of differences")
    return [_gap(tie) for tie in ties]


def _gap(tie: Values) -> float:
    return 1e300 if tie.get("gap") is None else number(tie["gap"], "near_ties.gap", 0)


def _differences(comparison: Values, run: Run) -> str:
    ties: list[dict[str, Any]] = comparison["near_ties"]
    of = f" of {shown(run.work['n'])} prompts" if "n" in run.work else ""
    if not ties:
        return (
            f"the greedy answers{of} are {'those' if comparison.get('identical') else 'not those'} of {PLAIN} decoding"
        )
    worst = max(ties, key=_gap)
    gap = "one answer ends there" if worst.get("gap") is None else f"by {worst['gap']:.2g} in the scores"
    return (
        f"{len(ties)} of the greedy answers{of} leave {PLAIN} decoding's, the farthest at prompt "
        f"{shown(worst.get('prompt'))}, token {shown(worst.get('position'))} of the answer, {gap}"
    )
