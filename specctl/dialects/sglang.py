"""SGLang's rules for a DeepSeek MTP layer in a directory of its own, the NextN export (read in the
version that readers.py names).

The layer has number 0 and config.json says num_hidden_layers 1: that is how SGLang tells an export from a target.
There is exactly one such layer. Quantisation is that of the export's own config. Names that fit no parameter are
passed over with a warning, numbers are copied into parameters whatever their dtype, and embedding and head are always
the target's.

Inside a target's own directory the layer has the number that follows the target's. The layer's modules are called
model.decoder in any case, and a list of modules that a quantised target leaves out is compared with that name: an entry
may be what it begins with, and `model.layers.61` in an entry, that number alone, is read as `model.decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.dialects import deepseek
from specctl.dialects.ignoring import Module, begins_with_any, is_listed
from specctl.dialects.reading import Dialect, Named, Place, experts, joined
from specctl.heads.quantisation import Scheme
from specctl.keys import Keys

ARCHITECTURE = "DeepseekV3ForCausalLMNextN"
DECODER, RENAMED = "model.decoder", "model.layers.61"
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


def is_plain(scheme: Scheme, number: int, module: Module) -> bool | None:
    entries = [entry.replace(RENAMED, DECODER) for entry in scheme.ignored]
    if scheme.method == "gptq":
        return is_listed(scheme, f"{DECODER}.{module.name}", entries)
    names = [f"{DECODER}.{member}" for member in module.members]
    if scheme.method == "compressed-tensors":
        taken = {is_listed(scheme, name, entries) for name in names}
    else:
        taken = {begins_with_any(name, entries) for name in names}
    return taken.pop() if len(taken) == 1 else None


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
    joined=_JOINED,
    is_plain=is_plain,
)
