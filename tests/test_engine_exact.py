"""Greedy text is transformers' greedy text, whatever drafts, batches, chunks and pages do; and two checks more.

Text alone cannot show a broken draft cache, which only lowers acceptance. So a draft that is the target must always be
accepted, and a draft's cache built step by step must be the one that a single pass over the same text builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from decoding import all_back, engine, greedy, greedy_params, llama_draft, model, outputs
from fixtures import Make

from specctl.attention.torch import TorchAttention
from specctl.drafts import Drafter
from specctl.drafts.llama import LlamaDrafter
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.engine import Engine
from specctl.engine.scheduler import DraftLength
from specctl.engine.sequence import Sequence, Status
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import CausalLM, Hidden
from specctl.sampling.params import SamplingParams

LENGTHS = (15, 16, 17, 31, 32, 33, 1, 5)  # around the ends of pages
COUNT = 20
KINDS = ("plain", "near", "self", "ngram")


def prompt(index: int, length: int) -> tuple[int, ...]:
    """Text-like: it says some things twice, so that prompt lookup has something to find."""
    return (tiny.BOS, *((7 * index + 3 * (j % 11)) % 256 for j in range(length - 1)))


PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[tiny.llama, tiny.deepseek], ids=["llama", "deepseek"])
def target(make: Make, request: pytest.FixtureRequest) -> Any:
    return make(request.param, seed=1)


@pytest.fixture(scope="module")
def references(target: Any) -> list[list[int]]:
    return [greedy(target, p, COUNT) for p in PROMPTS]


def drafter(kind: str, make: Make, target: Any) -> Drafter | None:
    if kind == "ngram":
        return NgramDrafter()
    path = {"near": make(tiny.near, of=target), "self": target}.get(kind)
    return None if path is None else llama_draft(path)


def design() -> Iterator[tuple[str, int, int, int, int]]:
    """(kind, k, batch, chunk, pages): every kind with every K, and the other three in turn, so that every pair of their
    values comes up. 6 pages hold one text and a little of the next."""
    index = 0
    for kind in KINDS:
        for k in (0,) if kind == "plain" else (0, 1, 2, 3, 5):
            for _ in range(2):
                yield kind, k, (1, 3, 8)[index % 3], (512, 7, 16, 40)[index % 4], (6, 200, 9, 6, 13)[index % 5]
                index += 1


def test_reference_texts_are_no_echo(references: list[list[int]]) -> None:
    assert all(len(set(text)) > COUNT / 2 for text in references)
    assert len({tuple(text) for text in references}) == len(references)


@pytest.mark.parametrize(("kind", "k", "batch", "chunk", "pages"), list(design()))
def test_greedy_text_is_the_reference(
    make: Make, target: Any, references: list[list[int]], kind: str, k: int, batch: int, chunk: int, pages: int
) -> None:
    e = engine(model(target), drafter(kind, make, target), k, pages=pages, max_sequences=batch, chunk=chunk)
    found = e.run([(list(p), greedy_params(COUNT)) for p in PROMPTS])
    assert outputs(found) == references
    assert [s.finish_reason for request in found for s in request] == ["length"] * len(PROMPTS)
    assert all_back(e)
    if batch == 1:
        assert e.stats.preemptions == 0
    elif pages == 6:
        assert e.stats.preemptions > 0
    drafts = e.stats.speculation
    assert drafts.emitted_tokens == COUNT * len(PROMPTS)
    if kind in ("near", "self") and k:
        assert drafts.num_drafts > 0
        assert e.stats.steps_by_k.keys() == {k}
        assert (drafts.acceptance_rate == 1) == (kind == "self")


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}])
@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_that_is_the_target_is_always_right(target: Any, params: dict[str, Any], k: int) -> None:
    """Loaded separately, with its own keys and values: greedy, exact and coupled, after preemption and in chunks."""
    e = engine(model(target), llama_draft(target), k, pages=8, max_sequences=3, chunk=10)
    found = e.run([(list(p), greedy_params(COUNT, **params)) for p in PROMPTS])
    assert e.stats.speculation.acceptance_rate == 1
    assert e.stats.preemptions > 0
    assert all(s.counters.num_accepted_tokens == s.counters.num_draft_tokens > 0 for [s] in found)


# The draft's cache


def one_shot(draft: CausalLM, tokens: list[int]) -> tuple[list[tuple[torch.Tensor, ...]], torch.Tensor]:
    """Keys and values of every layer, and the logits after the last token, from a single pass in a cache of its own."""
    pages = list(range(1, 2 + len(tokens) // PAGE_SIZE))
    cache = KVCache(draft.kv_layers("draft"), len(pages) + 1)
    attn = TorchAttention(cache, "draft")
    batch = Batch.pack([Span(tokens, 0, pages, 0)])
    attn.plan(batch)
    with torch.inference_mode():
        hidden: Hidden = draft(batch, attn)
        logits = draft.logits(hidden.final_TD[-1:])
    return [tuple(t[1:].flatten(0, 1) for t in cache.layer("draft", i)) for i in range(len(cache.layers))], logits[0]


def assert_as_one_shot(e: Engine, owner: str, m: CausalLM, s: Sequence, count: int) -> torch.Tensor:
    """The first `count` slots of a sequence are those of a single pass; its logits."""
    layers, logits = one_shot(m, s.tokens(0, count))
    slots = torch.tensor([s.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(count)])
    for i, expected in enumerate(layers):
        for ours, theirs in zip(e.cache.layer(owner, i), expected, strict=True):
            torch.testing.assert_close(ours.flatten(0, 1)[slots], theirs[:count], rtol=0, atol=1e-9)
    return logits


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_caches_built_step_by_step_are_those_of_a_single_pass(
    make: Make, target: Any, sampling: dict[str, Any]
) -> None:
    """Through rejections, whole blocks, blocks of other lengths, lags at K = 0, catching up, and resumption."""
    draft, now = llama_draft(make(tiny.near, of=target)), [3]
    e = engine(
        model(target), draft, lambda batch, context: DraftLength(now[0]), pages=13, max_sequences=4, chunk=12, seed=5
    )
    own = {2: 1, 4: 0, 5: 4}
    for i, p in enumerate(PROMPTS):
        e.add(list(p), greedy_params(40, k=own.get(i), **sampling))
    checked = lagging = 0
    schedule = (3, 3, 3, 5, 0, 0, 0, 1, 4, 0, 2)
    for step in range(10_000):
        if not e.has_work:
            break
        now[0] = schedule[step // 3 % len(schedule)]
        e.step()
        for s in e.scheduler.running if step % 2 == 0 else []:
            assert_as_one_shot(e, "target", e.target, s, s.cached)
            logits = assert_as_one_shot(e, "draft", draft.model, s, s.draft_cached) if s.draft_cached else None
            if logits is not None and s.draft_cached == len(s):
                torch.testing.assert_close(e.carry[s.lane], logits, rtol=0, atol=1e-9)
                checked += 1
            lagging += s.status is Status.DECODING and s.draft_cached < len(s)
    assert checked > 40
    assert lagging > 20
    assert e.stats.preemptions > 0
    rate = e.stats.speculation.acceptance_rate
    assert rate is not None
    assert 0.2 < rate < 0.9
    assert set(e.stats.steps_by_k) >= {0, 1, 2, 3, 4, 5}


class CountingDrafter(LlamaDrafter):
    """Notes how many rows of each sequence its passes after the target's take."""

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self.rows: list[list[int]] = []

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: torch.Tensor) -> None:
        self.rows.append([len(span.tokens) for span in rows.spans])
        super().catch_up(rows, hidden, carry)


