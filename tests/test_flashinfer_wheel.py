"""The installed FlashInfer wheel against its stand-in, without a GPU: signatures, and the wheel's own Python over plain
torch arithmetic in place of its compiled kernels. tests/flashinfer_signatures.py runs this for versions of choice."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attention_passes as passes
import flashinfer_mla_standin as mla
import flashinfer_standin as standin
import latent_passes
import pytest
import torch
from torch import Tensor

from specctl.attention.flashinfer import FlashInferAttention
from specctl.attention.torch import TorchAttention
from specctl.kv.cache import KVCache

pytestmark = pytest.mark.flashinfer

CPU = torch.device("cpu")
PAGED = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
WRAPPERS = (*PAGED, mla.NAME)
LATENTS = latent_passes.Widths(heads=4)
CAUSAL = 1


@pytest.fixture(scope="module")
def wheel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("flashinfer")


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("method", ["__init__", "plan", "_plan_impl", "run"])
def test_the_standin_has_the_signatures(wheel: Any, wrapper: str, method: str) -> None:
    version = next((v for v in (standin.OLDEST, standin.NEWEST) if wheel.__version__.startswith(v)), None)
    if version is None:
        pytest.skip(f"the stand-in has the signatures of {standin.OLDEST} and {standin.NEWEST}")
    stands_in = getattr(mla.release(version), wrapper)
    if method not in vars(stands_in):
        assert "Decode" not in wrapper, "only the decode wrapper's plan() hides its parameters"
        return
    assert parameters(getattr(stands_in, method)) == parameters(getattr(getattr(wheel, wrapper), method))


def test_the_standin_describes_batches_as_the_wheel_does(wheel: Any) -> None:
    if not is_new(wheel):
        assert not hasattr(wheel.mla, "MLAPlanMetadata")
        return
    theirs = wheel.mla.MLAPlanMetadata
    assert [f.name for f in dataclasses.fields(mla.MLAPlanMetadata)] == [f.name for f in dataclasses.fields(theirs)]
    assert parameters(mla.MLAPlanMetadata.csr) == parameters(theirs.csr)


def is_new(wheel: Any) -> bool:
    return "uniform_q_len" in inspect.signature(wheel.BatchPrefillWithPagedKVCacheWrapper.plan).parameters


def test_every_call_fits_the_wheel(wheel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "Event", standin.Event)
    standin.forget_copies()
    module = mla.release(standin.NEWEST if is_new(wheel) else standin.OLDEST)
    compare(module, torch.bfloat16)
    compare_latents(module, torch.bfloat16)
    assert {(wrapper, method) for wrapper, method, _, _ in module.calls} >= {
        (w, m) for w in WRAPPERS for m in ("plan", "run")
    }
    for wrapper, method, positional, named in module.calls:
        inspect.signature(getattr(getattr(wheel, wrapper), method)).bind(None, *positional, **named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_wheels_python_over_torch_kernels(wheel: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Everything of the wheel is real here but the compiled module and the pinned memory, which want a GPU."""
    asked_for: list[tuple[Any, ...]] = []

    def kernels(*key: Any) -> SimpleNamespace:
        asked_for.append(key)
        return SimpleNamespace(plan=_planned, paged_run=_run)

    without_pinned_memory(monkeypatch)
    for part in ("prefill", "decode"):
        monkeypatch.setattr(f"flashinfer.{part}.get_batch_prefill_module", kernels)
    compare(wheel, dtype)
    assert {key[0] for key in asked_for} == {"fa2"}
    assert len(set(asked_for)) == 1, "decode and verification use one compiled module"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_wheels_python_over_torch_mla_kernels(
    wheel: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The same for latents. What 0.7 asks the device for is answered as by a large GPU."""
    asked_for: list[tuple[Any, ...]] = []

    def kernels(*key: Any) -> SimpleNamespace:
        asked_for.append(key)
        return SimpleNamespace(plan=_planned_latents, run=_run_latents)

    without_pinned_memory(monkeypatch)
    if is_new(wheel):
        backends = "flashinfer.mla._batch_mla._backends"
        monkeypatch.setattr(f"{backends}.fa2_backend.get_batch_mla_module", kernels)
        answers = {"get_compute_capability": (9, 0), "get_device_sm_count": 132}
        for name, answer in (answers | {"_get_fa_shared_memory_limits": (233472, 232448)}).items():
            monkeypatch.setattr(f"{backends}._fa_common.{name}", lambda device, answer=answer: answer)
    else:
        monkeypatch.setattr("flashinfer.mla._core.get_batch_mla_module", kernels)
    compare_latents(wheel, dtype)
    assert {(key[0], *key[5:7]) for key in asked_for} == {("fa2", 512, 64)}
    assert len(set(asked_for)) == 1, "every pass uses one compiled module"


def without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))


def compare(module: Any, dtype: torch.dtype) -> None:
    cache = KVCache(passes.layers("target", 1, 2, 64, dtype), passes.num_pages(16))
    wide = KVCache(passes.layers("target", 1, 2, 64, torch.float64), passes.num_pages(16))
    tested = FlashInferAttention(cache, "target", CPU, module)
    for where, out, expected in passes.run_all(tested, cache, TorchAttention(wide, "target"), wide, "target", 6):
        assert torch.equal(out, expected.to(dtype)), where


def compare_latents(module: Any, dtype: torch.dtype) -> None:
    """Up to rounding only: queries and sums go through matrices of half precision."""
    cache = KVCache(LATENTS.layers("target", 1, dtype), passes.num_pages(16))
    wide = KVCache(LATENTS.layers("target", 1, torch.float64), passes.num_pages(16))
    tested = FlashInferAttention(cache, "target", CPU, module)
    reference = TorchAttention(wide, "target")
    for where, out, expected in latent_passes.run_all(tested, cache, reference, wide, "target", LATENTS):
        error = (out - expected).abs().max() / expected.abs().max()
        assert float(error) < 4 * torch.finfo(dtype).eps, where


def _planned(float_space: Tensor, int_space: Tensor, pinned: Tensor, *arguments: Any) -> list[Any]:
    qo_indptr, kv_indptr, kv_len, rows, sequences, heads, groups, page_size, graph, qk_dim, vo_dim, causal = arguments[
        :12
    ]
    window, fixed_split, no_split, *_ = arguments[12:]
    assert (qk_dim, vo_dim, graph, window, heads % groups) == (64, 64, False, -1, 0)
    assert bool(no_split) != (fixed_split > 0)
    assert len(qo_indptr) == len(kv_indptr) == len(kv_len) + 1 == sequences + 1
    assert int(qo_indptr[-1]) == rows
    assert (kv_len > 0).all()
    return [qo_indptr.tolist(), kv_len.tolist(), page_size, bool(causal)]


def _run(
    float_space: Tensor, int_space: Tensor, plan: list[Any], q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> None:
    qo_indptr, kv_indptr, indices, last_page_len, out, lse, mask_mode, layout, window, pdl, *rest = arguments
    planned_rows, lengths, page_size, causal = plan
    scale = rest[7]
    assert (lse, layout, window, pdl) == (None, 0, -1, False)
    assert qo_indptr.tolist() == planned_rows
    assert (mask_mode == CAUSAL) == causal
    for i, length in enumerate(lengths):
        pages = indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        assert (len(pages) - 1) * page_size + int(last_page_len[i]) == length
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        rows = slice(planned_rows[i], planned_rows[i + 1])
        out[rows] = standin.attention(q[rows], keys, values, scale, causal)


def _planned_latents(float_space: Tensor, int_space: Tensor, pinned: Tensor, *arguments: Any) -> list[Any]:
    qo_indptr, kv_indptr, kv_len, heads, width, causal = arguments
    assert (heads, width, causal) == (LATENTS.heads, 512, True)
    assert len(qo_indptr) == len(kv_indptr) == len(kv_len) + 1
    return [qo_indptr.tolist(), kv_indptr.tolist(), kv_len.tolist()]


def _run_latents(float_space: Tensor, int_space: Tensor, plan: list[Any], *arguments: Any) -> None:
    q_nope, q_pe, ckv, kpe, indices, out, lse, mask_mode, heads, page_size, scale, *scales = arguments
    rows, held, lengths = plan
    assert (lse, mask_mode, heads, page_size, scale) == (None, CAUSAL, LATENTS.heads, 16, latent_passes.SCALE)
    assert scales == [False, 1.0, 1.0, None]
    assert out.shape == q_nope.shape
    for i, length in enumerate(lengths):
        pages = indices[held[i] : held[i + 1]].long()
        latent_S1C, key_S1R = (x[pages].flatten(0, 1)[:length, None] for x in (ckv, kpe))
        of = slice(rows[i], rows[i + 1])
        q_QNE, keys = torch.cat((q_nope[of], q_pe[of]), dim=-1), torch.cat((latent_S1C, key_S1R), dim=-1)
        out[of] = standin.attention(q_QNE, keys, latent_S1C, scale, causal=True)
