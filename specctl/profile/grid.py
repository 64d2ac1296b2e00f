"""Which cells a profile has: batches, contexts, rows and prompt sizes, checked against the model and the memory."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.bench.passes import cache_shape
from specctl.errors import CapacityError, UsageError
from specctl.kv.cache import KVCache
from specctl.pair import GIB, OpenedDraft, Target, free_memory
from specctl.profile.places import choose_contexts

ROWS = tuple(range(1, 10))
"""Of each sequence: a plain step, and the verification of 1 to 8 tokens."""

CONTEXTS = (512, 2048)
PROMPTS = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Grid:
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    prompts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Of the longest text there is."""
        return max(*self.contexts, *self.prompts) + max(self.rows)


def choose_grid(
    target: Target,
    draft: OpenedDraft | None,
    batches: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    usual: tuple[int, ...] = CONTEXTS,
) -> Grid:
    """The grid asked for. contexts None: those of `usual` that the model can hold, half of what it holds if none.

    Raises UsageError for what is named twice or longer than the model's context, CapacityError when the largest cell
    does not fit into memory.
    """
    rows = ROWS
    if draft is not None and draft.drafter.max_k is not None:
        rows = tuple(q for q in ROWS if q <= draft.drafter.max_k + 1)
    holds = target.max_length - max(rows)
    if draft is not None and draft.drafter.max_length is not None:
        holds = min(holds, draft.drafter.max_length - max(rows))
    if holds < 1:
        raise UsageError(f"{target.name}: a context of {target.max_length} tokens is too short to be profiled")
    why = f"with {max(rows)} rows of a step behind it, the longest that fits into the context"
    contexts = choose_contexts(batches, contexts, usual, holds, why)
    prompts = tuple(n for n in PROMPTS if n <= holds) or (holds,)
    grid = Grid(tuple(sorted(batches)), contexts, rows, prompts)
    _check_memory(grid, target, draft)
    return grid


def _check_memory(grid: Grid, target: Target, draft: OpenedDraft | None) -> None:
    layers = target.model.kv_layers("target") + ([] if draft is None else draft.drafter.kv_layers)
    num_pages, _ = cache_shape(grid.num_tokens, max(grid.batches))
    needed = num_pages * KVCache.bytes_per_page(layers)
    given = target.options.kv_memory
    there = free_memory(target.device) if given is None else given * GIB
    if needed > there:
        raise CapacityError(
            f"--batches {max(grid.batches)} with --contexts {max(grid.contexts)} needs a KV cache of "
            f"{needed / GIB:.3g} GiB, there are {there / GIB:.3g}; leave the largest out"
        )
