"""Bugs that others reported of their decoders, replayed on this one: each name says what went wrong there."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from decoding import all_back, chi_square, engine, greedy, greedy_params, llama_draft, model, outputs, tokenizer
from families import FAMILIES, Pair, tables, texts
from fixtures import Make

from specctl.drafts.llama import LlamaDrafter
from specctl.engine.stats import SpeculationCounters
from specctl.errors import RequestError
from specctl.sampling.params import Accept, SamplingParams

A, B, C, D, START = range(5)
X = ord("x")
P = {A: 0.5, B: 0.3, C: 0.15, D: 0.05}
Q = {A: 0.1, B: 0.2, C: 0.3, D: 0.4}


@pytest.fixture(scope="module", params=FAMILIES[:2])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def constant(make: Make, family: str, row: dict[int, float], draft: dict[int, float]) -> Pair:
    """A target that says the same after every token, and so does what drafts."""
    rows, others = (dict.fromkeys((A, B, C, D, START), each) for each in (row, draft))
    return tables(make, family, rows, others, vocab=5)


@pytest.fixture(scope="module")
def random_pair(make: Make, family: str) -> Pair:
    return texts(make, family, max_position_embeddings=64)


@pytest.fixture(scope="module")
def random_target(make: Make) -> Any:
    return make(tiny.llama, seed=1, max_position_embeddings=64)


# Greedy output differs from the target's own: rejected tokens left in the cache, wrong positions


@pytest.mark.parametrize(
    ("text", "ks"), [("hello", (0, 3)), ("z", (1, 5)), ("testing", (3,)), ("the quick brown fox.", (5,))]
)
def test_greedy_output_is_the_targets(random_pair: Pair, text: str, ks: tuple[int, ...]) -> None:
    prompt = (tiny.BOS, *text.encode())
    expected = greedy(random_pair.plain, prompt, 40)
    assert len(set(expected)) > 20
    for k in ks:
        e = engine(model(random_pair.target), random_pair.drafter(), k)
        assert outputs(e.run([(list(prompt), greedy_params(40))])) == [expected]
        rate = e.stats.speculation.acceptance_rate
        assert (rate is None) if k == 0 else (rate is not None and 0 < rate < 1)


# Sampled output does not follow the target: ratio test with an argmax draft, temperature or top-p on one side only,
# resampling from p, a rejected token emitted again


def pooled(
    make: Make, family: str, draft: dict[int, float], draws: int, **params: Any
) -> tuple[list[int], SpeculationCounters]:
    """How often a, b, c and d come in so many draws: requests of 16 tokens, seeds from 0 on, K = 3."""
    pair = constant(make, family, P, draft)
    e = engine(model(pair.target), pair.drafter(), 3, pages=300, max_sequences=100, chunk=1000, check_pages=False)
    seeds = range(draws // 16)
    requests = [([START], greedy_params(16, **{"temperature": 1.0, "seed": seed, **params})) for seed in seeds]
    counts = Counter(token for text in outputs(e.run(requests)) for token in text)
    assert counts.total() == draws
    assert set(counts) <= set(P)
    return [counts[token] for token in P], e.stats.speculation


def likely(counts: list[int], p: list[float]) -> bool:
    """Chi-square below 16.3 at 3 degrees of freedom, as likely at fewer."""
    return chi_square(counts, [sum(counts) * share for share in p], sum(share > 0 for share in p) - 1) > 0.00098


COOL, NUCLEUS = [0.68493, 0.24658, 0.06164, 0.00685], [0.625, 0.375, 0.0, 0.0]


WAYS: list[tuple[dict[int, float], dict[str, Any], list[float]]] = [
    (Q, {"temperature": 0.5}, COOL),
    (Q, {"top_p": 0.8}, NUCLEUS),
    ({D: 1.0}, {}, list(P.values())),
]


@pytest.mark.parametrize(
    ("of", "way", "accept"),
    [
        *(("llama", way, accept) for way in range(3) for accept in (None, Accept("exact"))),
        ("deepseek_v3", 0, Accept("exact")),
        ("deepseek_v3", 1, None),
        ("deepseek_v2", 2, Accept("exact")),
    ],
)
def test_sampled_output_follows_the_target(make: Make, of: str, way: int, accept: Accept | None) -> None:
    draft, params, p = WAYS[way]
    counts, _ = pooled(make, of, draft, 960, accept=accept, **params)
    assert likely(counts, p)


def test_temperature_0_says_the_likeliest(make: Make) -> None:
    counts, _ = pooled(make, "llama", Q, 320, temperature=0.0)
    assert counts == [320, 0, 0, 0]


@pytest.mark.parametrize(
    ("of", "accept", "first", "overall"),
    [
        ("llama", Accept("exact"), 0.50, 0.29),
        ("llama", None, 0.443, 0.242),  # a request's own seed means coupled
        ("deepseek_v3", Accept("exact"), 0.50, 0.29),
    ],
)
def test_acceptance_is_what_the_distributions_allow(
    make: Make, of: str, accept: Accept | None, first: float, overall: float
) -> None:
    """exact: the sum of min(p, q) at every slot. coupled: a little lower, at least (1 - TV) / (1 + TV)."""
    counts, counters = pooled(make, of, Q, 2000, accept=accept)
    assert likely(counts, list(P.values()))
    assert counters.num_draft_tokens == 3 * counters.num_drafts > 2250
    assert counters.accepted_per_position[0] / counters.num_drafts == pytest.approx(first, abs=0.035)
    assert counters.acceptance_rate == pytest.approx(overall, abs=0.025)


# EOS accepted in the middle of a block is not noticed; only the first of several EOS ids stops


def sure(make: Make, family: str, rows: tiny.Rows) -> Pair:
    """What drafts says what the target says."""
    return tables(make, family, rows, rows)


@pytest.mark.parametrize("end", [tiny.END, tiny.UNUSED])
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_nothing_comes_after_an_eos_inside_a_block(make: Make, family: str, end: int, k: int) -> None:
    steps = [X, 65, 66, 67, end, 90, 90]
    pair = sure(make, family, {last: {following: 1.0} for last, following in pairwise(steps)})
    e = engine(
        model(pair.target),
        pair.drafter(),
        k,
        tokens=tokenizer(pair.target),
        eos_ids=frozenset({tiny.UNUSED, tiny.END}),
    )
    [[s], [going_on]] = e.run([([X], SamplingParams(max_tokens=20)), ([X], greedy_params(20))])
    assert s.text is not None
    assert (s.text.text, s.finish_reason, s.output) == ("ABC", "stop", [65, 66, 67, end])
    assert (going_on.finish_reason, going_on.output) == ("length", [65, 66, 67, end] + [90] * 16)


# Log-probabilities 0.0, missing after the first token, or more of them than tokens


@pytest.mark.parametrize("k", [0, 4])
def test_every_token_has_its_logprob(make: Make, family: str, k: int) -> None:
    pair = constant(make, family, P, Q)
    e = engine(model(pair.target), pair.drafter(), k)
    [[s]] = e.run([([START], greedy_params(6, logprobs=2))])
    assert s.output == [A] * 6
    assert len(s.logprobs) == 6
    for entry in s.logprobs:
        assert entry.logprob == pytest.approx(-0.6931, abs=1e-4)
        assert [token for token, _ in entry.top] == [A, B]
        assert [value for _, value in entry.top] == pytest.approx([-0.6931, -1.2040], abs=1e-4)


@pytest.mark.parametrize("k", [0, 4])
def test_logprobs_are_cut_with_the_text_a_stop_string_cuts(make: Make, family: str, k: int) -> None:
    pair = sure(make, family, tiny.chain("xABCDEFGH"))
    e = engine(model(pair.target), pair.drafter(), k, tokens=tokenizer(pair.target))
    [[s]] = e.run([([X], SamplingParams(max_tokens=20, stop=("C",), logprobs=2))])
    assert s.text is not None
    assert (s.text.text, len(s.output), len(s.logprobs), s.counters.emitted_tokens) == ("AB", 3, 3, 3)
    assert all(
        entry.logprob == pytest.approx(0.0, abs=1e-12) and entry.top[0][1] == entry.logprob for entry in s.logprobs
    )


# Look-ahead past the end of the context, and a draft whose context is shorter


def test_a_draft_of_a_shorter_context_stops_drafting_and_harms_nothing(make: Make, random_target: Any) -> None:
    short = llama_draft(make(tiny.near, of=make(tiny.llama, seed=1, max_position_embeddings=32)))
    assert short.max_length == 32
    for length, count, drafts in ((10, 40, True), (20, 20, True), (30, 8, False), (40, 8, False)):
        prompt = (tiny.BOS, *range(1, length))
        e = engine(model(random_target), short, 5, chunk=16)
        [[s]] = e.run([(list(prompt), greedy_params(count))])
        assert s.output == greedy(random_target, prompt, count)
        assert s.finish_reason == "length"
        assert (s.counters.num_drafts > 0) == drafts
        assert s.draft_cached <= 32
        assert all_back(e)


def test_a_short_draft_beside_a_batch_mate_that_still_drafts(make: Make, random_target: Any) -> None:
    """Rows are uniform, so the draft's pass holds rows beyond its own context, which nobody may read."""
    short = llama_draft(make(tiny.near, of=make(tiny.llama, seed=1, max_position_embeddings=32)))
    prompts = [(tiny.BOS, *range(1, length)) for length in (58, 4, 31)]
    e = engine(model(random_target), short, 5)
    found = e.run([(list(p), greedy_params(n)) for p, n in zip(prompts, (6, 20, 20), strict=True)])
    assert outputs(found) == [greedy(random_target, p, n) for p, n in zip(prompts, (6, 20, 20), strict=True)]
    assert [s.counters.num_drafts > 0 for [s] in found] == [False, True, False]


