"""The counter noise: that it is the hash it says it is, uniform, independent across keys, positions and purposes."""

from __future__ import annotations

import math

import pytest
import torch
from decoding import ALPHA, chi_square, kolmogorov
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specctl.sampling import noise

INT64 = st.integers(-(2**63), 2**63 - 1)
N = 20_000
KS_LIMIT = 2.7


def mix(h: int) -> int:
    """SplitMix64's output function, on Python's unbounded integers."""
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) % 2**64
    return h ^ (h >> 31)


def hashed(*words: int) -> int:
    h = 0
    for word in words:
        h = mix((h + word + 0x9E3779B97F4A7C15) % 2**64)
    return h


def hashed_from(key: int, *words: int) -> int:
    h = key % 2**64
    for word in words:
        h = mix((h + word + 0x9E3779B97F4A7C15) % 2**64)
    return h


def row(value: int) -> Tensor:
    return torch.tensor([value])


def test_the_hash_is_splitmix64() -> None:
    """The published first outputs for seed 1234567."""
    outputs = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    golden = 0x9E3779B97F4A7C15
    assert [hashed((1234567 + i * golden) % 2**64) for i in range(4)] == list(outputs)
    assert [noise.make_key(1234567 + i * golden) % 2**64 for i in range(4)] == list(outputs)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_a_key_is_the_hash_of_its_words_whatever_their_size(words: list[int]) -> None:
    key = noise.make_key(*words)
    assert -(2**63) <= key < 2**63
    assert key % 2**64 == hashed(*words)


@given(INT64, INT64, st.sampled_from([noise.DRAFT, noise.ACCEPT, noise.DEFINITE]))
def test_wrapping_int64_arithmetic_gives_the_hash(key: int, position: int, purpose: int) -> None:
    u = noise.uniform(row(key), row(position), purpose)
    assert u.dtype == torch.float64
    assert u.item() == (hashed_from(key, position, purpose) >> 11) * 2.0**-53


@given(INT64, st.integers(0, 2**31), st.lists(st.integers(0, 2**20), min_size=1, max_size=5))
def test_gumbel_noise_is_looked_up_by_token_id(key: int, position: int, ids: list[int]) -> None:
    g = noise.gumbel(row(key), row(position), torch.tensor(ids))[0]
    for value, token in zip(g.tolist(), ids, strict=True):
        u = ((hashed_from(key, position, token) >> 11) + 0.5) * 2.0**-53
        assert value == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-12)


def streams() -> dict[str, Tensor]:
    """Numbers that must look independent, each along another of the things that key them."""
    position = torch.arange(N)
    keys = torch.tensor([noise.make_key(0, 7, choice) for choice in range(N)])
    raw_keys = torch.arange(N)  # keys that differ in one bit or few
    along = {
        f"positions, purpose {p}": noise.uniform(row(3).expand(N), position, p)
        for p in range(noise.DRAFT - 2, noise.DRAFT + 1)
    }
    return along | {
        "choices": noise.uniform(keys, row(5).expand(N), noise.ACCEPT),
        "neighbouring keys": noise.uniform(raw_keys, row(5).expand(N), noise.ACCEPT),
        "token ids": torch.exp(-torch.exp(-noise.gumbel(row(11), row(5), position)))[0],
        "positions of a token": torch.exp(-torch.exp(-noise.gumbel(row(11).expand(N), position, row(42))))[:, 0],
    }


@pytest.mark.parametrize("name", list(streams()))
def test_numbers_are_uniform_in_value_and_from_one_to_the_next(name: str) -> None:
    u = streams()[name]
    assert bool(((u >= 0) & (u < 1)).all())
    assert kolmogorov(u) < KS_LIMIT
    assert together(u[:-1], u[1:]) > ALPHA


def together(a: Tensor, b: Tensor, cells: int = 16) -> float:
    """p-value of a table of 16 x 16 cells being that of independent uniform pairs."""
    index = (a * cells).long().clamp(max=cells - 1) * cells + (b * cells).long().clamp(max=cells - 1)
    counts = torch.bincount(index, minlength=cells * cells).double()
    return chi_square(counts.tolist(), [len(a) / cells**2] * cells**2, cells**2 - 1)


def test_the_purposes_of_a_position_are_independent() -> None:
    position = torch.arange(N)
    key = row(noise.make_key(0, 1, 0)).expand(N)
    other = row(noise.make_key(0, 1, 1)).expand(N)
    draft, accept, definite = (noise.uniform(key, position, p) for p in (noise.DRAFT, noise.ACCEPT, noise.DEFINITE))
    token = torch.exp(-torch.exp(-noise.gumbel(key, position, row(17))))[:, 0]
    pairs = [(draft, accept), (accept, definite), (draft, definite), (accept, token), (definite, token)]
    pairs += [(accept, noise.uniform(other, position, noise.ACCEPT)), (draft[1:], definite[:-1])]
    assert min(together(a, b) for a, b in pairs) > ALPHA


def test_the_purposes_collide_with_no_token_id() -> None:
    purposes = {noise.DRAFT, noise.ACCEPT, noise.DEFINITE}
    assert len(purposes) == 3
    assert max(purposes) < 0


def test_numbers_have_53_bits() -> None:
    u = noise.uniform(row(1).expand(N), torch.arange(N), noise.ACCEPT) * 2.0**53
    bits = u.long()
    assert torch.equal(bits.double(), u)
    for bit in range(53):
        ones = int(((bits >> bit) & 1).sum())
        assert abs(ones - N / 2) < 5 * math.sqrt(N) / 2, bit


def test_the_best_of_score_plus_noise_follows_the_distribution() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    g = noise.gumbel(row(9).expand(N), torch.arange(N), torch.arange(4))
    counts = torch.bincount((p.log() + g).argmax(-1), minlength=4)
    assert chi_square(counts.tolist(), (p * N).tolist(), 3) > ALPHA


@pytest.mark.parametrize("top", [0, 1, 2**52, 2**53 - 1])
def test_no_hash_gives_noise_that_wins_from_a_forbidden_token(monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    """Rounding may make the noise -inf, which loses, but never +inf or NaN: -inf + inf would be chosen by argmax."""
    monkeypatch.setattr(noise, "_top53", lambda h: torch.full_like(h, top))
    g = noise.gumbel(row(1), row(1), torch.arange(3))
    assert bool((g < 38).all())
    scores = torch.tensor([-torch.inf, 0.0, -torch.inf]) + g
    assert not bool(scores.isnan().any())
