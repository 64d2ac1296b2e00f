"""ModelShape: the sizes in a config.json that decide what a pass costs. It knows no tensor and loads no weights, so it
takes models that specctl itself cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.errors import CheckpointError
from specctl.keys import Keys
from specctl.schemas.roofline import Weights

DENSE = ("llama", "mistral", "qwen2", "qwen3")
GROUPED_EXPERTS = ("mixtral", "qwen3_moe")
LATENT = ("deepseek_v2", "deepseek_v3")
MODEL_TYPES = (*DENSE, *GROUPED_EXPERTS, *LATENT)

# What a family takes an absent num_key_value_heads to mean; the others: one for each head.
KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
HEAD_DIM = {"qwen3": 128}
QUANTISATION = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Grouped:
    """Attention in which groups of heads share keys and values. biased: q, k and v are. normed: q and k are, a head."""

    heads: int
    kv_heads: int
    head_dim: int
    biased: bool
    normed: bool


@dataclass(frozen=True)
class Latent:
    """Attention over one latent and one rotated key a token, shared by all heads (DeepSeek-V2, section 2.1). q_rank:
    None for queries without a low rank. nope, rotated, value: widths of a head."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rotated: int
    value: int


@dataclass(frozen=True)
class Experts:
    """chosen of `count` a token, from kept_groups of `groups` equal groups. inner: width of one; shared_inner: of those
    that every token goes through, together. dense_layers: with a plain MLP instead. biased: the router's choice is."""

    count: int
    chosen: int
    inner: int
    shared_inner: int
    groups: int
    kept_groups: int
    dense_layers: int
    biased: bool


@dataclass(frozen=True)
class ModelShape:
    """inner: of an MLP that every token goes through. head_vocab: tokens that the head knows. tied: embedding and head
    are     one. mtp_layers: beside `layers`. weights: as they are stored."""

    name: str
    model_type: str
    hidden: int
    inner: int
    layers: int
    vocab: int
    head_vocab: int
    tied: bool
    max_length: int
    attention: Grouped | Latent
    experts: Experts | None
    mtp_layers: int
    weights: Weights

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str, weights: Weights | None = None) -> ModelShape:
        """Read a config.json mapping. `where` names the file in errors. weights: in place of what the config says.

        Raises CheckpointError naming the key for a missing or malformed one and for a model_type that is not known.
        """
        keys = Keys(config, where)
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            keys.refuse("model_type", f"whose passes are not known here, expected {', '.join(MODEL_TYPES)}")
        experts = None if model_type in DENSE else _experts(keys, str(model_type))
        vocab = keys.integer("vocab_size")
        return cls(
            name=where,
            model_type=str(model_type),
            hidden=keys.integer("hidden_size"),
            inner=keys.integer("intermediate_size"),
            layers=keys.integer("num_hidden_layers"),
            vocab=vocab,
            head_vocab=keys.integer("draft_vocab_size", vocab),
            tied=keys.boolean("tie_word_embeddings", False),
            max_length=keys.integer("max_position_embeddings"),
            attention=_latent(keys, str(model_type)) if model_type in LATENT else _grouped(keys, str(model_type)),
            experts=experts,
            mtp_layers=_count(keys, "num_nextn_predict_layers", 0),
            weights=weights or _weights(keys),
        )

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else max(0, self.layers - self.experts.dense_layers)

    @property
    def dense_layers(self) -> int:
        return self.layers - self.sparse_layers


def attention_parameters(shape: ModelShape) -> int:
    """Of one layer, norms and biases inside attention counted."""
    attention, h = shape.attention, shape.hidden
    if isinstance(attention, Grouped):
        width = attention.heads * attention.head_dim
        kv_width = attention.kv_heads * attention.head_dim
        biases = (width + 2 * kv_width) if attention.biased else 0
        return h * (2 * width + 2 * kv_width) + biases + (2 * attention.head_dim if attention.normed else 0)
    head = attention.nope + attention.rotated
    if attention.q_rank is None:
        queries = h * attention.heads * head
    else:
        queries = h * attention.q_rank + attention.q_rank + attention.q_rank * attention.heads * head
    keys = h * (attention.kv_rank + attention.rotated) + attention.kv_rank
    keys += attention.kv_rank * attention.heads * (attention.nope + attention.value)
    return queries + keys + attention.heads * attention.value * h


def mlp_parameters(shape: ModelShape, *, active: bool = False) -> tuple[int, int]:
    """Of one layer with a plain MLP, and of one with experts (0 without any). active: only what one token reads."""
    h, experts = shape.hidden, shape.experts
    dense = 3 * h * shape.inner
    if experts is None:
        return dense, 0
    routed = (experts.chosen if active else experts.count) * 3 * h * experts.inner
    router = experts.count * (h + experts.biased)
    return dense, routed + 3 * h * experts.shared_inner + router


