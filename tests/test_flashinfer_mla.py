"""FlashInfer's MLA wrapper on the CPU, over a stand-in for it: every pass gives what the torch backend gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import attention_passes as passes
import flashinfer_mla_standin as mla
import flashinfer_standin as standin
import latent_passes
import pytest
import tiny
import torch
from fixtures import Make
from latent_passes import Widths

from specctl.attention import choose, flashinfer
from specctl.attention.flashinfer import FlashInferAttention
from specctl.attention.torch import TorchAttention
from specctl.checkpoint import Checkpoint
from specctl.errors import UsageError
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
def small(monkeypatch: pytest.MonkeyPatch) -> Widths:
    """Lets float64 and small latents through, which the stand-in's arithmetic can do: equality is then exact."""
    for module in (flashinfer, standin):
        monkeypatch.setattr(module, "DTYPES", (torch.float64,))
    monkeypatch.setattr(flashinfer, "LATENT_WIDTHS", (32, 8))
    monkeypatch.setattr(mla, "WIDTHS", (32, 8))
    return Widths(heads=4, latent=32, rotated=8)


def cache_of(layers: list[LayerKV], page_size: int = 16) -> KVCache:
    return KVCache(layers, passes.num_pages(page_size), page_size)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("heads", "page_size"), [(4, 16), (16, 1), (5, 4)])
def test_every_pass_equals_torch(version: str, heads: int, page_size: int) -> None:
    widths = Widths(heads, latent=32, rotated=8)
    layers = widths.layers("target", 2 if heads < 16 else 1, torch.float64)
    cache, wide = cache_of(layers, page_size), cache_of(layers, page_size)
    tested = FlashInferAttention(cache, "target", CPU, mla.release(version))
    for where, out, expected in latent_passes.run_all(
        tested, cache, TorchAttention(wide, "target"), wide, "target", widths
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11, msg=lambda text, where=where: f"{where}: {text}")
    for index in range(len(layers)):
        assert torch.equal(cache.layer("target", index)[0], wide.layer("target", index)[0])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [100, 128, 130])
def test_heads_by_the_hundred(version: str, heads: int) -> None:
    widths = Widths(heads, latent=32, rotated=8)
    caches = [KVCache(widths.layers("target", 1, torch.float64), 4) for _ in range(2)]
    tested = FlashInferAttention(caches[0], "target", CPU, mla.release(version))
    reference = TorchAttention(caches[1], "target")
    up = widths.projection(torch.float64)
    for start, count in ((0, 18), (18, 1), (19, 4)):
        rows = widths.rows(count, up, seed=start)
        batch = Batch.pack([Span([0] * count, start, [3, 1], 0)])
        outs = []
        for backend in (tested, reference):
            backend.plan(batch)
            outs.append(backend.attend_latent(0, rows))
        torch.testing.assert_close(*outs, rtol=0, atol=1e-11)


def test_target_and_draft_share_pages_and_workspace(small: Widths) -> None:
    """As a target and its MTP layer do; and a draft of keys and values lies beside latents as well."""
    layers = small.layers("target", 2, torch.float64) + small.layers("draft", 1, torch.float64)
    cache, wide = cache_of(layers), cache_of(layers)
    module = mla.release(standin.NEWEST)
    runs = [
        latent_passes.run_all(
            FlashInferAttention(cache, owner, CPU, module), cache, TorchAttention(wide, owner), wide, owner, small
        )
        for owner in ("target", "draft")
    ]
    # Pass by pass the draft goes after the target, as in the engine.
    for results in zip(*runs, strict=False):
        for where, out, expected in results:
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-11, msg=where)
    mixed = KVCache(small.layers("target", 1, torch.float64) + passes.layers("draft", 1, 2, 64, torch.float64), 2)
    for owner in ("target", "draft"):
        FlashInferAttention(mixed, owner, CPU, module)
    built = [(wrapper, args[0].data_ptr()) for wrapper, method, args, _ in module.calls if method == "__init__"]
    assert [wrapper for wrapper, _ in built[:6]] == [mla.NAME] * 6
    assert len({workspace for _, workspace in built[:4]}) == len({workspace for _, workspace in built[4:]}) == 1
    assert len(built) == 10


RANGES = [((0, 30), (0, 7)), ((30, 41), (7, 8)), ((41, 42), (8, 9)), ((42, 47), (9, 14)), ((44, 49), (10, 15))]


