"""The FlashInfer backend on the CPU, over a stand-in for FlashInfer: every pass gives what the torch backend gives."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_passes as passes
import flashinfer_standin as standin
import pytest
import tiny
import torch
from fixtures import Make

from specctl.attention import choose, flashinfer
from specctl.attention.flashinfer import FlashInferAttention
from specctl.attention.torch import TorchAttention
from specctl.checkpoint import Checkpoint
from specctl.errors import MissingDependency, UsageError
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache, LayerKV
from specctl.models import load

CPU = torch.device("cpu")
VERSIONS = (standin.OLDEST, standin.NEWEST)


@pytest.fixture(autouse=True)
def _lazy_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cpu, "Event", standin.Event)
    standin.forget_copies()
    yield
    standin.forget_copies()


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Lets float64 through, which the stand-in's arithmetic can do: equality is then exact and not up to rounding."""
    for module in (flashinfer, standin):
        monkeypatch.setattr(module, "DTYPES", (torch.float64,))
    return torch.float64


def cache_of(layers: list[LayerKV], page_size: int = 16) -> KVCache:
    return KVCache(layers, passes.num_pages(page_size), page_size)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "page_size"), [(4, 2, 64, 16), (3, 3, 64, 4), (7, 1, 128, 16), (8, 2, 256, 1)]
)
def test_every_pass_equals_torch(
    float64: torch.dtype, version: str, heads: int, groups: int, head_dim: int, page_size: int
) -> None:
    layers = passes.layers("target", 2, groups, head_dim, float64)
    cache, wide = cache_of(layers, page_size), cache_of(layers, page_size)
    tested = FlashInferAttention(cache, "target", CPU, standin.release(version))
    for where, out, expected in passes.run_all(tested, cache, TorchAttention(wide, "target"), wide, "target", heads):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11, msg=lambda text, where=where: f"{where}: {text}")
    for index in range(2):
        for kept, expected in zip(cache.layer("target", index), wide.layer("target", index), strict=True):
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_passed_through(dtype: torch.dtype) -> None:
    layers = passes.layers("target", 1, 2, 64, dtype)
    cache, wide = cache_of(layers), cache_of(passes.layers("target", 1, 2, 64, torch.float64))
    tested = FlashInferAttention(cache, "target", CPU, standin.release(standin.NEWEST))
    for where, out, expected in passes.run_all(tested, cache, TorchAttention(wide, "target"), wide, "target", 4):
        assert out.dtype == dtype
        assert torch.equal(out, expected.to(dtype)), where


def test_target_and_draft_share_pages_and_workspace(float64: torch.dtype) -> None:
    layers = passes.layers("target", 3, 2, 128, float64) + passes.layers("draft", 2, 1, 64, float64)
    cache, wide = cache_of(layers), cache_of(layers)
    module = standin.release(standin.NEWEST)
    pairs = {
        owner: (heads, FlashInferAttention(cache, owner, CPU, module), TorchAttention(wide, owner))
        for owner, heads in (("target", 8), ("draft", 3))
    }
    runs = [passes.run_all(tested, cache, torch_, wide, owner, n) for owner, (n, tested, torch_) in pairs.items()]
    # Pass by pass the draft goes after the target, as in the engine.
    for results in zip(*runs, strict=False):
        for where, out, expected in results:
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-11, msg=where)
    built = [args[0] for _, method, args, _ in module.calls if method == "__init__"]
    assert len(built) == 8
    assert len({workspace.data_ptr() for workspace in built}) == 1


