"""SamplingBatch: rows with different requests in one batch, penalties inside a block, reduced vocabularies, drawing."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specctl.errors import RequestError, UsageError
from specctl.sampling import batch as batch_module
from specctl.sampling import noise, process
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.params import Accept, SamplingParams

V = 30


def state(
    params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 2), output: tuple[int, ...] = (3,), key: int = 5
) -> SequenceState:
    return SequenceState(params, key, prompt, output, params.acceptance)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        seed=rng.choice([None, 3]),
    )


def transformers_chain(p: SamplingParams) -> LogitsProcessorList:
    """In the order of its generate()."""
    chain = LogitsProcessorList()
    if p.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature not in (0, 1):
        chain.append(TemperatureLogitsWarper(p.temperature))
    if p.temperature and p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.temperature and p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.temperature and p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    return chain


@pytest.mark.parametrize("seed", range(20))
def test_mixed_rows_equal_transformers_row_by_row(seed: int) -> None:
    """Everything but presence and frequency penalties, which transformers has not."""
    rng = random.Random(seed)
    texts = [tuple(rng.choices(range(V), k=rng.randint(1, 6))) for _ in range(9)]
    params = []
    for _ in texts:
        p = random_params(rng)
        params.append(SamplingParams(**{**vars(p), "presence_penalty": 0.0, "frequency_penalty": 0.0}))
    logits = randn(9, 1, V, seed=seed)
    batch = SamplingBatch([state(p, text[:1], text[1:]) for p, text in zip(params, texts, strict=True)])
    ours = batch.scores(logits)
    for b, (p, text) in enumerate(zip(params, texts, strict=True)):
        theirs = transformers_chain(p)(torch.tensor([text]), logits[b].clone())
        torch.testing.assert_close(ours[b].log_softmax(-1), theirs.log_softmax(-1), rtol=1e-9, atol=1e-9)


def penalised(logits: Tensor, p: SamplingParams, prompt: list[int], output: list[int], ids: list[int]) -> list[float]:
    """A row's logits, token by token."""
    found = []
    for column, token in enumerate(ids):
        value = float(logits[column])
        if token in prompt or token in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        times = Counter(output)[token]
        value -= p.frequency_penalty * times + p.presence_penalty * (times > 0)
        found.append(value)
    return found


PENALTIES = SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=-0.3)


@given(st.data())
def test_penalties_count_the_block_before_each_row(data: st.DataObject) -> None:
    """Against a count by hand, on the whole vocabulary and on a shuffled part of it."""
    tokens = st.integers(0, V - 1)
    prompt = data.draw(st.lists(tokens, min_size=1, max_size=5))
    output = data.draw(st.lists(tokens, max_size=5))
    ids = data.draw(st.sampled_from([None, list(range(V))[::-3], [4, 2, 9, 7, 1, 0]]))
    columns = list(range(V)) if ids is None else ids
    block = data.draw(st.lists(st.sampled_from(columns), max_size=4))
    ids_V = None if ids is None else torch.tensor(ids)
    batch = SamplingBatch([state(PENALTIES, tuple(prompt), tuple(output))])
    block_BK = torch.tensor([block], dtype=torch.int64)
    logits = randn(1, len(block) + 1, len(columns))
    if block:
        scores = batch.scores(logits, block_BK, ids_V)
        for m in range(len(block) + 1):
            expected = penalised(logits[0, m], PENALTIES, prompt, output + block[:m], columns)
            assert scores[0, m].tolist() == pytest.approx(expected)
    slot = batch.scores(logits[:, -1:], block_BK, ids_V)  # one row after all of the block, as a draft asks
    assert slot[0, 0].tolist() == pytest.approx(penalised(logits[0, -1], PENALTIES, prompt, output + block, columns))


def test_penalties_of_a_sequence_do_not_touch_its_neighbours() -> None:
    logits = randn(3, 4, V)
    block = torch.tensor([[1, 2, 3]] * 3)
    free = SamplingParams(temperature=1.0)
    mixed = SamplingBatch([state(free), state(PENALTIES), state(SamplingParams())]).scores(logits, block)
    for b, p in enumerate((free, PENALTIES, SamplingParams())):
        alone = SamplingBatch([state(p)]).scores(logits[b : b + 1], block[b : b + 1])
        torch.testing.assert_close(mixed[b].log_softmax(-1), alone[0].log_softmax(-1), rtol=0, atol=1e-12)


