"""Rows: the records of a data set as they come, from jsonl, json and parquet files and from the hub, each with where it
stood. It knows nothing about what is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specctl.errors import MissingDependency, UsageError
from specctl.text.shown import shown

SUFFIXES = (".jsonl", ".json", ".parquet")
_BOM = b"\xef\xbb\xbf"
_HUB = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?P<parts>(?::[^:]+){0,2})"
)


@dataclass(frozen=True)
class RawRow:
    """source: as it was named. line: of the file, from 1; of a parquet file or a hub data set, the row's number."""

    values: Mapping[str, Any]
    source: str
    line: int


def read_rows(source: str) -> Iterator[RawRow]:
    """The rows of a file, or of a hub data set `org/name[@revision][:config][:split]`, where the split is else "train".

    Raises UsageError naming file and line for what cannot be read: a set that is broken somewhere is not half a set.
    """
    path = Path(source).expanduser()
    hub = _HUB.fullmatch(source)
    if hub is not None and not path.exists() and path.suffix not in SUFFIXES:
        return _hub(hub["name"], hub["revision"], hub["parts"].split(":")[1:])
    if path.is_dir():
        raise UsageError(f"{source}: is a directory; name files in it ({', '.join(SUFFIXES)})")
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"{source}: expected a file that ends in {', '.join(SUFFIXES)}, or a hub data set like org/name:split"
        )
    return _parquet(path, source) if path.suffix == ".parquet" else _json(path, source)


def _json(path: Path, source: str) -> Iterator[RawRow]:
    """Objects, one a line; in a .json file a list of objects, or a single one, will do as well."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.removeprefix(_BOM).strip()), b"")
            file.seek(0)
            if path.suffix == ".jsonl" or _is_object(first):
                yield from _lines(file, source)
            else:
                yield from _whole(_decoded(file.read(), source), source)
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror or error}") from None


def _lines(file: Iterable[bytes], source: str) -> Iterator[RawRow]:
    """Lines end at a line feed only, as JSON strings may hold every other separator; blank ones are nothing."""
    for number, line in enumerate(file, start=1):
        where = f"{source}: line {number}"
        text = _decoded(line, where).strip()
        if not text:
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: is not JSON: {error}") from None
        yield RawRow(_object(value, where), source, number)


def _whole(text: str, source: str) -> Iterator[RawRow]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}: line {error.lineno}: is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: is not JSON: {error}") from None
    if not isinstance(value, list):
        yield RawRow(_object(value, source), source, 1)
        return
    decoder, at, line = json.JSONDecoder(), text.index("[") + 1, 1
    for item in value:
        start = len(text) - len(text[at:].lstrip(" \t\r\n,")) if text[at] in " \t\r\n," else at
        line += text.count("\n", at, start)
        yield RawRow(_object(item, f"{source}: line {line}"), source, line)
        _, at = decoder.raw_decode(text, start)
        line += text.count("\n", start, at)


def _parquet(path: Path, source: str) -> Iterator[RawRow]:
    parquet = _needed("pyarrow.parquet", source)
    arrow = _needed("pyarrow", source)
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(values, source, number)
    except (OSError, arrow.ArrowException) as error:
        raise UsageError(f"{source}: cannot be read as parquet: {_first_line(error)}") from None


def _hub(name: str, revision: str | None, parts: list[str]) -> Iterator[RawRow]:
    """parts: [], [split] or [config, split]."""
    datasets = _needed("datasets", name)
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) == 2 else None
    try:
        rows = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # noqa: BLE001 - the library's errors share no base class
        raise UsageError(
            f"{name}: no such file, and the hub data set {':'.join([name, *parts])} cannot be had: {_cause(error)}"
        ) from None
    for number, values in enumerate(rows, start=1):
        yield RawRow(values, name, number)


def _needed(module: str, source: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingDependency(
            f"{source}: needs the package {package}, which is not installed; pip install 'specctl[data]', or save the "
            "set as jsonl"
        ) from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.removeprefix(_BOM)), dict)
    except (ValueError, RecursionError):
        return False


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{where}: is not UTF-8; save the file in that encoding") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a JSON object, found {shown(value)}")
    return value


def _cause(error: BaseException) -> str:
    """What a library that wraps its errors met in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
