"""Logits to scores to tokens: equal to transformers' processors, right at ties and edges, no ruled-out token drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specctl.sampling import process

NO_IDS = torch.zeros(1, 0, dtype=torch.int64)


def rows(count: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def kept(scores: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in scores]


def nucleus(scores: list[float], top_p: float) -> list[int]:
    """Best first, the lowest id first among equals, until what is kept reaches top_p."""
    best = max(scores)
    weights = [math.exp(s - best) for s in scores]
    keep, mass = list[int](), 0.0
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if keep and mass >= top_p * sum(weights) - 1e-9:
            break
        keep.append(i)
        mass += weights[i]
    return sorted(keep)


@pytest.mark.parametrize("vocab", [7, 264, 3000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_each_filter_equals_transformers(vocab: int, spread: float) -> None:
    scores = rows(6, vocab, spread=spread)
    top_k = torch.tensor([1, 2, 5, 50, vocab, vocab + 9])
    ours = process.keep_top_k(scores, top_k, largest=vocab + 9)
    for row, k in enumerate(top_k.tolist()):
        assert torch.equal(ours[row], TopKLogitsWarper(k)(NO_IDS, scores[row : row + 1])[0])
    top_p = torch.tensor([0.001, 0.3, 0.6, 0.9, 0.97, 0.99], dtype=torch.float64)
    ours = process.keep_top_p(scores, top_p)
    for row, p in enumerate(top_p.tolist()):
        assert torch.equal(ours[row], TopPLogitsWarper(p)(NO_IDS, scores[row : row + 1])[0])
    min_p = torch.tensor([0.0001, 0.01, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    ours = process.keep_min_p(scores, min_p)
    for row, p in enumerate(min_p.tolist()):
        assert torch.equal(ours[row], MinPLogitsWarper(p)(NO_IDS, scores[row : row + 1])[0])


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
def test_temperature_equals_transformers(temperature: float) -> None:
    scores = rows(3, 20)
    ours = process.heat(scores, torch.full((3,), temperature, dtype=torch.float64))
    theirs = TemperatureLogitsWarper(temperature)(NO_IDS, scores)
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6, 1e6, 1e300])
def test_no_temperature_is_too_low_or_too_high(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-3e4, 5.0, 4.999, 5.0]], dtype=dtype)
    p = process.heat(logits, torch.tensor([temperature], dtype=torch.float64)).softmax(-1)
    expected = [[0.0, 0.5, 0.0, 0.5]] if temperature < 1 else [[0.25] * 4]
    torch.testing.assert_close(p, torch.tensor(expected, dtype=dtype), atol=0.01, rtol=0)


def test_repetition_penalty_equals_transformers() -> None:
    logits = rows(2, 12)
    ids = torch.tensor([[1, 5, 5], [0, 3, 11]])
    seen = torch.zeros(2, 12, dtype=torch.bool).scatter(1, ids, True)
    ours = process.penalise(logits, seen, torch.zeros(2, 12), repetition=1.7, presence=0.0, frequency=0.0)
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone()))


def test_presence_once_and_frequency_each_time() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64)
    count = torch.tensor([[0, 1, 3, 0]])
    ours = process.penalise(logits, count > 0, count, repetition=1.0, presence=0.5, frequency=0.25)
    assert ours.tolist() == [[0.0, -0.75, -1.25, 0.0]]


def test_tokens_tied_with_the_k_th_stay() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    assert kept(process.keep_top_k(scores, torch.tensor([2]), largest=2)) == [[0, 1, 2]]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.sampled_from([0.05, 0.33, 0.5, 0.77, 0.95]))
def test_the_nucleus_is_the_smallest_set_of_best_tokens(scores: list[int], top_p: float) -> None:
    found = process.keep_top_p(torch.tensor([scores], dtype=torch.float64), torch.tensor([top_p]))
    assert kept(found) == [nucleus([float(s) for s in scores], top_p)]


@pytest.mark.parametrize(
    ("tied", "top_p", "expected"),
    [
        (3000, 0.5, 1500),  # more of them than are looked at first
        (3000, 0.2, 600),  # fewer, but which of the equals were looked at first is chance
        (1024, 0.5, 512),
        (10, 0.5, 5),
    ],
)
def test_among_equals_the_lowest_ids_are_in_the_nucleus(tied: int, top_p: float, expected: int) -> None:
    scores = torch.full((2, 3000), -torch.inf, dtype=torch.float64)
    scores[0, -tied:] = 1.0
    scores[1, 7] = 5.0  # a row that needs no second look beside one that may
    found = kept(process.keep_top_p(scores, torch.tensor([top_p, top_p])))
    assert found == [list(range(3000 - tied, 3000 - tied + expected)), [7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decimal_edges_fall_where_they_are_written(dtype: torch.dtype) -> None:
    """0.5 + 0.3 fills 0.8 and 0.5 * 0.6 reaches 0.3, in either precision."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=dtype).log()
    for shift in (0.0, 0.3, -7.7):
        assert kept(process.keep_top_p(scores + shift, torch.tensor([0.8], dtype=torch.float64))) == [[0, 1]]
        assert kept(process.keep_min_p(scores + shift, torch.tensor([0.6], dtype=torch.float64))) == [[0, 1]]


def drawn(weights: list[float], u: float) -> int:
    p = torch.tensor([weights], dtype=torch.float64)
    return int(process.draw(p, torch.tensor([u], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 1), (0.2499999, 1), (0.25, 3), (0.9999, 3), (1 - 2**-53, 3), (1.0, 3)],
)
def test_u_picks_the_token_whose_share_holds_it(u: float, token: int) -> None:
    assert drawn([0.0, 0.25, 0.0, 0.75, 0.0], u) == token
    assert drawn([0.0, 1.0, 0.0, 3.0, 0.0], u) == token  # weights need not be normalised


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-17, 0.1, 1 / 3, 1.0, 1e9]), min_size=1, max_size=9).filter(any),
    st.one_of(st.sampled_from([0.0, 0.5, 1 - 2**-53, 1.0]), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_of_no_weight_is_never_drawn(weights: list[float], u: float) -> None:
    assert weights[drawn(weights, u)] > 0


def test_rows_are_drawn_by_their_own_u() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.1, 0.9]])
    assert process.draw(p, torch.tensor([0.4, 0.6, 0.4]).double()).tolist() == [0, 1, 1]
