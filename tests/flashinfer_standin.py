"""Stands in for FlashInfer on a machine without a GPU: its two paged wrappers with their exact signatures and plain
torch arithmetic, stricter than the real ones about what it is given.

release("0.6.18") and release("0.7.4") are modules with the signatures of those versions. What the wrappers here do not
do (graphs, masks, scales, windows) they refuse, so that nothing is passed to them without an effect.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NEWEST, OLDEST = "0.7.4", "0.6.18"
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)

# Parameters that the oldest supported version does not have yet.
NEW_IN_0_7 = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": {"variant_owns_mask", "max_total_num_rows"},
    "BatchPrefillWithPagedKVCacheWrapper.plan": {"uniform_q_len", "use_token_head_sf"},
    "BatchPrefillWithPagedKVCacheWrapper.run": {"lse_base", "lse_layout"},
    "BatchDecodeWithPagedKVCacheWrapper.__init__": {"jit_kwargs"},
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl": {"is_causal", "use_token_head_sf"},
}

# Wrappers whose plan() has started a copy from pinned memory that has not run yet. The device modelled here is the
# laziest there can be: it copies when somebody waits for it, and not before.
_copying: list[Any] = []


class Event:
    """Put in place of torch.cpu.Event: what was started before record() has run after synchronize()."""

    def __init__(self) -> None:
        self._started: list[Any] = []

    def record(self, stream: Any = None) -> None:
        self._started = list(_copying)

    def synchronize(self) -> None:
        _copying[:] = [wrapper for wrapper in _copying if all(wrapper is not other for other in self._started)]


def forget_copies() -> None:
    _copying.clear()


def start_copy(planned: Any) -> None:
    """What a wrapper's plan() does at its end."""
    if any(wrapper is planned for wrapper in _copying):
        raise RuntimeError("planned again while the copy of its last plan may still read its pinned memory")
    _copying.append(planned)


def attention(q_QNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, scale: float, causal: bool) -> Tensor:
    """Grouped-query attention of one sequence in float64; row i of Q sees the first S - Q + i + 1 slots when causal."""
    repeats = q_QNH.shape[1] // k_SGH.shape[1]
    k_SNH, v_SNH = (x.double().repeat_interleave(repeats, dim=1) for x in (k_SGH, v_SGH))
    score_NQS = torch.einsum("qnh,snh->nqs", q_QNH.double(), k_SNH) * scale
    if causal:
        rows, slots = score_NQS.shape[1:]
        hidden_QS = torch.arange(slots) > torch.arange(rows)[:, None] + slots - rows
        score_NQS = score_NQS.masked_fill(hidden_QS.to(score_NQS.device), -math.inf)
    return torch.einsum("nqs,snh->qnh", score_NQS.softmax(-1), v_SNH).to(q_QNH.dtype)


