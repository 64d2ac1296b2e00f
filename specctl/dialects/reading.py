"""What a reader makes of a directory, simulated from headers: what it drops, leaves unfilled or takes for something
else.

A reader is described by one function, from a tensor's name to the parameter it fills. All that follows from it, for any
reader, is here; what differs between readers is in their own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specctl.fp8 import E4M3
from specctl.heads.mtp import EMBEDDING, HEAD, MtpConfig, scale_of
from specctl.heads.quantisation import Fp8Config
from specctl.shards import TensorInfo

PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class Place(NamedTuple):
    """Where a tensor goes in the reader's own module: a parameter, and which part of it when several are joined."""

    parameter: str
    part: str = ""


class Named(NamedTuple):
    """A name understood: which of the MTP layers, from 0, and the tensor's name within the layer."""

    layer: int
    name: str


@dataclass(frozen=True)
class Reading:
    """What a reader is given. fp8: how it takes matrices to be stored, None for not quantised. count: of MTP layers."""

    tensors: Mapping[str, TensorInfo]
    mtp: MtpConfig
    fp8: Fp8Config | None
    count: int


@dataclass(frozen=True)
class Dialect:
    """One layout and its reader.

    named: understands a name, None when the reader passes over it (given: the target's number of layers and the count).
    place: the parameter that a tensor fills. own_copies: whether embedding and head stored here are used; else the
    target's always are. target_decides: whether sizes, count and quantisation come from the target's config even when
    another directory holds the weights. config: config.json as this layout wants it. first_layer: the number that the
    first MTP layer gets. config_faults: what the reader cannot take about the config.
    """

    name: str
    reader: str
    named: Callable[[str, Mapping[str, Any]], Named | None]
    place: Callable[[Named], Place]
    config: Callable[[dict[str, Any]], dict[str, Any]]
    first_layer: Callable[[int], int]
    config_faults: Callable[[Mapping[str, Any]], list[str]]
    own_copies: bool
    target_decides: bool


def faults(dialect: Dialect, reading: Reading, config: Mapping[str, Any]) -> list[str]:
    """Everything that would go wrong, one sentence each. config: the one that the reader goes by."""
    found = dialect.config_faults(config)
    wanted = _wanted(dialect, reading)
    filled: dict[Place, str] = {}
    for name, info in reading.tensors.items():
        named = dialect.named(name, config)
        if named is None:
            found.append(f"tensor {name} is dropped: {dialect.reader} passes over its name")
            continue
        if named.name in _COPIES and not dialect.own_copies:
            continue
        place = dialect.place(named)
        if place not in wanted:
            found.append(f"tensor {name} is dropped: {dialect.reader} has no parameter for it")
        elif place in filled:
            found.append(f"tensors {filled[place]} and {name} fill the same parameter {place.parameter}")
        else:
            found += _misread(name, info, wanted[place], reading.fp8)
            filled[place] = name
    for place, want in wanted.items():
        if place not in filled and want.role != "copy":
            found.append(f"parameter {place.parameter} is left unfilled: nothing gives its {want.tensor}")
    return found


_COPIES = (EMBEDDING, HEAD)


class _Wanted(NamedTuple):
    tensor: str
    role: str
    shape: tuple[int, ...]


def _wanted(dialect: Dialect, reading: Reading) -> dict[Place, _Wanted]:
    """Every part of every parameter that the reader's module has."""
    wanted: dict[Place, _Wanted] = {}
    for index in range(reading.count):
        for name, expected in reading.mtp.tensors().items():
            wanted[dialect.place(Named(index, name))] = _Wanted(name, expected.role, expected.shape)
            if reading.fp8 is not None and expected.role == "matrix":
                place = dialect.place(Named(index, scale_of(name)))
                wanted[place] = _Wanted(scale_of(name), "scale", reading.fp8.block.grid(expected.shape))
    return wanted


def _misread(name: str, info: TensorInfo, want: _Wanted, fp8: Fp8Config | None) -> list[str]:
    found = []
    if info.shape != want.shape:
        found.append(f"tensor {name} has shape {list(info.shape)}, the reader's is {list(want.shape)}")
    if want.role in ("bias", "scale"):
        allowed: tuple[torch.dtype, ...] = (torch.float32,)
    else:
        allowed = (E4M3,) if want.role == "matrix" and fp8 is not None else PLAIN
    if info.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        what = str(info.dtype).removeprefix("torch.")
        found.append(f"tensor {name} is stored as {what} and would be misread, expected {names}")
    return found


def joined(name: str, groups: Mapping[str, str]) -> Place | None:
    """The place of a tensor that a reader joins with others. groups: the last module's name to that of the joint
    one."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last not in groups:
        return None
    return Place(f"{parent}.{groups[last]}.{leaf}", last)


def experts(name: str) -> Place | None:
    """The place of an expert's matrix in tensors of all experts: w13 (gate and up) and w2."""
    parts = name.split(".")
    if len(parts) != 5 or parts[:2] != ["mlp", "experts"] or not parts[2].isdecimal():
        return None
    joint = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}.get(parts[3])
    return None if joint is None else Place(f"mlp.experts.{joint}_{parts[4]}", f"{parts[2]}.{parts[3]}")
