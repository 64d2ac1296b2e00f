"""KVCache: one list of per-layer tensors under one page id space. It knows nothing about who holds which page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specctl.kv.pages import PAGE_SIZE


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer stores for a slot.

    shapes: one shape per stored tensor; ((G, H), (G, H)) for the keys and values of grouped-query attention,
        ((kv_lora_rank + rope_dim,),) for latent attention.
    ranks: "leader" when only the leader of a tensor-parallel group keeps the layer (a small draft of a large target).
    """

    owner: Literal["target", "draft"]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    ranks: Literal["all", "leader"] = "all"

    @property
    def bytes_per_slot(self) -> int:
        numbers = sum(torch.Size(shape).numel() for shape in self.shapes)
        return numbers * self.dtype.itemsize


class KVCache:
    """Tensors of shape [num_pages, page_size, *shape] for every layer of target and draft."""

    def __init__(
        self, layers: list[LayerKV], num_pages: int, page_size: int = PAGE_SIZE, device: torch.device | str = "cpu"
    ) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self._tensors = [
            tuple(_zeros((num_pages, page_size, *shape), layer.dtype, self.device) for shape in layer.shapes)
            for layer in layers
        ]
        owners = [layer.owner for layer in layers]
        self._first: dict[str, int] = {owner: owners.index(owner) for owner in owners}

    def layer(self, owner: str, index: int) -> tuple[Tensor, ...]:
        """The tensors of the `index`-th attention layer of `owner`, each [P, page_size, *shape]."""
        return self._tensors[self._first[owner] + index]

    def move(self, source_S: Tensor, target_S: Tensor) -> None:
        """Copy slots in every layer. An accepted branch of a token tree is no prefix and has to be brought together."""
        for tensors in self._tensors:
            for tensor in tensors:
                flat = tensor.flatten(0, 1)
                flat[target_S] = flat[source_S]

    @staticmethod
    def bytes_per_page(layers: list[LayerKV], page_size: int = PAGE_SIZE) -> int:
        return page_size * sum(layer.bytes_per_slot for layer in layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty memory: a masked slot is multiplied by zero, and 0 * NaN would spread.

    On a CPU they are the system's own zero pages, which take memory only once they are written to; torch.zeros would
    write all of a cache that may never be filled (4 s a GiB on two cores).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
