"""Checkpoints of a training run: all it takes to go on as if nothing had happened, complete or not there at all.

    DIRECTORY/step-00000200/   state.json, model/ (a Hugging Face directory in the training dtype), optimiser/

A checkpoint is written under a temporary name and renamed when the disk has all of it, so a process may be killed at
any moment; what it leaves half written is removed by the next one that writes here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from specctl.checkpoint import INDEX, read_json, weight_map
from specctl.dist import ALONE, World
from specctl.errors import CapacityError, CheckpointError
from specctl.shard_writer import Entry, write_shards, write_synced
from specctl.shards import TensorInfo
from specctl.train.optimiser import Optimiser
from specctl.train.sharding import gathered, put

STATE = "state.json"
NO_TABLES: Mapping[str, Tensor] = {}
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Progress:
    """How far a run is. step: optimiser steps taken. epoch, index: the data cursor. validated: the last step that was
    validated, -1 for none; best_step, best_length: of the validation with the best acceptance; stale: validations since
    then. metrics_bytes: length of metrics.jsonl."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    validated: int = -1
    best_step: int | None = None
    best_length: float | None = None
    stale: int = 0
    metrics_bytes: int = 0


def save(
    directory: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    optimiser: Optimiser,
    progress: Progress,
    keep: int,
    identity: Mapping[str, Any],
    world: World = ALONE,
) -> Path:
    """Write the checkpoint of `progress.step` and remove all but the last `keep`. identity: what a run that goes on has
    to agree with. world: whose leading process writes, when all have come. Raises CapacityError when the disk is
    full."""
    path = _free_name(directory / step_name(progress.step))
    weights, moments = gathered(model.named_parameters(), world), gathered(optimiser.state(), world)
    if not world.leads:
        return path
    with new_directory(path) as temporary:
        save_model(temporary / "model", weights, config)
        (temporary / "optimiser").mkdir()
        states = [*moments.items(), *_random_states()]
        write_shards(temporary / "optimiser", [_entry(name, tensor) for name, tensor in states], stem="optimiser")
        state = {"progress": asdict(progress), "identity": dict(identity)}
        write_synced(temporary / STATE, json.dumps(state, indent=2) + "\n")
    for _, old in _found(directory)[:-keep]:
        shutil.rmtree(old)
    return path


def save_model(
    path: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    tables: Mapping[str, Tensor] = NO_TABLES,
) -> None:
    """Config.json and the weights, in `dtype` or as they are, into an empty directory or a new one. A tied head is not
    written. tables: what stands beside the weights, as it is."""
    path.mkdir(exist_ok=True)
    entries = [_entry(name, weight, dtype) for name, weight in weights.items()]
    entries += [_entry(name, table) for name, table in tables.items()]
    files = set(write_shards(path, entries, stem="model").values())
    if len(files) == 1:  # as everybody calls a single file, which then needs no index
        (path / files.pop()).rename(path / "model.safetensors")
        (path / INDEX).unlink()
    write_synced(path / "config.json", json.dumps(dict(config), indent=2) + "\n")
    _sync(path)


def latest(directory: Path) -> Path | None:
    """The last complete checkpoint, if there is one."""
    found = _found(directory)
    return found[-1][1] if found else None


def all_progress(directory: Path) -> list[Progress]:
    """Of every checkpoint that is there."""
    return [read_state(path)[0] for _, path in _found(directory)]


def read_state(path: Path) -> tuple[Progress, dict[str, Any]]:
    """A checkpoint's progress and identity."""
    state = read_json(path / STATE)
    try:
        return Progress(**state["progress"]), dict(state["identity"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path / STATE}: is not of this version of specctl; begin anew without --resume"
        ) from None


def load(path: Path, model: nn.Module, optimiser: Optimiser) -> Progress:
    """Put a checkpoint's numbers into a model and its optimiser, and torch's random state back.

    Raises CheckpointError naming the tensor that is not there or not of the run's shape or dtype.
    """
    progress, _ = read_state(path)
    load_model(path / "model", model)
    random_states = dict(_random_states())
    _fill(path / "optimiser", [*optimiser.state(), *random_states.items()])
    optimiser.num_steps = progress.step
    _set_random_states(random_states)
    return progress


def load_model(path: Path, model: nn.Module) -> None:
    """Put the weights that save_model wrote into a model of the same shape and dtype."""
    _fill(path, model.named_parameters())


def _fill(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copied, not mapped: what is computed from a tensor may depend on how it is aligned."""
    file_of = weight_map(path / INDEX) if (path / INDEX).exists() else None
    handles: dict[str, Any] = {}
    for name, tensor in tensors:
        file = "model.safetensors" if file_of is None else file_of.get(name, "")
        try:
            if file not in handles:
                handles[file] = safe_open(path / file, framework="pt")
            found: Tensor = handles[file].get_tensor(name)
        except Exception as error:  # noqa: BLE001 - the reader's errors share no base class
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: tensor {name} is {found.dtype} {list(found.shape)}, the run has {tensor.dtype} "
                f"{list(tensor.shape)}; begin anew without --resume"
            )
        with torch.no_grad():
            put(tensor, found)


def _entry(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Entry:
    dtype = dtype or tensor.dtype
    return Entry(name, TensorInfo(dtype, tuple(tensor.shape)), lambda: [tensor.detach().to("cpu", dtype)])


def _random_states() -> Iterator[tuple[str, Tensor]]:
    yield "random.cpu", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "random.cuda", torch.cuda.get_rng_state()


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["random.cpu"])
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"])


def prune(directory: Path, keep: Collection[int]) -> None:
    """Remove what is kept there of other steps."""
    for (step, _), path in _found(directory):
        if step not in keep:
            shutil.rmtree(path)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def _free_name(path: Path) -> Path:
    """`path`, or with a number behind it: a checkpoint that is there does not make room before the next one is
    complete."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _found(directory: Path) -> list[tuple[tuple[int, int], Path]]:
    """Steps, with the number of the attempt, and their checkpoints, in order."""
    if not directory.is_dir():
        return []
    names = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(((int(match[1]), int(match[2] or 0)), path) for match, path in names if match is not None)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill that takes the name `path` when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(".*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        temporary.rename(path)
        _sync(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"{path}: no disk space left for a checkpoint; free some and go on with --resume"
            ) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
