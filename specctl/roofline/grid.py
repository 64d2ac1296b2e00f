"""Which steps a profile from constants or tables has: batches with both sides of the edges that kernels have, rows of a
block, contexts."""

from __future__ import annotations

ROWS = tuple(range(1, 10))
"""Of each sequence: a plain step, and the verification of 1 to 8 tokens."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EDGES = (64, 128, 256)
"""Tokens of a step after which a tile of rows more is computed."""

CONTEXTS = (512, 2048, 8192, 32768)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)


def batches_with_edges(rows: tuple[int, ...] = ROWS) -> tuple[int, ...]:
    """Powers of two, and for every number of rows the last batch before an edge and the first after it."""
    beside = {edge // q + after for q in rows for edge in EDGES for after in (0, 1)}
    return tuple(sorted({*BATCHES, *beside}))


def contexts_up_to(max_length: int) -> tuple[int, ...]:
    """Those that the model can hold with a block behind them; half of what it holds if none."""
    holds = max_length - max(ROWS)
    return tuple(c for c in CONTEXTS if c <= holds) or (max(1, holds // 2),)
