"""The scheduler's rules: chunks, riders, a decode-only step between prefill steps, who gives way and who is let in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tiny
from decoding import all_back, engine, greedy_params, model
from fixtures import Make

from specctl.drafts.llama import LlamaDrafter
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.engine import Engine
from specctl.engine.scheduler import DecodeStep, DraftLength, PrefillStep, Scheduler
from specctl.engine.sequence import Sequence, Status
from specctl.kv.pages import PAGE_SIZE, PageTable
from specctl.sampling.params import Accept, SamplingParams


@pytest.fixture(scope="module")
def target(make: Make) -> Any:
    return model(make(tiny.llama, seed=1))


def recorded(e: Engine) -> list[PrefillStep | DecodeStep]:
    """Every step the scheduler hands out from now on."""
    steps: list[PrefillStep | DecodeStep] = []
    schedule = e.scheduler.schedule

    def record() -> PrefillStep | DecodeStep | None:
        step = schedule()
        if step is not None:
            steps.append(step)
        return step

    e.scheduler.schedule = record  # type: ignore[method-assign]
    return steps


def sequence(number: int, length: int, **params: Any) -> Sequence:
    return Sequence(number, 0, SamplingParams(**params), Accept(), [1] * length, 0)


def scheduler(pages: int, max_sequences: int = 4, chunk: int = 32, k: int = 3, draft: int | None = None) -> Scheduler:
    return Scheduler(
        PageTable(pages),
        max_sequences=max_sequences,
        max_length=256,
        chunk=chunk,
        policy=lambda batch, context: DraftLength(k),
        max_k=8,
        draft_max_length=draft,
    )


def admit(s: Scheduler, *sequences: Sequence) -> None:
    """Prefill sequences whole, as the engine would."""
    for each in sequences:
        s.add(each)
    while any(each.status is not Status.DECODING for each in sequences):
        step = s.schedule()
        assert isinstance(step, PrefillStep | DecodeStep)
        for each, stop in step.chunks if isinstance(step, PrefillStep) else []:
            each.cached = stop
            if stop == len(each):
                each.status = Status.DECODING
                each.output.append(1)


def test_prefill_carries_decoding_sequences_and_never_speculates(target: Any) -> None:
    """Requests keep coming: every prefill step takes along, as one plain row, whatever decodes; between two of them
    there is a decode-only step, and that one speculates."""
    e = engine(target, LlamaDrafter(target, tiny.VOCAB), 3, max_sequences=6, chunk=16)
    steps = recorded(e)
    for i in range(10):
        e.add([tiny.BOS, *range(i, i + 20)], greedy_params(25))
    drafted: list[int] = []
    while e.has_work:
        decoding = [s for s in e.scheduler.running if s.status is Status.DECODING]
        before = e.stats.speculation.num_draft_tokens
        e.step()
        step = steps[-1]
        drafted.append(e.stats.speculation.num_draft_tokens - before)
        if isinstance(step, PrefillStep):
            assert step.riders == [s for s in decoding if s.status is not Status.PREEMPTED]
            assert sum(len(s.tokens(0, stop)) for s, stop in step.chunks) > 0
            assert drafted[-1] == 0
        else:
            assert step.sequences == [s for s in decoding if s.status is not Status.PREEMPTED]
    carrying = [isinstance(step, PrefillStep) and bool(step.riders) for step in steps]
    assert sum(carrying) > 5
    for first, second in pairwise(carrying):
        assert not (first and second), "two prefill steps in a row while something decodes"
    speculating = [n > 0 for n, step in zip(drafted, steps, strict=True) if isinstance(step, DecodeStep)]
    assert all(speculating)


def test_a_prefill_step_takes_a_chunk_of_prompts_and_no_more(target: Any) -> None:
    """The rest of a prompt before the next prompt; between the steps, what has begun to decode decodes."""
    e = engine(target, chunk=32)
    steps = recorded(e)
    e.run([([1] * length, greedy_params(5)) for length in (50, 10, 20)])
    taken = [[(s.request_id, stop) for s, stop in step.chunks] for step in steps if isinstance(step, PrefillStep)]
    assert taken == [[(0, 32)], [(0, 50), (1, 10), (2, 4)], [(2, 20)]]
    assert [isinstance(step, PrefillStep) for step in steps[:5]] == [True, True, False, True, False]


def test_slots_are_reserved_for_the_block_and_the_token_after_it() -> None:
    s = scheduler(pages=40)
    first, second = sequence(0, 13), sequence(1, 12, k=0)
    admit(s, first, second)
    step = s.schedule()
    assert isinstance(step, DecodeStep)
    assert step.k == [3, 0]
    # 14 tokens, 3 drafted, one more: past the page. Uniform rows: the other gets as many slots.
    assert [len(each.pages) * PAGE_SIZE for each in (first, second)] == [32, 32]


def test_the_newest_gives_way_and_comes_back_first() -> None:
    s = scheduler(pages=1 + 6)
    old, middle, new = (sequence(i, 20) for i in range(3))
    admit(s, old, middle, new)
    assert s.table.num_free == 0
    old.output += [1] * 12  # 33 tokens: a third page
    waiting = sequence(3, 5)
    s.add(waiting)
    step = s.schedule()
    assert isinstance(step, DecodeStep)
    assert step.sequences == [old, middle]
    assert new.status is Status.PREEMPTED
    assert (new.cached, new.draft_cached, new.pages, new.lane) == (0, 0, [], -1)
    assert list(s.waiting) == [new, waiting]
    assert s.preemptions == 1
    s.check()
    s.release(old)
    for each in (new, waiting):
        assert each.status is not Status.DECODING
    step = s.schedule()
    assert isinstance(step, PrefillStep)
    assert step.chunks[0][0] is new
    s.check()


def test_nobody_is_let_in_without_room_for_its_text_and_a_step() -> None:
    """Let in on less it would only be preempted again; and nobody overtakes it."""
    s = scheduler(pages=1 + 4)
    admit(s, sequence(0, 30))
    large, small = sequence(1, 25), sequence(2, 2)
    s.add(large)
    s.add(small)
    assert isinstance(s.schedule(), DecodeStep)
    assert isinstance(s.schedule(), DecodeStep)
    assert list(s.waiting) == [large, small]


def test_lanes_bound_the_number_of_running_sequences() -> None:
    s = scheduler(pages=100, max_sequences=2)
    sequences = [sequence(i, 4) for i in range(3)]
    admit(s, *sequences[:2])
    s.add(sequences[2])
    assert isinstance(s.schedule(), DecodeStep)
    assert {each.lane for each in sequences[:2]} == {0, 1}
    s.release(sequences[0])
    assert isinstance(s.schedule(), PrefillStep)
    assert sequences[2].lane == 0
    s.check()


@pytest.mark.parametrize(("draft", "length", "k"), [(None, 20, 3), (32, 20, 3), (32, 27, 3), (32, 29, 1), (32, 40, 0)])
def test_k_is_shortened_by_the_context_of_target_and_draft(draft: int | None, length: int, k: int) -> None:
    s = scheduler(pages=40, chunk=64, draft=draft)
    one = sequence(0, length)
    admit(s, one)
    step = s.schedule()
    assert isinstance(step, DecodeStep)
    assert step.k == [k]
    assert s.wants_draft(one) == (k > 0)


def test_releasing_takes_a_sequence_out_of_any_state() -> None:
    s = scheduler(pages=1 + 6, chunk=20)
    decoding, prefilling, waiting = sequence(0, 20), sequence(1, 40), sequence(2, 20)
    admit(s, decoding)
    s.add(prefilling)
    s.schedule()
    s.schedule()
    assert prefilling.status is Status.PREFILLING
    s.add(waiting)
    for each in (prefilling, waiting, decoding):
        s.release(each)
        s.check()
    assert s.table.num_free == 6
    assert s.schedule() is None


def test_aborting_one_of_several_choices_frees_them_all(target: Any) -> None:
    """In whatever states its choices are: some decode, the others still wait."""
    e = engine(target, NgramDrafter(), 2, max_sequences=3, chunk=8)
    other = e.add([tiny.BOS, 9], greedy_params(6))
    aborted = e.add([tiny.BOS, 5, 6], greedy_params(20, temperature=1.0, n=4))
    choices, rest = e.choices(aborted), e.choices(other)
    for _ in range(6):
        e.step()
    states = {s.status for s in choices}
    assert states == {Status.DECODING, Status.WAITING}
    e.abort(aborted)
    e.abort(aborted)
    e.abort(12345)
    assert [s.finish_reason for s in choices] == ["abort"] * 4
    assert sum(e.stats.aborts.values()) == 4
    while e.has_work:
        for output in e.step():
            assert output.request_id == other
    assert len(rest[0].output) == 6
    assert all_back(e)


def test_a_finished_choice_stays_as_it_is_when_its_siblings_are_aborted(make: Make) -> None:
    """One of two choices meets EOS and is done; the abort that follows is only of the other."""
    rows = {last: {0: 0.5, 1: 0.5} for last in range(2)}
    e = engine(model(make(tiny.table, rows=rows, vocab=2, tokenizer=False)), eos_ids=frozenset({1}))
    request = e.add([0], SamplingParams(max_tokens=60, temperature=1.0, n=8))
    choices = e.choices(request)
    while not any(s.finished for s in choices):
        e.step()
    done = [s for s in choices if s.finished]
    e.abort(request)
    assert {s.finish_reason for s in done} == {"stop"}
    assert sum(e.stats.aborts.values()) == 8 - len(done) > 0
    assert all_back(e)
