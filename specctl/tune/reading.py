"""What --acceptance names: a number, or a file that is told by what is in it and not by what it is called."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.schemas.report import SCHEMA as REPORT
from specctl.schemas.report import read_report
from specctl.schemas.trace import SCHEMA as TRACE
from specctl.schemas.trace import read_trace
from specctl.tune import counters, request_metrics, table
from specctl.tune.evidence import Evidence, from_trace
from specctl.tune.only import Only

_METRICS = re.compile(r"^(vllm|sglang|specctl):\w", re.MULTILINE)
EXPECTED = (
    "a probability from 0 to 1, a TRACE.json or REPORT.json, the text of /metrics, answers with their metrics, or a "
    "table of survival or lengths"
)


def read_acceptance(given: str, only: Only | None = None) -> float | Evidence:
    """A probability from 0 to 1, or what is in a file. only: which part of it counts."""
    only = only or Only()
    try:
        probability = float(given)
    except ValueError:
        return _read(Path(given), given, only)
    if not (math.isfinite(probability) and 0 <= probability <= 1):
        raise UsageError(f"--acceptance {given}: expected {EXPECTED}")
    only.takes(f"--acceptance {given}", ())
    return probability


def _read(path: Path, where: str, only: Only) -> Evidence:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        words = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{where}: cannot be read: {words}; --acceptance takes {EXPECTED}") from None
    if not text.strip():
        raise UsageError(f"{where}: is empty; --acceptance takes {EXPECTED}")
    if text.lstrip()[0] in "{[":
        return _json(path, text, where, only)
    if _METRICS.search(text):
        return counters.from_metrics(text, where, only)
    return table.from_csv(text, where, only)


def _json(path: Path, text: str, where: str, only: Only) -> Evidence:
    value = _parse(text, where)
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema == TRACE or (isinstance(value, dict) and "classes" in value):
        only.takes(where, ("class",))
        return from_trace(read_trace(path), where, only.values("class"))
    if schema == REPORT or (isinstance(value, dict) and "runs" in value):
        return counters.from_report(read_report(path), where, only)
    if schema is not None:
        raise UsageError(f"{where}: its schema is {schema!r}; --acceptance takes {EXPECTED}")
    bodies = value if isinstance(value, list) else [value]
    if request_metrics.looks_like(bodies):
        return request_metrics.from_bodies(bodies, where, only)
    return table.from_json(value, where, only)


def _parse(text: str, where: str) -> Any:
    """One JSON value, or one a line."""
    try:
        return json.loads(text)
    except ValueError as error:
        first = error
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        values = [json.loads(line) for line in lines]
    except ValueError:
        raise UsageError(f"{where}: cannot be parsed: {' '.join(str(first).split())}") from None
    return values