def parameters(shape: ModelShape, *, active: bool = False) -> int:
    """Of the model without MTP layers, embedding and head counted once each, or together where they are tied. active:
    what one token reads, the whole embedding counted, as model cards do."""
    dense, sparse = mlp_parameters(shape, active=active)
    layers = shape.layers * (attention_parameters(shape) + 2 * shape.hidden)
    layers += shape.dense_layers * dense + shape.sparse_layers * sparse
    return layers + shape.hidden + shape.vocab * shape.hidden * (1 if shape.tied else 2)


def _grouped(keys: Keys, model_type: str) -> Grouped:
    heads = keys.integer("num_attention_heads")
    absent = heads if "num_key_value_heads" in keys.values else KV_HEADS.get(model_type, heads)
    kv_heads = keys.integer("num_key_value_heads", absent)
    if heads % kv_heads:
        raise CheckpointError(
            f"{keys.where}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}, expected whole "
            "groups of heads"
        )
    head_dim = keys.integer("head_dim", HEAD_DIM.get(model_type, max(1, keys.integer("hidden_size") // heads)))
    biased = model_type == "qwen2" or (model_type in ("llama", "qwen3") and keys.boolean("attention_bias", False))
    return Grouped(heads, kv_heads, head_dim, biased, normed=model_type.startswith("qwen3"))


def _latent(keys: Keys, model_type: str) -> Latent:
    absent = None if "q_lora_rank" in keys.values and keys.values["q_lora_rank"] is None else 1536
    return Latent(
        heads=keys.integer("num_attention_heads"),
        q_rank=None if absent is None else keys.integer("q_lora_rank", absent),
        kv_rank=keys.integer("kv_lora_rank", 512),
        nope=keys.integer("qk_nope_head_dim", 128),
        rotated=keys.integer("qk_rope_head_dim", 64),
        value=keys.integer("v_head_dim", 128),
    )


def _experts(keys: Keys, model_type: str) -> Experts:
    if model_type == "mixtral":
        count, chosen = keys.integer("num_local_experts", 8), keys.integer("num_experts_per_tok", 2)
        return Experts(count, chosen, keys.integer("intermediate_size"), 0, 1, 1, 0, biased=False)
    if model_type == "qwen3_moe":
        count, chosen = keys.integer("num_experts"), keys.integer("num_experts_per_tok")
        return Experts(count, chosen, keys.integer("moe_intermediate_size"), 0, 1, 1, 0, biased=False)
    v3 = model_type == "deepseek_v3"
    inner = keys.integer("moe_intermediate_size")
    groups, kept = keys.integer("n_group", 8 if v3 else 1), keys.integer("topk_group", 4 if v3 else 1)
    limited = v3 or keys.values.get("topk_method") == "group_limited_greedy"
    found = Experts(
        count=keys.integer("n_routed_experts"),
        chosen=keys.integer("num_experts_per_tok", 8 if v3 else None),
        inner=inner,
        shared_inner=inner * _count(keys, "n_shared_experts", 0),
        groups=groups if limited else 1,
        kept_groups=kept if limited else 1,
        dense_layers=_count(keys, "first_k_dense_replace", 3 if v3 else 0),
        biased=v3,
    )
    size = found.count // found.groups
    if found.count % found.groups or found.kept_groups > found.groups or found.chosen > size * found.kept_groups:
        raise CheckpointError(
            f"{keys.where}: num_experts_per_tok {found.chosen} of n_routed_experts {found.count} cannot be chosen from "
            f"topk_group {found.kept_groups} of n_group {found.groups} equal groups"
        )
    return found


def _count(keys: Keys, key: str, default: int) -> int:
    return 0 if keys.values.get(key, default) in (0, None) else keys.integer(key, default)


def _weights(keys: Keys) -> Weights:
    """As the checkpoint stores them."""
    key = next((key for key in QUANTISATION if keys.values.get(key)), None)
    if key is None:
        return "bf16"
    values = keys.values[key]
    method = values.get("quant_method") if isinstance(values, Mapping) else values
    if method == "fp8" and isinstance(values, Mapping):
        return "fp8-block" if values.get("weight_block_size") else "fp8"
    if method == "fbgemm_fp8":
        return "fp8"
    if method == "compressed-tensors" and isinstance(values, Mapping) and values.get("format") in FLOATS:
        return "fp8"
    raise CheckpointError(
        f"{keys.where}: {key} names {method!r}, whose products are not known here, expected FP8 or nothing; give "
        "--quantisation to say what they are to be taken for"
    )


FLOATS = ("float-quantized", "naive-quantized")
