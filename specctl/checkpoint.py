"""Checkpoint: a Hugging Face model directory, read lazily, tensor by tensor. It knows nothing about architectures.

Weights are data: safetensors, or a legacy pytorch_model.bin through torch's weights-only reader; no code, and no path
that leaves the directory. Opening reads headers, never numbers.
"""

from __future__ import annotations

import json
import re
import stat
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl.errors import CheckpointError
from specctl.shards import DTYPES, Shard, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEGACY = "pytorch_model.bin"
TIED_HEAD = "lm_head.weight"  # some programs leave it in the index when they save the embedding once
MAX_JSON = 40_000_000  # an index of 350,000 tensors; the largest models have half of that

_NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file when it is missing, unreadable or no object."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: expected a file with a JSON object in it")
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path}: has more than {MAX_JSON} bytes, too many for what it should be")
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text)
        if "\\ud" in text.lower():  # JSON can name half a character, which no file can hold when it is written again
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that stand beside a model and say nothing about its weights."""


class Checkpoint:
    """The tensors and the config of one directory.

    config: the object in config.json. generation_config: the one in generation_config.json, empty when there is none.
    files: of the files that an index names, those to open; the others need not be there. Raises CheckpointError, on
    opening or when a tensor is asked for, naming the file and the tensor or key at fault.
    """

    def __init__(self, path: Path, files: Collection[str] | None = None) -> None:
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; expected a Hugging Face model directory")
        self.config = read_json(path / "config.json")
        generation_config = path / "generation_config.json"
        self.generation_config = read_json(generation_config) if generation_config.exists() else {}
        tied = self.config.get("tie_word_embeddings") is True
        self._sources = _find_sources(path, files, frozenset({TIED_HEAD}) if tied else frozenset())
        self._source_of = {name: source for source in self._sources for name in source.tensors}
        if not self._source_of:
            raise CheckpointError(f"{self._sources[0].path}: has no tensor in it; fetch the checkpoint again")

    @property
    def files(self) -> list[Path]:
        """The files the tensors are in."""
        return [source.path for source in self._sources]

    def names(self) -> list[str]:
        return sorted(self._source_of)

    def __contains__(self, name: str) -> bool:
        return name in self._source_of

    def info(self, name: str) -> TensorInfo:
        if name not in self._source_of:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._source_of[name].tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.info(name).dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, backed by the mapped file."""
        self.info(name)
        return self._source_of[name].tensor(name)


class _Source(Protocol):
    """One file of weights."""

    path: Path
    tensors: dict[str, TensorInfo]

    def tensor(self, name: str) -> Tensor: ...


class SafetensorsFile:
    """One shard: its header, and its tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = Shard.read(path).tensors
        self._handle: Any = None

    def tensor(self, name: str) -> Tensor:
        try:
            if self._handle is None:
                self._handle = safe_open(self.path, framework="pt")
            tensor: Tensor = self._handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from None
        return tensor


class _Legacy:
    """A file that torch.save wrote, read by torch's weights-only reader, which builds tensors and runs nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception:  # noqa: BLE001 - a damaged or hostile pickle can raise anything
            raise CheckpointError(
                f"{path}: cannot be read as weights only (damaged, older than torch 1.6, or more than tensors); "
                "save it again as safetensors"
            ) from None
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise CheckpointError(f"{path}: expected tensors by name, found {type(found).__name__}")
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES.values() or not _is_dense(tensor):
                raise CheckpointError(
                    f"{path}: {name} is no dense tensor of a known dtype with elements; save it again as safetensors"
                )
        self._found: dict[str, Tensor] = found
        self.tensors = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}

    def tensor(self, name: str) -> Tensor:
        return self._found[name].detach()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta


