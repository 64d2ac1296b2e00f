"""Paged attention in plain torch: the definition the other backends are held to, and the backend of the CPU.

Legend: T rows, Q rows and S slots of one sequence, N query heads, G key-value heads, R = N / G, H head dim. For latents
E and V are as in attention.latent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specctl.attention.latent import LatentRows
from specctl.kv.batch import Batch
from specctl.kv.cache import KVCache


@dataclass(frozen=True)
class _Window:
    """Where one sequence's rows and slots are: rows[first_row:last_row], slots as a range or as an index."""

    rows: slice
    slots: slice | Tensor
    sees_QS: Tensor | None  # None: one row, which sees every slot
    _masks: dict[tuple[int, bool, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, heads: int, dtype: torch.dtype, *, heads_first: bool) -> Tensor | None:
        """[heads * Q, S]: minus infinity where a row does not see a slot, else 0; of each head the rows, or of each row
        the heads. The same for every layer, so it is made once."""
        if self.sees_QS is None:
            return None
        key = heads, heads_first, dtype
        if key not in self._masks:
            hides_QS = torch.zeros_like(self.sees_QS, dtype=dtype).masked_fill_(~self.sees_QS, -torch.inf)
            repeated = hides_QS.repeat(heads, 1) if heads_first else hides_QS.repeat_interleave(heads, dim=0)
            self._masks[key] = repeated
        return self._masks[key]


class TorchAttention:
    """`AttentionBackend` by gathering a sequence's pages (or viewing them, when they lie side by side)."""

    def __init__(self, cache: KVCache, owner: str) -> None:
        self._cache = cache
        self._owner = owner
        self._flat: dict[int, tuple[Tensor, ...]] = {}
        self._windows: list[_Window] = []
        self._slot_T = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        assert batch.parent_T is None, "token trees need a tree mask"
        device = batch.token_T.device
        self._slot_T = batch.slot_T
        self._windows = []
        qo, kv, lengths = batch.qo_indptr.tolist(), batch.kv_indptr.tolist(), batch.kv_len.tolist()
        for b, length in enumerate(lengths):
            num_rows = qo[b + 1] - qo[b]
            slots = _slots(batch.kv_indices[kv[b] : kv[b + 1]], batch.page_size, length)
            if isinstance(slots, Tensor):
                slots = slots.to(device)
            sees = None
            if num_rows > 1:
                sees = torch.ones(num_rows, length, dtype=torch.bool, device=device).tril(length - num_rows)
            self._windows.append(_Window(slice(qo[b], qo[b + 1]), slots, sees))

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        k_SGH, v_SGH = self._layer(layer)
        k_SGH.index_copy_(0, self._slot_T, k_TGH)
        v_SGH.index_copy_(0, self._slot_T, v_TGH)
        parts = [_attend(q_TNH[w.rows], k_SGH[w.slots], v_SGH[w.slots], w) for w in self._windows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        """Every sequence in the form that costs less for its number of rows."""
        (kept_SE,) = self._layer(layer)
        kept_SE.index_copy_(0, self._slot_T, rows.kept_TE)
        many = [w.rows.stop - w.rows.start >= rows.up.rows_to_expand for w in self._windows]
        if not any(many):
            return self._absorbed(self._windows, rows, kept_SE)
        few = [w for w, is_many in zip(self._windows, many, strict=True) if not is_many]
        absorbed = self._absorbed(few, rows, kept_SE) if few else rows.kept_TE[:0]
        pieces = iter(torch.split(absorbed, [w.rows.stop - w.rows.start for w in few]))
        parts = [
            self._expanded(w, rows, kept_SE) if is_many else next(pieces)
            for w, is_many in zip(self._windows, many, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expanded(self, w: _Window, rows: LatentRows, kept_SE: Tensor) -> Tensor:
        k_SNH, v_SNV = rows.up.expand(kept_SE[w.slots])
        q_NQH, k_NSH, v_NSV = (x.transpose(0, 1)[None] for x in (rows.q_TNH[w.rows], k_SNH, v_SNV))
        mask_QS = w.mask(1, q_NQH.dtype, heads_first=True)
        out_NQV = scaled_dot_product_attention(q_NQH, k_NSH, v_NSV, attn_mask=mask_QS, scale=rows.scale)
        return out_NQV[0].transpose(0, 1)

    def _absorbed(self, windows: list[_Window], rows: LatentRows, kept_SE: Tensor) -> Tensor:
        """[rows of the windows, N, V]. The matrices that queries and sums go through are read once for all windows."""
        q_TNH = rows.q_TNH
        if len(windows) < len(self._windows):
            q_TNH = torch.cat([q_TNH[w.rows] for w in windows])
        q_TNE = rows.up.absorb(q_TNH)
        if len(windows) == 1:
            out_TNE = _attend_latent(q_TNE, kept_SE[windows[0].slots], windows[0], rows.scale)
        else:
            q_QNEs = torch.split(q_TNE, [w.rows.stop - w.rows.start for w in windows])
            parts = [
                _attend_latent(q_QNE, kept_SE[w.slots], w, rows.scale) for w, q_QNE in zip(windows, q_QNEs, strict=True)
            ]
            out_TNE = torch.cat(parts)
        return rows.up.values(out_TNE)

    def _layer(self, layer: int) -> tuple[Tensor, ...]:
        """The layer's tensors by slot, [pages * page_size, G, H]."""
        if layer not in self._flat:
            self._flat[layer] = tuple(tensor.flatten(0, 1) for tensor in self._cache.layer(self._owner, layer))
        return self._flat[layer]


def _slots(pages: Tensor, page_size: int, length: int) -> slice | Tensor:
    """The slots of positions 0..length - 1, as a slice when the pages are consecutive."""
    first = int(pages[0])
    if int(pages[-1]) - first == len(pages) - 1 and bool((pages.diff() == 1).all()):
        return slice(first * page_size, first * page_size + length)
    offsets = torch.arange(page_size)
    return (pages[:, None].long() * page_size + offsets).flatten()[:length]


def _attend(q_QNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, window: _Window) -> Tensor:
    """Grouped-query attention of one sequence, the R heads of a group folded into rows: no key is repeated."""
    num_rows, heads, dim = q_QNH.shape
    groups = k_SGH.shape[1]
    per_group = heads // groups
    k_GSH, v_GSH = k_SGH.transpose(0, 1)[None], v_SGH.transpose(0, 1)[None]
    if num_rows == 1:  # the common pass: nothing to fold or to mask
        q_GRH = q_QNH.reshape(1, groups, per_group, dim)
        return scaled_dot_product_attention(q_GRH, k_GSH, v_GSH).view(1, heads, dim)
    q_GMH = q_QNH.reshape(num_rows, groups, per_group, dim).permute(1, 2, 0, 3).flatten(1, 2)[None]
    mask_MS = window.mask(per_group, q_QNH.dtype, heads_first=True)
    out_GMH = scaled_dot_product_attention(q_GMH, k_GSH, v_GSH, attn_mask=mask_MS)[0]
    return out_GMH.view(groups, per_group, num_rows, dim).permute(2, 0, 1, 3).reshape(num_rows, heads, dim)


def _attend_latent(q_QNE: Tensor, kept_SE: Tensor, window: _Window, scale: float) -> Tensor:
    """Sums of what one sequence keeps, [Q, N, E]. To all heads it is one key and one value, so heads are rows here."""
    num_rows, heads, width = q_QNE.shape
    q_ME, kept = q_QNE.reshape(1, 1, num_rows * heads, width), kept_SE[None, None]
    mask_MS = window.mask(heads, q_QNE.dtype, heads_first=False)
    return scaled_dot_product_attention(q_ME, kept, kept, attn_mask=mask_MS, scale=scale).view(num_rows, heads, width)
