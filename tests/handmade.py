"""PROFILE.yaml and TRACE.json as values, made by hand, for tests that need to know every number in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

PROVENANCE = {
    "specctl": "0",
    "torch": None,
    "transformers": None,
    "device": "by hand",
    "threads": None,
    "command": "",
    "date": "2026-01-01",
}


def cell(batch: int, q: int, ms: float, context: int = 1024, spread: float = 0.0) -> dict[str, Any]:
    return {"batch": batch, "q": q, "context": context, "ms": ms, "spread": spread, "source": "measured"}


def profile(
    steps: Mapping[int, Sequence[float]],
    draft: Mapping[int, float] | None = None,
    context: int = 1024,
    spread: float = 0.0,
    **changes: Any,
) -> dict[str, Any]:
    """steps[batch]: milliseconds for q = 1, 2, ...; draft[batch]: of a draft step."""
    return {
        "schema": "specctl.profile/1",
        "provenance": PROVENANCE,
        "hardware": {"name": "an abacus"},
        "engine": {"name": "none"},
        "model": {"name": "m", "config_sha": None, "dtype": "float32", "tp": 1, "ep": 1},
        "steps": [
            cell(b, q, float(ms), context, spread) for b, row in steps.items() for q, ms in enumerate(row, start=1)
        ],
        "draft": [cell(b, 1, float(ms), context, spread) for b, ms in (draft or {}).items()],
        "draft_follow": [],
        "prefill": [],
        "overheads_ms": {"base": 0.0, "spec": 0.0, "per_draft_step": 0.0, "tree": None},
        "roofline": None,
        "validated_against": [],
    } | changes


def trace(
    histograms: Sequence[Sequence[int]],
    drafted: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    confidence: Sequence[Sequence[float]] = (),
    accepted: Sequence[int] = (),
    temperature: float = 0.0,
    **changes: Any,
) -> dict[str, Any]:
    """One class. histograms: by request, drafts by number of accepted tokens. drafted: by position; all of full length
    if not given. steps: by request."""
    k = len(histograms[0]) - 1
    totals = [sum(column) for column in zip(*histograms, strict=True)]
    num_drafts = sum(totals)
    reached = k if num_drafts else 0
    requests = [
        {"histogram": list(histogram)} | ({} if steps is None else {"steps": steps[i]})
        for i, histogram in enumerate(histograms)
    ]
    return {
        "schema": "specctl.trace/1",
        "provenance": PROVENANCE,
        "k": k,
        "temperature": temperature,
        "classes": [
            {
                "class": "all",
                "context": 100.0,
                "num_drafts": num_drafts,
                "drafted_per_position": [num_drafts] * reached if drafted is None else list(drafted),
                "accepted_per_position": [sum(totals[j:]) for j in range(1, reached + 1)],
                "requests": requests,
                "confidence": [list(each) for each in confidence],
                "rank": [],
                "accepted": list(accepted),
            }
        ],
    } | changes


def write_yaml(path: Path, value: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(value)), encoding="utf-8")
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
