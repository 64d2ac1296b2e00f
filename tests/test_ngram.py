"""Prompt lookup: what it proposes is what followed the last occurrence of the longest matching end of the text."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from decoding import engine, greedy_params, model, outputs
from fixtures import Make
from hypothesis import given
from hypothesis import strategies as st

from specctl.drafts import Draft, OneHot
from specctl.drafts.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter
from specctl.engine.scheduler import DraftLength
from specctl.kv.batch import Batch, Span
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.params import Accept, SamplingParams

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def naive(text: list[int], k: int) -> list[int]:
    """By search: the longest end of 4 to 2 tokens that stands earlier too, at its latest place; the text goes on from
    there, and where it ends so does its continuation, from the front of itself."""
    for n in range(min(MAX_MATCH, len(text) - 1), MIN_MATCH - 1, -1):
        for after in range(len(text) - 1, n - 1, -1):
            if text[after - n : after] == text[-n:]:
                going_on = list(text)
                for i in range(k):
                    going_on.append(going_on[after + i])
                return going_on[len(text) :]
    return []


def rows(text: list[int], start: int, lane: int = 0) -> Batch:
    return Batch.pack([Span(text[start:], start, [], lane)])


def propose(drafter: NgramDrafter, carry: Any, texts: list[list[int]], k: list[int]) -> Draft:
    batch = Batch.pack([Span((0,), len(text), [], lane) for lane, text in enumerate(texts)])
    states = [SequenceState(SamplingParams(), 0, text, (), Accept()) for text in texts]
    return drafter.draft(batch, carry, k, SamplingBatch(states))


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # the later of two
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 2, [3, 6]),  # the longer match before the later one
        ([7, 7, 7], 4, [7, 7, 7, 7]),  # reads on into what it proposes
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([1, 1], 3, []),  # one token is no match
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_proposals(text: list[int], k: int, expected: list[int]) -> None:
    assert naive(text, k) == expected
    drafter = NgramDrafter()
    carry = drafter.new_carry(1)
    drafter.catch_up(rows(text, 0), None, carry)
    draft = propose(drafter, carry, [text], [k])
    assert draft.length == [len(expected)]
    assert draft.token_BK[0].tolist() == expected
    assert isinstance(draft.q, OneHot)


@given(st.data(), texts)
def test_a_text_that_comes_in_pieces_is_searched_as_a_whole(data: st.DataObject, text: list[int]) -> None:
    drafter = NgramDrafter()
    carry = drafter.new_carry(1)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)))) | {len(text)})
    start = 0
    for cut in cuts:
        drafter.catch_up(rows(text[:cut], start), None, carry)
        start = cut
        k = data.draw(st.integers(0, 6))
        assert propose(drafter, carry, [text[:cut]], [k]).token_BK[0].tolist() == naive(text[:cut], k)


@given(st.lists(st.tuples(texts, st.integers(0, 5)), min_size=1, max_size=4))
def test_sequences_do_not_see_each_other_and_are_padded(cases: list[tuple[list[int], int]]) -> None:
    drafter = NgramDrafter()
    carry = drafter.new_carry(len(cases))
    for lane, (text, _) in enumerate(cases):
        drafter.catch_up(rows(text, 0, lane), None, carry)
    draft = propose(drafter, carry, [text for text, _ in cases], [k for _, k in cases])
    expected = [naive(text, k) for text, k in cases]
    assert draft.length == [len(block) for block in expected]
    assert draft.token_BK.shape == (len(cases), max(draft.length))
    assert draft.token_BK.dtype == torch.int64
    for row, block in zip(draft.token_BK.tolist(), expected, strict=True):
        assert row[: len(block)] == block
        assert all(0 <= token <= 2 for token in row)  # some valid id where nothing is proposed


def test_a_lane_that_changes_hands_is_begun_anew() -> None:
    drafter = NgramDrafter()
    carry = drafter.new_carry(1)
    drafter.catch_up(rows([1, 2, 3, 1, 2], 0), None, carry)
    drafter.catch_up(rows([8, 9, 1, 2], 0), None, carry)
    assert propose(drafter, carry, [[8, 9, 1, 2]], [3]).length == [0]


@pytest.mark.parametrize("start", [2, 4])
def test_rows_that_leave_a_gap_or_come_twice_are_a_bug(start: int) -> None:
    drafter = NgramDrafter()
    carry = drafter.new_carry(1)
    drafter.catch_up(rows([1, 2, 3], 0), None, carry)
    with pytest.raises(AssertionError, match="missing or come twice"):
        drafter.catch_up(rows([1, 2, 3, 4, 5], start), None, carry)


class Checked(NgramDrafter):
    """Compares every proposal with the search through the sequence's text as the engine has it."""

    num_checked = num_found = 0

    def draft(self, batch: Batch, carry: Any, k: list[int], sampling: SamplingBatch) -> Draft:
        draft = super().draft(batch, carry, k, sampling)
        for b, state in enumerate(sampling.states):
            expected = naive([*state.prompt, *state.output], k[b])
            if k[b]:
                assert draft.token_BK[b, : draft.length[b]].tolist() == expected
                self.num_checked += 1
                self.num_found += bool(expected)
        return draft


def test_in_the_engine_it_always_knows_the_whole_text(make: Make) -> None:
    """Through lags at K = 0, chunks, riders of prefill steps, and resumption after preemption in another lane."""
    rows = {last: {(last * 2 + i) % 5: (0.7, 0.2, 0.1)[i] for i in range(3)} for last in range(5)}
    target = model(make(tiny.table, rows=rows, vocab=5, tokenizer=False))
    now, drafter = [3], Checked()
    e = engine(target, drafter, lambda batch, context: DraftLength(now[0]), pages=9, max_sequences=4, chunk=10)
    prompts = [[(i * j) % 5 for j in range(9 + 3 * i)] for i in range(6)]
    params = greedy_params(40, temperature=1.0, seed=3)
    choices = [e.choices(e.add(p, params)) for p in prompts]
    step = 0
    while e.has_work:
        now[0] = (3, 3, 0, 0, 5, 1)[step // 4 % 6]
        e.step()
        step += 1
    assert outputs(choices) == outputs(engine(target).run([(p, params) for p in prompts]))
    assert e.stats.preemptions > 0
    assert drafter.num_checked > 60
    assert drafter.num_found > 40
    assert e.stats.speculation.num_accepted_tokens > 0


def test_a_text_that_repeats_itself_is_accepted_whole(make: Make) -> None:
    """Two tokens for ever: every block is right, and a step emits K + 1 tokens."""
    cycle = make(tiny.table, rows={1: {2: 1.0}, 2: {1: 1.0}}, vocab=4, tokenizer=False)
    e = engine(model(cycle), NgramDrafter(), 4)
    [[s]] = e.run([([1, 2, 1, 2], greedy_params(21))])
    assert s.output == [1, 2] * 10 + [1]
    assert e.stats.steps_by_k == {4: 4}
    assert e.stats.speculation.acceptance_rate == 1
