"""Shard: what the header of one safetensors file says, checked. No tensor data is read here.

A file from anywhere is data to distrust: its header is measured before it is read, and every tensor it announces has to
lie inside the file, whole and alone.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specctl.errors import CheckpointError

# Of one file: 50,000 tensors fit, and no file has more than some ten thousand. What JSON makes of a header is up to 25
# times as large, so this is what bounds memory and time for a hostile one.
MAX_HEADER = 6_000_000
MAX_NAME = 400
MAX_DIMENSIONS = 16
_LENGTH_BYTES = 8
_TOO_MANY = 2**63
_KEYS = {"dtype", "shape", "data_offsets"}
# Of each mark, as many as one tensor's entry can have. Files may carry other things in __metadata__, in which _SPARE of
# each mark have room.
_MARKS = {b"{": 1, b"[": 2, b'"': 10, b",": MAX_DIMENSIONS + 3}
_SPARE = 20_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint, without its numbers. (A tuple: large models have a hundred thousand of them.)"""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file and the tensors in it."""

    path: Path
    tensors: dict[str, TensorInfo]

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read a file's header. Raises CheckpointError naming the file, and the tensor where there is one at fault."""
        with _no_collection():
            header, data_bytes = _read_header(path)
            header.pop("__metadata__", None)
            tensors: dict[str, TensorInfo] = {}
            spans: list[tuple[int, int, str]] = []
            for name, entry in header.items():
                if len(name) > MAX_NAME or not name.isprintable():
                    raise CheckpointError(f"{path}: {name[:MAX_NAME]!r} is no name for a tensor: the file is damaged")
                tensors[name], begin, end = _read_entry(entry, f"{path}: tensor {name}")
                spans.append((begin, end, name))
            _check_layout(spans, data_bytes, path)
            return cls(path, tensors)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python looks for garbage again and again while many objects are made, and here there is none to find."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON and the number of bytes after it."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; expected a safetensors file")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(start, "little")
            data_bytes = file_bytes - _LENGTH_BYTES - header_bytes
            if len(start) < _LENGTH_BYTES or header_bytes == 0 or data_bytes < 0:
                raise CheckpointError(
                    f"{path}: is {file_bytes} bytes long and cannot hold the safetensors header it announces; "
                    "it is cut short or no safetensors file: fetch it again"
                )
            if header_bytes > MAX_HEADER:
                raise CheckpointError(f"{path}: header of {header_bytes} bytes; {MAX_HEADER} is the most it may have")
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    entries = text.count(b'"data_offsets"')
    if any(text.count(mark) > entries * most + _SPARE for mark, most in _MARKS.items()):
        raise CheckpointError(f"{path}: the safetensors header is JSON with far more in it than {entries} tensors")
    try:
        header = json.loads(text.decode("utf-8"))
        if isinstance(header, dict) and entries != len(header) - ("__metadata__" in header):
            header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header cannot be read as JSON: {_first_line(error)}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is no JSON object: the file is damaged")
    return header, data_bytes


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:MAX_NAME]!r} is there twice")
        found[name] = value
    return found


def _read_entry(entry: Any, where: str) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets in the header: the file is damaged")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {str(entry['dtype'])[:40]!r} is unknown (known: {', '.join(DTYPES)})")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape or data_offsets are no lists of whole numbers: the file is damaged")
    if 0 in shape:
        raise CheckpointError(
            f"{where}: has no elements (shape {shape}); a sharded save that was not gathered leaves such"
        )
    info, (begin, end) = TensorInfo(dtype, tuple(shape)), offsets
    if end - begin != info.num_bytes:
        raise CheckpointError(
            f"{where}: takes {end - begin} bytes in the file, but {entry['dtype']} {shape} needs {info.num_bytes}: "
            "the file is damaged"
        )
    return info, begin, end


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return False
    for value in values:  # noqa: SIM110 - a generator inside all() doubles the time a large checkpoint takes to open
        if type(value) is not int or not 0 <= value < _TOO_MANY:
            return False
    return True


def _check_layout(spans: Iterable[tuple[int, int, str]], data_bytes: int, path: Path) -> None:
    """Every byte after the header belongs to exactly one tensor, as the format demands."""
    at, previous = 0, "the header"
    for begin, end, name in sorted(spans):
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: tensor {name} ends {end - data_bytes} bytes behind the end of the file: "
                "it is cut short; fetch it again"
            )
        if begin != at:
            what = "overlaps" if begin < at else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {name} {what} {previous}: the file is damaged")
        at, previous = end, name
    if at != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - at} bytes after tensor {previous} belong to none: it is damaged")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
