"""What becomes of a target's directory: files that stay, files that are written, files that go. Decided from headers.

Where and how it is carried out is not known here; `written` and `verify` work on any place that has the new files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.checkpoint import INDEX, SINGLE, SafetensorsFile, read_json
from specctl.convert_mtp.target import BACKBONE, Target
from specctl.errors import CheckpointError
from specctl.output import to_json
from specctl.shard_writer import Entry, divide, write_files, write_synced
from specctl.shards import Shard, TensorInfo

CONFIG = "config.json"
WORKERS = 2


@dataclass(frozen=True)
class Change:
    """shards: files to write, with their tensors; those of MTP layers' remains are written anew without them. moved:
    files that get another name. removed: files that go. weight_map: the new index, None where there is none. rewritten:
    those of `shards` that hold tensors of the target."""

    target: Target
    config: dict[str, Any]
    shards: dict[str, tuple[Entry, ...]]
    moved: dict[str, str]
    removed: tuple[str, ...]
    weight_map: dict[str, str] | None
    rewritten: frozenset[str]

    @property
    def written(self) -> list[str]:
        """The files that are written: shards, index, config, in the order in which they may be put in place."""
        return [*self.shards, *([] if self.weight_map is None else [INDEX]), CONFIG]

    @property
    def num_bytes(self) -> int:
        return sum(entry.info.num_bytes for entries in self.shards.values() for entry in entries)

    @property
    def kept(self) -> dict[str, str]:
        """The weight files that stay as they are, by their new names."""
        staying = [name for name in self.target.files if name not in self.removed and name not in self.shards]
        return {self.moved.get(name, name): name for name in staying}

    @property
    def replaced(self) -> set[str]:
        """Names in the target's directory that are not carried over as they are."""
        return {*self.removed, *self.moved, *self.written, INDEX}

    def write(self, directory: Path, progress: Callable[[int], object]) -> None:
        """Write the new files to a directory."""
        write_files(directory, self.shards, workers=WORKERS, progress=progress)
        if self.weight_map is not None:
            metadata = {k: v for k, v in (self.target.metadata or {}).items() if k != "total_parameters"}
            index = {"metadata": metadata | {"total_size": self._total()}, "weight_map": self.weight_map}
            write_synced(directory / INDEX, json.dumps(index, indent=2) + "\n")
        write_synced(directory / CONFIG, to_json(self.config) + "\n")

    def verify(self, place: Callable[[str], Path]) -> dict[str, TensorInfo]:
        """Read all files back, from where `place` says they are; returns every tensor's info.

        Raises CheckpointError when files, index and config do not say what they should.
        """
        found: dict[str, TensorInfo] = {}
        file_of: dict[str, str] = {}
        for name, expected in self._tensors():
            tensors = Shard.read(place(name)).tensors
            if tensors != expected:
                raise CheckpointError(f"{place(name)}: read back other tensors than expected; is the disk sound?")
            if twice := tensors.keys() & found.keys():
                raise CheckpointError(f"{place(name)}: tensor {min(twice)} is also in {file_of[min(twice)]}")
            found |= tensors
            file_of |= dict.fromkeys(tensors, name)
        if self.weight_map is not None and read_json(place(INDEX)).get("weight_map") != file_of:
            raise CheckpointError(f"{place(INDEX)}: read back another index than was written; is the disk sound?")
        if read_json(place(CONFIG)) != self.config:
            raise CheckpointError(f"{place(CONFIG)}: read back another config than was written; is the disk sound?")
        return found

    def _tensors(self) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
        """Every weight file of the result with its tensors."""
        for new, old in self.kept.items():
            yield new, self.target.files[old].tensors
        for name, entries in self.shards.items():
            yield name, {entry.name: entry.info for entry in entries}

    def _total(self) -> int:
        return sum(info.num_bytes for _, tensors in self._tensors() for info in tensors.values())


def plan_change(target: Target, config: dict[str, Any], entries: tuple[Entry, ...]) -> Change:
    """Remains of MTP layers go, `entries` come in files of their own, and an index names all of it. Without entries, a
    lone file needs none."""
    shards: dict[str, tuple[Entry, ...]] = {}
    moved: dict[str, str] = {}
    removed = [*target.gone]
    for name, file in target.files.items():
        new = _backbone(target) if name == SINGLE and entries else name
        stale = target.stale.get(name, frozenset())
        left = file.tensors.keys() - stale
        if stale and left:
            shards[new] = tuple(_copied(file, tensor) for tensor in left)
        if new != name and not stale:
            moved[name] = new
        elif new != name or not left:
            removed.append(name)
    removed += [name for name, file in target.others.items() if file.tensors.keys() == target.stale.get(name)]
    rewritten = frozenset(shards)
    staying = {*(moved.get(name, name) for name in target.files), *target.others} - {*removed}
    if entries:
        shards |= {name: tuple(part) for name, part in _new_files(entries, {*staying, *shards}).items()}
    # A file that is written is replaced, not removed.
    removed = [name for name in removed if name not in shards]
    change = Change(target, config, shards, moved, tuple(sorted(removed)), None, rewritten)
    if target.metadata is None and not entries and SINGLE in target.files:
        return change
    weight_map = {tensor: name for name, tensors in change._tensors() for tensor in tensors}
    return replace(change, weight_map=dict(sorted(weight_map.items())))


def _copied(file: SafetensorsFile, name: str) -> Entry:
    return Entry(name, file.tensors[name], lambda: [file.tensor(name)])


def _backbone(target: Target) -> str:
    """Beside an index a loader would take model.safetensors for the whole model, so it gets a shard's name."""
    name, number = BACKBONE, 1
    while (target.path / name).exists():
        number += 1
        name = f"model-backbone-{number:05d}.safetensors"
    return name


def _new_files(entries: tuple[Entry, ...], taken: set[str]) -> dict[str, list[Entry]]:
    """Files for the MTP layers, with names that no other file has. Loaders that go by `model*.safetensors` find them
    too."""
    number = 1
    while True:
        files = divide(entries, "model-mtp" if number == 1 else f"model-mtp-{number}")
        if not files.keys() & taken:
            return files
        number += 1
