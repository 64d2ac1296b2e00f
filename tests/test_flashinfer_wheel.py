"""The installed FlashInfer wheel against its stand-in, without a GPU: signatures, and the wheel's own Python over plain
torch arithmetic in place of its compiled kernels. tests/flashinfer_signatures.py runs this for versions of choice."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attention_passes as passes
import flashinfer_standin as standin
import pytest
import torch
from torch import Tensor

from specctl.attention.flashinfer import FlashInferAttention
from specctl.attention.torch import TorchAttention
from specctl.kv.cache import KVCache

pytestmark = pytest.mark.flashinfer

CPU = torch.device("cpu")
WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
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
    stands_in = getattr(standin.release(version), wrapper)
    if method not in vars(stands_in):
        assert wrapper == "BatchPrefillWithPagedKVCacheWrapper", "only the decode wrapper's plan() hides its parameters"
        return
    assert parameters(getattr(stands_in, method)) == parameters(getattr(getattr(wheel, wrapper), method))


def test_every_call_fits_the_wheel(wheel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "Event", standin.Event)
    standin.forget_copies()
    has_hint = "uniform_q_len" in inspect.signature(wheel.BatchPrefillWithPagedKVCacheWrapper.plan).parameters
    module = standin.release(standin.NEWEST if has_hint else standin.OLDEST)
    compare(module, torch.bfloat16)
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

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    for part in ("prefill", "decode"):
        monkeypatch.setattr(f"flashinfer.{part}.get_batch_prefill_module", kernels)
    compare(wheel, dtype)
    assert {key[0] for key in asked_for} == {"fa2"}
    assert len(set(asked_for)) == 1, "decode and verification use one compiled module"


def compare(module: Any, dtype: torch.dtype) -> None:
    cache = KVCache(passes.layers("target", 1, 2, 64, dtype), passes.num_pages(16))
    wide = KVCache(passes.layers("target", 1, 2, 64, torch.float64), passes.num_pages(16))
    tested = FlashInferAttention(cache, "target", CPU, module)
    for where, out, expected in passes.run_all(tested, cache, TorchAttention(wide, "target"), wide, "target", 6):
        assert torch.equal(out, expected.to(dtype)), where


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
