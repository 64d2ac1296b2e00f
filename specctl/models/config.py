"""ModelConfig: what a Llama-family config.json says, checked; what the code lacks is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from specctl.errors import CheckpointError
from specctl.keys import Keys
from specctl.models.quantised import read_scheme
from specctl.rope import RopeConfig


@dataclass(frozen=True)
class Family:
    """What a model_type fixes, and what transformers takes an absent key of it to mean.

    kv_heads, head_dim: None means as many as num_attention_heads, and hidden_size / num_attention_heads.
    biased: the projections of q, k and v always have a bias, and attention_bias is not read.
    reads_attention_bias, reads_mlp_bias: the family has that key.
    windowed: a sliding window acts unless sliding_window is null.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    biased: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    windowed: bool = False


FAMILIES = {
    "llama": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Family(kv_heads=8, windowed=True),
    "qwen2": Family(kv_heads=32, biased=True),
    "qwen3": Family(kv_heads=32, head_dim=128, reads_attention_bias=True, qk_norm=True),
}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# What other architectures multiply or squash by. Found in a config of ours, the label or the config is wrong.
FOREIGN = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "query_pre_attn_scalar",
    "residual_multiplier",
)


# Keys of config.json for fields that are called otherwise here.
SPELLINGS = {
    "num_layers": "num_hidden_layers",
    "max_position": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias (o_proj)",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
}


@dataclass(frozen=True)
class CommonConfig:
    """What every family has. intermediate_size: of an MLP that every token goes through. head_dim: of a query."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied: bool
    rope: RopeConfig

    @property
    def max_length(self) -> int:
        """The longest text, in tokens, that the model can be run on."""
        return min(self.max_position, self.rope.max_length or self.max_position)


def spelled(config: CommonConfig, leaving_out: Collection[str] = ()) -> dict[str, Any]:
    """What a config says, by the keys of config.json, rotation and routing spread out: equal for configs of layers that
    compute the same. leaving_out: fields of the config."""
    found: dict[str, Any] = {}
    for field in fields(config):
        key, value = SPELLINGS.get(field.name, field.name), getattr(config, field.name)
        if is_dataclass(value):
            found |= {f"{key} ({name})": inner for name, inner in vars(value).items()}
        elif field.name not in leaving_out:
            found[key] = value
    if config.rope.kind == "default":  # no frequency depends on the length
        del found["rope (original_length)"]
    return found


@dataclass(frozen=True)
class ModelConfig(CommonConfig):
    """Of the Llama family."""

    num_kv_heads: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelConfig:
        """Read a config.json mapping. `where` names the file in errors.

        Raises CheckpointError naming the key for anything missing, malformed or not supported.
        """
        keys = Keys(config, where)
        family = _family(keys)
        num_layers = keys.integer("num_hidden_layers")
        _refuse_windows(keys, family, num_layers)
        _refuse_unsupported(keys)
        num_heads = keys.integer("num_attention_heads")
        # Null is not absent here: it means one key-value head for each head in every family.
        absent = num_heads if "num_key_value_heads" in config else family.kv_heads or num_heads
        num_kv_heads = keys.integer("num_key_value_heads", absent)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{where}: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}, "
                "expected whole groups of heads"
            )
        bias = keys.boolean("attention_bias", False) and family.reads_attention_bias
        return cls(
            model_type=config["model_type"],
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(keys, family, num_heads),
            max_position=keys.integer("max_position_embeddings"),
            norm_eps=read_norm_eps(keys),
            tied=keys.boolean("tie_word_embeddings", False),
            qkv_bias=bias or family.biased,
            o_bias=bias,
            mlp_bias=keys.boolean("mlp_bias", False) and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            rope=RopeConfig.read(config, where),
        )


def read_norm_eps(keys: Keys) -> float:
    norm_eps = keys.number("rms_norm_eps", 1e-6)
    if not 0 <= norm_eps < 1:
        keys.refuse("rms_norm_eps", "expected a small positive number")
    return norm_eps


def _family(keys: Keys) -> Family:
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        keys.refuse("model_type", f"which is not supported, expected {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _head_dim(keys: Keys, family: Family, num_heads: int) -> int:
    hidden_size = keys.integer("hidden_size")
    if "head_dim" not in keys and family.head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{keys.where}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, expected a "
            "multiple of it, or the key head_dim"
        )
    head_dim = keys.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{keys.where}: head_dim {head_dim} is odd, expected an even number: pairs are rotated")
    return head_dim


def _refuse_windows(keys: Keys, family: Family, num_layers: int) -> None:
    """Refuse attention that does not see the whole text. Which keys decide differs by family, as in transformers."""
    layer_types = keys.values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            keys.refuse("layer_types", f"expected a list of {num_layers}, one for each layer")
        if any(kind != "full_attention" for kind in layer_types):
            keys.refuse("layer_types", "which is not supported, expected full_attention in every layer")
    if keys.values["model_type"].startswith("qwen"):
        first = keys.integer("max_window_layers", 28) if keys.boolean("use_sliding_window", False) else num_layers
        window = None if first >= num_layers or layer_types else keys.values.get("sliding_window", 4096)
    else:
        window = keys.values.get("sliding_window", 4096 if family.windowed else None)
    if window is not None:
        raise CheckpointError(
            f"{keys.where}: sliding_window is {window}{'' if 'sliding_window' in keys else ' by default'}: attention "
            "with a sliding window is not supported, expected null"
        )


def _refuse_unsupported(keys: Keys) -> None:
    read_scheme(keys.values, keys.where)
    for key in EXPERTS:
        if keys.values.get(key):
            keys.refuse(key, "a mixture of experts, which is not supported")
    if keys.values.get("hidden_act", "silu") not in ("silu", "swish"):
        keys.refuse("hidden_act", "which is not supported, expected silu")
    for key in FOREIGN:
        if keys.values.get(key) not in (None, 1):
            keys.refuse(key, "which models of this type do not have; is model_type right?")