class _Wrapper:
    """What the two wrappers have in common: what they check, what they remember, and the arithmetic."""

    def _construct(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        expect(workspace.dtype == torch.uint8 and workspace.dim() == 1, "the workspace is a row of bytes")
        expect(workspace.data_ptr() % 16 == 0, "the workspace is 16-byte aligned")
        expect(kv_layout == "NHD", "the stand-in has the NHD layout")
        expect(backend == "fa2", "the stand-in has the FA2 kernels")
        self._workspace = workspace
        self._plan: SimpleNamespace | None = None

    def _remember(
        self,
        qo_indptr: Tensor,
        pages: tuple[Tensor, Tensor, Tensor],
        geometry: tuple[int, int, int, int],
        dtypes: tuple[Any, Any, Any],
        scale: float | None,
        causal: bool,
        split: tuple[int | None, bool],
    ) -> None:
        kv_indptr, indices, last_page_len = pages
        heads, groups, head_dim, page_size = geometry
        for name, tensor in zip(
            ("qo_indptr", "kv_indptr", "indices", "last_page_len"), (qo_indptr, *pages), strict=True
        ):
            expect(tensor.dtype == torch.int32 and tensor.dim() == 1, f"{name} is a row of int32")
            expect(tensor.device.type == "cpu", f"{name} is on the host, else plan() waits for the device")
        rows, held = qo_indptr.diff(), kv_indptr.diff()
        expect(int(qo_indptr[0]) == 0 and int(kv_indptr[0]) == 0, "indptr start at 0")
        expect(len(rows) == len(held) == len(last_page_len) > 0, "all describe the same sequences")
        expect(int(rows.min()) >= 1 and int(held.min()) >= 1, "every sequence has rows and pages")
        expect(int(kv_indptr[-1]) == len(indices), "kv_indptr ends where indices do")
        expect(
            int(last_page_len.min()) >= 1 and int(last_page_len.max()) <= page_size, "1 <= last_page_len <= page size"
        )
        lengths = (held - 1) * page_size + last_page_len
        expect(not causal or bool((lengths >= rows).all()), "a causal row has at least its own slot")
        expect(heads % groups == 0, "the query heads are a multiple of the key-value heads")
        expect(head_dim in HEAD_DIMS, f"head dim {head_dim} has a kernel")
        q_dtype, kv_dtype, out_dtype = (getattr(torch, x) if isinstance(x, str) else x for x in dtypes)
        expect(q_dtype in DTYPES, f"{q_dtype} has a kernel")
        expect(kv_dtype in (None, q_dtype) and out_dtype in (None, q_dtype), "one dtype for all")
        self._check_space(rows, held, geometry, *split)
        start_copy(self)
        self._plan = SimpleNamespace(
            rows=rows.tolist(),
            pages=[part.long() for part in indices.split(held.tolist())],
            lengths=lengths.tolist(),
            geometry=geometry,
            dtype=q_dtype,
            scale=head_dim**-0.5 if scale is None else scale,
            causal=causal,
        )

    def _check_space(
        self, rows: Tensor, held: Tensor, geometry: tuple[int, int, int, int], split_pages: int | None, whole: bool
    ) -> None:
        """Partial outputs of split contexts have to fit: what PrefillPlan of 0.6.18 allocates, the largest of all."""
        if split_pages is None or whole:
            expect(whole, "a context is split at fixed places or not at all")
            return
        heads, groups, head_dim, _ = geometry
        packed = rows * (heads // groups)
        average = int(packed.sum()) // len(packed)
        tile = 128 if average > 64 and head_dim < 256 else 64 if average > 16 else 16
        chunks = -(-held // split_pages)
        if int(chunks.max()) == 1:
            return
        units = int((-(-packed // tile) * chunks).sum())
        needed = heads * units * tile * (head_dim + 1) * 4
        if needed > self._workspace.numel():
            raise RuntimeError(
                f"batch_prefill_tmp_v needs {needed} bytes of workspace, it has {self._workspace.numel()}"
            )

    def _attend(self, q: Tensor, cache: Any, rows_said: int | None) -> Tensor:
        plan = self._plan
        expect(plan is not None, "plan() comes before run()")
        assert plan is not None
        heads, groups, head_dim, page_size = plan.geometry
        expect(isinstance(cache, tuple) and len(cache) == 2, "the cache is a pair (keys, values)")
        k, v = cache
        expect(k.shape == v.shape and k.shape[1:] == (page_size, groups, head_dim), f"{tuple(k.shape)} is as planned")
        expect(q.shape == (sum(plan.rows), heads, head_dim), f"queries {tuple(q.shape)} are as planned")
        expect(rows_said in (None, sum(plan.rows)), "as many rows as sequences")
        for tensor in (q, k, v):
            expect(tensor.dtype == plan.dtype, f"{tensor.dtype} is as planned")
            expect(tensor.device == self._workspace.device, "queries, cache and workspace are on one device")
            expect(tensor.stride(-1) == 1, "the last dimension is contiguous")
        expect(all(int(pages.max()) < len(k) and int(pages.min()) >= 0 for pages in plan.pages), "the pages exist")
        parts = []
        for q_QNH, pages, length in zip(q.split(plan.rows), plan.pages, plan.lengths, strict=True):
            k_SGH, v_SGH = (x[pages].flatten(0, 1)[:length] for x in (k, v))
            parts.append(attention(q_QNH, k_SGH, v_SGH, plan.scale, plan.causal))
        return torch.cat(parts)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ) -> None:
        refuse(locals(), self.__init__, used={"float_workspace_buffer", "kv_layout", "backend"})
        self._construct(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ) -> None:
        used = {"causal", "sm_scale", "q_data_type", "kv_data_type", "o_data_type"}
        used |= {"fixed_split_size", "disable_split_kv", "uniform_q_len"}
        refuse(locals(), self.plan, used)
        if uniform_q_len is not None:
            expect(bool((qo_indptr.diff() == uniform_q_len).all()), "uniform_q_len is every sequence's number of rows")
        self._remember(
            qo_indptr,
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (q_data_type, kv_data_type, o_data_type),
            sm_scale,
            causal,
            (fixed_split_size, disable_split_kv),
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ) -> Tensor:
        refuse(locals(), self.run, used=set())
        return self._attend(q, paged_kv_cache, None)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ) -> None:
        refuse(locals(), self.__init__, used={"kv_layout", "use_tensor_cores", "backend"})
        self._construct(float_workspace_buffer, kv_layout, backend)
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ) -> None:
        expect(not deprecated_positional_args, "options are given by name")
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
        use_token_head_sf=False,
    ) -> None:
        used = {"q_data_type", "kv_data_type", "o_data_type", "sm_scale", "fixed_split_size", "disable_split_kv"}
        refuse(locals(), self._plan_impl, used)
        if not self._tensor_cores:
            expect(num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8), "CUDA-core decode knows this ratio of heads")
            expect(fixed_split_size is None, "fixed_split_size is for tensor-core decode")
        self._remember(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type, o_data_type),
            sm_scale,
            False,
            (fixed_split_size, disable_split_kv),
        )
        self._sequences = len(last_page_len)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ) -> Tensor:
        refuse(locals(), self.run, used=set())
        return self._attend(q, paged_kv_cache, self._sequences)


