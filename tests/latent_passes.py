"""The passes of attention_passes for layers that keep latents, for comparing one backend with another."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import attention_passes as passes
import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.attention.latent import LatentRows, UpProjection
from specctl.kv.cache import KVCache, LayerKV

KEY, VALUE = 24, 16  # of a head
SCALE = 0.2  # of no width that anything has


@dataclass(frozen=True)
class Widths:
    """Numbers of a latent and of a rotated key, and how many heads there are."""

    heads: int
    latent: int = 512
    rotated: int = 64

    def layers(self, owner: str, count: int, dtype: torch.dtype) -> list[LayerKV]:
        return [LayerKV(owner, ((self.latent + self.rotated,),), dtype) for _ in range(count)]  # type: ignore[arg-type]

    def projection(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> UpProjection:
        up = UpProjection(self.latent, self.heads, KEY, VALUE)
        weight = torch.randn(up.weight.shape, generator=torch.Generator().manual_seed(seed)) * self.latent**-0.5
        up.weight.data = weight.to(device, dtype)
        return up.requires_grad_(False)

    def rows(self, count: int, up: UpProjection, seed: int) -> LatentRows:
        """Random rows in the projection's dtype, the queries large enough that single keys matter."""
        generator = torch.Generator().manual_seed(seed)
        q_TNH = 3 * torch.randn(count, self.heads, KEY + self.rotated, generator=generator)
        kept_TE = torch.randn(count, self.latent + self.rotated, generator=generator)
        return LatentRows(q_TNH.to(up.weight), kept_TE.to(up.weight), up, SCALE)


def run_all(
    tested: AttentionBackend, cache: KVCache, reference: AttentionBackend, wide: KVCache, owner: str, widths: Widths
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(pass, output of `tested`, output of `reference`) for every pass and layer; the reference has a wider cache."""
    owned = [layer for layer in cache.layers if layer.owner == owner]
    for dirty, index in itertools.product((cache, wide), range(len(owned))):
        for tensor in dirty.layer(owner, index):
            tensor.fill_(1e4)  # what others left in the pages must not show
    kept = cache.layer(owner, 0)[0]
    ups = [widths.projection(kept.dtype, kept.device, seed=index) for index in range(len(owned))]
    wide_ups = [copy.deepcopy(up).to(wide.layer(owner, 0)[0].dtype) for up in ups]
    for number, (name, batch) in enumerate(passes.batches(cache.page_size, kept.device)):
        tested.plan(batch)
        reference.plan(batch)
        for index, (up, wide_up) in enumerate(zip(ups, wide_ups, strict=True)):
            rows = widths.rows(len(batch.slot_T), up, seed=1000 * number + index)
            out = tested.attend_latent(index, rows)
            wide_rows = LatentRows(rows.q_TNH.to(wide_up.weight), rows.kept_TE.to(wide_up.weight), wide_up, rows.scale)
            yield f"{name}, layer {index}", out, reference.attend_latent(index, wide_rows)
