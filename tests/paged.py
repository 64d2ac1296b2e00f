"""Runs a model over texts through the paged cache, in chunks of any sizes, and hands back what every row gave.

Legend: T rows, V vocabulary, D width, A taps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.attention.torch import TorchAttention
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import CausalLM


class Paged:
    """A model with a cache of its own. Pages are dealt in random order, so that a text's pages lie anywhere."""

    def __init__(self, model: CausalLM, num_pages: int = 64, seed: int = 0) -> None:
        self.model = model
        self._cache = KVCache(model.kv_layers("target"), num_pages)
        self._attn = TorchAttention(self._cache, "target")
        self._free = list(range(1, num_pages))
        random.Random(seed).shuffle(self._free)
        # What an earlier text left in a page must not show.
        for layer in range(model.config.num_layers):
            for tensor in self._cache.layer("target", layer):
                tensor.fill_(1e4)

    def forward(self, spans: Sequence[Span], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """One pass: logits of every row [T, V] and the taps [A, T, D]."""
        batch = Batch.pack(spans)
        self._attn.plan(batch)
        with torch.inference_mode():
            hidden = self.model(batch, self._attn, taps)
            return self.model.logits(hidden.final_TD), hidden.taps_ATD

    def pages(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // PAGE_SIZE)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's cache is too small"
        return taken

    def run(self, ids: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """Logits [T, V] of one text fed in chunks of these sizes (None: in one)."""
        return self.run_together([ids], [chunks or [len(ids)]])[0]

    def run_together(self, texts: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of several texts, each fed in its own chunks; the i-th chunks of all of them go in one pass."""
        pages = [self.pages(len(ids)) for ids in texts]
        done = [0] * len(texts)
        parts: list[list[Tensor]] = [[] for _ in texts]
        for step in range(max(len(sizes) for sizes in chunks)):
            turn = [i for i, sizes in enumerate(chunks) if step < len(sizes)]
            spans = [Span(texts[i][done[i] : done[i] + chunks[i][step]], done[i], pages[i], i) for i in turn]
            logits_TV, _ = self.forward(spans)
            for i, part in zip(turn, logits_TV.split([len(span.tokens) for span in spans]), strict=True):
                parts[i].append(part)
                done[i] += len(part)
        assert done == [len(ids) for ids in texts], "chunks that do not add up to the text"
        self._free += [page for held in pages for page in held]
        return [torch.cat(part) for part in parts]