@torch.inference_mode()
def test_a_whole_model_gives_the_same_logits(make: Make, float64: torch.dtype) -> None:
    """Prefill in chunks, decode, verify, roll back and verify again: two texts at once, all logits compared."""
    model = load(Checkpoint(make(tiny.llama, head_dim=64)), float64, CPU)
    pages = [[9, 3, 17, 5, 12, 2], [1, 20, 4, 11, 19, 7]]
    texts = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(1)).tolist()
    caches = [KVCache(model.kv_layers("target"), 21) for _ in range(2)]
    tested = FlashInferAttention(caches[0], "target", CPU, standin.release(standin.NEWEST))
    reference = TorchAttention(caches[1], "target")
    logits = []
    for ranges in [
        ((0, 30), (0, 7)),
        ((30, 41), (7, 8)),
        ((41, 42), (8, 9)),
        ((42, 47), (9, 14)),
        ((44, 49), (10, 15)),
    ]:
        spans = [Span(texts[i][a:b], a, pages[i], i) for i, (a, b) in enumerate(ranges)]
        batch = Batch.pack(spans)
        for backend in (tested, reference):
            backend.plan(batch)
            logits.append(model.logits(model(batch, backend).final_TD))
        torch.testing.assert_close(logits[-2], logits[-1], rtol=0, atol=1e-11)
    one_shot = Batch.pack([Span(texts[0][:49], 0, [6, 8, 10, 13], 0)])
    reference.plan(one_shot)
    torch.testing.assert_close(
        model.logits(model(one_shot, reference).final_TD)[44:], logits[-2][:5], rtol=0, atol=1e-11
    )


def test_a_whole_model_runs_in_bfloat16(make: Make) -> None:
    model = load(Checkpoint(make(tiny.llama, head_dim=64)), torch.bfloat16, CPU)
    cache = KVCache(model.kv_layers("target"), 8)
    attn = FlashInferAttention(cache, "target", CPU, standin.release(standin.OLDEST))
    with torch.inference_mode():
        for tokens, start in (([5, 6, 7, 8], 0), ([9], 4), ([1, 2, 3], 5)):
            batch = Batch.pack([Span(tokens, start, [3], 0)])
            attn.plan(batch)
            logits = model.logits(model(batch, attn).final_TD)
            assert logits.dtype == torch.bfloat16
            assert bool(logits.isfinite().all())


def one_layer(dtype: torch.dtype = torch.bfloat16, groups: int = 2, head_dim: int = 64, pages: int = 40) -> KVCache:
    return KVCache(passes.layers("target", 1, groups, head_dim, dtype), pages)


def started(module: Any, cache: KVCache, heads: int) -> FlashInferAttention:
    """A backend that has seen its first queries, and so plans in plan()."""
    attn = FlashInferAttention(cache, "target", CPU, module)
    attn.plan(Batch.pack([Span([0], 0, [1], 0)]))
    attn.attend(0, *passes.random_qkv(1, heads, cache.layers[0], CPU, 0))
    module.calls.clear()
    return attn


@pytest.mark.parametrize(("version", "hints"), [(standin.OLDEST, [None] * 4), (standin.NEWEST, [None, 5, 2, None])])
def test_which_wrapper_and_which_hint(version: str, hints: list[int | None]) -> None:
    module = standin.release(version)
    attn = started(module, one_layer(), heads=4)
    for rows in ((1, 1), (5, 5), (2, 2), (3, 1)):
        attn.plan(Batch.pack([Span([0] * n, 20, [2 * i + 1, 2 * i + 2], i) for i, n in enumerate(rows)]))
    plans = [(wrapper, named) for wrapper, method, _, named in module.calls if method == "plan"]
    assert [wrapper for wrapper, _ in plans] == ["BatchDecodeWithPagedKVCacheWrapper"] + [
        "BatchPrefillWithPagedKVCacheWrapper"
    ] * 3
    assert [named.get("uniform_q_len") for _, named in plans] == hints
    assert all(named["fixed_split_size"] == 16 for _, named in plans), "256 tokens in pages of 16"


def test_plans_far_ahead_of_the_device_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = one_layer()
    attn = started(standin.release(standin.NEWEST), cache, heads=4)
    decode = Batch.pack([Span([0], 5, [1], 0)])
    verify = Batch.pack([Span([0] * 4, 5, [1], 0)])
    for _ in range(6):
        attn.plan(decode)
        attn.plan(verify)
    monkeypatch.setattr(standin.Event, "synchronize", lambda self: None)  # without the wait it is noticed:
    standin.forget_copies()
    attn.plan(decode)
    attn.plan(decode)
    with pytest.raises(RuntimeError, match="pinned memory"):
        attn.plan(decode)


