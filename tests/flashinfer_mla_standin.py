"""Stands in for FlashInfer's MLA wrapper, as tests/flashinfer_standin.py does for the two others.

release(version) is the module of flashinfer_standin with this wrapper in it. Of the forms that 0.7 knows the stand-in
has the one that is not deprecated: a batch described by an object, all arguments by name, latent and rotated key in one
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flashinfer_standin as standin
import torch
from flashinfer_standin import expect, refuse
from torch import Tensor

NAME = "BatchMLAPagedAttentionWrapper"
WIDTHS = (512, 64)
MULTIPROCESSORS = 160
WORK_ITEMS = 16384

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class _Wrapper:
    """What the releases have in common: what they check, what they remember, and the arithmetic."""

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ) -> None:
        refuse(locals(), self.__init__, used={"backend"})
        expect(backend == "fa2", "the stand-in has the FA2 kernels")
        expect(float_workspace_buffer.dtype == torch.uint8, "the workspace is a row of bytes")
        partials = 2 * MULTIPROCESSORS * 64 * (2 * WIDTHS[0] + 4)
        expect(float_workspace_buffer.numel() >= partials, "partial outputs fit the workspace")
        self._workspace = float_workspace_buffer
        self._plan: SimpleNamespace | None = None

    def _remember(
        self,
        tables: Tables,
        heads: int,
        widths: tuple[int, int],
        page_size: int,
        causal: bool,
        scale: float,
        dtypes: Any,
    ) -> None:
        for name, tensor in zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), tables, strict=True):
            expect(tensor.dtype == torch.int32 and tensor.dim() == 1, f"{name} is a row of int32")
            expect(tensor.device.type == "cpu", f"{name} is on the host, else plan() waits for the device")
            expect(tensor.is_contiguous(), f"{name} is contiguous")
        qo_indptr, kv_indptr, indices, lengths = tables
        rows, held = qo_indptr.diff(), kv_indptr.diff()
        expect(int(qo_indptr[0]) == 0 and int(kv_indptr[0]) == 0, "indptr start at 0")
        expect(len(rows) == len(held) == len(lengths) > 0, "all describe the same sequences")
        expect(bool((rows >= 1).all()), "every sequence has rows")
        expect(bool((held == -(-lengths // page_size)).all()), "every sequence has the pages of its length")
        expect(int(kv_indptr[-1]) == len(indices), "kv_indptr ends where indices do")
        expect(not causal or bool((lengths >= rows).all()), "a causal row has at least its own slot")
        expect(widths == WIDTHS, f"widths {widths} have a kernel")
        expect(set(dtypes) <= set(standin.DTYPES) and len(set(dtypes)) == 1, f"{dtypes} have a kernel")
        self._check_tiles(rows, lengths, heads, causal)
        standin.start_copy(self)
        self._plan = SimpleNamespace(
            rows=rows.tolist(),
            pages=[part.long() for part in indices.split(held.tolist())],
            lengths=lengths.tolist(),
            heads=heads,
            page_size=page_size,
            dtype=dtypes[0],
            scale=scale,
            causal=causal,
        )

    @staticmethod
    def _check_tiles(rows: Tensor, lengths: Tensor, heads: int, causal: bool) -> None:
        """Stricter than 0.7: no tile ends within a row, whether or not a key would be lost by it."""
        tile = 128 if int(rows.sum()) * heads // len(rows) > 64 else 64
        expect(not causal or tile % heads == 0, f"{heads} heads divide a tile of {tile}")
        tiles = -(-rows * heads // tile)
        limit = max(256, int((tiles * lengths).sum()) // MULTIPROCESSORS)
        expect(int((tiles * -(-lengths // limit)).sum()) <= WORK_ITEMS, "a plan has room for all pieces of work")

    def _attend(self, q: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor]) -> Tensor:
        plan = self._plan
        expect(plan is not None, "plan() comes before run()")
        assert plan is not None
        for tensor, width in zip((*q, *kept), WIDTHS * 2, strict=True):
            expect(tensor.dim() == 3 and tensor.shape[-1] == width, f"{tuple(tensor.shape)} is as planned")
            expect(tensor.dtype == plan.dtype, f"{tensor.dtype} is as planned")
            expect(tensor.device == self._workspace.device, "queries, cache and workspace are on one device")
            expect(tensor.stride(-1) == 1, "the last dimension is contiguous")
            steps = (*tensor.stride()[:-1], tensor.storage_offset())
            expect(all(step * tensor.itemsize % 16 == 0 for step in steps), "rows are 16-byte aligned")
        expect(q[0].shape[:2] == q[1].shape[:2] == (sum(plan.rows), plan.heads), "queries are as planned")
        expect(kept[0].shape[:2] == kept[1].shape[:2], "latents and rotated keys are of the same slots")
        expect(kept[0].shape[1] == plan.page_size, "pages are as planned")
        expect(
            all(int(pages.min()) >= 0 and int(pages.max()) < len(kept[0]) for pages in plan.pages), "the pages exist"
        )
        parts = []
        queries = torch.cat(q, dim=-1).split(plan.rows)
        for q_QNE, pages, length in zip(queries, plan.pages, plan.lengths, strict=True):
            latent_S1C, key_S1R = (x[pages].flatten(0, 1)[:length, None] for x in kept)
            keys = torch.cat((latent_S1C, key_S1R), dim=-1)
            parts.append(standin.attention(q_QNE, keys, latent_S1C, plan.scale, plan.causal))
        return torch.cat(parts)


class _Wrapper06(_Wrapper):
    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ) -> None:
        refuse(locals(), self.plan, used=set())
        tables = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        widths, dtypes = (head_dim_ckv, head_dim_kpe), (q_data_type, kv_data_type)
        self._remember(tables, num_heads, widths, page_size, causal, sm_scale, dtypes)

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
    ) -> Tensor:
        refuse(locals(), self.run, used=set())
        return self._attend((q_nope, q_pe), (ckv_cache, kpe_cache))


class _Wrapper07(_Wrapper):
    def plan(
        self,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        num_heads=None,
        head_dim_ckv=None,
        head_dim_kpe=None,
        page_size=None,
        causal=None,
        sm_scale=None,
        q_data_type=None,
        kv_data_type=None,
        use_profiler=False,
        *,
        metadata=None,
        cum_seq_lens_q=None,
        block_tables=None,
        seq_lens=None,
        max_q_len=None,
        query_layout=None,
        kv_cache_layout=None,
        lse_mode="none",
        output_dtype=None,
        output_scale="none",
        scale_mode="default",
        skip_softmax=False,
        enable_pdl=None,
        use_sinks=False,
    ) -> None:
        used = {"metadata", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"}
        refuse(locals(), self.plan, used | {"q_data_type", "kv_data_type"})
        expect(isinstance(metadata, MLAPlanMetadata), "the batch is described by an MLAPlanMetadata")
        tables = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        widths, dtypes = (head_dim_ckv, head_dim_kpe), (q_data_type, kv_data_type)
        self._remember(tables, num_heads, widths, page_size, causal, sm_scale, dtypes)

    def run(
        self,
        q_nope=None,
        q_pe=None,
        ckv_cache=None,
        kpe_cache=None,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        query=None,
        kv_cache=None,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
        bmm1_scale=None,
        bmm2_scale=None,
    ) -> Tensor:
        refuse(locals(), self.run, used={"query", "kv_cache"})
        for packed in (query, kv_cache):
            expect(isinstance(packed, Tensor) and packed.shape[-1] == sum(WIDTHS), "latent and rotated key are packed")
        return self._attend(query.split(WIDTHS, dim=-1), kv_cache.split(WIDTHS, dim=-1))


def release(version: str) -> SimpleNamespace:
    """FlashInfer as of `version`, all three wrappers."""
    module = standin.release(version)
    wrapper = type(NAME, (_Wrapper06 if version == standin.OLDEST else _Wrapper07,), {})
    methods = {name: standin.recorded(wrapper, name, {}, module.calls) for name in ("__init__", "plan", "run")}
    setattr(module, NAME, type(NAME, (wrapper,), methods))
    module.mla = SimpleNamespace(**({} if version == standin.OLDEST else {"MLAPlanMetadata": MLAPlanMetadata}))
    return module
