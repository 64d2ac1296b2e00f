"""A target's directory as it is: its files by their headers, and which tensors in them are of an MTP layer.

It takes what `Checkpoint` refuses: remains of an MTP layer that the index does not know of, for these are what is to be
removed. Everything else about it has to be whole. Numbers are read only when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.checkpoint import INDEX, LEGACY, SINGLE, SafetensorsFile, read_json, weight_map
from specctl.convert_mtp.families import refuse_others
from specctl.convert_mtp.files import refuse_unfinished
from specctl.convert_mtp.source import marked_layers
from specctl.dialects.sglang import is_export
from specctl.errors import CheckpointError
from specctl.heads.mtp import SCALE, SHARED, MtpConfig
from specctl.heads.quantisation import Scheme
from specctl.shards import TensorInfo

BACKBONE = "model-00001-of-00001.safetensors"  # what a lone model.safetensors is called beside an index
_LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.")
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5,6}\.safetensors")
_OF_A_BLOCK = "input_layernorm.weight"


@dataclass(frozen=True)
class Target:
    """files: by name, all that an index or the file names call for. others: safetensors beside them that no index
    names. metadata: the index's own, None where there is no index. stale: of each file, the tensors of MTP layers.
    gone: files of nothing but such tensors, which the index names and which are not there."""

    path: Path
    config: dict[str, Any]
    mtp: MtpConfig
    scheme: Scheme | None
    files: dict[str, SafetensorsFile]
    others: dict[str, SafetensorsFile]
    metadata: dict[str, Any] | None
    stale: dict[str, frozenset[str]]
    gone: tuple[str, ...]

    @cached_property
    def file_of(self) -> dict[str, SafetensorsFile]:
        """Where each tensor is that is not of an MTP layer."""
        return {
            name: file
            for file_name, file in self.files.items()
            for name in file.tensors
            if name not in self.stale.get(file_name, ())
        }

    @property
    def stale_layers(self) -> list[int]:
        return sorted({_number(name) for names in self.stale.values() for name in names})

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def info(self, name: str) -> TensorInfo:
        return self.file_of[name].tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def tensor(self, name: str) -> Tensor:
        return self.file_of[name].tensor(name)


def open_target(path: Path) -> Target:
    """Read config, index and every header. Raises CheckpointError for what is no whole DeepSeek target."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; expected the directory of a DeepSeek target")
    refuse_unfinished(path)
    where = str(path / "config.json")
    config = read_json(path / "config.json")
    if is_export(config):
        raise CheckpointError(f"{path}: is an MTP layer by itself (a NextN export), expected a target")
    index = _read_index(path)
    files, gone = _open_files(path, config, index)
    others = {
        file.name: SafetensorsFile(file)
        for file in sorted(path.glob("*.safetensors"))
        if file.name not in files and file.is_file()
    }
    names = {name for file in files.values() for name in file.tensors}
    refuse_others(config, names, where)
    mtp = MtpConfig.read(config, where)
    scheme = Scheme.read(config, where)
    _check_layers(path, names | {n for file in others.values() for n in file.tensors}, mtp)
    stale = {}
    for name, file in (files | others).items():
        if found := frozenset(n for n in file.tensors if is_beyond(n, mtp.num_layers)):
            stale[name] = found
    target = Target(path, config, mtp, scheme, files, others, _metadata(path), stale, gone)
    _check_index(target, index)
    _check_whole(target)
    return target


def _read_index(path: Path) -> dict[str, str] | None:
    if not (path / INDEX).exists():
        return None
    index = weight_map(path / INDEX)
    if (path / SINGLE).exists() and SINGLE not in index.values():
        raise CheckpointError(f"{path}: both {SINGLE} and {INDEX} are there; remove the one that is out of date")
    return index


def _metadata(path: Path) -> dict[str, Any] | None:
    if not (path / INDEX).exists():
        return None
    metadata = read_json(path / INDEX).get("metadata")
    return dict(metadata) if isinstance(metadata, Mapping) else {}


