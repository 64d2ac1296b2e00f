"""Sentences and ranges that every output of `tune` says alike."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.schemas.policy import Cell
from specctl.tune.choice import Decision
from specctl.tune.goodput import Candidate


def reason(decision: Decision, ruled: Candidate | None = None) -> str:
    """Why this length, in a sentence. ruled: what the policy says there, where that is looked at."""
    best, chosen = decision.best, decision.chosen
    if ruled is not None and ruled.key != chosen.key:
        return f"K = {ruled.k}, as for its neighbours: K = {chosen.k} is predicted at {chosen.speedup:.3f} x"
    if chosen not in decision.candidates:
        stop = f"a stop below confidence {chosen.confidence:g}"
        return f"K = {chosen.k} with {stop}, which pays on requests that it was not chosen by"
    if any(decision.within) and not decision.within[0] and chosen.k:
        return f"K = {chosen.k}: K = 0 does not keep to the limit"
    if best.k and not decision.within[best.k] and chosen.k == 0 and any(decision.within):
        return f"do not speculate: K = {best.k} ({best.speedup:.3f} x) does not keep to the limit"
    if best.k == 0:
        longest = max(decision.candidates[1:], key=lambda candidate: candidate.speedup)
        return f"do not speculate: no length is predicted above {longest.speedup:.3f} x (K = {longest.k})"
    if chosen.k == 0:
        return f"do not speculate: what K = {best.k} gains ({best.speedup:.3f} x) is within the uncertainty"
    if chosen.k < best.k:
        return f"K = {chosen.k}: K = {best.k} ({best.speedup:.3f} x) cannot be told from it, and it is shorter"
    if chosen.k > best.k:
        return f"K = {chosen.k}: of the lengths that keep to the limit or surely gain, the fastest"
    return f"K = {chosen.k}: the fastest"


def of_range(bounds: Sequence[int | None]) -> str:
    low, high = bounds
    if high is None:
        return "all" if low == 1 else f"{low} and more"
    return str(low) if low == high else f"{low} - {high}"


def of_cells(cells: Sequence[Cell]) -> str:
    """Where they are, in words; contexts only where they matter."""
    parts = []
    for cell in cells:
        batch = f"{of_range(cell.batch)} texts at a time" if cell.batch != [1, None] else "any number of texts"
        context = "" if cell.context == [1, None] else f" with context {of_range(cell.context)}"
        parts.append(batch + context)
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