@torch.inference_mode()
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.usefixtures("small")
def test_a_whole_model_gives_the_same_logits(make: Make, version: str, model_type: str) -> None:
    """Prefill in chunks, decode, verify, roll back and verify again: two texts at once, all logits compared."""
    path = make(tiny.deepseek, model_type=model_type, kv_lora_rank=32, qk_rope_head_dim=8, dtype=torch.float64)
    model = load(Checkpoint(path), torch.float64, CPU)
    pages = [[9, 3, 17, 5, 12, 2], [1, 20, 4, 11, 19, 7]]
    texts = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(1)).tolist()
    caches = [KVCache(model.kv_layers("target"), 21) for _ in range(2)]
    module = mla.release(version)
    tested, reference = FlashInferAttention(caches[0], "target", CPU, module), TorchAttention(caches[1], "target")
    for ranges in RANGES:
        batch = Batch.pack([Span(texts[i][a:b], a, pages[i], i) for i, (a, b) in enumerate(ranges)])
        logits = []
        for backend in (tested, reference):
            backend.plan(batch)
            logits.append(model.logits(model(batch, backend).final_TD))
        torch.testing.assert_close(*logits, rtol=0, atol=1e-11)
    plans = sum(method == "plan" for _, method, _, _ in module.calls)
    assert plans == len(RANGES), "one for all layers"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_the_widths_there_are_kernels_for(version: str, dtype: torch.dtype) -> None:
    """To the same bits as by hand: absorbed, summed by the stand-in, and taken through the values' matrix."""
    widths = Widths(heads=16)
    cache = KVCache(widths.layers("target", 1, dtype), 8)
    attn = FlashInferAttention(cache, "target", CPU, mla.release(version))
    up = widths.projection(dtype)
    for start, count in ((0, 20), (20, 1), (21, 5)):
        rows = widths.rows(count, up, seed=start)
        attn.plan(Batch.pack([Span([0] * count, start, [5, 2], 0)]))
        out = attn.attend_latent(0, rows)
        kept = cache.layer("target", 0)[0][[5, 2]].flatten(0, 1)[: start + count, None]
        assert torch.equal(kept[start:, 0], rows.kept_TE)
        summed = standin.attention(up.absorb(rows.q_TNH), kept, kept[..., :512], rows.scale, causal=True)
        assert out.dtype == dtype
        assert torch.equal(out, up.values(summed))


def started(module: Any, widths: Widths, pages: int = 40) -> FlashInferAttention:
    """A backend that has seen its first queries, and so plans in plan()."""
    attn = FlashInferAttention(KVCache(widths.layers("target", 1, torch.bfloat16), pages), "target", CPU, module)
    attn.plan(Batch.pack([Span([0], 0, [1], 0)]))
    attn.attend_latent(0, widths.rows(1, widths.projection(torch.bfloat16), 0))
    module.calls.clear()
    return attn


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("heads", "planned"), [(1, 1), (16, 16), (20, 32), (128, 128), (200, 128)])
def test_what_is_planned(version: str, heads: int, planned: int) -> None:
    module = mla.release(version)
    attn = started(module, Widths(heads))
    batch = Batch.pack([Span([0] * 4, 20, [1, 2], 0), Span([0], 15, [3], 1)])
    attn.plan(batch)
    ((wrapper, method, positional, named),) = module.calls
    assert (wrapper, method) == (mla.NAME, "plan")
    if version == standin.NEWEST:  # which warns of anything positional
        assert not positional
        metadata = named.pop("metadata")
        tables = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
    else:
        tables = positional
    assert [table.tolist() for table in tables] == [[0, 4, 5], [0, 2, 3], [1, 2, 3], [24, 16]]
    assert named == {
        "num_heads": planned,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": 16,
        "causal": True,
        "sm_scale": latent_passes.SCALE,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }


def test_plans_far_ahead_of_the_device_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = started(mla.release(standin.NEWEST), Widths(16))
    batch = Batch.pack([Span([0] * 4, 5, [1], 0)])
    for _ in range(6):
        attn.plan(batch)
    monkeypatch.setattr(standin.Event, "synchronize", lambda self: None)  # without the wait it is noticed:
    standin.forget_copies()
    attn.plan(batch)
    attn.plan(batch)
    with pytest.raises(RuntimeError, match="pinned memory"):
        attn.plan(batch)


