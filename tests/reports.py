"""Reports as bench writes them, made from a few numbers, and files that hold them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]
Change = Callable[[Report], object]

PROVENANCE = {
    "specctl": "1",
    "torch": None,
    "transformers": None,
    "device": "cpu",
    "threads": 1,
    "command": "specctl bench",
    "date": "2026-01-01T00:00:00+00:00",
}


def speculation(accepted: list[int], drafts: int, k: int | None = None) -> Report:
    """Counters of drafts that are all k long; accepted[i]: those with at least i + 1 accepted tokens."""
    k = len(accepted) if k is None else k
    total = sum(accepted)
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafts * k,
        "num_accepted_tokens": total,
        "drafted_per_position": [drafts] * k,
        "accepted_per_position": accepted,
        "acceptance_rate": total / (drafts * k),
        "mean_acceptance_length": 1 + total / drafts,
        "counts_bonus": True,
        "emitted_tokens": drafts + total,
        "accept": "exact",
        "lossy": False,
    }


def run(name: str, k: int | None, counters: Report | None) -> Report:
    return {
        "name": name,
        "k": k,
        "batch": 1,
        "tokens": 100,
        "seconds": [1.0, 1.0],
        "tok_s": 100.0,
        "ttft_ms": {"p50": 10.0, "p95": 40.0},
        "tpot_ms": {"p50": 5.0, "p95": 30.0},
        "speculation": counters,
    }


def comparison(name: str, speedup: float = 1.5) -> Report:
    return {
        "run": name,
        "against": "plain",
        "speedup": speedup,
        "ci95": [speedup * 0.9, speedup * 1.1],
        "c": 0.1,
        "v": 1.2,
        "u": 0.1,
        "implied": None,
        "efficiency": None,
        "identical": True,
        "near_ties": [],
    }


def report(accepted: list[int] | None = None, drafts: int = 1000, name: str = "near k=3") -> Report:
    """Plain decoding and one draft; 0.4 of the drafted tokens are accepted unless told otherwise."""
    counters = speculation([600, 400, 200] if accepted is None else accepted, drafts)
    return {
        "schema": "specctl.report/1",
        "provenance": dict(PROVENANCE),
        "work": {"prompts_sha": "A", "n": 8, "max_tokens": 24, "temperature": 0.0, "seed": None},
        "runs": [run("plain", 0, None), run(name, len(counters["accepted_per_position"]), counters)],
        "comparisons": [comparison(name)],
    }


def changed(value: Report, *changes: Change) -> Report:
    """A copy with changes made to it."""
    value = copy.deepcopy(value)
    for change in changes:
        change(value)
    return value


def counters(**values: Any) -> Change:
    """Set counters of the run that drafts; None takes one away."""

    def change(value: Report) -> None:
        found = value["runs"][-1]["speculation"]
        for key, new in values.items():
            found.pop(key) if new is None else found.update({key: new})

    return change


def write(path: Path, value: Any) -> Path:
    """As JSON, NaN and all."""
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