def _open_files(
    path: Path, config: dict[str, Any], index: dict[str, str] | None
) -> tuple[dict[str, SafetensorsFile], tuple[str, ...]]:
    """The files of the target, and those that are not there but held MTP tensors alone."""
    if index is None:
        names = _without_index(path)
        return {name: SafetensorsFile(path / name) for name in names}, ()
    first = config.get("num_hidden_layers")
    of_model = {f for n, f in index.items() if not (isinstance(first, int) and is_beyond(n, first))}
    files, gone = {}, []
    for name in sorted(set(index.values())):
        if (path / name).is_file():
            files[name] = SafetensorsFile(path / name)
        elif name in of_model:
            raise CheckpointError(f"{path / INDEX}: names {name}, which is not there; fetch the checkpoint again")
        else:
            gone.append(name)
    return files, tuple(gone)


def _without_index(path: Path) -> list[str]:
    if (path / SINGLE).is_file():
        return [SINGLE]
    names = sorted(file.name for file in path.iterdir() if _NUMBERED.fullmatch(file.name))
    if names:
        total = int(names[0].split("-of-")[1].split(".")[0])
        if len(names) != total:
            raise CheckpointError(f"{path}: {len(names)} of {total} shards are there and no {INDEX}; fetch it again")
        return names
    if (path / LEGACY).exists():
        raise CheckpointError(f"{path}: the weights are a pickle ({LEGACY}); save it again as safetensors first")
    raise CheckpointError(f"{path}: no weights: neither {SINGLE} nor {INDEX} is there")


def _check_layers(path: Path, names: set[str], mtp: MtpConfig) -> None:
    """Layers behind the target's last are taken for MTP layers only where that is what they are."""
    by_layer: dict[int, dict[str, str]] = {}
    for name in names:
        if found := _LAYER.match(name):
            by_layer.setdefault(int(found[1]), {})[name[found.end() :]] = name
    marked = marked_layers(by_layer)
    if within := [number for number in marked if number < mtp.num_layers]:
        raise CheckpointError(
            f"{path}: layer {within[0]} is an MTP layer, but num_hidden_layers is {mtp.num_layers}; set it right"
        )
    for number in sorted(n for n in by_layer if n >= mtp.num_layers and n not in marked):
        claimed = number < mtp.num_layers + mtp.count
        if not claimed and (number > mtp.num_layers or _OF_A_BLOCK in by_layer[number]):
            raise CheckpointError(
                f"{path}: layer {number} is neither one of {mtp.num_layers} (num_hidden_layers) nor an MTP layer; set "
                "the number right or remove its tensors"
            )
    absent = next((number for number in range(mtp.num_layers) if number not in by_layer), None)
    if absent is not None:
        raise CheckpointError(f"{path}: has no tensor of layer {absent}; expected all {mtp.num_layers}")


def _check_index(target: Target, index: dict[str, str] | None) -> None:
    """Index and headers say the same about every tensor of the target itself, and none is in two files."""
    file_of: dict[str, str] = {}
    for name, file in target.files.items():
        for tensor in file.tensors.keys() - target.stale.get(name, frozenset()):
            if index is not None and index.get(tensor) != name:
                there = f"is in {index[tensor]} by the index" if tensor in index else f"is not in {INDEX}"
                raise CheckpointError(
                    f"{target.path / name}: tensor {tensor} {there}; index and shards are not of one checkpoint"
                )
            if tensor in file_of:
                raise CheckpointError(f"{target.path}: tensor {tensor} is both in {file_of[tensor]} and in {name}")
            file_of[tensor] = name
    for tensor, name in (index or {}).items():
        if tensor not in file_of and not is_beyond(tensor, target.mtp.num_layers):
            raise CheckpointError(f"{target.path / INDEX}: tensor {tensor} should be in {name}, which does not have it")


def _check_whole(target: Target) -> None:
    """There is a model for the layer to draft for, and its own matrices are quantised if the config says so."""
    embedding = next(iter(SHARED.values()))
    if embedding not in target and embedding.removeprefix("model.") not in target:
        raise CheckpointError(
            f"{target.path}: has no {embedding}; expected a whole target, not a head or a part of one"
        )
    if target.scheme is not None:
        return
    for name in target.file_of:
        fp8 = target.info(name).dtype == torch.float8_e4m3fn
        if fp8 or name.endswith((".qweight", ".weight_packed", SCALE)):
            raise CheckpointError(
                f"{target.path}: {name} is quantised, but config.json has no quantization_config; put it there"
            )


def is_beyond(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a layer behind a target's own."""
    return _number(name) >= num_layers


def _number(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1
