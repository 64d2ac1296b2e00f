"""Checkpoint: a Hugging Face model directory, read lazily, tensor by tensor. It knows nothing about architectures.

Weights are data: safetensors only here, no pickle, no code, and no path that leaves the directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file when it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Checkpoint:
    """The tensors and the config of one directory. Opening reads headers only; a tensor is mapped when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; expected a Hugging Face model directory")
        self.config = read_json(path / "config.json")
        self._files: dict[str, Any] = {}
        self._file_of = dict(self._find_tensors())

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, backed by the mapped file."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _find_tensors(self) -> Iterator[tuple[str, Path]]:
        index_path = self.path / INDEX
        if not index_path.is_file():
            file = self.path / SINGLE
            if not file.is_file():
                raise CheckpointError(f"{self.path}: neither {SINGLE} nor {INDEX} is there")
            for name in self._open(file).keys():  # noqa: SIM118 - not a dict
                yield name, file
            return
        index = read_json(index_path)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index_path}: weight_map is missing")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index_path}: {name} is in {shard!r}, which is not a file of this directory")
            file = self.path / shard
            if name not in set(self._open(file).keys()):
                raise CheckpointError(f"{index_path}: {name} should be in {shard}, which does not have it")
            yield name, file

    def _open(self, file: Path) -> Any:
        handle = self._files.get(str(file))
        if handle is None:
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from None
            self._files[str(file)] = handle
        return handle


def dtype_of(config: dict[str, Any], where: str) -> torch.dtype:
    """The dtype a config.json names (`dtype` or `torch_dtype`), float32 when it names none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: dtype {name!r} is unknown")
    return dtype
