"""The list of modules that a quantised target leaves out: entries for the MTP layer, put in and taken out.

Written in the target's own scheme and for every reader's way of comparing: vLLM compares whole names of the
checkpoint's modules, SGLang what names begin with and calls the layer's modules model.decoder, transformers patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from specctl.dialects.sglang import DECODER, RENAMED
from specctl.heads.mtp import EMBEDDING, MtpConfig
from specctl.heads.quantisation import GPTQ_OUT, LISTS, REGEX, Scheme

# transformers leaves the head out by itself, but not when a list is given.
_BY_DEFAULT = {"fp8": ["lm_head"]}


def leave_out(scheme: Scheme, numbers: Iterable[int], mtp: MtpConfig) -> dict[str, Any]:
    """The scheme's object with every module of these layers left out. What it has of them already goes first."""
    layers = sorted(numbers)
    values = take_back(scheme.values, scheme.method, layers)
    keys = [key for key in LISTS[scheme.method] if values.get(key)] or [LISTS[scheme.method][0]]
    for key in keys:
        if scheme.method == "gptq":
            # Its patterns are tried in order, and the first that takes a name decides.
            ours: dict[str, Any] = {GPTQ_OUT + pattern: {} for pattern in _patterns(layers)}
            values[key] = ours | dict(values.get(key) or {})
            continue
        names = [f"{_prefix(number)}.{module}" for number in layers for module in _modules(mtp)]
        values[key] = [*(values.get(key) or _BY_DEFAULT.get(scheme.method, [])), *names, *_whole(scheme, layers)]
    return values


def take_back(values: Mapping[str, Any], method: str, numbers: Iterable[int]) -> dict[str, Any]:
    """The same without the entries that name these layers and nothing else."""
    layers, found = sorted(numbers), dict(values)
    patterns = {sign + pattern for pattern in _patterns(layers) for sign in (REGEX, GPTQ_OUT)}
    prefixes = (DECODER, *map(_prefix, layers))

    def is_ours(entry: Any) -> bool:
        if not isinstance(entry, str):
            return False
        return entry in patterns or any(entry == p or entry.startswith(f"{p}.") for p in prefixes)

    for key in LISTS[method]:
        entries = found.get(key)
        if isinstance(entries, Mapping):
            found[key] = {entry: value for entry, value in entries.items() if not is_ours(entry)}
        elif isinstance(entries, list):
            found[key] = [entry for entry in entries if not is_ours(entry)]
    return found


def _whole(scheme: Scheme, layers: list[int]) -> list[str]:
    """Entries for whole layers."""
    if scheme.method == "compressed-tensors":
        return [REGEX + pattern for pattern in _patterns(layers)]
    whole = [_prefix(number) for number in layers]
    # SGLang reads one number's prefix as its own name for the layer; for the others that name is given.
    return whole if whole == [RENAMED] else [*whole, DECODER]


def _patterns(layers: list[int]) -> list[str]:
    return [re.escape(f"{prefix}.") + ".*" for prefix in (*map(_prefix, layers), DECODER)]


def _prefix(number: int) -> str:
    return f"model.layers.{number}"


def _modules(mtp: MtpConfig) -> list[str]:
    """Every module with a matrix, by the checkpoint's names."""
    tensors = mtp.tensors().items()
    return [
        name.removesuffix(".weight")
        for name, expected in tensors
        if name.endswith(".weight") and len(expected.shape) == 2 and name != EMBEDDING
    ]
