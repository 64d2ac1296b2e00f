"""A draft that reads hidden states follows every step of its target, or is given up: what it keeps of a text is what a
single pass over it leaves, and how many rows it takes depends on nothing that was accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
import torch
from decoding import all_back, eagle3_draft, engine, greedy_params, llama_draft, model, mtp_draft, outputs
from fixtures import Make
from test_mtp import COUNT, LENGTHS, PROMPTS
from torch import Tensor

from specctl.attention.torch import TorchAttention
from specctl.drafts.head import HeadDrafter
from specctl.engine.engine import Engine
from specctl.engine.scheduler import DraftLength
from specctl.engine.sequence import Sequence, Status
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import Hidden

Pair = tuple[Any, Callable[[], HeadDrafter]]
"""A target, and what makes a draft for it."""


@pytest.fixture(scope="module", params=["llama", "deepseek_v3", "deepseek_v2", "reduced", "eagle3", "reduced eagle3"])
def pair(make: Make, request: pytest.FixtureRequest) -> Pair:
    if request.param.endswith("eagle3"):
        ids = tiny_eagle3.IDS if request.param.startswith("reduced") else None
        path, head = tiny_eagle3.pair(make, ids=ids)
        return path, lambda: eagle3_draft(head, path)
    if request.param == "reduced":
        path = make(tiny.llama, seed=1, num_hidden_layers=1)
        layer = make(tiny_mtp.reduced, of=make(tiny_mtp.mtp, of=path, alone="deepseek"), ids=tiny_eagle3.IDS)
        return path, lambda: mtp_draft(layer, path)
    path = tiny_mtp.with_mtp(make, request.param)
    return path, lambda: mtp_draft(path)


@pytest.fixture(scope="module")
def shallow(make: Make) -> Any:
    return tiny_mtp.with_mtp(make, "llama")


# The draft's cache


def one_shot(e: Engine, drafter: HeadDrafter, tokens: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Keys and values of rows 0..len(tokens) - 2, and what the last row leaves, from one pass of both models."""
    count = len(tokens) - 1
    pages = list(range(1, 2 + count // PAGE_SIZE))
    cache = KVCache([*e.target.kv_layers("target"), *drafter.kv_layers], len(pages) + 1)
    attn = TorchAttention(cache, "target")
    batch = Batch.pack([Span(tokens[:-1], 0, pages, 0)])
    fresh, carry = HeadDrafter(drafter.kind, drafter.model), drafter.new_carry(1)
    fresh.attn = TorchAttention(cache, "draft")
    with torch.inference_mode():
        attn.plan(batch)
        hidden: Hidden = e.target(batch, attn, drafter.taps)
        fresh.catch_up(Batch.pack([Span(tokens[1:], 0, pages, 0)]), hidden, carry)
    layers = [t[1:].flatten(0, 1)[:count] for t in cache.layer("draft", 0)]
    return layers, carry.logits_LV[0], carry.fed_LD[0]


def assert_as_one_shot(e: Engine, drafter: HeadDrafter, s: Sequence) -> None:
    layers, logits, out = one_shot(e, drafter, s.tokens(0, s.draft_cached + 1))
    slots = torch.tensor([s.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(s.draft_cached)])
    for ours, theirs in zip(e.cache.layer("draft", 0), layers, strict=True):
        torch.testing.assert_close(ours.flatten(0, 1)[slots], theirs, rtol=0, atol=1e-9)
    torch.testing.assert_close(e.carry.logits_LV[s.lane], logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(e.carry.fed_LD[s.lane], out, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_the_cache_built_step_by_step_is_that_of_a_single_pass(pair: Pair, sampling: dict[str, Any]) -> None:
    """Through chunks of prompts, riders, rejections, blocks of other lengths, K = 0, and resumption."""
    target, draft = pair
    drafter, now = draft(), [3]
    e = engine(
        model(target), drafter, lambda batch, context: DraftLength(now[0]), pages=13, max_sequences=4, chunk=12, seed=5
    )
    own = {2: 1, 4: 0, 5: 4}
    for i, p in enumerate(PROMPTS):
        e.add(list(p), greedy_params(40, k=own.get(i), **sampling))
    states: dict[Status, int] = dict.fromkeys(Status, 0)
    schedule = (3, 3, 3, 5, 0, 0, 0, 1, 4, 0, 2)
    for step in range(10_000):
        if not e.has_work:
            break
        now[0] = schedule[step // 3 % len(schedule)]
        e.step()
        for s in e.scheduler.running:
            assert s.draft_cached == s.cached
            if s.cached and step % 2 == 0:
                assert_as_one_shot(e, drafter, s)
                states[s.status] += 1
    assert states[Status.DECODING] > 40
    assert states[Status.PREFILLING] > 4
    assert e.stats.preemptions > 0
    assert set(e.stats.steps_by_k) >= {0, 1, 2, 3, 4, 5}


# K = 0


class Counting(HeadDrafter):
    """Notes how many rows of each sequence its passes after the target's take."""

    def __init__(self, inner: HeadDrafter) -> None:
        super().__init__(inner.kind, inner.model)
        self.rows: list[list[int]] = []

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Any) -> None:
        self.rows.append([len(span.tokens) for span in rows.spans])
        super().catch_up(rows, hidden, carry)


def test_it_follows_with_uniform_rows_whatever_was_accepted(shallow: Any) -> None:
    now, drafter = [3], Counting(mtp_draft(shallow))
    e = engine(model(shallow), drafter, lambda batch, context: DraftLength(now[0]), max_sequences=8)
    for p in PROMPTS:
        e.add(list(p), greedy_params(COUNT))
    expected = [list(LENGTHS)]
    e.step()
    for k in (3, 3, 0, 0, 1):
        now[0] = k
        e.step()
        expected.append([k + 1] * len(PROMPTS))
    assert drafter.rows == expected


def test_a_policy_may_give_the_draft_up_for_the_texts_that_meet_its_k_0(shallow: Any) -> None:
    """Those with a length of their own keep it, and so do texts that come later; what is given up is so to its end,
    preempted or not."""
    now, drafter = [DraftLength(2)], Counting(mtp_draft(shallow))
    e = engine(model(shallow), drafter, lambda batch, context: now[0], max_sequences=4, chunk=64, pages=13)
    first = [
        e.choices(e.add(list(p), greedy_params(60, k=k)))[0] for p, k in zip(PROMPTS, (None, None, 3), strict=False)
    ]
    e.step()
    e.step()
    assert drafter.rows[-1] == [4, 4, 4]
    now[0] = DraftLength(0, detach=True)
    e.step()
    assert drafter.rows[-1] == [4]
    assert [s.detached for s in first] == [True, True, False]
    now[0] = DraftLength(2)
    later = e.choices(e.add(list(PROMPTS[4]), greedy_params(30)))[0]
    e.step()
    assert drafter.rows[-1] == [1, 32] or drafter.rows[-1] == [32, 1]
    while e.has_work:
        e.step()
    assert e.stats.preemptions > 0
    assert all_back(e)
    assert [s.counters.num_drafts > 0 for s in (*first, later)] == [True, True, True, True]
    assert first[0].counters.num_drafts == first[1].counters.num_drafts == 1
    assert not later.detached
    again = engine(model(shallow))
    requests = [(list(p), greedy_params(60)) for p in PROMPTS[:3]] + [(list(PROMPTS[4]), greedy_params(30))]
    assert [s.output for s in (*first, later)] == outputs(again.run(requests))


def test_without_detach_and_for_a_request_with_k_0_it_follows(shallow: Any) -> None:
    drafter = Counting(mtp_draft(shallow))
    e = engine(model(shallow), drafter, 0)
    s = e.choices(e.add(list(PROMPTS[0]), greedy_params(5, k=0)))[0]
    while e.has_work:
        e.step()
    assert drafter.rows == [[15], [1], [1], [1], [1]]
    assert not s.detached


def test_a_draft_that_may_lag_is_never_given_up(make: Make) -> None:
    path = make(tiny.llama, seed=1)
    now = [DraftLength(0, detach=True)]
    e = engine(model(path), llama_draft(path), lambda batch, context: now[0])
    s = e.choices(e.add(list(PROMPTS[0]), greedy_params(30)))[0]
    for _ in range(5):
        e.step()
    now[0] = DraftLength(3)
    while e.has_work:
        e.step()
    assert not s.detached
    assert s.counters.acceptance_rate == 1
