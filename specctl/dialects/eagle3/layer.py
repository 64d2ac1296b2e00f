"""The decoder layer of an EAGLE-3 head in config.json: said in full, in one form, whatever a file has left out.

A key that is absent means something else to each reader, so what is written has every key, and the rotation in both
spellings, since programs that know one of them take the other's absence for a theta of 10,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.errors import CheckpointError
from specctl.models import ModelConfig
from specctl.models.config import spelled
from specctl.rope import ORIGINAL_LENGTH, RopeConfig

FAMILIES = ("llama", "qwen3")
"""The families whose layer an EAGLE-3 head may have. Qwen3's has norms over queries and keys."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SCALED = ("linear", "dynamic", "yarn", "llama3")
_ELSEWHERE = ("num_layers", "max_position", "tied")


def whole(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The layer that a Llama-like config.json describes, absent keys as transformers takes them.

    Raises CheckpointError naming the key for what is missing, malformed or no layer that a head can have.
    """
    if config.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type is {config.get('model_type')!r}, an EAGLE-3 head has a layer of "
            f"{' or '.join(FAMILIES)}"
        )
    read = ModelConfig.read({**config, "num_hidden_layers": 1, "tie_word_embeddings": False}, where)
    ends = {key: config[key] for key in ENDS if config.get(key) is not None}
    return {
        "model_type": read.model_type,
        "vocab_size": read.vocab_size,
        "hidden_size": read.hidden_size,
        "intermediate_size": read.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": read.num_heads,
        "num_key_value_heads": read.num_kv_heads,
        "head_dim": read.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": read.max_position,
        "rms_norm_eps": read.norm_eps,
        "attention_bias": read.qkv_bias,
        "mlp_bias": read.mlp_bias,
        "tie_word_embeddings": False,
        **rotation(config, where),
        **ends,
    }


def rotation(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a config says about rotation, in both spellings: rope_theta beside rope_scaling, and rope_parameters."""
    read = RopeConfig.read(config, where)
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    said = {key: value for key, value in raw.items() if key not in ("type", "rope_type", "rope_theta")}
    said = {key: value for key, value in said.items() if value is not None}
    if read.kind in SCALED:
        said |= {"factor": read.factor, ORIGINAL_LENGTH: read.original_length}
    parameters = {"rope_type": read.kind, "rope_theta": read.theta, **said}
    return {
        "rope_theta": read.theta,
        "rope_scaling": dict(parameters) if read.kind in SCALED else None,
        "rope_parameters": parameters,
    }


def by_class(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A config of which only what differs from transformers' class for its model_type was written, with the rest of
    that class. Raises CheckpointError for values that the class refuses."""
    model_type = config.get("model_type", "llama")
    if model_type not in FAMILIES:
        return dict(config)  # whole() says so
    from transformers import CONFIG_MAPPING

    of = CONFIG_MAPPING[model_type]
    given = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    try:
        found: dict[str, Any] = of(**{**given, "num_hidden_layers": 1}).to_dict()
    except Exception as error:  # noqa: BLE001 - what the class's own checks raise shares no base class
        raise CheckpointError(f"{where}: transformers does not take it for a {model_type}: {_line(error)}") from None
    rope = ("rope_parameters", "rope_scaling", "rope_theta", ORIGINAL_LENGTH)
    if any(key in given for key in rope):
        found = {key: value for key, value in found.items() if key not in rope}
    found = {key: value for key, value in found.items() if key not in ENDS}  # of the text, not of the layer
    return found | given | {"model_type": model_type}


def described(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a layer is, by the keys of config.json, whichever spelling it is in: equal for layers that compute the
    same."""
    return spelled(ModelConfig.read(config, where), _ELSEWHERE)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
