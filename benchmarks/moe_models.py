"""The two models of moe_decode.py: a DeepSeek of V2-Lite's shape with an MTP layer, and a Llama for comparison.

What a token is followed by is made up so that texts are diverse and drafts are often right, not always: the head knows
two successors of every token, one slightly likelier, and what the layers add to the token's embedding decides between
them. The MTP layer reads the same embedding, but adds something else.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specctl.drafts.mtp import Mtp
from specctl.models import ARCHITECTURES, CausalLM, read_config
from specctl.moe import MoE
from specctl.output import new_directory
from specctl.shard_writer import Entry, write_shards
from specctl.shards import TensorInfo

LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "num_nextn_predict_layers": 1,
}
COMMON = {
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

EMBEDDING = "model.embed_tokens.weight"
GAINS = {"q_proj": 2.0, "gate": 2.0, "o_proj": 0.5, "down_proj": 0.5}
"""Of what a matrix gives, all else being 1: attention and routing are decided, a layer adds less than it is given."""
LIKELIER = 2.0
"""The lead of the likelier successor, in the spread of what layers as strong as the embedding add to the two."""


def make_models(directory: Path, scale: float) -> dict[str, Path]:
    deepseek = deepseek_config(scale)
    configs = {"deepseek": deepseek, "llama": llama_config(deepseek)}
    return {name: make(directory / name, config) for name, config in configs.items()}


def deepseek_config(scale: float) -> dict[str, Any]:
    """Half of V2-Lite's widths, 11 of its 27 layers, 32,000 of its 102,400 tokens; of these `scale`."""
    width = max(64, 64 * round(16 * scale))
    heads = max(1, width // 128)
    return LITE | COMMON | {
        "vocab_size": max(512, round(32000 * scale)),
        "hidden_size": width,
        "intermediate_size": 5472 * width // 1024,
        "moe_intermediate_size": 704 * width // 1024,
        "kv_lora_rank": width // 2,
        "num_hidden_layers": max(2, round(11 * scale)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }  # fmt: skip


def llama_config(deepseek: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as bring it nearest to the DeepSeek's active weights."""
    width, vocab = deepseek["hidden_size"], deepseek["vocab_size"]
    layer = (4 + 3 * 4) * width**2
    return COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": max(1, round((active_parameters(build(deepseek)) - width * vocab) / layer)),
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
    }


def build(config: Mapping[str, Any]) -> CausalLM:
    """The model without numbers."""
    with torch.device("meta"):
        return ARCHITECTURES[config["model_type"]](read_config(config, "the benchmark"))


def make(path: Path, config: dict[str, Any]) -> Path:
    """Raises SystemExit when something else is there."""
    if path.exists():
        if json.loads((path / "config.json").read_text()) != config:
            sys.exit(f"{path}: is a model of another shape or scale, or not ours; name another directory")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"writing {path}", file=sys.stderr, flush=True)
    model = build(config)
    parts = [model]
    if config.get("num_nextn_predict_layers"):
        with torch.device("meta"):
            parts.append(Mtp(model, config["num_hidden_layers"]))
    shapes = {name: tuple(parameter.shape) for part in parts for name, parameter in part.named_parameters()}
    with new_directory(path) as temporary:
        write_shards(temporary, [entry(name, shape) for name, shape in shapes.items()], stem="model")
        (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return path


def entry(name: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, TensorInfo(torch.bfloat16, shape), lambda: [numbers(name, shape).bfloat16()])


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """The same in every run: the seed is the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    part = name.split(".")[-2]
    if len(shape) == 1:
        return torch.ones(shape)
    if part == "lm_head":
        return successors(shape, generator)
    noise = torch.randn(shape, generator=generator)
    if name == EMBEDDING:
        return noise
    noise *= GAINS.get(part, 1.0) / math.sqrt(shape[1])
    if part == "eh_proj":  # the embedding as it is, the hidden state mixed up
        noise[:, : shape[0]] = torch.eye(shape[0])
    return noise


def successors(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A head whose row of a token holds the embeddings of the two tokens that it may follow."""
    embedding_VD = numbers(EMBEDDING, shape)
    width = shape[1]
    likelier_V, other_V = (torch.randperm(shape[0], generator=generator) for _ in range(2))
    less = 1 - LIKELIER / math.sqrt(width)
    return (embedding_VD[likelier_V] + less * embedding_VD[other_V]) / math.sqrt(width)


def active_parameters(model: CausalLM) -> int:
    """Of those that a token goes through. One row of an embedding is nothing, and the head is another matrix."""
    total = count(model) - count(model.model.embed_tokens)
    for layer in model.model.layers:
        if isinstance(layer.mlp, MoE):
            routing = layer.mlp.gate.routing
            total -= count(layer.mlp.experts) * (routing.experts - routing.chosen) // routing.experts
    return total


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
