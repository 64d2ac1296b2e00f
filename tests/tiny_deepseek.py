"""Tiny DeepSeek-V3 checkpoints with an MTP layer, laid out as the published ones; and R1 itself, headers only.

What a layer holds is written down here anew, so that the tests do not ask the code under test what it should find.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
INDEX = "model.safetensors.index.json"
E4M3 = torch.float8_e4m3fn
BLOCK = 128
R1_TENSORS, R1_BYTES, R1_SHARDS = 91_991, 688_574_839_360, 163

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 48,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 136,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
R1 = TINY | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
_PLAIN = ("norm.weight", "embed_tokens.weight", "head.weight", "eh_proj.weight", "mlp.gate.weight")


def mtp_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    first = config["num_hidden_layers"]
    return tuple(f"model.layers.{first + index}." for index in range(config["num_nextn_predict_layers"]))


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint without scales, MTP layers last."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    layers = config["num_hidden_layers"]
    for index in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{index}."
        layer = _attention(config)
        layer |= _dense(config) if index < config["first_k_dense_replace"] else _moe(config)
        if index >= layers:
            layer |= {
                "embed_tokens.weight": (vocab, hidden),
                "enorm.weight": (hidden,),
                "hnorm.weight": (hidden,),
                "eh_proj.weight": (hidden, 2 * hidden),
                "shared_head.norm.weight": (hidden,),
                "shared_head.head.weight": (vocab, hidden),
            }
        found |= {prefix + name: shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def deepseek(
    path: Path,
    *,
    fp8: bool = False,
    scale_fmt: str | None = None,
    shards: int = 3,
    seed: int = 0,
    copies: Literal["equal", "differ", "none"] = "equal",
    lose_mtp: bool = False,
    edit: Edit | None = None,
    **overrides: Any,
) -> Path:
    """A random checkpoint. Some scales lie in another shard than their weight. lose_mtp: the layer is gone, the config
    unchanged, as transformers' save_pretrained leaves it. edit: changes config and tensors in place before they
    are written."""
    config = TINY | overrides
    tensors = random_tensors(config, seed)
    prefixes = mtp_prefixes(config)
    for prefix in prefixes:
        for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            if copies == "none":
                del tensors[f"{prefix}{copy}.weight"]
            else:
                tensors[f"{prefix}{copy}.weight"] = tensors[f"{original}.weight"] + (0.5 if copies == "differ" else 0)
    if fp8:
        config["quantization_config"] = FP8 | ({"scale_fmt": scale_fmt} if scale_fmt else {})
        tensors = quantised(tensors, powers_of_two=scale_fmt == "ue8m0")
    if lose_mtp:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
    if edit is not None:
        edit(config, tensors)
    return write(path, config, tensors, shards)


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(config).items():
        dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        found[name] = torch.randn(shape, generator=generator).to(dtype)
    return found


def is_matrix(name: str) -> bool:
    """Whether the published checkpoints have it in FP8."""
    return (name.endswith("_proj.weight") and not name.endswith(_PLAIN)) or name.endswith("with_mqa.weight")


def quantised(tensors: Mapping[str, Tensor], *, powers_of_two: bool = False) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_matrix(name):
            found[name], found[f"{name}_scale_inv"] = quantise(tensor, powers_of_two=powers_of_two)
        else:
            found[name] = tensor
    return found


def quantise(weight: Tensor, *, powers_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Block by block, the plain way."""
    rows, columns = weight.shape
    scale = torch.zeros(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    number = torch.zeros(rows, columns, dtype=E4M3)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            at = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
            block = weight[at].float()
            s = block.abs().max() / 448
            if powers_of_two:
                s = torch.tensor(2.0 ** math.ceil(math.log2(s)))
            scale[r, c] = s
            number[at] = (block / s).to(E4M3)
    return number, scale


def dequantise(number: Tensor, scale: Tensor) -> Tensor:
    """The reference: repeat each scale over its block, cut to the shape, multiply in float32."""
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return number.float() * wide[: number.shape[0], : number.shape[1]]


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 3) -> Path:
    """Shards with the digits of the published index (5 and 6), each a run of names; some scales go one before."""
    path.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    weight_map = {}
    for position, name in enumerate(names):
        shard = position * shards // len(names)
        if name.endswith("_scale_inv") and position % 7 == 0:
            shard = (shard - 1) % shards
        parts[shard][name] = tensors[name].contiguous().clone()
        weight_map[name] = _file(shard, shards)
    for number, part in enumerate(parts):
        save_file(part, path / _file(number, shards), metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(dict(config), indent=1))
    return path


def sparse_r1(path: Path) -> Path:
    """All of DeepSeek-R1 but its numbers: 163 shards that take no room, 91,991 tensors, config and index.

    As published, layer 61 begins in shard 160 with lm_head and model.norm, and ends in shard 163.
    """
    config = R1 | {"quantization_config": FP8}
    spans: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, shape in shapes(config).items():
        count = math.prod(shape)
        if is_matrix(name):
            grid = (math.ceil(shape[0] / BLOCK), math.ceil(shape[1] / BLOCK))
            spans[name] = ("F8_E4M3", shape, count)
            spans[f"{name}_scale_inv"] = ("F32", grid, 4 * math.prod(grid))
        else:
            bias = name.endswith("correction_bias")
            spans[name] = ("F32" if bias else "BF16", shape, (4 if bias else 2) * count)
    assert len(spans) == R1_TENSORS
    assert sum(num_bytes for _, _, num_bytes in spans.values()) == R1_BYTES
    files = _r1_files(list(spans))
    path.mkdir(parents=True)
    weight_map = {}
    for file, names in files.items():
        header, at = {}, 0
        for name in names:
            dtype, shape, num_bytes = spans[name]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
            at += num_bytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        (path / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(path / file, 8 + len(text) + at)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    return path


def _r1_files(names: list[str]) -> dict[str, list[str]]:
    """Names by file: the layers before spread over 159 shards, what comes after the last of them over four."""
    layer = [name for name in names if name.startswith("model.layers.61.")]
    last = ["lm_head.weight", "model.norm.weight"]
    before = [name for name in names if name not in {*layer, *last}]
    files: dict[str, list[str]] = {}
    for number in range(159):
        part = before[number * len(before) // 159 : (number + 1) * len(before) // 159]
        files[_file(number, R1_SHARDS)] = part
    for number in range(4):
        part = layer[number * len(layer) // 4 : (number + 1) * len(layer) // 4]
        files[_file(159 + number, R1_SHARDS)] = (last if number == 0 else []) + part
    return files


def _file(number: int, shards: int) -> str:
    return f"model-{number + 1:05d}-of-{shards:06d}.safetensors"


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    nope, rope, value, kv = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (kv + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if rank is None:
        return found | {"self_attn.q_proj.weight": (heads * (nope + rope), hidden)}
    return found | {
        "self_attn.q_a_proj.weight": (rank, hidden),
        "self_attn.q_a_layernorm.weight": (rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), rank),
    }


def _dense(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return _gated("mlp", config["hidden_size"], config["intermediate_size"])


def _moe(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, experts, width = (config[key] for key in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    found: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    for index in range(experts):
        found |= _gated(f"mlp.experts.{index}", hidden, width)
    shared = config["n_shared_experts"]
    return found | (_gated("mlp.shared_experts", hidden, width * shared) if shared else {})


def _gated(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }
