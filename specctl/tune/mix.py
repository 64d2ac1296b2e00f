"""Which batches a server really runs at: from a histogram, or from a log of its requests.

A histogram is CSV (columns `batch` and `tokens`, or `batch` and `seconds`) or JSON ({"tokens": {"1": 120, ...}}); a log
is JSONL, a request a line with `arrival` in seconds, `input_tokens` and `output_tokens`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import UsageError

UNITS = ("tokens", "seconds")
FIELDS = {
    "arrival": ("arrival", "timestamp", "arrival_s"),
    "input_tokens": ("input_tokens", "prompt_tokens", "isl"),
    "output_tokens": ("output_tokens", "completion_tokens", "osl"),
}
EXPECTED = (
    "columns batch and tokens (or seconds), the same as JSON, or a request a line with arrival, input_tokens and "
    "output_tokens"
)


@dataclass(frozen=True)
class Histogram:
    """How much was served at each batch: in output tokens, or in seconds."""

    unit: str
    amounts: dict[int, float]

    def tokens(self, tpot_ms: Callable[[int], float]) -> dict[int, float]:
        """The share of output tokens at each batch, of which one takes tpot_ms a sequence."""
        of = {b: n if self.unit == "tokens" else n * b / tpot_ms(b) for b, n in self.amounts.items() if n}
        total = sum(of.values())
        return {batch: amount / total for batch, amount in sorted(of.items())}


@dataclass(frozen=True)
class Arrival:
    at: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Log:
    """Requests in the order in which they came, the first at 0 seconds."""

    arrivals: tuple[Arrival, ...]

    @property
    def input_tokens(self) -> int:
        return round(sum(each.input_tokens for each in self.arrivals) / len(self.arrivals))

    @property
    def output_tokens(self) -> int:
        return max(1, round(sum(each.output_tokens for each in self.arrivals) / len(self.arrivals)))


def read_mix(path: Path) -> Histogram | Log:
    """Raises UsageError naming the line or the key that is wrong."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        words = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--mix {path}: cannot be read: {words}; expected {EXPECTED}") from None
    where = f"--mix {path}"
    if not text.strip():
        raise UsageError(f"{where}: is empty, expected {EXPECTED}")
    if text.lstrip()[0] != "{":
        return _from_csv(text, where)
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        return _from_json(json.loads(text), where)
    except ValueError:
        return _from_log(lines, where)


def _from_csv(text: str, where: str) -> Histogram:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    units = [unit for unit in UNITS if unit in (reader.fieldnames or ())]
    if "batch" not in (reader.fieldnames or ()) or len(units) != 1:
        raise UsageError(f"{where}: has columns {', '.join(reader.fieldnames or ()) or 'none'}; expected {EXPECTED}")
    return _histogram(units[0], ((row["batch"], row[units[0]]) for row in reader), where)


def _from_json(value: Any, where: str) -> Histogram | Log:
    if isinstance(value, dict) and any(name in value for name in FIELDS["arrival"]):
        return _from_log([json.dumps(value)], where)
    units = [unit for unit in UNITS if isinstance(value, dict) and unit in value]
    if len(units) != 1 or not isinstance(value[units[0]], dict):
        raise UsageError(f"{where}: expected one of {' and '.join(UNITS)}, with a number for each batch")
    if len(value) > 1:
        other = next(key for key in value if key != units[0])
        raise UsageError(f"{where}: key {other} is unknown beside {units[0]}")
    return _histogram(units[0], value[units[0]].items(), where)


def _histogram(unit: str, pairs: Iterable[tuple[Any, Any]], where: str) -> Histogram:
    amounts: dict[int, float] = {}
    for batch, amount in pairs:
        if not str(batch).strip().isdigit() or int(batch) < 1:
            raise UsageError(f"{where}: batch is {batch!r}, expected a number of sequences from 1 up")
        if int(batch) in amounts:
            raise UsageError(f"{where}: lists batch {int(batch)} twice")
        amounts[int(batch)] = _number(amount, where, f"{unit} at batch {batch}")
    if not any(amounts.values()):
        raise UsageError(f"{where}: has no {unit} at any batch")
    return Histogram(unit, amounts)


def _from_log(lines: list[str], where: str) -> Log:
    arrivals = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: line {number} cannot be parsed: {error}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{where}: line {number} is no object with arrival, input_tokens and output_tokens")
        here = f"{where}: line {number}"
        given = {name: _field(value, name, names, here) for name, names in FIELDS.items()}
        arrivals.append(Arrival(given["arrival"], int(given["input_tokens"]), int(given["output_tokens"])))
    if not all(each.output_tokens >= 1 and each.input_tokens >= 1 for each in arrivals):
        raise UsageError(f"{where}: a request has no tokens in or out; leave it out")
    arrivals.sort(key=lambda each: each.at)
    start = arrivals[0].at
    return Log(tuple(Arrival(each.at - start, each.input_tokens, each.output_tokens) for each in arrivals))


def _field(value: Mapping[str, Any], name: str, names: Iterable[str], where: str) -> float:
    found = next((each for each in names if each in value), None)
    if found is None:
        raise UsageError(f"{where}: has no {name} (keys: {', '.join(map(str, value))})")
    return _number(value[found], where, found)


def _number(value: Any, where: str, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{where}: {name} is {value!r}, expected a number from 0 up")
    return number
