"""SGLang's rules for a DeepSeek MTP layer in a directory of its own, the NextN export (read in 0.5.23).

The layer has number 0 and config.json says num_hidden_layers 1: that is how SGLang tells an export from a target.
There is exactly one such layer. Quantisation is that of the export's own config. Names that fit no parameter are
passed over with a warning, numbers are copied into parameters whatever their dtype, and embedding and head are always
the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.dialects import deepseek
from specctl.dialects.reading import Dialect, Named, Place, experts, joined
from specctl.keys import Keys

ARCHITECTURE = "DeepseekV3ForCausalLMNextN"
_OUTSIDE = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_JOINED = {
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def is_export(config: Mapping[str, Any]) -> bool:
    """Whether a directory's config is that of a NextN export."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and ARCHITECTURE in architectures


def named(name: str, config: Mapping[str, Any]) -> Named | None:
    num_layers = Keys(config, "config.json").integer("num_hidden_layers")
    prefix = f"model.layers.{0 if num_layers == 1 else num_layers}"
    # SGLang compares without the dot, so that layer 61 would also pass for layer 6.
    return Named(0, name.removeprefix(prefix).lstrip(".")) if name.startswith(prefix) else None


def place(named: Named) -> Place:
    if named.name.startswith(_OUTSIDE):
        return Place(f"model.{named.name}")
    inner = experts(named.name) or joined(named.name, _JOINED) or Place(named.name)
    return Place(f"model.decoder.{inner.parameter}", inner.part)


def config(source: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in source.items() if key != "auto_map"}
    return kept | {"architectures": [ARCHITECTURE], "num_hidden_layers": 1}


def config_faults(config: Mapping[str, Any]) -> list[str]:
    found = deepseek.config_faults(config)
    count = config.get("num_nextn_predict_layers")
    if count not in (None, 1):
        found.append(f"config.json says num_nextn_predict_layers {count}, SGLang takes exactly 1")
    return found


DIALECT = Dialect(
    name="sglang",
    reader="SGLang",
    named=named,
    place=place,
    config=config,
    first_layer=lambda num_layers: 0,
    config_faults=config_faults,
    own_copies=False,
    target_decides=False,
)