@pytest.mark.parametrize(("heads", "most"), [(128, 15360), (16, 122880)])
def test_a_pass_of_more_rows_than_a_plan_has_room_for_is_refused(heads: int, most: int) -> None:
    attn = started(mla.release(standin.OLDEST), Widths(heads), pages=2)
    pages = [1] * (-(-most // 16) + 1)
    attn.plan(Batch.pack([Span([0] * most, 0, pages, 0)]))
    with pytest.raises(UsageError, match=rf"a pass of {most + 8} rows .* use --attention torch"):
        attn.plan(Batch.pack([Span([0] * (most + 8), 0, pages, 0)]))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (Widths(1).layers("target", 1, torch.float32), "no kernels for float32; use --attention torch or --dtype"),
        (
            Widths(1, rotated=32).layers("target", 1, torch.bfloat16),
            r"latents of 512 and rotated keys of 64 numbers a token, and the target's layers keep \[544\] a token; use",
        ),
        (
            Widths(1).layers("target", 1, torch.bfloat16) + passes.layers("target", 1, 2, 64, torch.bfloat16),
            "one shape and dtype, and the target's differ",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(layers: list[LayerKV], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FlashInferAttention(KVCache(layers, 2), "target", CPU, mla.release(standin.NEWEST))


def test_other_widths_of_the_same_sum_are_refused() -> None:
    widths = Widths(4, latent=384, rotated=192)
    cache = KVCache(widths.layers("target", 1, torch.bfloat16), 2)
    attn = FlashInferAttention(cache, "target", CPU, mla.release(standin.NEWEST))
    attn.plan(Batch.pack([Span([0], 0, [1], 0)]))
    with pytest.raises(UsageError, match="the target has latents of 384 and rotated keys of 192 numbers; use --attent"):
        attn.attend_latent(0, widths.rows(1, widths.projection(torch.bfloat16), 0))


def test_choose_looks_at_dtype_and_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    module = mla.release(standin.NEWEST)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "_workspace", lambda cache, device: torch.zeros(2**27, dtype=torch.uint8))
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cpu)
    cuda = torch.device("cuda")

    def chosen(name: str, widths: Widths, dtype: torch.dtype, device: torch.device = cuda) -> type:
        return type(choose(name, KVCache(widths.layers("target", 1, dtype), 2), "target", device))

    assert chosen("auto", Widths(16), torch.bfloat16) is FlashInferAttention
    assert chosen("flashinfer", Widths(16), torch.float16) is FlashInferAttention
    assert chosen("auto", Widths(16), torch.float32) is TorchAttention
    assert chosen("auto", Widths(16, latent=256), torch.bfloat16) is TorchAttention
    assert chosen("auto", Widths(16), torch.bfloat16, CPU) is TorchAttention
    with pytest.raises(UsageError, match=r"keep \[320\] a token; use --attention torch"):
        chosen("flashinfer", Widths(16, latent=256), torch.bfloat16)


def sound_plan(**fault: Any) -> dict[str, Any]:
    tables = {
        "qo_indptr": torch.tensor([0, 3, 4], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 2, 3], dtype=torch.int32),
        "kv_indices": torch.tensor([4, 1, 2], dtype=torch.int32),
        "kv_len_arr": torch.tensor([32, 1], dtype=torch.int32),
    }
    options = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 16, "causal": True}
    options |= {"sm_scale": 0.1, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    tables |= {name: value for name, value in fault.items() if name in tables}
    options |= {name: value for name, value in fault.items() if name not in tables}
    return {"metadata": mla.MLAPlanMetadata.csr(**tables)} | options


@pytest.mark.parametrize(
    "fault",
    [
        {"kv_indices": torch.tensor([4, 1, 2])},
        {"kv_indices": torch.tensor([4, 1], dtype=torch.int32)},
        {"kv_len_arr": torch.tensor([33, 1], dtype=torch.int32)},
        {"kv_len_arr": torch.tensor([32, 0], dtype=torch.int32)},
        {"qo_indptr": torch.tensor([0, 3, 5], dtype=torch.int32)},
        {"qo_indptr": torch.tensor([0, 4], dtype=torch.int32)},
        {"qo_indptr": torch.tensor([0, 3, 4], dtype=torch.int32, device="meta")},
        {"num_heads": 20},
        {"num_heads": 256},
        {"head_dim_ckv": 256},
        {"kv_data_type": torch.float16},
        {"q_data_type": torch.float32, "kv_data_type": torch.float32},
        {"lse_mode": "base2"},
        {"kv_cache_layout": "split"},
        {"metadata": None},
    ],
    ids=lambda fault: f"{next(iter(fault))}-{next(iter(fault.values()))}".replace("\n", ""),
)
def test_the_standin_is_strict_about_plans(fault: dict[str, Any]) -> None:
    wrapper = mla.release(standin.NEWEST).BatchMLAPagedAttentionWrapper(
        torch.zeros(2**25, dtype=torch.uint8), backend="fa2"
    )
    with pytest.raises(ValueError, match="expected"):
        wrapper.plan(**sound_plan(**fault))
    standin.forget_copies()
    wrapper.plan(**sound_plan())


def test_the_standin_is_strict_about_runs() -> None:
    module = mla.release(standin.NEWEST)
    wrapper = module.BatchMLAPagedAttentionWrapper(torch.zeros(2**25, dtype=torch.uint8), backend="fa2")
    q, kv = torch.zeros(4, 16, 576, dtype=torch.bfloat16), torch.zeros(5, 16, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="before run"):
        wrapper.run(query=q, kv_cache=kv)
    wrapper.plan(**sound_plan())
    assert wrapper.run(query=q, kv_cache=kv).shape == (4, 16, 512)
    shifted = torch.zeros(5 * 16 * 576 + 1, dtype=torch.bfloat16)[1:].view(5, 16, 576)
    for wrong in (
        (q[:3], kv),
        (q[:, :8], kv),
        (q.float(), kv),
        (q, kv.half()),
        (q, kv[:4]),
        (q, kv[:, :8]),
        (q, shifted),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrapper.run(query=wrong[0], kv_cache=wrong[1])
    old = mla.release(standin.OLDEST).BatchMLAPagedAttentionWrapper(wrapper._workspace, backend="fa2")
    with pytest.raises(TypeError, match="missing a required argument: 'qo_indptr'"):
        old.plan(**sound_plan())