def batch_shapes() -> Iterator[list[tuple[int, int]]]:
    """(rows, context) of every sequence: uniform batches of every size up to where nothing fits, and ragged ones."""
    for rows, context in itertools.product((1, 5, 17), (100, 700)):
        yield from ([(rows, context)] * sequences for sequences in range(1, 25))
    draw = random.Random(0)
    for _ in range(100):
        longest = draw.choice((4, 9, 33))
        yield [(draw.randint(1, longest), draw.randint(0, 1500)) for _ in range(draw.randint(1, 24))]


@pytest.mark.parametrize(
    ("heads", "groups", "head_dim"), [(32, 8, 128), (28, 4, 128), (9, 3, 64), (16, 16, 256), (64, 4, 128)]
)
def test_split_contexts_fit_the_workspace(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, head_dim: int
) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 2**23)  # soon full
    module = standin.release(standin.OLDEST)
    attn = started(module, one_layer(groups=groups, head_dim=head_dim, pages=2), heads)
    for sequences in batch_shapes():
        spans = [Span([0] * rows, context, [1] * 100, i) for i, (rows, context) in enumerate(sequences)]
        attn.plan(Batch.pack(spans))  # the stand-in raises when the parts do not fit
    options = [named for _, method, _, named in module.calls if method == "plan"]
    assert 20 < sum("fixed_split_size" in option for option in options) < len(options) - 20, "both ways are taken"


@pytest.mark.parametrize(
    ("rows", "context", "sequences", "option"),
    [
        (1, 4000, 1, {"fixed_split_size": 16}),
        (6, 4000, 1, {"fixed_split_size": 16}),
        (6, 8000, 64, {"disable_split_kv": True}),
        (32, 4000, 1, {"fixed_split_size": 16}),
        (33, 4000, 1, {"disable_split_kv": True}),
    ],
)
def test_contexts_are_cut_at_fixed_places_or_not_at_all(
    rows: int, context: int, sequences: int, option: dict[str, Any]
) -> None:
    module = standin.release(standin.NEWEST)
    attn = started(module, one_layer(groups=8, head_dim=128, pages=2), heads=32)
    attn.plan(Batch.pack([Span([0] * rows, context, [1] * 600, i) for i in range(sequences)]))
    named = next(named for _, method, _, named in module.calls if method == "plan")
    assert {name: named[name] for name in ("fixed_split_size", "disable_split_kv") if name in named} == option


def sound_plan() -> dict[str, Any]:
    return {
        "qo_indptr": torch.tensor([0, 3, 4], dtype=torch.int32),
        "paged_kv_indptr": torch.tensor([0, 2, 3], dtype=torch.int32),
        "paged_kv_indices": torch.tensor([4, 1, 2], dtype=torch.int32),
        "paged_kv_last_page_len": torch.tensor([16, 1], dtype=torch.int32),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "page_size": 16,
        "causal": True,
        "q_data_type": torch.bfloat16,
        "disable_split_kv": True,
    }


@pytest.mark.parametrize(
    "fault",
    [
        {"paged_kv_indices": torch.tensor([4, 1, 2])},
        {"paged_kv_indices": torch.tensor([4, 1], dtype=torch.int32)},
        {"paged_kv_last_page_len": torch.tensor([16, 0], dtype=torch.int32)},
        {"paged_kv_last_page_len": torch.tensor([17, 1], dtype=torch.int32)},
        {"qo_indptr": torch.tensor([0, 3, 5], dtype=torch.int32)},
        {"qo_indptr": torch.tensor([0, 4], dtype=torch.int32)},
        {"qo_indptr": torch.tensor([0, 3, 4], dtype=torch.int32, device="meta")},
        {"num_kv_heads": 3},
        {"head_dim_qk": 96},
        {"q_data_type": torch.float32},
        {"disable_split_kv": False},
        {"uniform_q_len": 3},
        {"window_left": 128},
    ],
)
def test_the_standin_is_strict_about_plans(fault: dict[str, Any]) -> None:
    wrapper = standin.release(standin.NEWEST).BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), "NHD", backend="fa2"
    )
    with pytest.raises((ValueError, NotImplementedError)):
        wrapper.plan(**(sound_plan() | fault))
    standin.forget_copies()
    wrapper.plan(**sound_plan())


