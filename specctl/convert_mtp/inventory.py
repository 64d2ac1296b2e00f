"""Is the MTP layer whole? Every tensor that the config calls for, with shape and dtype, and none besides.

An engine that loads a quantised checkpoint does not notice what is missing, so it is asked here, before a byte is
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from specctl.checkpoint import Checkpoint
from specctl.convert_mtp.source import Layer, Source
from specctl.errors import CheckpointError
from specctl.fp8 import E4M3
from specctl.heads.mtp import SCALE, Expected, MtpConfig, scale_of
from specctl.heads.quantisation import KEY, Fp8Config
from specctl.shards import TensorInfo

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
SHOWN = 5  # faults in one sentence


@dataclass(frozen=True)
class Part:
    """One tensor of an MTP layer. name: within the layer. weight, scale: names in the checkpoint; scale None: none."""

    name: str
    expected: Expected
    weight: str
    info: TensorInfo
    scale: str | None


@dataclass(frozen=True)
class Inventory:
    """What a layer has, and what is wrong with it."""

    number: int
    parts: tuple[Part, ...]
    faults: tuple[str, ...]

    @property
    def is_fp8(self) -> bool:
        return any(part.scale is not None and part.expected.role == "matrix" for part in self.parts)


def take_inventory(source: Source, checkpoint: Checkpoint) -> list[Inventory]:
    """Of every layer. Raises CheckpointError for a config that cannot be read; faults of tensors are in the result."""
    fp8 = stored_fp8(source)
    return [_inventory(layer, source.mtp, checkpoint, fp8) for layer in source.layers]


def stored_fp8(source: Source) -> Fp8Config | None:
    """How the layers' FP8 matrices are stored. What a config says about other modules, in whatever scheme, does not
    matter where the MTP layers have no scales: they were left out of it."""
    has_scales = any(name.endswith(SCALE) for layer in source.layers for name in layer.names)
    values = source.config.get(KEY)
    in_blocks = isinstance(values, Mapping) and values.get("quant_method") == "fp8" and values.get("weight_block_size")
    if not has_scales and not in_blocks:
        return None
    return Fp8Config.read(source.config, str(source.files.path / "config.json"))


def has_fp8(source: Source) -> bool:
    """Whether the layers' matrices are FP8, by names alone."""
    matrices = [name for name, expected in source.mtp.tensors().items() if expected.role == "matrix"]
    return any(scale_of(name) in layer.names for layer in source.layers for name in matrices)


def require_whole(inventories: list[Inventory], where: str) -> None:
    """Raises CheckpointError with the faults of the first layer that has any."""
    for inventory in inventories:
        if inventory.faults:
            shown = "; ".join(inventory.faults[:SHOWN])
            more = len(inventory.faults) - SHOWN
            rest = f"; and {more} more" if more > 0 else ""
            raise CheckpointError(f"{where}: layer {inventory.number} is not a whole MTP layer: {shown}{rest}")


def expected_tensors(mtp: MtpConfig, found: int) -> dict[str, Expected] | None:
    """What a layer should have; None when the config claims more experts than `found` tensors could be."""
    return None if mtp.experts > found else mtp.tensors()


def check_names(layer: Layer, mtp: MtpConfig) -> tuple[str, ...]:
    """What names alone show: of a checkpoint whose shards are not here."""
    expected = expected_tensors(mtp, len(layer.names))
    if expected is None:
        return (_too_many_experts(layer, mtp),)
    faults = [f"{name} is missing" for name, want in expected.items() if _is_lacking(name, want, layer.names)]
    weights = {name for name in layer.names if not name.endswith(SCALE)}
    faults += [f"{name} is not part of it" for name in sorted(weights - expected.keys())]
    return tuple(faults)


def _inventory(layer: Layer, mtp: MtpConfig, checkpoint: Checkpoint, fp8: Fp8Config | None) -> Inventory:
    expected = expected_tensors(mtp, len(layer.names))
    if expected is None:
        return Inventory(layer.number, (), (_too_many_experts(layer, mtp),))
    parts: list[Part] = []
    faults = list(check_names(layer, mtp))
    for name, want in expected.items():
        if name not in layer.names:
            continue
        weight, scale = layer.names[name], layer.names.get(scale_of(name))
        part = Part(name, want, weight, checkpoint.info(weight), scale)
        parts.append(part)
        faults += _faults(part, layer.names, checkpoint, fp8)
    faults += _strange_scales(layer.names, expected)
    return Inventory(layer.number, tuple(parts), tuple(faults))


def _faults(part: Part, names: Mapping[str, str], checkpoint: Checkpoint, fp8: Fp8Config | None) -> Iterator[str]:
    info, want = part.info, part.expected
    if info.shape != want.shape:
        yield f"{part.weight} has shape {list(info.shape)}, config.json expects {list(want.shape)}"
    elif info.dtype == E4M3:
        yield from _scale_faults(part, checkpoint, fp8)
    elif info.dtype not in PLAIN:
        what = str(info.dtype).removeprefix("torch.")
        yield f"{part.weight} is stored as {what}, expected bfloat16, or float8_e4m3fn with scales"
    elif part.scale is not None:
        yield f"{part.scale} is there but {part.weight} is not FP8"


def _scale_faults(part: Part, checkpoint: Checkpoint, fp8: Fp8Config | None) -> Iterator[str]:
    if part.scale is None:
        yield f"{part.weight} is FP8 and {scale_of(part.weight)}, its scale, is missing"
    elif fp8 is None:
        yield f"{part.weight} is FP8, but config.json has no quantization_config that gives the size of its blocks"
    elif len(part.info.shape) != 2:
        yield f"{part.weight} is FP8, which only a matrix can be in blocks"
    else:
        info = checkpoint.info(part.scale)
        grid = fp8.block.grid(part.info.shape)
        if info.dtype != torch.float32 or info.shape != grid:
            what = f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
            yield f"{part.scale} is {what}, blocks of {list(fp8.block)} need float32 {list(grid)}"


def _strange_scales(names: Mapping[str, str], expected: Mapping[str, Expected]) -> Iterator[str]:
    """Scales of weights that are not there."""
    for name in sorted(names):
        if name.endswith(SCALE) and name.removesuffix(SCALE) not in expected:
            yield f"{name} is not part of it"


def _is_lacking(name: str, want: Expected, names: Mapping[str, str]) -> bool:
    return want.role != "copy" and name not in names


def _too_many_experts(layer: Layer, mtp: MtpConfig) -> str:
    return f"config.json says n_routed_experts {mtp.experts}, the layer has {len(layer.names)} tensors"