def release(version: str) -> SimpleNamespace:
    """FlashInfer as of `version`; its `calls` collects (class, method, positional, named) of all calls to wrappers."""
    assert version in (OLDEST, NEWEST)
    calls: list[tuple[str, str, Sequence[Any], dict[str, Any]]] = []
    module = SimpleNamespace(__version__=version, calls=calls)
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        methods = {
            name: recorded(wrapper, name, NEW_IN_0_7 if version == OLDEST else {}, calls)
            for name in ("__init__", "plan", "_plan_impl", "run")
            if name in vars(wrapper)
        }
        setattr(module, wrapper.__name__, type(wrapper.__name__, (wrapper,), methods))
    return module


def recorded(wrapper: type, name: str, absent: dict[str, set[str]], calls: list[Any]) -> Callable[..., Any]:
    """The wrapper's method, logged and without the parameters that are absent."""
    method = getattr(wrapper, name)
    signature = inspect.signature(method)
    missing = absent.get(f"{wrapper.__name__}.{name}", set())
    assert missing <= signature.parameters.keys()
    signature = signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in missing])

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        signature.bind(self, *args, **kwargs)  # a TypeError for an absent parameter
        calls.append((wrapper.__name__, name, args, kwargs))
        return method(self, *args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"expected: {what}")


def refuse(given: dict[str, Any], method: Callable[..., Any], used: set[str]) -> None:
    """Refuse any optional argument that differs from its default and is not among the used ones."""
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            expect(not given[name], f"the stand-in does without *{name}")
        elif parameter.default is not parameter.empty and name not in used:
            expect(
                given[name] is parameter.default or given[name] == parameter.default,
                f"the stand-in does without {name}",
            )
