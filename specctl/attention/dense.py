"""Attention for training: rows attend among themselves, with gradients and without a cache.

Every sequence of the batch stands there whole, from its first position on, and sees only itself: packing examples into
one pass changes none of them. Legend: T rows, Q rows of one sequence, C rows of a part of it, N query heads, G
key-value heads, H head dim, V its width for values, J steps of a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from specctl.attention.latent import LatentRows
from specctl.kv.batch import Batch

# Rows of a chain's step whose scores are held at a time; those of more are computed again for their gradients.
CHAIN_ROWS = 512


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
        return self._attend(layer, q_TNH, k_TGH, v_TGH, None)

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        """The plain form."""
        return self._attend(layer, rows.q_TNH, *rows.up.expand(rows.kept_TE), rows.scale)

    def _attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGV: Tensor, scale: float | None) -> Tensor:
        by_example = (torch.split(x, self._num_rows) for x in (q_TNH, k_TGH, v_TGV))
        parts = [_attend(q, k, v, scale) for q, k, v in zip(*by_example, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ChainAttention(DenseAttention):
    """`ChainBackend`: keys and values of the steps so far are kept until the next plan. A step may be run again for its
    gradients if it is begun again."""

    def __init__(self) -> None:
        super().__init__()
        self._step = 0
        self._kept: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}

    def plan(self, batch: Batch) -> None:
        super().plan(batch)
        self._kept = {}
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self._step = step

    def _attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGV: Tensor, scale: float | None) -> Tensor:
        kept = self._kept.setdefault(layer, {})
        kept[self._step] = k_TGH, v_TGV
        if self._step == 0:
            return super()._attend(layer, q_TNH, k_TGH, v_TGV, scale)
        keys, values = zip(*(kept[step] for step in range(self._step + 1)), strict=True)
        scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
        by_example = (torch.split(x, self._num_rows) for x in (q_TNH, *keys, *values))
        parts = [_attend_chain(q, rows, scale) for q, *rows in zip(*by_example, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q_QNH: Tensor, k_QGH: Tensor, v_QGV: Tensor, scale: float | None = None) -> Tensor:
    q_NQH, k_GQH, v_GQV = (x.transpose(0, 1)[None] for x in (q_QNH, k_QGH, v_QGV))
    grouped = q_QNH.shape[1] != k_QGH.shape[1]
    out_NQV = scaled_dot_product_attention(q_NQH, k_GQH, v_GQV, is_causal=True, enable_gqa=grouped, scale=scale)
    return out_NQV[0].transpose(0, 1)


def _attend_chain(q_QNH: Tensor, rows: list[Tensor], scale: float) -> Tensor:
    """One sequence's rows at a later step of a chain. rows: keys [Q, G, H] of every step so far, then values."""
    groups = q_QNH.shape[1] // rows[0].shape[1]
    rows_N = [x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in rows]
    num_rows = len(q_QNH)
    if num_rows <= CHAIN_ROWS:
        return _attend_part(0, q_QNH, scale, *rows_N)
    parts = []
    for first in range(0, num_rows, CHAIN_ROWS):
        part = q_QNH[first : first + CHAIN_ROWS]
        if torch.is_grad_enabled():
            found = checkpoint(_attend_part, first, part, scale, *rows_N, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(found, Tensor)
            parts.append(found)
        else:
            parts.append(_attend_part(first, part, scale, *rows_N))
    return torch.cat(parts)


def _attend_part(first: int, q_CNH: Tensor, scale: float, *rows: Tensor) -> Tensor:
    """Rows first, first + 1, ... of a sequence: scores of step 0's rows, causal, and of the row's own later steps."""
    num_steps, end = len(rows) // 2, first + len(q_CNH)
    (k_QNH, *own_k), (v_QNV, *own_v) = rows[:num_steps], rows[num_steps:]
    common_NCQ = torch.einsum("cnh,qnh->ncq", q_CNH, k_QNH[:end])
    row_C = torch.arange(first, end, device=q_CNH.device)
    unseen_CQ = torch.arange(end, device=q_CNH.device) > row_C[:, None]
    own_NCJ = torch.stack([torch.einsum("cnh,cnh->nc", q_CNH, k[first:end]) for k in own_k], dim=-1)
    score = torch.cat((common_NCQ.masked_fill(unseen_CQ, float("-inf")), own_NCJ), dim=-1) * scale
    weight = score.to(torch.promote_types(score.dtype, torch.float32)).softmax(-1).to(v_QNV.dtype)
    out_CNV = torch.einsum("ncq,qnv->cnv", weight[..., :end], v_QNV[:end])
    for step, v in enumerate(own_v):
        out_CNV = out_CNV + weight[..., end + step].T[..., None] * v[first:end]
    return out_CNV
