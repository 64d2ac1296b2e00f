"""Attention backends. A model asks `attend(layer, q, k, v)` and does not know how, or where, it is done.

choose() resolves --attention once; nothing else decides between backends.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specctl.attention.latent import LatentRows
from specctl.errors import UsageError
from specctl.kv.batch import Batch
from specctl.kv.cache import KVCache

BACKENDS = ("torch", "flashinfer")


class AttentionBackend(Protocol):
    """Attention of one owner's layers ("target" or "draft") over one KVCache.

    plan() runs on the host, from host lengths, once per pass; attend() runs once per layer and reads device data only.
    """

    def plan(self, batch: Batch) -> None:
        """Prepare for `batch`; the next pass's attend() calls are for its rows."""

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Write k and v to the batch's slots of `layer`, attend causally, return [T, N, H].

        N query heads, G key-value heads (N a multiple of G), H head dimension; scores are scaled by H ** -0.5.
        """

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        """The same for a layer that keeps latents: write `rows` to the batch's slots, attend, return [T, N, V]."""


class ChainBackend(AttentionBackend, Protocol):
    """A backend for training a chain of drafts: all chains at once, one from every row."""

    def begin_step(self, step: int) -> None:
        """The next attend() calls are for step `step` of every row's chain; plan() begins step 0. Row i of step 0 sees
        rows up to i. At a later step it lies at position i + step, and sees rows up to i of step 0 and what it was
        itself at steps 1 to `step`: as decoding would, which keeps what the target's pass left up to i and then runs on
        what it drafted."""


def choose(name: str, cache: KVCache, owner: str, device: torch.device) -> AttentionBackend:
    """The backend called `name` ("auto": flashinfer on CUDA when it works and serves these layers, torch otherwise).

    Raises UsageError for an unknown name, and when flashinfer is asked for: MissingDependency when it cannot be used,
    UsageError when it does not serve the device, the dtype or the head dim.
    """
    from specctl.attention import flashinfer
    from specctl.attention.torch import TorchAttention

    if name == "auto":
        serves = device.type == "cuda" and not flashinfer.refusal(cache, owner) and not flashinfer.problem()
        name = "flashinfer" if serves else "torch"
    if name == "torch":
        return TorchAttention(cache, owner)
    if name == "flashinfer":
        return flashinfer.FlashInferAttention(cache, owner, device)
    raise UsageError(f"--attention {name}: expected auto, {' or '.join(BACKENDS)}")
