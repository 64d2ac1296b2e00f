"""FP8 blocks: bit for bit what the plain definition gives, whatever the shape, and nothing wrong passed over."""

from __future__ import annotations

import pytest
import tiny_deepseek
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl import fp8
from specctl.errors import CheckpointError
from specctl.fp8 import E4M3, Block

EVERY_NUMBER = torch.arange(256, dtype=torch.uint8).view(E4M3)
SHAPES = [(1, 1), (128, 128), (576, 200), (129, 127), (5, 1000), (1000, 3)]


def plain(number: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
    """number[r, c] * scale[r // rows, c // columns], one by one in meaning: indices, no repetition, no views."""
    rows = torch.arange(number.shape[0]) // block.rows
    columns = torch.arange(number.shape[1]) // block.columns
    return number.float() * scale[rows][:, columns]


def random_numbers(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """E4M3 of every bit pattern but NaN."""
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where(raw & 0x7F == 0x7F, torch.zeros_like(raw), raw).view(E4M3)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [Block(), Block(64, 32), Block(1, 128), Block(7, 5)])
@pytest.mark.parametrize("band", [1, 1 << 20])
def test_dequantise(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], block: Block, band: int) -> None:
    monkeypatch.setattr(fp8, "BAND", band)
    number = random_numbers(shape)
    scale = torch.rand(block.grid(shape)) * 1e-3 + 1e-9
    bands = list(fp8.dequantise(number, scale, block))
    assert same_bits(torch.cat(bands), plain(number, scale, block))
    assert len(bands) == (1 if band > 1 else -(-shape[0] // block.rows))


def test_every_number_is_decoded() -> None:
    """All 256, subnormals, both zeros and both NaNs, as torch casts them; from any place in memory."""
    for numbers in (
        EVERY_NUMBER,
        EVERY_NUMBER[:127],
        EVERY_NUMBER[1:127],
        EVERY_NUMBER.view(torch.uint8).flip(0).view(E4M3)[5:90],
    ):
        found = torch.cat(list(fp8.dequantise(numbers[None], torch.ones(1, -(-len(numbers) // 128)), Block())))
        expected = numbers.float()[None]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32))


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantise(shape: tuple[int, int], powers_of_two: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    number, scale = tiny_deepseek.quantise(weight, powers_of_two=powers_of_two)
    found = torch.cat(list(fp8.quantise(weight, Block(), powers_of_two=powers_of_two, name="w")))
    assert same_bits(found, number)
    assert same_bits(fp8.scales(weight, Block(), powers_of_two=powers_of_two, name="w"), scale)
    assert not powers_of_two or bool((torch.frexp(scale).mantissa == 0.5).all())


def test_quantised_weights_come_back() -> None:
    """What dequantisation gives is quantised to the same numbers and scales again."""
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    number, scale = tiny_deepseek.quantise(weight, powers_of_two=True)
    back = torch.cat(list(fp8.dequantise(number, scale, Block())))
    assert same_bits(torch.cat(list(fp8.quantise(back, Block(), powers_of_two=True, name="w"))), number)
    error = (back - weight.float()).abs() / weight.float().abs().clamp(min=1e-2)
    assert error.max() < 0.13  # three bits of mantissa: 1/16, and subnormals


def test_a_block_of_zeros() -> None:
    weight = torch.zeros(130, 4)
    assert torch.equal(fp8.scales(weight, Block(), powers_of_two=False, name="w"), torch.ones(2, 1))
    assert not torch.cat(list(fp8.quantise(weight, Block(), powers_of_two=True, name="w"))).float().any()


@given(st.floats(min_value=2.0**-120, max_value=2.0**120, width=32))
@settings(max_examples=300)
def test_rounding_up_to_a_power_of_two(number: float) -> None:
    found = fp8.round_up_to_power_of_two(torch.tensor(number)).item()
    assert found >= number > found / 2
    assert torch.frexp(torch.tensor(found)).mantissa == 0.5


def test_a_power_of_two_stays() -> None:
    powers = torch.ldexp(torch.ones(200), torch.arange(-100, 100))
    assert torch.equal(fp8.round_up_to_power_of_two(powers), powers)


@pytest.mark.parametrize(
    ("wrong", "word"), [(float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-0.5, "-0.5"), (-0.0, "-0")]
)
def test_scales_that_are_none(wrong: float, word: str) -> None:
    scale = torch.rand(4, 5) + 0.1
    fp8.check_scales(scale, "some.scale")
    scale[2, 3] = wrong
    with pytest.raises(CheckpointError, match=rf"some\.scale has a scale that is {word},"):
        fp8.check_scales(scale, "some.scale")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_none(wrong: float) -> None:
    weight = torch.ones(300, 200)
    weight[299, 199] = wrong
    with pytest.raises(CheckpointError, match=r"some\.weight has a NaN or an infinity"):
        fp8.scales(weight, Block(), powers_of_two=False, name="some.weight")
    with pytest.raises(CheckpointError, match=r"some\.weight"):
        list(fp8.quantise(weight, Block(), powers_of_two=False, name="some.weight"))