@pytest.mark.parametrize("k", [0, 5])
def test_the_context_holds_exactly_what_it_says(random_pair: Pair, k: int) -> None:
    e = engine(model(random_pair.target), random_pair.drafter(), k)
    prompt = (tiny.BOS, *range(1, 61))
    for max_tokens in (3, 10):
        [[s]] = e.run([(list(prompt), greedy_params(max_tokens))])
        assert (s.output, s.finish_reason) == (greedy(random_pair.plain, prompt, 3), "length")
    for length in (64, 80):
        with pytest.raises(RequestError, match=f"{length} tokens.*64"):
            e.add([1] * length, SamplingParams())
    [[s]] = e.run([([tiny.BOS, 5], greedy_params(4))])
    assert len(s.output) == 4


# Padded vocabularies: ids that no tokenizer has are proposed or emitted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_rows_of_the_draft_are_never_proposed(make: Make, random_target: Any, temperature: float) -> None:
    """Its own logits there are huge; cut off, it is the target and always right."""
    padded = model(make(tiny.padded, of=random_target))
    assert padded.config.vocab_size == 272
    e = engine(model(random_target), LlamaDrafter(padded, tiny.VOCAB), 3)
    prompt = (tiny.BOS, *b"hello")
    [[s]] = e.run([(list(prompt), greedy_params(24, temperature=temperature))])
    assert e.stats.speculation.acceptance_rate == 1
    assert max(s.output) < tiny.VOCAB
    if temperature == 0:
        assert s.output == greedy(random_target, prompt, 24)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_target_with_more_rows_than_the_draft_can_say_them_all(make: Make, seed: int | None) -> None:
    """Half of its probability lies beyond the draft's columns: reached through the residual, or by the shared noise."""
    rows = {last: {0: 0.3, 1: 0.2, 4: 0.5} for last in range(5)}
    target = make(tiny.table, rows=rows, vocab=5, tokenizer=False)
    draft = make(tiny.table, rows={last: {0: 0.5, 1: 0.5} for last in range(5)}, vocab=5, tokenizer=False)
    e = engine(model(target), LlamaDrafter(model(draft), 4), 2, max_sequences=100, chunk=500, pages=400)
    params = [greedy_params(20, temperature=1.0, seed=None if seed is None else i) for i in range(60)]
    counts = Counter(token for text in outputs(e.run([([0], p) for p in params])) for token in text)
    assert chi_square([counts[i] for i in (0, 1, 4)], [360, 240, 600], 2) > 0.00098
    assert e.stats.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "seed": 1, "logprobs": 1}]
)
def test_half_precision_models_decode(random_target: Any, dtype: torch.dtype, params: dict[str, Any]) -> None:
    """A draft that is the target is right nearly always: the same rows in another pass round differently."""
    e = engine(model(random_target, dtype), llama_draft(random_target, dtype), 3, max_sequences=3)
    found = e.run([([tiny.BOS, *text], greedy_params(20, **params)) for text in (b"one", b"two and", b"three")])
    assert [len(text) for text in outputs(found)] == [20] * 3
    rate = e.stats.speculation.acceptance_rate
    assert rate is not None
    assert rate > 0.8
