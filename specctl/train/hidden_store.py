"""HiddenStore: what the target leaves in the rows of examples, computed once and kept on the disk.

    DIRECTORY/hidden.json   what it is of: target, taps, rows, format, and the data once it is complete
    DIRECTORY/states-00001.safetensors and so on: for each example `KEY.final` [R, E] and `KEY.taps` [A, R, E]

KEY is a digest of the example's tokens and of the rows that are read. A file is complete when it has its name, so a
store may be interrupted at any moment and filled further. In float8 every row has a scale beside it.
Legend: R rows of an example that are read, E the target's width, A taps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from specctl.errors import UsageError
from specctl.fp8 import E4M3, LARGEST
from specctl.models import Hidden
from specctl.shard_writer import Entry, write_files
from specctl.shards import TensorInfo
from specctl.train.examples import Example
from specctl.train.hidden import HiddenStates, Reads

Format = Literal["target", "bfloat16", "float8"]

INDEX, SCHEMA = "hidden.json", "specctl.hidden/1"
SHARD = 256 * 2**20  # bytes from which on what is waiting is written
FINAL, TAPS, SCALE = "final", "taps", "scale"


@dataclass(frozen=True)
class Identity:
    """What a store holds. target: its digest. dtype: that the target computes in."""

    target: str
    dtype: str
    format: Format
    taps: tuple[int, ...]
    rows: Literal["every", "labels"]

    @classmethod
    def of(cls, target: str, dtype: torch.dtype, format: Format, reads: Reads) -> Identity:
        name = str(dtype).removeprefix("torch.")
        return cls(target, name, format, reads.taps, "every" if reads.every_row else "labels")

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "taps": list(self.taps)}


def bytes_needed(examples: Iterable[Example], reads: Reads, width: int, dtype: torch.dtype, format: Format) -> int:
    """On the disk, headers left out."""
    rows = sum(map(reads.num_rows, examples)) * (1 + len(reads.taps))
    size = {"target": dtype.itemsize, "bfloat16": 2, "float8": 1}[format]
    return rows * (width * size + (4 if format == "float8" else 0))


def data_digest(examples: Iterable[Example], reads: Reads) -> str:
    """Of all that is to be kept of these examples."""
    total = hashlib.sha256()
    for key in sorted({key_of(example, reads) for example in examples}):
        total.update(key.encode())
    return total.hexdigest()


def key_of(example: Example, reads: Reads) -> str:
    rows = [] if reads.every_row else reads.rows(example).tolist()
    return hashlib.sha256(json.dumps([example.ids, rows]).encode()).hexdigest()[:32]


class Shards:
    """The files of a store, and what waits to be written. Raises UsageError for a directory that holds something
    else."""

    def __init__(self, directory: Path, identity: Identity, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.directory = directory
        self.identity = identity
        self._place: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._bytes = 0
        self._files: list[str] = []
        self.data: str | None = None
        self._open()
        if self._place:
            say(f"{directory}: holds the target's states of {len(self._place)} examples already")

    def __contains__(self, key: str) -> bool:
        return key in self._place or key in self._waiting

    def __len__(self) -> int:
        return len(self._place) + len(self._waiting)

    def put(self, key: str, hidden: Hidden) -> None:
        """Keep what was read of one example."""
        if key in self:
            return
        parts = {FINAL: hidden.final_TD} | ({} if hidden.taps_ATD is None else {TAPS: hidden.taps_ATD})
        stored: dict[str, Tensor] = {}
        for name, tensor in parts.items():
            stored |= _narrowed(name, tensor.detach().cpu(), self.identity.format)
        self._waiting[key] = stored
        self._bytes += sum(tensor.nbytes for tensor in stored.values())
        if self._bytes >= SHARD:
            self.flush()

    def get(self, key: str, dtype: torch.dtype) -> Hidden:
        """In the target's dtype, on the CPU."""
        stored = self._waiting.get(key)
        if stored is None:
            handle = self._handle(self._place[key])
            names = [name for part in (FINAL, TAPS) for name in (part, f"{part}.{SCALE}")]
            held = set(handle.keys())
            stored = {name: handle.get_tensor(f"{key}.{name}") for name in names if f"{key}.{name}" in held}
        return Hidden(_widened(FINAL, stored, dtype), _widened(TAPS, stored, dtype) if TAPS in stored else None)

    def flush(self) -> None:
        """Have the disk hold what waits."""
        if not self._waiting:
            return
        file = f"states-{len(self._files) + 1:05d}.safetensors"
        tensors = {f"{key}.{name}": each for key, parts in self._waiting.items() for name, each in parts.items()}
        partial = f".{file}.partial"
        (self.directory / partial).unlink(missing_ok=True)
        write_files(self.directory, {partial: [_entry(name, tensor) for name, tensor in tensors.items()]})
        (self.directory / partial).replace(self.directory / file)
        self._files.append(file)
        self._place |= dict.fromkeys(self._waiting, self.directory / file)
        self._waiting, self._bytes = {}, 0
        self._write_index()

    def seal(self, data: str) -> None:
        """Say what data it is complete for."""
        self.flush()
        self.data = data
        self._write_index()

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt")
        return self._handles[file]

    def _write_index(self) -> None:
        value = {"schema": SCHEMA, **self.identity.as_dict(), "data": self.data, "files": self._files}
        temporary = self.directory / f"{INDEX}.partial"
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.directory / INDEX)

    def _open(self) -> None:
        if not (self.directory / INDEX).exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            if any(self.directory.iterdir()):
                raise UsageError(
                    f"{self.directory}: is no store of hidden states ({INDEX} is missing); name another one"
                )
            return
        found = self._read_index()
        for key, ours in self.identity.as_dict().items():
            if found.get(key) != ours:
                raise UsageError(
                    f"{self.directory / INDEX}: {key} is {_brief(found.get(key))}, this run needs {_brief(ours)}; "
                    "remove the directory, or name another one in hidden.directory"
                )
        self.data, self._files = found.get("data"), list(found["files"])
        for file in self._files:
            path = self.directory / file
            try:
                names = list(self._handle(path).keys())
            except Exception as error:  # noqa: BLE001 - the reader's errors share no base class
                raise UsageError(f"{path}: cannot be read: {error}; remove {self.directory}") from None
            self._place |= {name.partition(".")[0]: path for name in names}

    def _read_index(self) -> dict[str, Any]:
        where = self.directory / INDEX
        try:
            value = json.loads(where.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = None
        files = value.get("files") if isinstance(value, dict) else None
        named = isinstance(files, list) and all(isinstance(file, str) and "/" not in file for file in files)
        if not isinstance(value, dict) or value.get("schema") != SCHEMA or not named:
            raise UsageError(f"{where}: is not of this version of specctl; remove {self.directory}")
        return value


@dataclass(frozen=True)
class StoredStates:
    """`Teacher` over a store. What is not there is computed and kept."""

    states: HiddenStates
    shards: Shards
    dtype: torch.dtype
    keys: list[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", [key_of(example, self.states.reads) for example in self.states.examples])

    @property
    def missing(self) -> list[int]:
        """Examples whose states are still to be computed."""
        return [index for index, key in enumerate(self.keys) if key not in self.shards]

    def fill(self, between: Callable[[], None]) -> None:
        """Compute what is missing. `between` is called after each example; it may raise, and what was computed stays.

        Raises UsageError when the store is complete for other data.
        """
        data = data_digest(self.states.examples, self.states.reads)
        if self.shards.data not in (None, data):
            raise UsageError(
                f"{self.shards.directory / INDEX}: holds the states of other data; remove the directory, or name "
                "another one in hidden.directory"
            )
        try:
            for index in self.missing:
                self.shards.put(self.keys[index], self.states.example(index))
                between()
        finally:
            self.shards.flush()
        self.shards.seal(data)

    def hidden(self, indices: list[int]) -> Hidden:
        """See HiddenStates."""
        parts = []
        for index in indices:
            found = self.shards.get(self.keys[index], self.dtype)
            parts.append(self.states.reads.whole(self.states.examples[index], found))
        taps = [part.taps_ATD for part in parts if part.taps_ATD is not None]
        device = self.states.device
        return Hidden(
            torch.cat([part.final_TD for part in parts]).to(device),
            torch.cat(taps, dim=1).to(device) if taps else None,
        )


def _narrowed(name: str, tensor: Tensor, format: Format) -> dict[str, Tensor]:
    if format == "float8":
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
        return {name: (tensor.float() / scale).to(E4M3), f"{name}.{SCALE}": scale}
    return {name: tensor.to(torch.bfloat16) if format == "bfloat16" else tensor.clone()}


def _widened(name: str, stored: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    scale = stored.get(f"{name}.{SCALE}")
    return stored[name].to(dtype) if scale is None else (stored[name].float() * scale).to(dtype)


def _entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, TensorInfo(tensor.dtype, tuple(tensor.shape)), lambda: [tensor])


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
