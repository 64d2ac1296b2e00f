"""The layout of DeepSeek's own checkpoints: the MTP layer follows the target's layers, under the same names.

Read so by transformers, TensorRT-LLM and this project. A layer's embedding and head may be absent; what is stored is
used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specctl.dialects.ignoring import Module, begins_with_any, is_listed
from specctl.dialects.reading import Dialect, Named, Place
from specctl.heads.quantisation import Scheme
from specctl.keys import Keys

_NAME = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")


def named(name: str, config: Mapping[str, Any]) -> Named | None:
    found = _NAME.fullmatch(name)
    keys = Keys(config, "config.json")
    if found is None or "num_nextn_predict_layers" not in keys:
        return None
    index = int(found[1]) - keys.integer("num_hidden_layers")
    return Named(index, found[2]) if 0 <= index < keys.integer("num_nextn_predict_layers") else None


def place(named: Named) -> Place:
    return Place(f"{named.layer}.{named.name}")


def config_faults(config: Mapping[str, Any]) -> list[str]:
    return [
        f"config.json has no {key}, which the reader needs to {what}"
        for key, what in (
            ("num_nextn_predict_layers", "know that there is an MTP layer"),
            ("topk_method", "know that experts are chosen with a bias"),
        )
        if config.get(key) is None
    ]


def is_plain(scheme: Scheme, number: int, module: Module) -> bool | None:
    """By any of the ways: a module named, what its name begins with, or a pattern."""
    names = [f"model.layers.{number}.{member}" for member in module.members]
    taken = {begins_with_any(name, scheme.ignored) or is_listed(scheme, name, scheme.ignored) for name in names}
    return taken.pop() if len(taken) == 1 else None


DIALECT = Dialect(
    name="deepseek",
    reader="a reader of DeepSeek checkpoints",
    named=named,
    place=place,
    config=dict,
    first_layer=lambda num_layers: num_layers,
    config_faults=config_faults,
    own_copies=True,
    target_decides=False,
    joined={},
    is_plain=is_plain,
)
