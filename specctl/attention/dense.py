"""Attention for training: rows attend among themselves, with gradients and without a cache.

Every sequence of the batch stands there whole, from its first position on, and sees only itself: packing examples into
one pass changes none of them. Legend: T rows, Q rows of one sequence, N query heads, G key-value heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specctl.attention.latent import LatentRows
from specctl.kv.batch import Batch


class DenseAttention:
    """`AttentionBackend` over one pass. It keeps nothing, so a layer may be run again for its gradients as long as the
    plan is the same."""

    def __init__(self) -> None:
        self._num_rows: list[int] = []

    def plan(self, batch: Batch) -> None:
        assert batch.parent_T is None, "token trees need a tree mask"
        self._num_rows = batch.qo_indptr.diff().tolist()
        assert self._num_rows == batch.kv_len.tolist(), "a sequence without its first rows: there is no cache to see"

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        by_example = (torch.split(x, self._num_rows) for x in (q_TNH, k_TGH, v_TGH))
        parts = [_attend(*rows) for rows in zip(*by_example, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        """The plain form."""
        k_TNH, v_TNV = rows.up.expand(rows.kept_TE)
        by_example = (torch.split(x, self._num_rows) for x in (rows.q_TNH, k_TNH, v_TNV))
        parts = [_attend(q, k, v, rows.scale) for q, k, v in zip(*by_example, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q_QNH: Tensor, k_QGH: Tensor, v_QGH: Tensor, scale: float | None = None) -> Tensor:
    q_NQH, k_GQH, v_GQH = (x.transpose(0, 1)[None] for x in (q_QNH, k_QGH, v_QGH))
    grouped = q_QNH.shape[1] != k_QGH.shape[1]
    out_NQH = scaled_dot_product_attention(q_NQH, k_GQH, v_GQH, is_causal=True, enable_gqa=grouped, scale=scale)
    return out_NQH[0].transpose(0, 1)
