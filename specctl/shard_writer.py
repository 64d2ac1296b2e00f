"""Writing safetensors of any size with little memory: headers first, then every tensor piece by piece, in parallel.

It knows where bytes go, not what they mean. Files are complete and on the disk when a function returns; to have all of
them or none, fill a directory of specctl.output.new_directory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specctl.shards import DTYPES, TensorInfo

INDEX = "model.safetensors.index.json"
MAX_SHARD = 5_000_000_000
PIECE = 1 << 24  # bytes in one write

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor to write. pieces: gives its numbers in order, as CPU tensors of its dtype; called once."""

    name: str
    info: TensorInfo
    pieces: Callable[[], Iterable[Tensor]]


def write_shards(
    directory: Path,
    entries: Sequence[Entry],
    *,
    stem: str,
    max_bytes: int = MAX_SHARD,
    workers: int = 2,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> dict[str, str]:
    """Write `entries` to the files that `divide` gives and their index. Returns the index's weight_map. `progress` is
    told the bytes written, from any thread."""
    files = divide(entries, stem, max_bytes)
    write_files(directory, files, workers=workers, progress=progress)
    total = sum(entry.info.num_bytes for entry in entries)
    weight_map = {entry.name: file for file, part in files.items() for entry in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_synced(directory / INDEX, json.dumps(index, indent=2) + "\n")
    return weight_map


def divide(entries: Iterable[Entry], stem: str, max_bytes: int = MAX_SHARD) -> dict[str, list[Entry]]:
    """Which entry goes to which file: `STEM-00001-of-0000N.safetensors` and so on, of at most max_bytes each (more for
    a larger tensor)."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in sorted(entries, key=_order):
        if parts[-1] and size + entry.info.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.info.num_bytes
    return {f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def write_files(
    directory: Path,
    files: Mapping[str, Iterable[Entry]],
    *,
    workers: int = 2,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Write each file with its entries. Tensors are ordered by falling item size and by name, so that each is
    aligned."""
    with ExitStack() as stack:
        descriptors: list[int] = []
        jobs: list[tuple[int, int, Entry]] = []
        for file, part in files.items():
            descriptor = os.open(directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, descriptor)
            descriptors.append(descriptor)
            for offset, entry in _write_header(descriptor, sorted(part, key=_order)):
                jobs.append((descriptor, offset, entry))
        _fill(jobs, workers, progress)
        for descriptor in descriptors:
            os.fsync(descriptor)


def _order(entry: Entry) -> tuple[int, str]:
    return -entry.info.dtype.itemsize, entry.name


def write_synced(path: Path, text: str) -> None:
    """Write a small file and wait until the disk has it."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write_header(descriptor: int, entries: Sequence[Entry]) -> Iterator[tuple[int, Entry]]:
    """Write the header and set the file's length; gives where each tensor's data goes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        span = [at, at + entry.info.num_bytes]
        header[entry.name] = {
            "dtype": _NAMES[entry.info.dtype],
            "shape": list(entry.info.shape),
            "data_offsets": span,
        }
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    _write_all(descriptor, start, 0)
    os.posix_fallocate(descriptor, 0, len(start) + at)
    at = len(start)
    for entry in entries:
        yield at, entry
        at += entry.info.num_bytes


def _fill(jobs: Sequence[tuple[int, int, Entry]], workers: int, progress: Callable[[int], object]) -> None:
    """Write the tensors' data; the first failure ends all and is raised."""
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        futures = [pool.submit(_write_entry, *job, progress) for job in jobs]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _write_entry(descriptor: int, offset: int, entry: Entry, progress: Callable[[int], object]) -> None:
    begin = offset
    for tensor in entry.pieces():
        assert tensor.dtype == entry.info.dtype, f"{entry.name} is {tensor.dtype}, announced as {entry.info.dtype}"
        raw = memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        assert offset + len(raw) <= begin + entry.info.num_bytes, f"{entry.name} is longer than announced"
        for at in range(0, len(raw), PIECE):
            piece = raw[at : at + PIECE]
            _write_all(descriptor, piece, offset + at)
            progress(len(piece))
        offset += len(raw)
    assert offset - begin == entry.info.num_bytes, f"{entry.name} is shorter than announced"


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """A write may take less than it was given."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
