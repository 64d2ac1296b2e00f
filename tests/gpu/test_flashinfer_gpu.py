"""FlashInfer's kernels on a real GPU, against the torch backend. The first run compiles them, which takes minutes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import attention_passes as passes
import latent_passes
import pytest
import tiny
import torch
from latent_passes import Widths
from torch import Tensor

from specctl.attention import AttentionBackend, choose, flashinfer
from specctl.attention.flashinfer import FlashInferAttention
from specctl.attention.latent import LatentRows
from specctl.attention.torch import TorchAttention
from specctl.checkpoint import Checkpoint
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.models import load

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# Two kernels to compile: (query heads, key-value heads, head dim).
SHAPES = [(9, 3, 64), (32, 8, 128)]
# And one for latents, with the heads of V2-Lite and V3, and with some that get company.
LATENTS = [Widths(16), Widths(128), Widths(20)]


@pytest.fixture(autouse=True)
def _needs_flashinfer() -> None:
    if why := flashinfer.problem():
        pytest.skip(why)


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def one_layer(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    _, groups, head_dim = shape
    cache = KVCache(passes.layers("target", 1, groups, head_dim, dtype), passes.num_pages(16), 16, device)
    for tensor in cache.layer("target", 0):
        tensor.normal_(generator=torch.Generator(device).manual_seed(5))
    return cache


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pass_is_torchs_within_rounding(shape: tuple[int, int, int], gpu: torch.device) -> None:
    cache, wide = one_layer(shape, gpu), one_layer(shape, gpu, torch.float32)
    tested = choose("auto", cache, "target", gpu)
    assert isinstance(tested, FlashInferAttention)
    reference = TorchAttention(wide, "target")
    for where, out, expected in passes.run_all(tested, cache, reference, wide, "target", shape[0]):
        torch.testing.assert_close(
            out.float(), expected, rtol=2e-2, atol=2e-2, msg=lambda text, where=where: f"{where}: {text}"
        )


Pass = tuple[Batch, tuple[Tensor, Tensor, Tensor]]


def prepared(cache: KVCache, heads: int, spans: list[Span]) -> Pass:
    """A batch, and queries, keys and values that depend on a row's lane and position only."""
    batch = Batch.pack(spans, cache.page_size, cache.layer("target", 0)[0].device)
    seeds = [1000 * span.lane + position for span in spans for position in range(span.start, span.end)]
    rows = [passes.random_qkv(1, heads, cache.layers[0], batch.slot_T.device, seed) for seed in seeds]
    q, k, v = (torch.cat(part) for part in zip(*rows, strict=True))
    return batch, (q, k, v)


def attended(attn: AttentionBackend, one: Pass) -> Tensor:
    batch, qkv = one
    attn.plan(batch)
    return attn.attend(0, *qkv)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_sequence_does_not_depend_on_its_batch(rows: int, gpu: torch.device) -> None:
    """Bit for bit: contexts are cut at places of their own, whatever else is in the batch."""
    heads = SHAPES[0][0]
    cache = one_layer(SHAPES[0], gpu)
    attn = FlashInferAttention(cache, "target", gpu)
    pages = [list(range(1 + 40 * i, 41 + 40 * i)) for i in range(4)]
    spans = [Span([0] * rows, start, pages[i], i) for i, start in enumerate((600, 17, 256, 333))]
    together = attended(attn, prepared(cache, heads, spans))
    for i, span in enumerate(spans):
        alone = attended(attn, prepared(cache, heads, [span]))
        assert torch.equal(alone, together[rows * i : rows * (i + 1)]), f"sequence {i}"


def test_passes_planned_far_ahead_of_the_device(gpu: torch.device) -> None:
    """Nothing waits for a pass while the device is kept busy with other work, so that plans run far ahead of it."""
    pages = [list(range(1, 41)), list(range(41, 81))]
    busy = torch.randn(4096, 4096, device=gpu)

    def run(between: Callable[[], object]) -> list[Tensor]:
        cache = one_layer(SHAPES[0], gpu)
        attn = FlashInferAttention(cache, "target", gpu)
        steps = [
            prepared(cache, SHAPES[0][0], [Span([0] * rows, start + 100 * i, pages[i], i) for i in range(2)])
            for start, rows in zip(range(0, 240, 4), itertools.cycle((1, 4)), strict=False)
        ]
        results = []
        for step in steps:
            results.append(attended(attn, step))
            between()
        torch.cuda.synchronize()
        return results

    waiting = run(torch.cuda.synchronize)
    ahead = run(lambda: [busy @ busy for _ in range(5)])
    for step, (first, second) in enumerate(zip(waiting, ahead, strict=True)):
        assert torch.equal(first, second), f"pass {step}"


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Call it, and from then on an operation that waits for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_planning_does_not_wait_for_the_device(gpu: torch.device, no_waiting: Callable[[], None]) -> None:
    cache = one_layer(SHAPES[0], gpu)
    attn = FlashInferAttention(cache, "target", gpu)
    batches = [batch for _, batch in passes.batches(16, gpu)]
    steps = [(batch, passes.random_qkv(len(batch.slot_T), SHAPES[0][0], cache.layers[0], gpu, 0)) for batch in batches]
    for step in steps:  # afterwards everything is compiled and the heads are known
        attended(attn, step)
    no_waiting()
    for step in steps:
        attended(attn, step)