def test_greedy_logits_are_left_as_they_are() -> None:
    """Sorting, dividing or copying them would be work for nothing."""
    logits = randn(2, 3, V).bfloat16()
    batch = SamplingBatch([state(SamplingParams(top_k=5, top_p=0.5)), state(SamplingParams(seed=4))])
    assert batch.scores(logits) is logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_processed_in_float32(dtype: torch.dtype) -> None:
    logits = randn(2, 1, V).to(dtype)
    params = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    batch = SamplingBatch([state(params), state(params)])
    assert torch.equal(batch.scores(logits), batch.scores(logits.float()))
    assert batch.scores(logits).dtype == torch.float32
    q = batch.draw_draft(logits[:, 0], 0).prob_BV
    assert q is not None
    assert q.dtype == torch.float32


def test_the_lowest_id_wins_a_tie() -> None:
    logits = torch.zeros(1, 2, V)
    logits[0, 1, 7:] = 1.0
    assert SamplingBatch([state(SamplingParams())]).choose(logits).tolist() == [[0, 7]]


@pytest.mark.parametrize("cells", [1, 2 * V, 2**20])
def test_coupled_rows_choose_by_noise_of_position_and_target_id(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    monkeypatch.setattr(batch_module, "_CPU_CELLS", cells)
    seeded = SamplingParams(temperature=1.0, seed=1)
    states = [state(seeded, key=9), state(SamplingParams()), state(seeded, prompt=(1,) * 8, key=-4)]
    batch = SamplingBatch(states)
    ids = torch.tensor([5, 3, 11, 40, 2])
    scores = randn(3, 3, 5) / 5
    chosen = batch.choose(scores, first=2, ids_V=ids)
    for b in (0, 2):
        for m in range(3):
            at = torch.tensor([states[b].position + 2 + m])
            g = noise.gumbel(torch.tensor([states[b].key]), at, ids)[0]
            assert int(chosen[b, m]) == int((scores[b, m] + g).argmax())
    assert torch.equal(chosen[1], scores[1].argmax(-1))


def test_a_draft_draws_from_the_q_it_reports() -> None:
    p = SamplingParams(temperature=0.8, top_k=6)
    batch = SamplingBatch([state(p, key=k) for k in range(5)])
    logits = randn(5, V)
    drawn = batch.draw_draft(logits, 1, torch.tensor([[4]] * 5))
    expected = (logits / 0.8).masked_fill(logits < logits.topk(6).values[:, -1:], -torch.inf).softmax(-1)
    assert drawn.prob_BV is not None
    torch.testing.assert_close(drawn.prob_BV, expected)
    u = noise.uniform(batch.key_B, batch.position_B + 1, noise.DRAFT)
    assert torch.equal(drawn.token_B, process.draw(expected, u))


def test_deterministic_rows_report_no_q() -> None:
    batch = SamplingBatch([state(SamplingParams()), state(SamplingParams(temperature=1.0, seed=1))])
    drawn = batch.draw_draft(randn(2, V), 0)
    assert drawn.prob_BV is None
    assert drawn.confidence_B is None


@pytest.mark.parametrize(
    "p", [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=2), SamplingParams()]
)
def test_confidence_is_the_best_probability_whatever_is_drawn(p: SamplingParams) -> None:
    logits = randn(40, V)
    batch = SamplingBatch([state(p, key=k) for k in range(40)], min_confidence=0.3)
    confidence = batch.draw_draft(logits, 0).confidence_B
    assert confidence is not None
    torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("n", 0),
        ("stop", ("",)),
        ("logprobs", -1),
        ("k", -1),
    ],
)
def test_a_bad_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_any_64_bit_seed_has_a_key(seed: int) -> None:
    batch = SamplingBatch([state(SamplingParams(temperature=1.0, seed=seed), key=noise.make_key(0, seed, 0))])
    assert 0 <= int(batch.choose(randn(1, 1, V))) < V


def test_acceptance_follows_seed_and_temperature_unless_asked_for() -> None:
    assert SamplingParams(temperature=1.0).acceptance.method == "exact"
    assert SamplingParams(temperature=1.0, seed=1).acceptance.method == "coupled"
    assert SamplingParams(seed=1).acceptance.method == "exact"
    assert SamplingParams(temperature=1.0, seed=1, accept=Accept("exact")).acceptance.method == "exact"


def test_accept_is_read_and_written_alike() -> None:
    for text in ("exact", "coupled", "typical", "threshold=0.25"):
        assert str(Accept.parse(text)) == text
    assert [Accept.parse(t).lossy for t in ("exact", "coupled", "typical", "threshold=1")] == [False, False, True, True]


@pytest.mark.parametrize(
    "text", ["", "exactly", "threshold", "threshold=", "threshold=0", "threshold=1.5", "exact=1", "threshold=x"]
)
def test_a_bad_accept_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="accept"):
        Accept.parse(text)
