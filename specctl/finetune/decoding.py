"""An engine for work that is known beforehand: its KV cache as large as the longest texts need, or --kv-memory
allows."""

from __future__ import annotations

from specctl.drafts import Drafter
from specctl.engine.engine import MAX_K, Engine, EngineOptions
from specctl.errors import CapacityError
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.pair import GIB, Target, constant


def make_engine(
    target: Target, longest: int, batch: int, *, drafter: Drafter | None = None, k: int = 0, seed: int = 0
) -> Engine:
    """longest: tokens of the longest prompt and answer; batch: sequences run at a time.

    Raises CapacityError when a given --kv-memory does not hold even one such text.
    """
    longest = min(longest, target.max_length)
    pages = -(-(longest + MAX_K + 2) // PAGE_SIZE)
    num_pages = batch * pages + 1
    if target.options.kv_memory is not None:
        layers = target.model.kv_layers("target") + ([] if drafter is None else drafter.kv_layers)
        num_pages = min(num_pages, int(target.options.kv_memory * GIB) // KVCache.bytes_per_page(layers))
        if num_pages <= pages:
            raise CapacityError(
                f"--kv-memory: {target.options.kv_memory:g} GiB hold {max(0, num_pages - 1) * PAGE_SIZE} tokens of KV "
                f"cache, a prompt with its answer has up to {longest}; give more, or a smaller max_tokens"
            )
    options = EngineOptions(
        num_pages=num_pages,
        max_length=longest,
        max_sequences=batch,
        attention=target.options.attention,
        eos_ids=target.eos_ids,
        seed=seed,
    )
    return Engine(target.model, options, drafter, constant(k))
