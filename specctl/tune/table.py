"""Acceptance from a table, CSV or JSON, of what somebody counted elsewhere: survival, conditional rates, or the mean
length at each K.

A CSV has a row for each K (columns `k` and one of `survival`, `conditional`, `length`), or all positions in a row
(columns S1, S2, ... of survival, C1, ... conditional, K1, ... mean lengths by K). `drafts` says how many were counted.
Further columns tell rows apart: `class`, `temperature`, `context`, or whatever they are called.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.errors import UsageError
from specctl.tune.acceptance import Acceptance, of_survival
from specctl.tune.evidence import Evidence, Kind
from specctl.tune.only import Only
from specctl.tune.rates import Conditional, Survival, of_lengths

KINDS = {"survival": "S", "conditional": "C", "length": "K"}
_WIDE = re.compile(r"([SCK])([1-9][0-9]?)")
_OWN = {"k", "drafts", *KINDS}


@dataclass(frozen=True)
class Entry:
    """Of one part of the table. kind: what its values are, by K. drafts: counted for each, where that is told."""

    labels: Mapping[str, str]
    kind: str
    values: dict[int, float]
    drafts: dict[int, float]


def from_csv(text: str, where: str, only: Only) -> Evidence:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    columns = [name.strip() for name in reader.fieldnames or []]
    rows = [{k.strip(): (v or "").strip() for k, v in row.items() if k is not None} for row in reader]
    if not rows:
        raise UsageError(f"{where}: is no table: expected a header and a row for every K")
    return from_rows(rows, columns, where, only)


def from_json(value: Any, where: str, only: Only) -> Evidence:
    """An object with survival, conditional or length (a list, or numbers by K), or a list of such."""
    rows: list[dict[str, str]] = []
    for number, entry in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(entry, dict):
            raise UsageError(f"{where}: entry {number} is {type(entry).__name__}, expected an object with survival")
        rows += _json_rows(entry, f"{where}: entry {number}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return from_rows(rows, columns, where, only)


def _json_rows(entry: dict[str, Any], where: str) -> Iterator[dict[str, str]]:
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        raise UsageError(
            f"{where}: has {' and '.join(kinds) or 'keys ' + ', '.join(map(str, entry))}, expected one of "
            f"{', '.join(KINDS)}"
        )
    given = entry[kinds[0]]
    if isinstance(given, (int, float)):
        yield {key: str(value) for key, value in entry.items()}
        return
    if not isinstance(given, (list, dict)):
        raise UsageError(f"{where}: {kinds[0]} is {given!r}, expected a list, or numbers by K")
    pairs = given.items() if isinstance(given, dict) else enumerate(given, start=1)
    rest = {key: str(value) for key, value in entry.items() if key != kinds[0]}
    for k, value in pairs:
        yield rest | {"k": str(k), kinds[0]: str(value)}


def from_rows(rows: Sequence[Mapping[str, str]], columns: Sequence[str], where: str, only: Only) -> Evidence:
    """Raises UsageError for a table that is not as above, or whose rows stand for several things."""
    labels = [name for name in columns if name not in _OWN and not _WIDE.fullmatch(name)]
    only.takes(where, labels)
    kept = [row for row in rows if all(only.allows(name, row.get(name, "")) for name in labels)]
    if not kept:
        raise UsageError(f"{where}: has no row{only.words()}")
    wide = [name for name in columns if _WIDE.fullmatch(name)]
    entries = list(_wide(kept, wide, labels, where) if wide else _long(kept, columns, labels, where))
    _refuse_several(entries, where)
    notices: list[str] = []
    by_class = [(entry.labels, _acceptance(entry, where, notices)) for entry in entries]
    contexts = [(_context(labels, where), acceptance) for labels, acceptance in by_class]
    if len(contexts) == 1:
        return Evidence(by_class[0][1], notices)
    contexts.sort(key=lambda pair: pair[0])
    kinds = tuple(Kind(f"context {context:g}", context, acceptance) for context, acceptance in contexts)
    return Evidence(contexts[0][1], notices, kinds=kinds, by_context=tuple(contexts))


def _refuse_several(entries: Sequence[Entry], where: str) -> None:
    """Only the context may differ: that is what a policy can follow."""
    for name in dict.fromkeys(name for entry in entries for name in entry.labels if name != "context"):
        values = sorted({entry.labels.get(name, "") for entry in entries})
        if len(values) > 1:
            shown = ", ".join(values[:6]) + (", ..." if len(values) > 6 else "")
            raise UsageError(f"{where}: has rows of several {name} ({shown}); name one: --only {name}=VALUE")
    contexts = [entry.labels.get("context") for entry in entries]
    if len(set(contexts)) < len(entries):
        raise UsageError(f"{where}: has {len(entries)} rows that nothing tells apart")


def _context(labels: Mapping[str, str], where: str) -> float:
    return _number(labels.get("context") or "1", where, "context")


def _wide(rows: Sequence[Mapping[str, str]], wide: Sequence[str], labels: Sequence[str], where: str) -> Iterator[Entry]:
    letters = sorted({name[0] for name in wide})
    if len(letters) > 1:
        raise UsageError(f"{where}: has columns {', '.join(wide)}; expected those of one of {', '.join(letters)}")
    kind = next(kind for kind, letter in KINDS.items() if letter == letters[0])
    for row in rows:
        values = {int(name[1:]): _number(row[name], where, name) for name in wide if row.get(name)}
        drafts = dict.fromkeys(values, _number(row["drafts"], where, "drafts")) if row.get("drafts") else {}
        yield Entry({name: row.get(name, "") for name in labels}, kind, values, drafts)


def _long(
    rows: Sequence[Mapping[str, str]], columns: Sequence[str], labels: Sequence[str], where: str
) -> Iterator[Entry]:
    kinds = [kind for kind in KINDS if kind in columns]
    if "k" not in columns or len(kinds) != 1:
        raise UsageError(
            f"{where}: has columns {', '.join(columns)}; expected k and one of {', '.join(KINDS)}, or S1, S2, ..., or "
            "a TRACE.json, a REPORT.json or the text of /metrics"
        )
    groups: dict[tuple[str, ...], Entry] = {}
    for row in rows:
        key = tuple(row.get(name, "") for name in labels)
        entry = groups.setdefault(key, Entry(dict(zip(labels, key, strict=True)), kinds[0], {}, {}))
        k = _number(row.get("k", ""), where, "k")
        if k != int(k) or k < 1:
            raise UsageError(f"{where}: k is {k:g}, expected an integer from 1 up")
        if int(k) in entry.values:
            raise UsageError(f"{where}: lists k {k:g} twice{_said(entry.labels)}")
        entry.values[int(k)] = _number(row.get(kinds[0], ""), where, kinds[0])
        if row.get("drafts"):
            entry.drafts[int(k)] = _number(row["drafts"], where, "drafts")
    yield from groups.values()


def _acceptance(entry: Entry, where: str, notices: list[str]) -> Acceptance:
    source = f"{where}{_said(entry.labels)}"
    temperature = (
        _number(entry.labels["temperature"], where, "temperature") if entry.labels.get("temperature") else None
    )
    if entry.kind == "length":
        survival = _projected(entry, source, notices)
        notices.append(f"{source}: mean lengths do not tell how far they may be off, so their own noise is not counted")
        return of_survival(survival, None, f"{source}: mean lengths of separate runs", temperature)
    ks = sorted(entry.values)
    if ks != list(range(1, len(ks) + 1)):
        raise UsageError(f"{source}: has {entry.kind} at positions {ks}, expected all from 1 on")
    values = [entry.values[k] for k in ks]
    if entry.kind == "conditional":
        survival = Conditional.checked(values, source).survival()
    else:
        survival = Survival.checked(values, source)
    reached = None
    if len(entry.drafts) == len(ks):
        reached = tuple(entry.drafts[k] for k in ks)
        if not all(count >= 1 for count in reached):
            raise UsageError(f"{source}: drafts is {min(reached):g}, expected how many were counted")
    else:
        notices.append(f"{source}: has no column drafts, so how far its rates may be off is not known")
    return of_survival(survival, reached, f"{source}: {entry.kind} by position", temperature)


def _projected(entry: Entry, source: str, notices: list[str]) -> Survival:
    projection = of_lengths(entry.values, entry.drafts, source)
    if projection.moved > 5e-4:
        notices.append(
            f"{source}: mean lengths of separate runs imply survival that rises somewhere; projected on what can be, "
            f"the length at K = {projection.at_k} moved by {projection.moved:.3f}, the most of all"
        )
    else:
        notices.append(f"{source}: survival from mean lengths of separate runs; nothing had to be projected")
    if projection.between:
        listed = ", ".join(map(str, projection.between))
        notices.append(f"{source}: has no length at K = {listed}; survival there is spread evenly")
    return projection.survival


def _number(text: str, where: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{where}: {name} is {text!r}, expected a number")
    return value


def _said(labels: Mapping[str, str]) -> str:
    words = ", ".join(f"{name} {value}" for name, value in labels.items() if value)
    return f" ({words})" if words else ""
