"""EAGLE-3 heads for tiny models, written by hand in each of the layouts that others publish them in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tiny
import torch
from fixtures import Make
from torch import Tensor

Layout = Literal["original", "vllm", "sglang", "speculators"]
LAYERS = 8
TAPS = (2, 4, 5)  # the original three of eight layers
IDS = (*range(0, 256, 3), tiny.END)  # a third of all ids, and the end
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
HEAD_DIM = 8
LENGTH = 2.0  # of a number in the residual that leaves the layer


def target(
    path: Path, *, seed: int = 1, layers: int = LAYERS, first: float = 0.1, small: float = 0.005, **overrides: Any
) -> Path:
    """A model whose first layer does most of the work, so that a head of one layer can be right about it. first, small:
    of what that layer and the others would add to the residual."""
    tiny.llama(path, seed=seed, num_hidden_layers=layers, **overrides)
    config, tensors = tiny.read(path)
    for name in tensors:
        if ".layers." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * (first if ".layers.0." in name else small)
    return tiny.write(path, config, tensors)


def head(
    path: Path,
    *,
    of: Path,
    layout: Layout = "vllm",
    ids: Sequence[int] | None = None,
    taps: Sequence[int] = TAPS,
    norms: Sequence[str] = (),
    embedding: bool = False,
    hidden: float = 0.6,
    noise: float = 0.02,
    seed: int = 11,
    tokenizer: bool = False,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> Path:
    """A head that is sometimes right about the first layer of its target: it carries the token's embedding past the
    residual by heads that see their own row only, and has that layer's weights beside them. ids: of the target that it
    has rows for; norms: the variants that it has; hidden: how much the taps say; overrides: of the config."""
    config, tensors = tiny.read(of)
    found = _tensors(config, tensors, list(taps), norms, hidden, noise, seed)
    if embedding:
        found["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    if ids is not None:
        found["lm_head.weight"] = found["lm_head.weight"][list(ids)]
    if dtype is not None:
        found = {name: tensor.to(dtype) for name, tensor in found.items()}
    if ids is not None:
        found |= tables(ids, config["vocab_size"])
    written = layer(config) | {"dtype": str(found["fc.weight"].dtype).removeprefix("torch.")}
    described = describe(written, layout, list(taps), norms, len(found["lm_head.weight"]), config["hidden_size"], of)
    described = {key: value for key, value in (described | overrides).items() if value is not tiny.ABSENT}
    return tiny.write(path, described, renamed(found, layout), tokenizer=tokenizer)


def tables(ids: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """d2t, what is added to a row's number, and t2d, which ids there are rows for."""
    d2t = torch.tensor([index - row for row, index in enumerate(ids)])
    return {"d2t": d2t, "t2d": torch.tensor([index in ids for index in range(vocab_size)])}


def layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head's layer: the target's, with twice its heads."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "hidden_act", "max_position_embeddings", "rms_norm_eps")
    rope = ("rope_parameters", "rope_theta", "rope_scaling")
    return {
        "model_type": "llama",
        **{key: config[key] for key in kept},
        **{key: config[key] for key in rope if key in config},
        "num_hidden_layers": 1,
        "num_attention_heads": 2 * config["num_attention_heads"],
        "num_key_value_heads": 2 * config["num_attention_heads"],
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
    }


