"""The MTP layer of a checkpoint: its number from the config, its tensors by what they are, the files they are in.

It reads names and configs. Whether the layer is whole is asked in inventory.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.checkpoint import Checkpoint, read_json
from specctl.convert_mtp.families import refuse_others
from specctl.convert_mtp.files import Files, find_files
from specctl.dialects.sglang import is_export
from specctl.errors import CheckpointError
from specctl.heads.mtp import MARKS, SHARED, MtpConfig

FACTS = "specctl.json"
_NAME = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.(.+)")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Layer:
    """One MTP layer. number: in the source. names: the tensor's name within the layer, to its name in the
    checkpoint."""

    number: int
    names: dict[str, str]


@dataclass(frozen=True)
class Source:
    """num_layers: of the target, None when an export does not say. shared: the target's embedding and head, by the
    names that an MTP layer gives its copies. strays: layers that the config knows nothing of."""

    files: Files
    config: dict[str, Any]
    mtp: MtpConfig
    layers: tuple[Layer, ...]
    num_layers: int | None
    shared: dict[str, str]
    strays: dict[int, int] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return str(self.files.path)

    @property
    def needed(self) -> list[str] | None:
        """The files that hold the layers, None when there is no index and all are taken."""
        index = self.files.index
        if index is None:
            return None
        return sorted({index[name] for layer in self.layers for name in layer.names.values()})

    def open(self) -> Checkpoint:
        """The files with the MTP layers, and those with the target's embedding and head where they are here."""
        index, needed = self.files.index, self.needed
        if index is None or needed is None:
            return self.files.open()
        also = {index[name] for name in self.shared.values() if self.files.is_here(index[name])}
        return self.files.open({*needed, *also})


def find_source(model: str) -> Source:
    """Find the MTP layers of a directory or hub id.

    Raises CheckpointError for another family, a config that claims no layer, or a layer that is not there.
    """
    files = find_files(model)
    config = read_json(files.path / "config.json")
    names = files.index.keys() if files.index is not None else Checkpoint(files.path).names()
    return locate_layers(files, config, names)


def locate_layers(files: Files, config: dict[str, Any], names: Collection[str]) -> Source:
    """The same for names already read."""
    where = str(files.path / "config.json")
    refuse_others(config, names, where)
    mtp = MtpConfig.read(config, where)
    by_layer = tensors_by_layer(names, str(files.path))
    first = 0 if is_export(config) else mtp.num_layers
    _check_claim(mtp, by_layer, first, where)
    layers = tuple(Layer(number, by_layer[number]) for number in range(first, first + mtp.count))
    shared = {copy: found for copy, name in SHARED.items() if (found := _present(name, names))}
    strays = {} if is_export(config) else {n: len(t) for n, t in by_layer.items() if n >= first + mtp.count}
    num_layers = _layers_before_export(files.path) if is_export(config) else mtp.num_layers
    return Source(files, config, mtp, layers, num_layers, shared, strays)


def tensors_by_layer(names: Collection[str], where: str) -> dict[int, dict[str, str]]:
    """Every numbered layer's tensors, by their names within it. `model.` in front may be absent."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or name.endswith(_IGNORED_SUFFIX):
            continue
        layer = found[int(match[1])]
        if match[2] in layer:
            raise CheckpointError(f"{where}: tensors {layer[match[2]]} and {name} are the same one; remove either")
        layer[match[2]] = name
    return found


def marked_layers(by_layer: Mapping[int, Mapping[str, str]]) -> list[int]:
    """The layers with modules that only an MTP layer has."""
    return sorted(number for number, names in by_layer.items() if any(mark in names for mark in MARKS))


def _present(name: str, names: Collection[str]) -> str | None:
    return next((found for found in (name, name.removeprefix("model.")) if found in names), None)


def _check_claim(mtp: MtpConfig, by_layer: Mapping[int, Mapping[str, str]], first: int, where: str) -> None:
    """The config claims MTP layers, and tensors of an MTP layer are where they should be."""
    marked = marked_layers(by_layer)
    if mtp.count == 0:
        but = f", but layer {marked[0]} is one: set it to {len(marked)}" if marked else "; use the original checkpoint"
        raise CheckpointError(f"{where}: num_nextn_predict_layers is 0 or absent: no MTP layer is declared{but}")
    for number in range(first, first + mtp.count):
        if number in by_layer and (number in marked or not marked):
            continue
        found = f", found one at layer {', '.join(map(str, marked))}" if marked else ""
        remedy = "they were lost in saving; use the original checkpoint"
        if marked:
            key = "num_hidden_layers" if marked[0] != first else "num_nextn_predict_layers"
            remedy = f"set {key} to what the checkpoint has"
        raise CheckpointError(f"{where}: expected MTP weights in layer {number}, there are none{found}; {remedy}")


def _layers_before_export(path: Path) -> int | None:
    """The target's number of layers, which a NextN export keeps in specctl.json only."""
    if not (path / FACTS).is_file():
        return None
    recipe = read_json(path / FACTS).get("recipe")
    number = recipe.get("num_hidden_layers") if isinstance(recipe, dict) else None
    return number if type(number) is int and number > 0 else None
