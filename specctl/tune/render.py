"""A tuning as people and programs read it: for every place of the profile what each length costs and brings, and why
one was chosen; then the policy. Only here are numbers rounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.profile.render import aligned, as_yaml
from specctl.schemas.base import Provenance
from specctl.schemas.policy import Cell
from specctl.tune.choice import Decision
from specctl.tune.goodput import Candidate
from specctl.tune.run import Tuning

SCHEMA = "specctl.tuning/1"

NOTES = """\
survival: drafts whose first K tokens were all accepted. tokens: of one sequence a step, the definite one counted.
drafting: steps of a sequence that have a block. v: verifying K tokens, c: a draft step, u: the draft's pass after a
block, in plain passes. tok/s: of one sequence. speed-up: against decoding without a draft, prefill apart; 95 %: what
the requests of the trace and the spread of the profile leave open. >: chosen."""


def as_json(tuning: Tuning) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "provenance": Provenance.here().model_dump(),
        "effective": {
            "profile": tuning.profile,
            "acceptance": tuning.acceptance.source,
            "iid": tuning.acceptance.iid,
            "temperature": tuning.acceptance.temperature,
            "k_max": tuning.k_max,
        },
        "places": [_place(tuning, decision) for decision in tuning.decisions],
        "policy": tuning.policy.model_dump(mode="json", by_alias=True),
        "notices": tuning.notices,
    }


def policy_yaml(tuning: Tuning) -> str:
    return as_yaml(tuning.policy.model_dump(mode="json", by_alias=True))


def terminal(tuning: Tuning) -> str:
    return "\n".join(_lines(tuning)) + "\n"


def _lines(tuning: Tuning) -> Iterator[str]:
    acceptance = tuning.acceptance
    heat = "" if acceptance.temperature is None else f", temperature {acceptance.temperature:g}"
    yield f"profile: {tuning.profile}; acceptance: {acceptance.source}{heat}; K up to {tuning.k_max}"
    for decision in tuning.decisions:
        times = decision.times
        c, u = (float(ms / times.target_SQ[0, 0]) for ms in (times.draft_S[0], times.follow_SK[0, 0]))
        where = f"batch {decision.batch}, context {decision.context}"
        yield f"\n{where}: plain step {times.plain_S[0]:.2f} ms, c {c:.2f}, u {u:.2f}"
        yield aligned(list(_rows(tuning, decision)))
        yield reason(decision)
    yield "\npolicy"
    yield aligned([_words(cell) for cell in tuning.policy.k])
    yield f"\n{NOTES}"


def _rows(tuning: Tuning, decision: Decision) -> Iterator[list[str]]:
    yield ["", "K", "survival", "tokens", "drafting", "v", "step ms", "tok/s", "speed-up", "95 %"]
    survival = tuning.acceptance.survival()
    stop = decision.chosen.confidence
    extra = [] if decision.chosen in decision.candidates else [decision.chosen]
    for each in [*decision.candidates, *extra]:
        low, middle, high = each.band
        yield [
            ">" if each is decision.chosen else "",
            f"{each.k}" + (f" stop {stop:g}" if each in extra else ""),
            f"{survival[each.k - 1]:.3f}" if each.k and each not in extra else "",
            f"{each.tokens_S[0]:.2f}",
            f"{each.drafting:.0%}" if each.k else "",
            f"{_v(decision, each.k):.2f}",
            f"{each.step_S[0]:.2f}",
            f"{each.tok_s:.1f}",
            f"{middle:.3f}",
            f"{low:.2f} - {high:.2f}" if each.k else "",
        ]


def reason(decision: Decision) -> str:
    """Why this length, in a sentence."""
    best, chosen = decision.best, decision.chosen
    if chosen not in decision.candidates:
        stop = f"a stop below confidence {chosen.confidence:g}"
        return f"K = {chosen.k} with {stop}, which pays on requests that it was not chosen by"
    if best.k == 0:
        longest = max(decision.candidates[1:], key=lambda candidate: candidate.speedup)
        return f"do not speculate: no length is predicted above {longest.speedup:.3f} x (K = {longest.k})"
    if chosen.k == 0:
        return f"do not speculate: what K = {best.k} gains ({best.speedup:.3f} x) is within the uncertainty"
    if chosen.k < best.k:
        return f"K = {chosen.k}: K = {best.k} ({best.speedup:.3f} x) cannot be told from it, and it is shorter"
    return f"K = {chosen.k}: the fastest"


def _place(tuning: Tuning, decision: Decision) -> dict[str, Any]:
    times, chosen = decision.times, decision.chosen
    plain_ms = float(times.target_SQ[0, 0])
    return {
        "batch": decision.batch,
        "context": decision.context,
        "plain_step_ms": float(times.plain_S[0]),
        "c": float(times.draft_S[0]) / plain_ms,
        "u": float(times.follow_SK[0, 0]) / plain_ms,
        "best_k": decision.best.k,
        **_candidate(tuning, decision, chosen),
        "reason": reason(decision),
        "candidates": [_candidate(tuning, decision, each) for each in decision.candidates],
    }


def _candidate(tuning: Tuning, decision: Decision, candidate: Candidate) -> dict[str, Any]:
    """accepted, drafted: tokens a step; acceptance_rate: of the drafted tokens, null when none is."""
    k = candidate.k
    return {
        "k": k,
        "confidence": candidate.confidence,
        "survival": [float(value) for value in tuning.acceptance.survival()[:k]],
        "tokens_per_step": float(candidate.tokens_S[0]),
        "accepted": candidate.accepted,
        "drafted": candidate.drafted,
        "acceptance_rate": candidate.accepted / candidate.drafted if candidate.drafted else None,
        "v": _v(decision, k),
        "step_ms": float(candidate.step_S[0]),
        "tok_s": candidate.tok_s,
        "speedup": list(candidate.band),
    }


def _v(decision: Decision, k: int) -> float:
    return float(decision.times.target_SQ[0, k] / decision.times.target_SQ[0, 0])


def _words(cell: Cell) -> list[str]:
    stop = "" if cell.confidence is None else f"stop {cell.confidence:g}"
    low, middle, high = cell.speedup or [1.0, 1.0, 1.0]
    gain = f"{middle:.2f} x ({low:.2f} - {high:.2f})" if cell.k else ""
    return [f"batch {_range(cell.batch)}", f"context {_range(cell.context)}", f"K = {cell.k}", stop, gain]


def _range(bounds: list[int | None]) -> str:
    low, high = bounds
    return f"{low} and more" if high is None else str(low) if low == high else f"{low} - {high}"
