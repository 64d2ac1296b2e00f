"""FP8 checkpoints run as the plain numbers they stand for: DeepSeek's blocks, and the ways Llama comes in FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_deepseek
import torch
from paged import Paged
from torch import Tensor
from transformers import AutoModelForCausalLM

from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.models import CausalLM, load

E4M3 = torch.float8_e4m3fn
IDS = [(37 * i * i + 11 * i) % 256 for i in range(40)]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
Tensors = dict[str, Tensor]
Quantise = Callable[[str, Tensor], tuple[Tensors, Tensor]]
"""A weight's tensors under a scheme, and what they stand for in float32."""


def blocks(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    number, scale = tiny_deepseek.quantise(weight)
    return {name: number, f"{name}_scale_inv": scale}, tiny_deepseek.dequantise(number, scale)


def scaled(suffix: str, by_row: bool, shape: tuple[int, ...] | None, **more: Tensor) -> Quantise:
    """One scale for each row or for all, kept in that shape (None: a column)."""

    def quantise(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = (weight.float().abs().amax(1, keepdim=True) if by_row else weight.float().abs().max()) / 448
        number = (weight.float() / scale).to(E4M3)
        kept = scale if shape is None else scale.reshape(shape)
        extra = {name.replace(".weight", f".{key}"): tensor for key, tensor in more.items()}
        return {name: number, f"{name}{suffix}": kept, **extra}, number.float() * scale

    return quantise


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


ONE = torch.ones(1)
SCHEMES: dict[str, tuple[dict[str, Any], Quantise]] = {
    "blocks": (BLOCKS, blocks),
    "blocks, scale_fmt": (BLOCKS | {"scale_fmt": "ue8m0"}, blocks),
    "a matrix, dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, scaled("_scale", False, (1,))),
    "a matrix, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        scaled("_scale", False, (), input_scale=torch.tensor(0.5)),
    ),
    "a matrix, inverse by name": (
        {"quant_method": "fp8", "weight_block_size": None},
        scaled("_scale_inv", False, ()),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        scaled("_scale", True, None, input_scale_ub=torch.tensor(1200.0)),
    ),
    "compressed, a matrix": (compressed("tensor"), scaled("_scale", False, (1,), input_scale=ONE)),
    "compressed, a row": (compressed("channel"), scaled("_scale", True, None)),
    "compressed, blocks": (
        compressed("block", block_structure=[128, 128]),
        lambda name, weight: (lambda t, plain: ({k.removesuffix("_inv"): v for k, v in t.items()}, plain))(
            *blocks(name, weight)
        ),
    ),
}


def write(path: Path, of: Path, scheme: dict[str, Any], quantise: Quantise) -> tuple[Path, Path]:
    """The checkpoint with its projections in FP8, and a plain one of the numbers they stand for."""
    config, tensors = tiny.read(of)
    fp8: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if tiny_deepseek.is_matrix(name):
            found, plain[name] = quantise(name, tensor)
            fp8 |= found
        else:
            fp8[name] = plain[name] = tensor
    assert any(tensor.dtype == E4M3 for tensor in fp8.values())
    wanted = tiny.write(path / "plain", config, plain)
    return tiny.write(path / "fp8", config | {"quantization_config": scheme}, fp8, shards=2), wanted


def ours(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load(Checkpoint(path), dtype, torch.device("cpu"))


def llama(path: Path) -> Path:
    """Wide enough for more blocks than one, the last of them ragged."""
    return tiny.llama(path, hidden_size=160, intermediate_size=200, num_hidden_layers=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_llama_runs_as_the_numbers_it_stands_for(name: str, tmp_path: Path) -> None:
    fp8, plain = write(tmp_path, llama(tmp_path / "of"), *SCHEMES[name])
    assert torch.equal(Paged(ours(fp8)).run(IDS), Paged(ours(plain)).run(IDS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_numbers_are_multiplied_in_float32_and_then_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    fp8, plain = write(tmp_path, llama(tmp_path / "of"), *SCHEMES["blocks"])
    assert torch.equal(Paged(ours(fp8, dtype)).run(IDS), Paged(ours(plain, dtype)).run(IDS))


@pytest.mark.parametrize("name", ["blocks", "a matrix, dynamic", "compressed, a row"])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_deepseek_runs_as_the_numbers_it_stands_for(model_type: str, name: str, tmp_path: Path) -> None:
    of = tiny.deepseek(tmp_path / "of", model_type=model_type, hidden_size=144, dtype=torch.bfloat16)
    fp8, plain = write(tmp_path, of, *SCHEMES[name])
    found = Paged(ours(fp8)).run(IDS)
    assert torch.equal(found, Paged(ours(plain)).run(IDS))
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_scales_of_an_mtp_layer_are_left_to_the_draft(tmp_path: Path) -> None:
    """As published: the layer is in FP8 like the others, and some scales are in another shard."""
    fp8 = tiny_deepseek.deepseek(tmp_path / "fp8", fp8=True)
    ids = [i % 64 for i in IDS]
    plain = tiny_deepseek.deepseek(tmp_path / "plain", fp8=True, edit=_dequantise)
    assert torch.equal(Paged(ours(fp8)).run(ids), Paged(ours(plain)).run(ids))


def _dequantise(config: dict[str, Any], tensors: Tensors) -> None:
    del config["quantization_config"]
    for name in [name for name, tensor in tensors.items() if tensor.dtype == E4M3]:
        tensors[name] = tiny_deepseek.dequantise(tensors[name], tensors.pop(f"{name}_scale_inv"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "gptq", "bits": 4}, "quantization_config names 'gptq'"),
    "four bits": (compressed("group", num_bits=4, type="int"), "names 'compressed-tensors float-quantized'"),
    "zero points": (compressed("channel", symmetric=False), "names 'compressed-tensors float-quantized'"),
    "packed": (compressed("tensor") | {"format": "pack-quantized"}, "names 'compressed-tensors pack-quantized'"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "names 'compressed-tensors"),
    "a block of one size": (BLOCKS | {"weight_block_size": [128]}, "weight_block_size in quantization_config is"),
    "E5M2": (BLOCKS | {"fmt": "e5m2"}, "fmt in quantization_config is 'e5m2'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_schemes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    scheme, words = REFUSED[name]
    fp8, _ = write(tmp_path, llama(tmp_path / "of"), scheme, blocks)
    with pytest.raises(CheckpointError) as caught:
        ours(fp8)
    assert words in str(caught.value)


WEIGHT = "model.layers.0.self_attn.o_proj.weight"
Edit = Callable[[dict[str, Any], Tensors], object]
DAMAGED: dict[str, tuple[Edit, str]] = {
    "no scale": (lambda c, t: t.pop(f"{WEIGHT}_scale_inv"), f"{WEIGHT} is stored as float8_e4m3fn and has 0 tensors"),
    "two scales": (
        lambda c, t: t.update({f"{WEIGHT}_scale": torch.ones(2, 2)}),
        f"{WEIGHT} is stored as float8_e4m3fn and has 2 tensors",
    ),
    "scales of another grid": (
        lambda c, t: t.update({f"{WEIGHT}_scale_inv": torch.ones(2, 3)}),
        f"{WEIGHT}_scale_inv has shape [2, 3], expected [2, 2]",
    ),
    "a scale that is no number": (
        lambda c, t: t[f"{WEIGHT}_scale_inv"].fill_(float("nan")),
        f"tensor {WEIGHT} has a scale that is nan",
    ),
    "no scheme in the config": (lambda c, t: c.pop("quantization_config"), "_scale_inv is not part of"),
    "a scale without a quantised weight": (
        lambda c, t: t.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}),
        "tensor model.norm.weight_scale_inv is not part of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    fp8, _ = write(tmp_path, llama(tmp_path / "of"), *SCHEMES["blocks"])
    config, tensors = tiny.read(fp8)
    edit, words = DAMAGED[name]
    edit(config, tensors)
    with pytest.raises(CheckpointError) as caught:
        ours(tiny.write(tmp_path / "damaged", config, tensors))
    assert words in str(caught.value)
