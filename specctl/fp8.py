"""FP8 weights in blocks: E4M3 numbers with one float32 scale for every block of rows and columns.

weight[r, c] = number[r, c] * scale[r // rows, c // columns], multiplied in float32; the last block of a row or column
may be ragged. Works in bands of rows, so that memory stays bounded whatever the tensor. It knows nothing about files.

Shape letters: R rows, C columns, r and c blocks in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.errors import CheckpointError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number E4M3 can say
BAND = 1 << 20  # elements worked on at a time


class Block(NamedTuple):
    """The size of a block."""

    rows: int = 128
    columns: int = 128

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


def bands(weight_RC: Tensor, block: Block) -> Iterator[tuple[int, Tensor]]:
    """The matrix in slices of whole block rows, each with the number of its first block row."""
    num_rows, num_columns = weight_RC.shape
    step = block.rows * max(1, BAND // (block.rows * num_columns))
    for first in range(0, num_rows, step):
        yield first // block.rows, weight_RC[first : first + step]


def check_scales(scale_rc: Tensor, name: str) -> None:
    """Raises CheckpointError naming the tensor for a scale that is no finite positive number."""
    if bool((torch.isfinite(scale_rc) & (scale_rc > 0)).all()):
        return
    worst = scale_rc[~(torch.isfinite(scale_rc) & (scale_rc > 0))][0].item()
    raise CheckpointError(
        f"tensor {name} has a scale that is {worst:g}, expected finite numbers above 0; fetch or quantise it again"
    )


def dequantise(weight_RC: Tensor, scale_rc: Tensor, block: Block) -> Iterator[Tensor]:
    """The weight in float32, band by band. Shapes have to agree already (Block.grid)."""
    assert tuple(scale_rc.shape) == block.grid(tuple(weight_RC.shape))
    for first, band_RC in bands(weight_RC, block):
        value_RC = _decode(band_RC)
        scale_rc_band = scale_rc[first : first + -(-band_RC.shape[0] // block.rows)]
        for rows_RC, scale_C in _by_block_row(value_RC, scale_rc_band, block):
            rows_RC.mul_(scale_C)
        yield value_RC


def dequantise_rows(weight_RC: Tensor, scale_R: Tensor) -> Iterator[Tensor]:
    """The same with one scale for each row, or one for all."""
    assert len(scale_R) in (1, len(weight_RC))
    step = max(1, BAND // weight_RC.shape[1])
    for first in range(0, len(weight_RC), step):
        scale = scale_R if len(scale_R) == 1 else scale_R[first : first + step, None]
        yield _decode(weight_RC[first : first + step]).mul_(scale)


def quantise(weight_RC: Tensor, block: Block, *, powers_of_two: bool, name: str) -> Iterator[Tensor]:
    """E4M3 numbers, band by band: the weight divided by `scales` of the same arguments."""
    for _, band_RC in bands(weight_RC, block):
        value_RC = band_RC.to(torch.float32, copy=True)
        scale_rc = _scales(value_RC, block, powers_of_two, name)
        for rows_RC, scale_C in _by_block_row(value_RC, scale_rc, block):
            rows_RC.div_(scale_C)
        yield value_RC.to(E4M3)


def scales(weight_RC: Tensor, block: Block, *, powers_of_two: bool, name: str) -> Tensor:
    """float32 scales for `quantise`: the greatest magnitude of each block / 448.

    powers_of_two (scale_fmt ue8m0): rounded up to one, before the weight is divided by it. A block of zeros has scale
    1. Raises CheckpointError naming the tensor when it has a NaN or an infinity in it.
    """
    return torch.cat([_scales(band_RC.float(), block, powers_of_two, name) for _, band_RC in bands(weight_RC, block)])


def _scales(value_RC: Tensor, block: Block, powers_of_two: bool, name: str) -> Tensor:
    scale_rc = _greatest(value_RC, block) / LARGEST
    if not bool(torch.isfinite(scale_rc).all()):
        raise CheckpointError(f"tensor {name} has a NaN or an infinity in it, expected finite weights")
    if powers_of_two:
        scale_rc = round_up_to_power_of_two(scale_rc)
    return torch.where(scale_rc == 0, torch.ones_like(scale_rc), scale_rc)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The least power of two that is not below each positive number (zero stays zero). Exact: no logarithm."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, 0.5 <= mantissa < 1
    rounded = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(scale == 0, torch.zeros_like(scale), rounded)


def _decode(band_RC: Tensor) -> Tensor:
    """E4M3 to float32, exactly, by moving bits, which on a CPU takes a tenth of the time of torch's own cast.

    With the sign apart, E4M3's exponent and mantissa shifted by 7 are those of a float16 whose value is 256 times less:
    subnormals too, as both formats halve the same step. NaN alone is another pattern.
    """
    raw_RC = band_RC.contiguous().view(torch.int8)
    if int((raw_RC & 0x7F).amax()) == 0x7F:
        return band_RC.float()
    # Widening repeats the sign in the bits above; of these, bit 14 would be the highest of the exponent.
    bits_RC = raw_RC.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits_RC.view(torch.float16).float().mul_(256)


def _by_block_row(value_RC: Tensor, scale_rc: Tensor, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each block row (a view), and the scale of each of their columns."""
    wide_rC = scale_rc.repeat_interleave(block.columns, dim=1)[:, : value_RC.shape[1]]
    for index, scale_C in enumerate(wide_rC):
        yield value_RC[index * block.rows : (index + 1) * block.rows], scale_C


def _greatest(value_RC: Tensor, block: Block) -> Tensor:
    """The greatest magnitude in each block; NaN where there is one."""
    num_rows, num_columns = value_RC.shape
    grid = block.grid((num_rows, num_columns))
    padded = value_RC.new_zeros(grid[0] * block.rows, grid[1] * block.columns)
    padded[:num_rows, :num_columns] = value_RC
    return padded.abs_().view(grid[0], block.rows, grid[1], block.columns).amax(dim=(1, 3))
