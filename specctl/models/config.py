"""ModelConfig: what a Llama-family config.json says, checked; what the code lacks is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.errors import CheckpointError
from specctl.rope import RopeConfig

# model_type -> the defaults transformers gives to absent keys of that family, where they differ from Llama's.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_dim": 128, "qk_norm": True},
}


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig

    @property
    def max_length(self) -> int:
        """The longest text, in tokens, that the model can be run on."""
        return min(self.max_position, self.rope.max_length or self.max_position)

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelConfig:
        """Read a config.json mapping. `where` names the file in errors.

        Raises CheckpointError naming the key for anything missing, malformed or not supported.
        """
        model_type = config.get("model_type")
        if model_type not in FAMILIES:
            raise CheckpointError(
                f"{where}: model_type {model_type!r} is not supported (supported: {', '.join(FAMILIES)})"
            )
        family = FAMILIES[model_type]
        _refuse_unsupported(config, family, where)

        def integer(key: str, default: Any = None) -> int:
            value = config.get(key)
            value = family.get(key, default) if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{where}: {key} is {value!r}, expected a positive integer")
            return value

        hidden_size, num_heads = integer("hidden_size"), integer("num_attention_heads")
        num_kv_heads = integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = integer("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(f"{where}: head_dim {head_dim} is odd, which cannot be rotated")
        norm_eps = config.get("rms_norm_eps", 1e-6)
        if isinstance(norm_eps, bool) or not isinstance(norm_eps, (int, float)) or not 0 <= norm_eps < 1:
            raise CheckpointError(f"{where}: rms_norm_eps is {norm_eps!r}, expected a small positive number")
        bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size"),
            num_layers=integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=integer("max_position_embeddings"),
            norm_eps=float(norm_eps),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.get("qkv_bias", bias and model_type != "mistral"),
            o_bias=bias and model_type in ("llama", "qwen3"),
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=family.get("qk_norm", False),
            rope=RopeConfig.read(config, where),
        )


def _refuse_unsupported(config: Mapping[str, Any], family: Mapping[str, Any], where: str) -> None:
    def refuse(key: str, what: str) -> None:
        raise CheckpointError(f"{where}: {key} is {config.get(key)!r}: {what} is not supported")

    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        raise CheckpointError(
            f"{where}: quantization_config names {method!r}: quantised checkpoints are not supported; use the original"
        )
    window = config.get("sliding_window", family.get("sliding_window"))
    if window is not None and config.get("use_sliding_window", "qwen" not in str(config.get("model_type"))):
        raise CheckpointError(f"{where}: sliding_window is {window}: sliding-window attention is not supported")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        refuse("layer_types", "attention other than full_attention")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            refuse(key, "a mixture of experts")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "an activation other than silu")
    if config.get("pretraining_tp") not in (None, 1):
        # transformers ignores it since 5.0, and slicing changes nothing but rounding.
        return
