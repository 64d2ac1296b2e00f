"""Source tensors to output tensors: which dtype each gets, and its numbers piece by piece.

keep: as they are, bit for bit, but for a bias that is not float32 and an eh_proj, gate or norm in FP8: readers would
take these for something else, so they become float32 and bfloat16. bf16: matrices multiplied out. fp8: matrices in
blocks, those that are so already unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specctl import fp8
from specctl.checkpoint import Checkpoint
from specctl.convert_mtp.inventory import Part
from specctl.convert_mtp.shared import Tensors
from specctl.errors import CheckpointError
from specctl.heads.mtp import scale_of
from specctl.heads.quantisation import Fp8Config
from specctl.shards import TensorInfo

DtypeWish = Literal["keep", "bf16", "fp8"]


@dataclass(frozen=True)
class Output:
    """One tensor to write. name: within the layer."""

    name: str
    info: TensorInfo
    pieces: Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Recipe:
    """How dtypes are decided. source: how the checkpoint's matrices are stored; target: how those written are."""

    wish: DtypeWish
    source: Fp8Config | None
    target: Fp8Config | None

    def outputs(self, part: Part, checkpoint: Checkpoint) -> Iterator[Output]:
        """What becomes of one tensor: itself, and its scales where it is FP8."""
        role, stored = part.expected.role, part.info.dtype
        if role == "matrix" and self.wish != "bf16":
            if stored == fp8.E4M3:
                yield _unchanged(part.name, part.weight, checkpoint)
                assert part.scale is not None
                yield _unchanged(scale_of(part.name), part.scale, checkpoint, check_scale=True)
                return
            if self.wish == "fp8":
                assert self.target is not None
                yield from _quantised(part, checkpoint, self.target)
                return
        wanted = _wanted_dtype(role, stored, self.wish)
        if stored == wanted:
            yield _unchanged(part.name, part.weight, checkpoint)
        else:
            yield Output(part.name, TensorInfo(wanted, part.info.shape), lambda: self._cast(part, checkpoint, wanted))

    def copied(self, name: str, checkpoint: Tensors, source: str) -> Output:
        """A tensor of the target, written as one of the layer."""
        info = checkpoint.info(source)
        if self.wish != "bf16" or info.dtype == torch.bfloat16:
            return _unchanged(name, source, checkpoint)

        def pieces() -> Iterator[Tensor]:
            for piece in _slices(checkpoint.tensor(source)):
                yield piece.to(torch.bfloat16)

        return Output(name, TensorInfo(torch.bfloat16, info.shape), pieces)

    def _cast(self, part: Part, checkpoint: Checkpoint, wanted: torch.dtype) -> Iterator[Tensor]:
        for piece in self._values(part, checkpoint):
            yield piece.to(wanted)

    def _values(self, part: Part, checkpoint: Checkpoint) -> Iterator[Tensor]:
        weight = checkpoint.tensor(part.weight)
        if part.info.dtype != fp8.E4M3:
            yield from _slices(weight)
            return
        assert part.scale is not None
        assert self.source is not None
        scale = checkpoint.tensor(part.scale)
        fp8.check_scales(scale, part.scale)
        yield from fp8.dequantise(weight, scale, self.source.block)


def _wanted_dtype(role: str, stored: torch.dtype, wish: DtypeWish) -> torch.dtype:
    if role == "bias":
        return torch.float32
    return torch.bfloat16 if wish == "bf16" or stored == fp8.E4M3 else stored


def _unchanged(name: str, source: str, checkpoint: Tensors, *, check_scale: bool = False) -> Output:
    def pieces() -> Iterator[Tensor]:
        tensor = checkpoint.tensor(source)
        if check_scale:
            fp8.check_scales(tensor, source)
        yield tensor

    return Output(name, checkpoint.info(source), pieces)


def _quantised(part: Part, checkpoint: Checkpoint, target: Fp8Config) -> Iterator[Output]:
    block, shape = target.block, part.info.shape

    def weights() -> Iterator[Tensor]:
        weight = checkpoint.tensor(part.weight)
        return fp8.quantise(weight, block, powers_of_two=target.powers_of_two, name=part.weight)

    def scales() -> Iterator[Tensor]:
        weight = checkpoint.tensor(part.weight)
        yield fp8.scales(weight, block, powers_of_two=target.powers_of_two, name=part.weight)

    yield Output(part.name, TensorInfo(fp8.E4M3, shape), weights)
    yield Output(scale_of(part.name), TensorInfo(torch.float32, block.grid(shape)), scales)


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.contiguous().flatten()
    for begin in range(0, flat.numel(), fp8.BAND):
        yield flat[begin : begin + fp8.BAND]


def check_uniform(parts: Iterable[Part], wish: DtypeWish, where: str) -> None:
    """keep: all matrices FP8 or none, as an engine takes the whole layer for one or the other."""
    stored: dict[bool, str] = {
        part.info.dtype == fp8.E4M3: part.weight for part in parts if part.expected.role == "matrix"
    }
    if wish == "keep" and len(stored) == 2:
        raise CheckpointError(
            f"{where}: {stored[True]} is FP8 and {stored[False]} is not, which no reader takes; pass --dtype bf16 "
            "or fp8"
        )