def test_after_a_block_the_draft_runs_over_two_rows_whatever_was_accepted(make: Make, target: Any) -> None:
    """It has run over the accepted tokens while it drafted them."""
    draft = CountingDrafter(model(make(tiny.near, of=target)), tiny.VOCAB)
    e = engine(model(target), draft, 4, max_sequences=8, chunk=1000)
    e.run([(list(p), greedy_params(COUNT)) for p in PROMPTS])
    assert draft.rows[0] == [length + 1 for length in LENGTHS]
    assert all(counts == [2] * len(counts) for counts in draft.rows[1:])
    assert e.stats.speculation.accepted_per_position[3] > 0


def test_a_draft_far_behind_catches_up_a_chunk_at_a_time(target: Any) -> None:
    """What is left undone at K = 0 must not become one pass over everything."""
    now, draft = [0], CountingDrafter(llama_draft(target).model, tiny.VOCAB)
    e = engine(model(target), draft, lambda batch, context: DraftLength(now[0]), max_sequences=2, chunk=8)
    sequences = [e.choices(e.add(list(p), greedy_params(40)))[0] for p in PROMPTS[3:5]]
    while any(len(s.output) < 20 for s in sequences):
        e.step()
    assert draft.rows == []
    now[0] = 3
    while e.has_work:
        e.step()
    assert max(map(max, draft.rows)) == 9
    assert sum(max(counts) > 2 for counts in draft.rows) >= 5
    assert e.stats.speculation.acceptance_rate == 1


def test_a_whole_accepted_block_takes_one_step(target: Any) -> None:
    """A draft that is the target: each step emits K + 1 tokens."""
    e = engine(model(target), llama_draft(target), 4)
    [[s]] = e.run([(list(PROMPTS[0]), SamplingParams(max_tokens=21, temperature=1.0, ignore_eos=True))])
    assert len(s.output) == 21
    assert e.stats.steps_by_k == {4: 4}
