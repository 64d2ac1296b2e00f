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

from specctl.dialects.ignoring import Module, modules
from specctl.fp8 import E4M3
from specctl.heads.mtp import EMBEDDING, HEAD, MtpConfig, scale_of
from specctl.heads.quantisation import Scheme
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
    """What a reader is given. scheme: how it takes matrices to be stored, None for not quantised. count: of MTP
    layers."""

    tensors: Mapping[str, TensorInfo]
    mtp: MtpConfig
    scheme: Scheme | None
    count: int


@dataclass(frozen=True)
class Dialect:
    """One layout and its reader.

    named: understands a name, None when the reader passes over it (given: the target's number of layers and the count).
    place: the parameter that a tensor fills. own_copies: whether embedding and head stored here are used; else the
    target's always are. target_decides: whether sizes, count and quantisation come from the target's config even when
    another directory holds the weights. config: config.json as this layout wants it. first_layer: the number that the
    first MTP layer gets. config_faults: what the reader cannot take about the config. joined: modules that it joins, by
    their last names. is_plain: whether the list of a quantised target leaves a module of the layer with this number
    unquantised; None when it does so for a part of a joint module.
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
    joined: Mapping[str, str]
    is_plain: Callable[[Scheme, int, Module], bool | None]


def faults(dialect: Dialect, reading: Reading, config: Mapping[str, Any]) -> list[str]:
    """Everything that would go wrong, one sentence each. config: the one that the reader goes by."""
    found = dialect.config_faults(config)
    number = config.get("num_hidden_layers")
    wanted = _wanted(dialect, reading, number if isinstance(number, int) else reading.mtp.num_layers, found)
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
            found += _misread(name, info, wanted[place])
            filled[place] = name
    for place, want in wanted.items():
        if place not in filled and want.role != "copy":
            found.append(f"parameter {place.parameter} is left unfilled: nothing gives its {want.tensor}")
    return found


_COPIES = (EMBEDDING, HEAD)


class _Wanted(NamedTuple):
    """scheme: the quantisation that a matrix is taken to be in, None for none."""

    tensor: str
    role: str
    shape: tuple[int, ...]
    scheme: Scheme | None = None


def _wanted(dialect: Dialect, reading: Reading, first: int, found: list[str]) -> dict[Place, _Wanted]:
    """Every part of every parameter that the reader's module has. first: the first MTP layer's number in the target."""
    wanted: dict[Place, _Wanted] = {}
    tensors = reading.mtp.tensors()
    for index in range(reading.count):
        plain = _plain(dialect, reading, first + index, found)
        for name, expected in tensors.items():
            quantised = expected.role == "matrix" and reading.scheme is not None and name not in plain
            scheme = reading.scheme if quantised else None
            wanted[dialect.place(Named(index, name))] = _Wanted(name, expected.role, expected.shape, scheme)
            if scheme is not None and scheme.fp8 is not None:
                place = dialect.place(Named(index, scale_of(name)))
                wanted[place] = _Wanted(scale_of(name), "scale", scheme.fp8.block.grid(expected.shape))
    return wanted


def _plain(dialect: Dialect, reading: Reading, number: int, found: list[str]) -> set[str]:
    """The matrices that the reader takes to be not quantised although the target is."""
    plain: set[str] = set()
    if reading.scheme is None:
        return plain
    matrices = [name for name, expected in reading.mtp.tensors().items() if expected.role == "matrix"]
    for module in modules(matrices, dialect.joined):
        verdict = dialect.is_plain(reading.scheme, number, module)
        if verdict is None:
            found.append(
                f"modules {', '.join(module.members[:3])} of layer {number} are one in {dialect.reader}, and the "
                "config leaves only a part of them unquantised"
            )
        elif verdict:
            plain.update(f"{member}.weight" for member in module.members)
    return plain


def _misread(name: str, info: TensorInfo, want: _Wanted) -> list[str]:
    found = []
    if info.shape != want.shape:
        found.append(f"tensor {name} has shape {list(info.shape)}, the reader's is {list(want.shape)}")
    if want.scheme is not None and want.scheme.fp8 is None:
        return [*found, f"tensor {name} would be misread: its module is taken to be in {want.scheme.method}"]
    if want.role in ("bias", "scale"):
        allowed: tuple[torch.dtype, ...] = (torch.float32,)
    else:
        allowed = PLAIN if want.scheme is None else (E4M3,)
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
