"""What a config.json may say: the defaults are those of transformers, and what the code lacks is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig

from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.models import ModelConfig, load

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(model_type: str = "llama", **overrides: Any) -> dict[str, Any]:
    values = tiny.base_config(model_type) | overrides
    return {key: value for key, value in values.items() if value is not tiny.ABSENT}


def read(model_type: str = "llama", **overrides: Any) -> ModelConfig:
    return ModelConfig.read(config(model_type, **overrides), "config.json")


def refusal(model_type: str = "llama", **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(model_type, **overrides)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


OPTIONAL = [
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_parameters",
]


@pytest.mark.parametrize("absent", OPTIONAL)
@pytest.mark.parametrize("model_type", tiny.ARCHITECTURES)
def test_an_absent_key_means_what_it_means_to_transformers(model_type: str, absent: str, tmp_path: Path) -> None:
    values = config(model_type, num_attention_heads=32, hidden_size=128, **{absent: tiny.ABSENT})
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), ModelConfig.read(values, "config.json")
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_no_number_of_key_value_heads_means_one_for_each_head(model_type: str, tmp_path: Path) -> None:
    values = config(model_type, num_key_value_heads=None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.read(values, "").num_kv_heads == AutoConfig.from_pretrained(tmp_path).num_key_value_heads == 4


def test_only_the_families_that_read_a_bias_key_have_the_bias() -> None:
    biases = {
        family: (read(family, **keys).qkv_bias, read(family, **keys).o_bias, read(family, **keys).mlp_bias)
        for family in tiny.ARCHITECTURES
        for keys in [{"attention_bias": True, "mlp_bias": True}]
    }
    assert biases == {
        "llama": (True, True, True),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (True, True, False),
    }


def test_the_spellings_of_a_rotation_read_the_same() -> None:
    values = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20, "truncate": False}
    spelled = [read(**tiny.rope("yarn", spelling, **values)).rope for spelling in ("parameters", "scaling", "type")]
    assert spelled[0] == spelled[1] == spelled[2]
    both = {"rope_parameters": YARN, "rope_scaling": YARN}
    assert read(**both).rope == read(rope_parameters=YARN).rope


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    assert read(rope_parameters=parameters).rope == read(rope_parameters=parameters | {"factor": 4.0}).rope


def test_a_dynamic_rotation_limits_the_length_to_the_shortest_that_any_program_calls_original() -> None:
    dynamic = tiny.rope("dynamic", factor=2.0)
    assert read(**dynamic).max_length == 256
    assert read(**tiny.rope("dynamic", factor=2.0, original_max_position_embeddings=64)).max_length == 64
    assert read(**dynamic, original_max_position_embeddings=32).max_length == 32
    assert read(**tiny.rope("yarn", factor=4.0, original_max_position_embeddings=64)).max_length == 256


@pytest.mark.parametrize(
    ("model_type", "overrides", "accepted"),
    [
        ("mistral", {"sliding_window": tiny.ABSENT}, False),
        ("mistral", {"sliding_window": 64}, False),
        ("mistral", {"sliding_window": None}, True),
        ("llama", {"sliding_window": 64}, False),
        ("llama", {"sliding_window": None}, True),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, True),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, True),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention"] * 2}, True),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, False),
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, False),
    ],
)
def test_only_attention_to_the_whole_text_is_accepted(
    model_type: str, overrides: dict[str, Any], accepted: bool, tmp_path: Path
) -> None:
    if accepted:
        (tmp_path / "config.json").write_text(json.dumps(config(model_type, **overrides)))
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert set(getattr(theirs, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        assert model_type != "mistral" or theirs.sliding_window is None
        read(model_type, **overrides)
    else:
        assert re.search("sliding_window is (64|4096)|layer_types is ", refusal(model_type, **overrides))


def test_a_window_by_default_is_called_so() -> None:
    message = refusal("mistral", sliding_window=tiny.ABSENT)
    assert "sliding_window is 4096 by default: attention with a sliding window is not supported" in message


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("unknown architecture", {"model_type": "gemma2"}, "model_type is 'gemma2'"),
    ("no architecture", {"model_type": tiny.ABSENT}, "model_type is None"),
    ("architecture of another kind", {"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    ("experts", {"num_local_experts": 8}, "num_local_experts is 8, a mixture of experts"),
    ("experts", {"num_experts": 4}, "num_experts is 4, a mixture of experts"),
    ("quantised", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config names 'gptq'"),
    ("quantised", {"quantization_config": "fp8"}, "quantization_config names 'fp8'"),
    ("quantised", {"compression_config": {"format": "pack"}}, "compression_config names None"),
    ("activation", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported, expected silu"),
    ("activation", {"hidden_act": None}, "hidden_act is None"),
    ("softcap", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0"),
    ("multiplier", {"residual_multiplier": 0.2}, r"residual_multiplier is 0\.2"),
    ("partial rotation", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, expected 1\.0"),
    ("partial rotation", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary"),
    ("longrope", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope type 'longrope' is not supp"),
    ("unknown rotation", {"rope_scaling": {"type": "su"}, "rope_parameters": None}, "rope_scaling: rope type 'su'"),
    ("rotation by layer", {"rope_parameters": {"full_attention": YARN}}, "rope_parameters differs by layer type"),
    ("two rotations", {"rope_scaling": YARN | {"factor": 2.0}, "rope_parameters": YARN}, "and rope_scaling differ"),
    ("odd head", {"head_dim": 7}, "head_dim 7 is odd"),
    (
        "uneven heads",
        {"num_attention_heads": 5, "num_key_value_heads": None},
        "hidden_size 32 is no multiple of num_attention_heads 5",
    ),
    ("uneven groups", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
    ("uneven groups", {"num_key_value_heads": 8}, "num_key_value_heads 8 does not divide num_attention_heads 4"),
    ("layer count", {"layer_types": ["full_attention"]}, "layer_types is .*expected a list of 2"),
    ("rotation", {"rope_parameters": "yarn"}, "rope_parameters is 'yarn', expected an object"),
    ("rotation", {"rope_parameters": {"rope_type": "linear"}}, "key factor is missing"),
    ("rotation", {"rope_parameters": {"rope_type": "dynamic"}}, "key factor is missing"),
    ("rotation", {"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "key low_freq_factor is missing"),
    ("rotation", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "expected more than low_freq_factor, 1"),
    ("rotation", {"rope_parameters": YARN | {"factor": 0}}, "factor is 0, expected a number greater than 0"),
    ("rotation", {"rope_parameters": YARN | {"factor": float("inf")}}, "factor is inf, expected a finite number"),
    ("rotation", {"rope_parameters": YARN | {"factor": 10**400}}, "expected a finite number"),
    ("rotation", {"rope_parameters": YARN | {"truncate": 1}}, "truncate is 1, expected true or false"),
    ("rotation", {"rope_parameters": YARN | {"rope_theta": True}}, "rope_theta is True, expected a finite number"),
    ("rotation", {"rope_parameters": YARN | {"original_max_position_embeddings": 2.5}}, "expected a positive integer"),
    ("rotation", {"rope_parameters": None, "rope_theta": 0}, "rope_theta is 0, expected a number greater than 1"),
    ("rotation", {"rope_parameters": None, "rope_theta": "1e4"}, "rope_theta is '1e4', expected a finite number"),
    ("length", {"original_max_position_embeddings": -1}, "original_max_position_embeddings is -1"),
    ("eps", {"rms_norm_eps": 1}, "rms_norm_eps is 1, expected a small positive number"),
    ("eps", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number"),
]


@pytest.mark.parametrize(("overrides", "expected"), [case[1:] for case in UNSUPPORTED], ids=[c[0] for c in UNSUPPORTED])
def test_what_is_not_supported_is_refused_by_name(overrides: dict[str, Any], expected: str) -> None:
    values = config() | overrides
    with pytest.raises(CheckpointError, match=expected):
        ModelConfig.read({key: value for key, value in values.items() if value is not tiny.ABSENT}, "config.json")


SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_a_positive_integer_and_has_no_default(key: str) -> None:
    for value in (True, "32", 0, -4, 32.0, [32]):
        assert f"{key} is {value!r}, expected a positive integer" in refusal(**{key: value})
    for value in (None, tiny.ABSENT):
        assert f"key {key} is missing, expected a positive integer" in refusal(**{key: value})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_a_switch_is_true_or_false(key: str) -> None:
    for value in (1, 0, "false", []):
        assert f"{key} is {value!r}, expected true or false" in refusal(**{key: value})


def test_a_head_may_be_of_any_width_that_is_stated() -> None:
    assert read(num_attention_heads=5, num_key_value_heads=5, head_dim=6).head_dim == 6


def changed(path: Path, changes: dict[str, torch.Tensor | None], **overrides: Any) -> str:
    """The refusal of a checkpoint some of whose tensors are others, or gone."""
    values, tensors = tiny.read(tiny.llama(path / "whole", tokenizer=False, **overrides))
    tensors = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    with pytest.raises(CheckpointError) as caught:
        load(Checkpoint(tiny.write(path / "changed", values, tensors, tokenizer=False)), torch.float32, CPU)
    return str(caught.value).removeprefix(f"{path / 'changed'}: ")


def test_tensors_are_exactly_those_of_the_config(tmp_path: Path) -> None:
    down, bias = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    assert changed(tmp_path / "a", {down: None}) == f"tensor {down} is missing (1 in all)"
    assert changed(tmp_path / "b", {"lm_head.weight": None}) == "tensor lm_head.weight is missing (1 in all)"
    message = f"tensor {bias} is not part of a llama model of 2 layers (1 such tensors)"
    assert changed(tmp_path / "c", {bias: torch.zeros(32)}) == message
    message = f"tensor {down} has shape [64, 32], the config expects [32, 64]"
    assert changed(tmp_path / "d", {down: torch.zeros(64, 32)}) == message
    extra = {"model.layers.2.input_layernorm.weight": torch.ones(32)}
    assert "model.layers.2.input_layernorm.weight is not part of" in changed(tmp_path / "e", extra)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_a_tensor_in_a_number_format_that_needs_scales_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    message = changed(tmp_path, {name: torch.zeros(64, 32).to(dtype)})
    assert message.startswith(f"tensor {name} is stored as {str(dtype).removeprefix('torch.')}: quantised checkpoints")


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path: Path) -> None:
    message = changed(tmp_path, {"lm_head.weight": torch.zeros(tiny.VOCAB, 32)}, tie_word_embeddings=True)
    assert message.startswith("tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight")