def latents(widths: Widths, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(widths.layers("target", 1, dtype), passes.num_pages(16), 16, device)


@pytest.mark.parametrize("widths", LATENTS, ids=str)
def test_every_pass_over_latents_is_torchs_within_rounding(widths: Widths, gpu: torch.device) -> None:
    cache, wide = latents(widths, gpu), latents(widths, gpu, torch.float32)
    tested = choose("auto", cache, "target", gpu)
    assert isinstance(tested, FlashInferAttention)
    reference = TorchAttention(wide, "target")
    for where, out, expected in latent_passes.run_all(tested, cache, reference, wide, "target", widths):
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            out.float(), expected, rtol=2e-2, atol=2e-2 * scale, msg=lambda text, where=where: f"{where}: {text}"
        )


@pytest.mark.parametrize("rows", [5, 41])
def test_no_row_of_latents_loses_its_last_key(rows: int, gpu: torch.device) -> None:
    """20 heads, as they are, do not divide a tile: rows at its end would lose the newest key at some lengths. Here that
    key is all that a row sees of any weight, so that its loss is plain."""
    widths = LATENTS[2]
    cache, wide = latents(widths, gpu), latents(widths, gpu, torch.float32)
    tested, reference = FlashInferAttention(cache, "target", gpu), TorchAttention(wide, "target")
    up = widths.projection(torch.bfloat16, gpu)
    wide_up = widths.projection(torch.bfloat16, gpu).float()
    for start in range(60, 133):
        batch = Batch.pack([Span([0] * rows, start, list(range(1, 20)), 0)], device=gpu)
        drawn = widths.rows(rows, up, seed=start)
        q_TNH, kept_TE = drawn.q_TNH.clone(), drawn.kept_TE.clone()
        q_TNH[..., -widths.rotated :] = 10 * kept_TE[:, None, -widths.rotated :]  # each row asks for its own key
        for backend, dtype, of in ((tested, torch.bfloat16, up), (reference, torch.float32, wide_up)):
            backend.plan(batch)
            out = backend.attend_latent(0, LatentRows(q_TNH.to(dtype), kept_TE.to(dtype), of, latent_passes.SCALE))
            if backend is tested:
                found = out.float()
        torch.testing.assert_close(found, out, rtol=2e-2, atol=2e-2 * float(out.abs().max()), msg=f"from {start}")


def test_latents_planned_far_ahead_of_the_device(gpu: torch.device, no_waiting: Callable[[], None]) -> None:
    """As for keys and values: plans run ahead of a busy device without waiting for it, and nothing changes by it."""
    widths = LATENTS[0]
    up = widths.projection(torch.bfloat16, gpu)
    busy = torch.randn(4096, 4096, device=gpu)
    pages = [list(range(1, 41)), list(range(41, 81))]
    steps = []
    for start, rows in zip(range(0, 240, 4), itertools.cycle((1, 4)), strict=False):
        spans = [Span([0] * rows, start + 100 * i, pages[i], i) for i in range(2)]
        steps.append((Batch.pack(spans, device=gpu), widths.rows(2 * rows, up, seed=start)))

    def run(between: Callable[[], object]) -> list[Tensor]:
        cache = latents(widths, gpu)
        attn = FlashInferAttention(cache, "target", gpu)
        results = []
        for batch, rows in steps:
            attn.plan(batch)
            results.append(attn.attend_latent(0, rows))
            between()
        return results

    waiting = run(torch.cuda.synchronize)  # afterwards everything is compiled
    no_waiting()
    ahead = run(lambda: [busy @ busy for _ in range(5)])
    torch.cuda.set_sync_debug_mode("default")
    for step, (first, second) in enumerate(zip(waiting, ahead, strict=True)):
        assert torch.equal(first, second), f"pass {step}"


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_a_whole_model(kind: str, gpu: torch.device, tmp_path: Path) -> None:
    """Prefill, a chunk, decode, verify and verify again: as near to the float32 model as torch in bfloat16."""
    if kind == "llama":
        path = tiny.llama(tmp_path / "model", head_dim=64, hidden_size=128, intermediate_size=256)
    else:  # without experts: which are chosen hangs on rounding
        widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        path = tiny.deepseek(tmp_path / "model", hidden_size=128, first_k_dense_replace=2, **widths)
    pages = [[9, 3, 17, 5], [1, 20, 4, 11]]
    texts = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(dtype: torch.dtype, name: str) -> Tensor:
        model = load(Checkpoint(path), dtype, gpu)
        cache = KVCache(model.kv_layers("target"), 21, device=gpu)
        attn = choose(name, cache, "target", gpu)
        parts = []
        for ranges in [
            ((0, 30), (0, 7)),
            ((30, 41), (7, 8)),
            ((41, 42), (8, 9)),
            ((42, 47), (9, 14)),
            ((44, 49), (10, 15)),
        ]:
            spans = [Span(texts[i][a:b], a, pages[i], i) for i, (a, b) in enumerate(ranges)]
            batch = Batch.pack(spans, device=gpu)
            attn.plan(batch)
            parts.append(model.logits(model(batch, attn).final_TD).float())
        return torch.cat(parts)

    exact = logits(torch.float32, "torch")
    torchs = (logits(torch.bfloat16, "torch") - exact).abs()
    ours = (logits(torch.bfloat16, "flashinfer") - exact).abs()
    assert float(ours.mean()) <= 1.5 * float(torchs.mean())
    assert float(ours.max()) <= 3 * float(torchs.max())
