"""The time of one kernel in microseconds, from its sizes and the constants of device and engine.

The forms are those of a roofline with three corrections that published kernel tables show on H100: every call costs
something to start, rows are computed in tiles, and reading and computing overlap, but not entirely (a p-norm of both).
Legend: T tokens of a step, B sequences, C tokens of context; bytes and operations are per device.
"""

from __future__ import annotations

import numpy as np

from specctl.schemas.roofline import AllReduce, Attention, Elementwise, Peaks, Product

Array = np.ndarray

GIGA_PER_US, TERA_PER_US = 1e3, 1e6


def product_us(rows_T: Array, out: float, inner: float, bytes_each: float, kind: Product, peaks: Peaks) -> Array:
    """rows x inner times inner x out: start + ((bytes / bandwidth) ** p + (operations / flops) ** p) ** (1 / p), with
    rows rounded up to whole tiles for the operations. bytes_each: of a weight, and of an activation that goes in."""
    tflops = peaks.bf16_tflops if bytes_each > 1 else peaks.fp8_tflops or peaks.bf16_tflops
    moved = out * inner * bytes_each + rows_T * (inner * bytes_each + out * 2)
    read = moved / (kind.bandwidth * peaks.memory_gbps * GIGA_PER_US)
    tiled = np.ceil(rows_T / kind.tile) * kind.tile
    compute = 2 * tiled * out * inner / (kind.flops * tflops * TERA_PER_US)
    return kind.start_us + _both(read, compute, kind.norm)


def experts_us(
    hit_T: Array, rows_T: Array, weights: float, bytes_each: float, kind: Product, peaks: Peaks, hidden: int
) -> Array:
    """hit_T experts of `weights` numbers each, over rows_T rows together, each expert's rows in whole tiles."""
    tflops = peaks.bf16_tflops if bytes_each > 1 else peaks.fp8_tflops or peaks.bf16_tflops
    moved = hit_T * weights * bytes_each + rows_T * hidden * (bytes_each + 2)
    read = moved / (kind.bandwidth * peaks.memory_gbps * GIGA_PER_US)
    tiles = np.ceil(rows_T / np.maximum(hit_T, 1e-9) / kind.tile)
    compute = 2 * hit_T * tiles * kind.tile * weights / (kind.flops * tflops * TERA_PER_US)
    return kind.start_us + _both(read, compute, kind.norm)


def decode_attention_us(
    batch_B: Array,
    rows_B: Array,
    context_B: Array,
    shape: tuple[int, int, int],
    cache: float,
    kind: Attention,
    peaks: Peaks,
) -> Array:
    """Every sequence's cache is read once for all its rows: start + bytes / bandwidth * f(rows) + queries and outputs.

    shape: query heads, key heads, their width. f: a few rows are free, as rows times group share one tile of 64 (FA3);
    beyond, tiles add up. From published decode tables with more query heads per key head, which read and compute the
    same: ratios 1.00 to 1.07 up to 64, 1.2 to 1.36 at 96 to 128.
    """
    heads, kv_heads, width = shape
    group = heads / kv_heads
    filled = rows_B * group / 64
    shared = 1 + 0.03 * np.log2(np.clip(rows_B, 1, max(1.0, 64 / group)))
    factor = np.where(filled > 1, shared + 0.25 * (filled - 1), shared)
    read = batch_B * context_B * kv_heads * width * 2 * cache / (kind.bandwidth * peaks.memory_gbps * GIGA_PER_US)
    queries = batch_B * rows_B * heads * width * 4 / (0.8 * peaks.memory_gbps * GIGA_PER_US)
    found: Array = kind.start_us + read * factor + queries
    return found


def latent_attention_us(
    batch_B: Array,
    rows_B: Array,
    context_B: Array,
    shape: tuple[int, int, int],
    cache: float,
    kind: Attention,
    peaks: Peaks,
) -> Array:
    """Latents are read once for all heads and rows, and computed with for each: so the operations count.

    shape: heads, width of a latent, of a rotated key. Operations: scores over both, sums over the latent.
    """
    heads, latent, rotated = shape
    read = batch_B * context_B * (latent + rotated) * cache / (kind.bandwidth * peaks.memory_gbps * GIGA_PER_US)
    rows = np.ceil(rows_B * heads / 64) * 64
    compute = 2 * batch_B * rows * context_B * (2 * latent + rotated) / (kind.flops * peaks.bf16_tflops * TERA_PER_US)
    return kind.start_us + _both(read, compute, 2.0)


def prompt_attention_us(tokens: Array, each: Array, heads: int, width: int, kind: Attention, peaks: Peaks) -> Array:
    """Of prompts of `each` tokens, `tokens` in all, to themselves: half of the square is seen. width: of query and
    value together."""
    operations = 2 * tokens * each * heads * width / 2
    found: Array = kind.start_us + operations / (kind.flops * peaks.bf16_tflops * TERA_PER_US)
    return found


def all_reduce_us(rows_T: Array, hidden: int, kind: AllReduce) -> Array:
    """Of hidden states in 16 bits: small ones go at once to everybody, large ones in pieces and faster."""
    moved = rows_T * hidden * 2
    small = moved / (kind.small_gbps * GIGA_PER_US)
    large = kind.switch_us + moved / (kind.gbps * GIGA_PER_US)
    return kind.start_us + np.minimum(small, large)


def elementwise_us(rows_T: Array, hidden: int, kind: Elementwise, peaks: Peaks) -> Array:
    """Norms, rotations, activations of one layer: each reads and writes the hidden states."""
    moved = rows_T * hidden * 4
    return kind.calls * (kind.start_us + moved / (kind.bandwidth * peaks.memory_gbps * GIGA_PER_US))


def _both(read: Array, compute: Array, norm: float) -> Array:
    result: Array = (read**norm + compute**norm) ** (1 / norm)
    return result
