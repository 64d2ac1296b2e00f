"""The layers of layers.py, packed and plain, and the memory that a model takes while it is made ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specctl.layers import Embedding, Linear, RMSNorm

MB = 1_000_000
ROOT = Path(__file__).parent.parent
packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def filled(layer: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(layer.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    return layer


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)


@packs
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(33, 70), (576, 192), (576, 1536)])
def test_a_packed_linear_is_the_plain_one_up_to_rounding(inputs: int, outputs: int, bias: bool) -> None:
    layer = filled(Linear(inputs, outputs, bias))
    weight, offset = layer.weight.detach().clone(), layer.bias
    layer.prepare("serve")
    assert "weight" not in dict(layer.named_parameters())
    for count in [*range(65), 512]:
        x = rows(count, inputs)
        found = layer(x)
        assert found.shape == (count, outputs)
        if count:
            truth = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
            plain = (F.linear(x, weight, offset) - truth).abs().max()
            # Both sum in an order of their own: neither is nearer to the truth by more than a small factor.
            assert (found - truth).abs().max() < 4 * plain + 1e-5


@packs
def test_a_packed_linear_takes_rows_that_are_not_side_by_side() -> None:
    layer, x = filled(Linear(48, 20)), rows(9, 96)
    expected = layer(x[::2, ::2])
    layer.prepare("serve")
    torch.testing.assert_close(layer(x[::2, ::2]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_serving_works_in_every_dtype(dtype: torch.dtype) -> None:
    layer, x = filled(Linear(48, 20, bias=True), dtype), rows(5, 48, dtype)
    expected = layer(x)
    layer.prepare("serve")
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=48 * tolerance)


def test_training_leaves_a_linear_as_it_is() -> None:
    layer = Linear(4, 3)
    layer.prepare("train")
    assert layer.state_dict().keys() == {"weight"}
    assert layer.weight.requires_grad


@pytest.mark.parametrize("biases", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_fused_linear_gives_the_outputs_side_by_side(dtype: torch.dtype, biases: tuple[bool, bool]) -> None:
    parts = [filled(Linear(48, outputs, bias), dtype, outputs) for outputs, bias in zip((20, 7), biases, strict=True)]
    x = rows(5, 48, dtype)
    expected = torch.cat([part(x) for part in parts], dim=-1)
    layer = Linear.fused(parts)
    layer.prepare("serve")
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert not any(list(part.parameters()) for part in parts), "the parts still hold their weights"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_serving_linear_refuses_to_be_saved_or_prepared_again(dtype: torch.dtype) -> None:
    layer = filled(Linear(4, 3), dtype)
    layer.prepare("serve")
    with pytest.raises(AssertionError, match="prepared for serving"):
        nn.Sequential(layer).state_dict()
    with pytest.raises(AssertionError, match="prepared for serving already"):
        layer.prepare("train")


def test_rms_norm_takes_the_mean_square_in_float32() -> None:
    layer, x = filled(RMSNorm(64, 1e-5), torch.float64), rows(3, 64, torch.float64) * 1e-3
    truth = layer.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    difference = (layer(x) - truth).abs().max() / truth.abs().max()
    assert layer(x).dtype == torch.float64
    assert 1e-12 < difference < 1e-6


def test_building_on_the_meta_device_imports_nothing_more() -> None:
    """torch.nn.Embedding would import sympy there, which costs seconds and 70 MB."""
    program = (
        "import sys, torch; from specctl.layers import Embedding\n"
        "with torch.device('meta'): Embedding(4, 3)\n"
        "sys.exit('sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    layer = filled(Embedding(4, 3))
    assert torch.equal(layer(torch.tensor([2, 0])), layer.weight[[2, 0]])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
@pytest.mark.parametrize(("stored", "tied"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_loading_takes_hardly_more_memory_than_the_model(stored: torch.dtype, tied: bool, tmp_path: Path) -> None:
    """In anonymous memory: the weights, a packed tied head and 300 MB, of which torch itself takes about 150."""
    config = tiny.base_config(dtype=stored) | {
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": tied,
    }
    tensors = {name: torch.ones(shape, dtype=stored) for name, shape in tiny.shapes(config).items()}
    path = tiny.write(tmp_path / "m", config, tensors, tokenizer=False)
    weights = 4 * sum(tensor.numel() for tensor in tensors.values())
    head = 4 * 32768 * 512 if tied else 0
    del tensors
    command = [sys.executable, str(ROOT / "tests" / "peak_memory.py"), str(path), "float32"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    memory = json.loads(done.stdout)
    assert weights > 200 * MB
    assert memory["looks"] > 20, "too few looks to have seen the peak"
    assert memory["peak"] <= weights + head + 300 * MB
    assert memory["peak"] - memory["before"] <= weights + head + 16 * MB
    # Unless converted, the embedding stays in the mapped file and does not count; the packed rest does.
    assert memory["after"] - memory["before"] >= 0.7 * weights