def test_the_standin_is_strict_about_runs() -> None:
    module = standin.release(standin.OLDEST)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8), "NHD", backend="fa2")
    q, kv = torch.zeros(4, 4, 64, dtype=torch.bfloat16), torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="before run"):
        wrapper.run(q, (kv, kv))
    with pytest.raises(TypeError, match="uniform_q_len"):
        wrapper.plan(**sound_plan(), uniform_q_len=None)
    wrapper.plan(**sound_plan())
    assert wrapper.run(q, (kv, kv)).shape == q.shape
    for wrong in ((q[:3], (kv, kv)), (q.float(), (kv, kv)), (q, (kv, kv.half())), (q, (kv[:4], kv[:4])), (q, kv)):
        with pytest.raises(ValueError, match="expected"):
            wrapper.run(*wrong)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (passes.layers("target", 1, 2, 64, torch.float32), "no kernels for float32; use --attention torch or --dtype"),
        (passes.layers("target", 1, 2, 64, torch.float64), "no kernels for float64"),
        (passes.layers("target", 1, 2, 96, torch.bfloat16), r"keep \[2, 96\] and \[2, 96\] a token"),
        ([LayerKV("target", ((512,), (64,)), torch.bfloat16)], r"keep \[512\] and \[64\] a token"),
        (
            passes.layers("target", 1, 2, 64, torch.bfloat16) + passes.layers("target", 1, 2, 128, torch.bfloat16),
            "one shape and dtype, and the target's differ",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(layers: list[LayerKV], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FlashInferAttention(KVCache(layers, 2), "target", CPU, standin.release(standin.NEWEST))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.fixture
def broken_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A FlashInfer whose import fails."""
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_problem_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer.problem() == "FlashInfer is not installed (pip install 'specctl[cuda]')"


@pytest.mark.usefixtures("broken_package")
def test_problem_no_gpu_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flashinfer.problem() == "FlashInfer needs a CUDA device, and torch sees none"


@pytest.mark.usefixtures("broken_package", "a_gpu")
def test_problem_import_fails() -> None:
    problem = flashinfer.problem()
    assert problem is not None
    assert "its import fails (libcudart.so.13: cannot open)" in problem


@pytest.mark.usefixtures("broken_package", "a_gpu")
def test_problem_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    problem = flashinfer.problem()
    assert problem is not None
    assert "this GPU has 7.5" in problem


def test_choose_flashinfer_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingDependency, match=r"pip install 'specctl\[cuda\]'"):
        choose("flashinfer", one_layer(), "target", CPU)
    assert isinstance(choose("auto", one_layer(), "target", torch.device("cuda")), TorchAttention)


@pytest.mark.usefixtures("a_gpu")
def test_choose_looks_at_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", standin.release(standin.NEWEST))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert flashinfer.problem() is None
    with pytest.raises(UsageError, match="needs --device cuda, not cpu"):
        choose("flashinfer", one_layer(), "target", CPU)
    cuda = torch.device("cuda")
    with pytest.raises(UsageError, match="no kernels for float32"):
        choose("flashinfer", one_layer(torch.float32), "target", cuda)
    for cache, device in ((one_layer(), CPU), (one_layer(torch.float32), cuda), (one_layer(head_dim=96), cuda)):
        assert isinstance(choose("auto", cache, "target", device), TorchAttention)
