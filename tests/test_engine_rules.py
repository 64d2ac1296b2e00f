"""What ends a text, what is counted, who drafts how much: the engine's rules, on texts that are known in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from decoding import all_back, engine, greedy, greedy_params, llama_draft, model, outputs, tokenizer
from families import FAMILIES, Pair, tables, texts
from fixtures import Make

from specctl.checkpoint import Checkpoint
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.engine import Engine
from specctl.engine.output import Output
from specctl.engine.scheduler import DraftLength
from specctl.engine.sequence import Sequence
from specctl.errors import CapacityError, NumericalError, RequestError
from specctl.models import load
from specctl.sampling.params import SamplingParams

X = [tiny.BOS, ord("x")]
ALPHABET = "ABCDEFGH"
KS = (0, 1, 2, 3, 5, 8)
CASES = [*(("llama", k) for k in KS), *(("deepseek_v3", k) for k in (0, 3, 8))]


@pytest.fixture(params=FAMILIES[:2])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def alpha(make: Make, family: str) -> Pair:
    """x, then A to H, then the end; what drafts is never wrong."""
    rows = tiny.chain("x" + ALPHABET)
    return tables(make, family, rows, rows, max_position_embeddings=64)


@pytest.fixture
def slip(make: Make, family: str) -> Pair:
    """The same, but what drafts thinks that B is followed by Z, and Z by Z."""
    rows = tiny.chain("x" + ALPHABET)
    wrong = rows | {ord("B"): {ord("Z"): 1.0}, ord("Z"): {ord("Z"): 1.0}}
    return tables(make, family, rows, wrong, max_position_embeddings=64)


@pytest.fixture
def random_pair(make: Make, family: str) -> Pair:
    return texts(make, family)


@pytest.fixture(scope="module")
def llama(make: Make) -> Path:
    return make(tiny.llama, seed=1)


def chain_engine(pair: Pair, k: int, **options: Any) -> Engine:
    settings = {"eos_ids": frozenset({tiny.END}), "tokens": tokenizer(pair.target)} | options
    return engine(model(pair.target), pair.drafter(), k, **settings)


def answer(e: Engine, params: SamplingParams, prompt: list[int] | None = None) -> tuple[Sequence, list[Output]]:
    """One request's choice, and the outputs it was delivered in."""
    [choice] = e.choices(e.add(prompt or X, params))
    steps = []
    while e.has_work:
        steps += e.step()
    assert all_back(e)
    assert [token for output in steps for token in output.token_ids] == choice.output
    assert [output.finish_reason for output in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == choice.finish_reason
    if choice.text is not None:
        assert "".join(output.text for output in steps) == choice.text.text
    return choice, steps


def shown(choice: Sequence) -> tuple[str, str | None, int]:
    assert choice.text is not None
    return choice.text.text, choice.finish_reason, len(choice.output)


# Ends


@pytest.mark.parametrize(("family", "k"), CASES)
@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_max_tokens_ends_a_text_at_any_place_of_a_block(alpha: Pair, k: int, max_tokens: int) -> None:
    """The ninth token is EOS, which is a stop even where it is also the last that may come."""
    choice, _ = answer(chain_engine(alpha, k), SamplingParams(max_tokens=max_tokens))
    reason = "length" if max_tokens < 9 else "stop"
    assert shown(choice) == (ALPHABET[:max_tokens], reason, min(max_tokens, 9))


@pytest.mark.parametrize(("family", "k"), CASES)
@pytest.mark.parametrize("end", range(1, 9))
def test_any_of_several_eos_ids_ends_a_text_at_any_place_of_a_block(alpha: Pair, k: int, end: int) -> None:
    e = chain_engine(alpha, k, eos_ids=frozenset({tiny.END, tiny.UNUSED, ord(ALPHABET[end - 1])}))
    choice, _ = answer(e, SamplingParams(max_tokens=30))
    assert shown(choice) == (ALPHABET[: end - 1], "stop", end)


@pytest.mark.parametrize(("family", "k"), CASES)
def test_ignore_eos_goes_on(alpha: Pair, k: int) -> None:
    choice, _ = answer(chain_engine(alpha, k), greedy_params(14))
    assert choice.finish_reason == "length"
    assert choice.output[:9] == [*ALPHABET.encode(), tiny.END]
    assert len(choice.output) == 14


@pytest.mark.parametrize(("family", "k"), CASES)
@pytest.mark.parametrize("stop", [("A",), ("D",), ("CDE",), ("H",), ("FG", "GH"), ("zz", "BC")])
def test_stop_strings_cut_at_any_place_of_a_block(alpha: Pair, k: int, stop: tuple[str, ...]) -> None:
    first = min((s for s in stop if s in ALPHABET), key=lambda s: ALPHABET.index(s) + len(s))
    until = ALPHABET.index(first) + len(first)
    choice, _ = answer(chain_engine(alpha, k), SamplingParams(max_tokens=30, stop=stop))
    assert shown(choice) == (ALPHABET[: until - len(first)], "stop", until)
    choice, _ = answer(chain_engine(alpha, k), SamplingParams(max_tokens=30, stop=stop, include_stop=True))
    assert shown(choice) == (ALPHABET[:until], "stop", until)


@pytest.mark.parametrize("k", [0, 4])
def test_stop_beats_length_on_the_same_token(alpha: Pair, k: int) -> None:
    choice, _ = answer(chain_engine(alpha, k), SamplingParams(max_tokens=4, stop=("D",)))
    assert shown(choice) == ("ABC", "stop", 4)


@pytest.mark.parametrize(("family", "k"), CASES)
@pytest.mark.parametrize("length", [60, 61, 62, 63])
def test_the_context_ends_a_text_and_shortens_the_last_blocks(random_pair: Pair, k: int, length: int) -> None:
    prompt = [tiny.BOS, *range(1, length)]
    e = engine(model(random_pair.target), random_pair.drafter(), k, max_length=64)
    [[choice]] = e.run([(prompt, greedy_params(30))])
    assert choice.output == greedy(random_pair.plain, tuple(prompt), 64 - length)
    assert choice.finish_reason == "length"
    assert len(choice.counters.drafted_per_position) == min(k, max(0, 64 - length - 2))
    assert all_back(e)


def test_logprobs_are_the_same_at_every_k_and_cut_with_the_tokens(random_pair: Pair) -> None:
    """Of the target's raw logits, whatever temperature and penalties do."""
    target = model(random_pair.target)
    prompt = [tiny.BOS, *b"logprobs"]
    params = greedy_params(13, temperature=0.7, top_k=8, repetition_penalty=1.3, seed=2, logprobs=3)
    plain, _ = answer(engine(target), params, prompt)
    assert len(plain.logprobs) == 13
    for entry in plain.logprobs:
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert len(entry.top) == 3
        assert entry.logprob <= entry.top[0][1]
    assert any(entry.logprob < entry.top[0][1] for entry in plain.logprobs)
    for k in (1, 2, 3, 5):
        choice, steps = answer(engine(target, random_pair.drafter(), k), params, prompt)
        assert choice.output == plain.output
        assert [e for output in steps for e in output.logprobs] == choice.logprobs
        for ours, theirs in zip(choice.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_only_who_asks_gets_logprobs(alpha: Pair) -> None:
    e = chain_engine(alpha, 3)
    found = e.run([(X, SamplingParams(max_tokens=5, logprobs=n)) for n in (None, 0, 2, 1000)])
    assert [len(s.logprobs) for [s] in found] == [0, 5, 5, 5]
    assert [len(s.logprobs[0].top) for [s] in found[1:]] == [0, 2, tiny.VOCAB]


# Counters


def test_counters_are_those_worked_out_by_hand(slip: Pair) -> None:
    """A comes from prefill. Then, three at a time: B, Z, Z of which B is right, and C; D, E, F all right, and G; H, the
    end, and (after the end any token is as likely, and both say the first) one more, all right, and another. What
    comes after the end was decided but is not emitted."""
    choice, steps = answer(chain_engine(slip, 3), SamplingParams(max_tokens=20))
    assert choice.output == [*ALPHABET.encode(), tiny.END]
    assert [len(output.token_ids) for output in steps] == [1, 2, 4, 2]
    counters = choice.counters
    assert counters.num_drafts == 3
    assert counters.num_draft_tokens == 9
    assert counters.num_accepted_tokens == 1 + 3 + 3
    assert counters.drafted_per_position == [3, 3, 3]
    assert counters.accepted_per_position == [3, 2, 2]
    assert counters.emitted_tokens == 9
    assert counters.acceptance_rate == pytest.approx(7 / 9)
    assert counters.mean_acceptance_length == pytest.approx(1 + 7 / 3)
    assert counters.as_dict()["counts_bonus"] is True


def test_max_tokens_does_not_shorten_the_draft(slip: Pair) -> None:
    """So that the counters agree with engines that count what was verified."""
    choice, _ = answer(chain_engine(slip, 3), SamplingParams(max_tokens=4))
    assert choice.output == list(b"ABCD")
    assert choice.counters.num_draft_tokens == 6
    assert choice.counters.num_accepted_tokens == 4
    assert choice.counters.emitted_tokens == 4


def test_plain_decoding_drafts_nothing(alpha: Pair) -> None:
    choice, _ = answer(chain_engine(alpha, 0), SamplingParams(max_tokens=4))
    assert choice.counters.num_drafts == choice.counters.num_draft_tokens == 0
    assert choice.counters.acceptance_rate is None
    assert choice.counters.mean_acceptance_length is None
    assert choice.counters.emitted_tokens == 4


def test_masked_slots_are_not_counted(alpha: Pair) -> None:
    """Requests with K of their own in one batch: uniform rows, but each is charged what it asked for."""
    e = chain_engine(alpha, 4)
    wanted = [None, 0, 1, 2, 5]
    found = e.run([(X, greedy_params(9, k=k)) for k in wanted])
    assert [s.output for [s] in found] == [found[0][0].output] * 5
    for k, [s] in zip((4, 0, 1, 2, 5), found, strict=True):
        assert s.counters.num_draft_tokens == k * s.counters.num_drafts
        assert s.counters.num_accepted_tokens == s.counters.num_draft_tokens
        assert len(s.counters.drafted_per_position) == k
    assert e.stats.steps_by_k[5] > 0
    assert e.stats.speculation.num_draft_tokens == sum(s.counters.num_draft_tokens for [s] in found)


# The draft length


def test_the_policy_is_asked_by_batch_and_context_and_may_switch_off(random_pair: Pair) -> None:
    """Off above two sequences; those that stay on while others end are caught up and drafted for again."""
    asked = []

    def policy(batch: int, context: float) -> DraftLength:
        asked.append((batch, context))
        return DraftLength(0 if batch > 2 else 3)

    e = engine(model(random_pair.target), random_pair.drafter(), policy, max_sequences=4)
    prompts = [[tiny.BOS, *range(i, i + 9)] for i in range(4)]
    lengths = (6, 12, 30, 40)
    found = e.run([(p, greedy_params(n)) for p, n in zip(prompts, lengths, strict=True)])
    assert outputs(found) == [greedy(random_pair.plain, tuple(p), n) for p, n in zip(prompts, lengths, strict=True)]
    assert set(e.stats.steps_by_k) == {0, 3}
    assert [s.counters.num_drafts > 0 for [s] in found] == [False, False, True, True]
    assert {batch for batch, _ in asked} == {1, 2, 3, 4}
    contexts = [context for batch, context in asked if batch == 1]
    assert contexts == sorted(contexts)
    assert contexts[-1] > 40


def test_k_may_change_at_every_step(random_pair: Pair) -> None:
    for drafter in (random_pair.drafter(), NgramDrafter()):
        lengths = iter([0, 3, 0, 0, 5, 1, 2, 0, 4] * 40)
        e = engine(model(random_pair.target), drafter, lambda batch, context, k=lengths: DraftLength(next(k)), pages=12)
        prompts = [(tiny.BOS, *b"again and again"[: 4 + i]) for i in range(5)]
        found = e.run([(list(p), greedy_params(30)) for p in prompts])
        assert outputs(found) == [greedy(random_pair.plain, p, 30) for p in prompts]
        assert len(e.stats.steps_by_k) > 1


def test_a_request_that_wants_no_draft_has_none_even_alone(random_pair: Pair) -> None:
    e = engine(model(random_pair.target), random_pair.drafter(), 3)
    [[s]] = e.run([(X, greedy_params(10, k=0))])
    assert s.counters.num_drafts == 0
    assert s.draft_cached == 0
    assert set(e.stats.steps_by_k) == {0}


def test_a_confidence_that_is_never_reached_stops_every_draft(random_pair: Pair) -> None:
    target, prompt = model(random_pair.target), (tiny.BOS, *b"sure")
    for least, drafts in ((1.1, False), (0.6, True)):
        e = engine(target, random_pair.drafter(), lambda batch, context, least=least: DraftLength(4, least))
        [[s]] = e.run([(list(prompt), greedy_params(40))])
        assert s.output == greedy(random_pair.plain, prompt, 40)
        assert (s.counters.num_drafts > 0) == drafts
        assert s.counters.num_draft_tokens < 4 * sum(e.stats.steps_by_k.values())


# Requests that cannot be


def test_requests_are_refused_by_name(llama: Path) -> None:
    e = engine(model(llama), NgramDrafter(), 3, max_length=64, pages=4)
    for prompt, params, param, words in (
        ([], {}, "prompt", "empty"),
        ([1, 264], {}, "prompt", "264"),
        ([-1], {}, "prompt", "-1"),
        ([1] * 64, {}, "prompt", "64"),
        ([1] * 80, {}, "prompt", "80.*64"),
        ([1], {"k": 17}, "k", "16"),
        ([1], {"stop": ("a",)}, "stop", "tokenizer"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            e.add(prompt, SamplingParams(**params))
        assert caught.value.param == param
    with pytest.raises(CapacityError, match="4 KV pages and there are 3"):
        e.add([1] * 40, SamplingParams(max_tokens=20))
    assert not e.has_work
    [[s]] = e.run([([1] * 20, greedy_params(10))])
    assert len(s.output) == 10


def test_a_k_without_a_draft_is_refused(llama: Path) -> None:
    with pytest.raises(RequestError, match="at most 0"):
        engine(model(llama)).add([1], SamplingParams(k=1))


@pytest.mark.parametrize("k", [0, 3])
def test_logits_that_are_no_numbers_end_their_request_alone(make: Make, llama: Path, k: int) -> None:
    """One token's embedding is NaN: whoever has said it has nothing to choose from."""
    healthy, poison = [tiny.BOS, *b"hello"], [tiny.BOS, *b"hel\x07"]
    broken = load(Checkpoint(llama), torch.float64, torch.device("cpu"))
    broken.model.embed_tokens.weight.data[7] = torch.nan
    draft = llama_draft(make(tiny.near, of=llama))
    e = engine(broken, draft, k, eos_ids=frozenset(), max_sequences=2)
    [kept] = e.choices(e.add(healthy, greedy_params(12)))
    lost = e.add(poison, greedy_params(12))
    failures = []
    while e.has_work:
        try:
            e.step()
        except NumericalError as error:
            failures.append(error)
    assert [error.request_ids for error in failures] == [{lost}]
    assert "NaN or infinite after 5 tokens" in str(failures[0])
    assert kept.output == greedy(llama, tuple(healthy), 12)
    assert all_back(e)