def describe(
    layer: dict[str, Any],
    layout: Layout,
    taps: list[int],
    norms: Sequence[str],
    draft_vocab: int,
    target_hidden: int,
    target: Path,
) -> dict[str, Any]:
    """config.json of a layout, as its readers' own programs write it."""
    flags = {norm: norm in norms for norm in NORMS}
    sizes = {"draft_vocab_size": draft_vocab, "target_hidden_size": target_hidden}
    ids = "eagle_aux_hidden_state_layer_ids"
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.4.0",
            "transformer_layer_config": {key: value for key, value in layer.items() if key != "dtype"},
            **sizes,
            **flags,
            ids: taps,
            "dtype": layer["dtype"],
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
            },
        }
    flat = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **sizes}
    if layout == "original":
        return flat
    if layout == "sglang":
        kept = {norm: flags[norm] for norm in ("fc_norm", "norm_output")}
        inner = {ids: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
        return flat | kept | {ids: taps, "eagle_config": inner, "num_aux_hidden_states": len(taps)}
    inner = {ids: taps, "use_aux_hidden_state": True, "norm_before_fc": flags["norm_before_fc"]}
    return flat | flags | {ids: taps, "eagle_config": inner, "num_aux_hidden_states": len(taps)}


def renamed(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    if layout != "speculators":
        return dict(tensors)
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def table(path: Path, *, of: Path, draft: Path, ids: Sequence[int] | None = None) -> Path:
    """For the exact table `of`, whose one layer is entered by the embedding: a head that says after a token and any
    other what the table in `draft` says after the first of them. Its layer adds nothing, so a chain repeats itself."""
    config, _ = tiny.read(of)
    width = config["hidden_size"]
    written = layer(config) | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "dtype": "float32"}
    inner = config["intermediate_size"]
    found = {f"midlayer.self_attn.{name}_proj.weight": torch.zeros(2, 2 * width) for name in ("q", "k", "v")}
    found |= {
        "midlayer.self_attn.o_proj.weight": torch.zeros(width, 2),
        "midlayer.mlp.gate_proj.weight": torch.zeros(inner, width),
        "midlayer.mlp.up_proj.weight": torch.zeros(inner, width),
        "midlayer.mlp.down_proj.weight": torch.zeros(width, inner),
        "fc.weight": torch.eye(width),
        "lm_head.weight": tiny.read(draft)[1]["lm_head.weight"],
    }
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    found |= {f"{name}.weight": torch.ones(width) for name in norms}
    if ids is not None:
        found["lm_head.weight"] = found["lm_head.weight"][list(ids)]
        found |= tables(ids, config["vocab_size"])
    described = describe(written, "vllm", [0], (), len(found["lm_head.weight"]), width, of)
    return tiny.write(path, described, found, tokenizer=False)


def pair(make: Make, **of_head: Any) -> tuple[Path, Path]:
    """A shallow target and a head for it."""
    of = make(target, layers=3)
    return of, make(head, of=of, taps=(0, 1, 2), **of_head)


def _tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    taps: list[int],
    norms: Sequence[str],
    hidden: float,
    noise: float,
    seed: int,
) -> dict[str, Tensor]:
    width, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    assert width == heads * HEAD_DIM
    generator, of = torch.Generator().manual_seed(seed), "model.layers.0."
    first = {name.removeprefix(of): tensor for name, tensor in tensors.items() if name.startswith(of)}

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        return size / math.sqrt(shape[-1]) * torch.randn(shape, generator=generator, dtype=torch.float64)

    def beside(embedding: Tensor) -> Tensor:
        """What reads the embedding, and a little of the hidden state."""
        return torch.cat((embedding, drawn(len(embedding), width, size=noise)), dim=1)

    def repeated(weight: Tensor) -> Tensor:
        return weight.double().view(groups, HEAD_DIM, width).repeat_interleave(heads // groups, dim=0).flatten(0, 1)

    norm = first["input_layernorm.weight"].double()
    look = drawn(width, width, size=6.0)  # queries and keys that find nothing but their own row
    carry = torch.diag(1 / norm)  # values that are the embedding again, but for its length
    hidden_norm = 1 + 0.1 * torch.randn(width, generator=generator, dtype=torch.float64)
    # And values that take away the hidden state, which is about as long wherever it comes from: what a row is fed would
    # else stay in the residual.
    away = torch.diag(-LENGTH / hidden_norm)
    found = {
        "midlayer.self_attn.q_proj.weight": beside(torch.cat((first["self_attn.q_proj.weight"].double(), look))),
        "midlayer.self_attn.k_proj.weight": beside(torch.cat((repeated(first["self_attn.k_proj.weight"]), look))),
        "midlayer.self_attn.v_proj.weight": torch.cat(
            (
                beside(repeated(first["self_attn.v_proj.weight"])),
                torch.cat((carry, away), dim=1),
            )
        ),
        "midlayer.self_attn.o_proj.weight": torch.cat(
            (first["self_attn.o_proj.weight"].double(), torch.eye(width, dtype=torch.float64)), dim=1
        ),
        **{
            f"midlayer.mlp.{name}.weight": first[f"mlp.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")
        },
        "midlayer.input_layernorm.weight": norm,
        "midlayer.hidden_norm.weight": hidden_norm,
        "midlayer.post_attention_layernorm.weight": first["post_attention_layernorm.weight"],
        "fc.weight": drawn(width, len(taps) * width, size=hidden),
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]),
    }
    if "norm_before_fc" in norms:
        found["input_norm.weight"] = 1 + 0.1 * torch.randn(len(taps) * width, generator=generator)
    if "fc_norm" in norms:
        found |= {f"fc_norm.{i}.weight": 1 + 0.1 * torch.randn(width, generator=generator) for i in range(len(taps))}
    like = tensors["model.norm.weight"].dtype
    return {name: tensor.to(like) for name, tensor in found.items()}
