"""vLLM's rules for a DeepSeek MTP layer in a directory of its own (read in the version that readers.py names).

The layer keeps the number it has in the target. The draft is built from the *target's* config: number of layers, count
of MTP layers and quantisation, whatever the draft's own directory says. Names outside the MTP layers are passed over
without a word; of a quantised checkpoint, what is missing is not noticed either. eh_proj is never quantised. Embedding
and head are always the target's without pipeline parallelism; with it, the draft's first rank wants the embedding in
the draft's files.

Which modules a quantised target leaves out is said by its list. Names are compared whole, and all modules that are
joined have to be on the list or none; the experts are one module, left out when an entry has its name in it. AWQ takes
parts of names, GPTQ patterns of the joint module's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specctl.dialects import deepseek
from specctl.dialects.ignoring import EXPERTS, Module, is_listed
from specctl.dialects.reading import Dialect, Named, Place, experts, joined
from specctl.heads.quantisation import Scheme
from specctl.keys import Keys

_NAME = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d{1,6})\.(.+)")
_OUTSIDE = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
_JOINED = {
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def named(name: str, config: Mapping[str, Any]) -> Named | None:
    found = _NAME.fullmatch(name)
    keys = Keys(config, "config.json")
    if found is None or "num_nextn_predict_layers" not in keys:
        return None
    index = int(found[1]) - keys.integer("num_hidden_layers")
    return Named(index, found[2]) if 0 <= index < keys.integer("num_nextn_predict_layers") else None


def place(named: Named) -> Place:
    prefix = f"model.layers[{named.layer}]"
    if named.name == "embed_tokens.weight":
        return Place("model.embed_tokens.weight", str(named.layer))
    if named.name.startswith(_OUTSIDE):
        return Place(f"{prefix}.{named.name}")
    inner = experts(named.name) or joined(named.name, _JOINED) or Place(named.name)
    return Place(f"{prefix}.mtp_block.{inner.parameter}", inner.part)


def config(source: dict[str, Any]) -> dict[str, Any]:
    """The target's config, which vLLM turns into the draft's. auto_map would name Python files that are not here."""
    kept = {key: value for key, value in source.items() if key != "auto_map"}
    return kept | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}


def is_plain(scheme: Scheme, number: int, module: Module) -> bool | None:
    prefix = f"model.layers.{number}."
    if scheme.method == "gptq":
        return is_listed(scheme, prefix + module.name, scheme.ignored)
    if module.name == EXPERTS:
        whole = prefix + EXPERTS
        parts = scheme.method == "awq" and any(entry in whole for entry in scheme.ignored)
        return parts or any(whole in entry for entry in scheme.ignored) or is_listed(scheme, whole, scheme.ignored)
    taken = {_is_named(scheme, prefix + member) for member in module.members}
    return taken.pop() if len(taken) == 1 else None


def _is_named(scheme: Scheme, name: str) -> bool:
    if scheme.method == "awq":
        return any(entry in name for entry in scheme.ignored)
    return is_listed(scheme, name, scheme.ignored)


DIALECT = Dialect(
    name="vllm",
    reader="vLLM",
    named=named,
    place=place,
    config=config,
    first_layer=lambda num_layers: num_layers,
    config_faults=deepseek.config_faults,
    own_copies=False,
    target_decides=True,
    joined=_JOINED,
    is_plain=is_plain,
)