def _find_sources(path: Path, files: Collection[str] | None, spare: frozenset[str]) -> list[_Source]:
    """The files of a directory's weights: one file, shards with an index, shards without one, or a legacy file. spare:
    what an index may name though no shard has it."""
    single, index = path / SINGLE, path / INDEX
    if single.exists() and index.exists() and SINGLE not in weight_map(index).values():
        raise CheckpointError(f"{path}: both {SINGLE} and {INDEX} are there; remove the one that is out of date")
    if index.exists():
        return _indexed(path, weight_map(index), files, spare)
    if single.exists():
        return [SafetensorsFile(single)]
    if numbered := sorted(file.name for file in path.iterdir() if _NUMBERED.fullmatch(file.name)):
        return _numbered(path, numbered)
    if (path / LEGACY).exists():
        return [_Legacy(path / LEGACY)]
    raise CheckpointError(f"{path}: no weights: neither {SINGLE} nor {INDEX} is there")


def weight_map(index: Path) -> dict[str, str]:
    """What an index says: for every tensor the name of a file beside it. Raises CheckpointError naming the index."""
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{index}: weight_map is missing or empty; expected a file name for every tensor")
    files = {file if isinstance(file, str) else "" for file in file_of.values()}
    if wrong := {file for file in files if not _is_neighbour(file)}:
        name, file = next((n, f) for n, f in file_of.items() if not isinstance(f, str) or f in wrong)
        raise CheckpointError(f"{index}: tensor {name} is in {file!r}, which is no name of a file beside the index")
    return file_of


def _is_neighbour(file: str) -> bool:
    """Whether this is a plain file name, which cannot lead out of a directory."""
    return file.isprintable() and file not in ("", ".", "..") and not re.search(r"[/\\]", file)


def _indexed(
    path: Path, file_of: dict[str, str], files: Collection[str] | None, spare: frozenset[str]
) -> list[_Source]:
    """The shards an index names. Index and headers have to say the same, tensor by tensor."""
    promised: dict[str, set[str]] = defaultdict(set)
    for name, file in file_of.items():
        if files is None or file in files:
            promised[file].add(name)
    sources: list[_Source] = []
    for file, names in sorted(promised.items()):
        if not (path / file).is_file():
            raise CheckpointError(f"{path / INDEX}: names {file}, which is not there; fetch the checkpoint again")
        source = SafetensorsFile(path / file)
        if missing := sorted(names - source.tensors.keys() - spare):
            raise CheckpointError(f"{path / INDEX}: tensor {missing[0]} should be in {file}, which does not have it")
        if surplus := sorted(source.tensors.keys() - names):
            elsewhere = file_of.get(surplus[0])
            what = f"is in {elsewhere} by the index" if elsewhere else f"is not in {INDEX}"
            raise CheckpointError(
                f"{path / file}: tensor {surplus[0]} {what}; index and shards are not of one checkpoint"
            )
        sources.append(source)
    return sources


def _numbered(path: Path, files: list[str]) -> list[_Source]:
    """Shards model-00001-of-0000N.safetensors without an index: all N of them, and no tensor twice."""
    total = files[0].split("-of-")[1]
    expected = [f"model-{number:05d}-of-{total}" for number in range(1, int(total[:5]) + 1)]
    if surplus := sorted(set(files) - set(expected)):
        raise CheckpointError(f"{path}: {surplus[0]} and {files[0]} are shards of two checkpoints; keep those of one")
    if missing := sorted(set(expected) - set(files)):
        raise CheckpointError(f"{path}: {missing[0]} is not there; fetch the checkpoint again")
    sources: list[_Source] = []
    file_of: dict[str, str] = {}
    for file in files:
        source = SafetensorsFile(path / file)
        for name in source.tensors:
            if name in file_of:
                raise CheckpointError(f"{path}: tensor {name} is both in {file_of[name]} and in {file}")
            file_of[name] = file
        sources.append(source)
    return sources


def dtype_of(config: dict[str, Any], where: str) -> torch.dtype:
    """The dtype a config.json names (`dtype` or `torch_dtype`), float32 when it names none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: dtype {name!r} is unknown")
    return dtype
