"""The passes an attention backend meets in a life of serving, for comparing one backend with another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache, LayerKV

# For each pass the (start, rows) of sequences 0, 1, 2, ...; None: the sequence is not in the batch.
PASSES: dict[str, list[tuple[int, int] | None]] = {
    "prefill, one of them to the end of a page": [(0, 17), (0, 5), (0, 16), (0, 1)],
    "chunks beside single rows": [(17, 24), (5, 1), (16, 1), (1, 32)],
    "decode": [(41, 1), (6, 1), (17, 1), (33, 1)],
    "verify, over a page edge": [(42, 5), (7, 5), (18, 5), (34, 5)],
    "verify again after rejections": [(43, 5), (12, 5), (19, 5), (39, 5)],
    "verify one row further": [(48, 6), (13, 6), (22, 6), (40, 6)],
    "catch-up of two rows": [(53, 2), (14, 2), (23, 2), (41, 2)],
    "decode in another order of batch": [None, (16, 1), (25, 1), (43, 1)],
    "one sequence alone": [None, None, (26, 1), None],
    "a long chunk": [(55, 500), None, None, None],
    "decode beside a long context": [(555, 1), (17, 1), None, (44, 1)],
    "verify beside a long context": [(556, 5), (18, 5), None, (45, 5)],
    "a long chunk of all": [(561, 40), (23, 70), (27, 64), (50, 41)],
}
LONGEST = 700


def layers(owner: str, count: int, groups: int, head_dim: int, dtype: torch.dtype) -> list[LayerKV]:
    shape = (groups, head_dim)
    return [LayerKV(owner, (shape, shape), dtype) for _ in range(count)]  # type: ignore[arg-type]


def num_pages(page_size: int) -> int:
    return 4 * (LONGEST // page_size) + 1


def batches(page_size: int, device: torch.device | str = "cpu") -> Iterator[tuple[str, Batch]]:
    """The passes as batches, the pages of every sequence scattered over the pool."""
    each = LONGEST // page_size
    pool = list(range(1, 4 * each + 1))
    random.Random(0).shuffle(pool)
    pages = [pool[i * each : (i + 1) * each] for i in range(4)]
    for name, sequences in PASSES.items():
        spans = [Span([0] * at[1], at[0], pages[i], lane=i) for i, at in enumerate(sequences) if at is not None]
        yield name, Batch.pack(spans, page_size, device)


def random_qkv(
    rows: int, heads: int, layer: LayerKV, device: torch.device | str, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the layer's dtype, the queries large enough that single keys matter."""
    generator = torch.Generator().manual_seed(seed)
    groups, head_dim = layer.shapes[0]
    q, k, v = (torch.randn(rows, n, head_dim, generator=generator) for n in (heads, groups, groups))
    q, k, v = (x.to(device, layer.dtype) for x in (3 * q, k, v))
    return q, k, v


def run_all(
    tested: AttentionBackend, cache: KVCache, reference: AttentionBackend, wide: KVCache, owner: str, heads: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(pass, output of `tested`, output of `reference`) for every pass and layer; the reference has a wider cache."""
    device = cache.layer(owner, 0)[0].device
    owned = [layer for layer in cache.layers if layer.owner == owner]
    for dirty, index in itertools.product((cache, wide), range(len(owned))):
        for tensor in dirty.layer(owner, index):
            tensor.fill_(1e4)  # what others left in the pages must not show
    for number, (name, batch) in enumerate(batches(cache.page_size, device)):
        tested.plan(batch)
        reference.plan(batch)
        for index, layer in enumerate(owned):
            qkv = random_qkv(len(batch.slot_T), heads, layer, device, seed=1000 * number + index)
            out = tested.attend(index, *qkv)
            expected = reference.attend(index, *(x.to(wide.layer(owner, index)[0].dtype) for x in qkv))
            yield f"{name}, layer {index}", out, expected
