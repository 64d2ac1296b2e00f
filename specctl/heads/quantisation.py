"""What config.json says about quantised weights, checked: FP8 in blocks, which is read and written here, and the other
schemes a target may have, of which only one thing matters: which modules are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.errors import CheckpointError
from specctl.fp8 import Block

KEY = "quantization_config"
OTHER_KEYS = ("compression_config",)
# The keys in which a scheme lists the modules it leaves out. Of FP8's two, vLLM takes the first that is not empty.
LISTS: dict[str, tuple[str, ...]] = {
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "compressed-tensors": ("ignore",),
    "gptq": ("dynamic",),
    "awq": ("modules_to_not_convert",),
}
REGEX, GPTQ_OUT = "re:", "-:"  # before a pattern in compressed-tensors' list and in GPTQ's keys
_MAX_PATTERN, _MAX_REPEATS = 400, 6


@dataclass(frozen=True)
class Fp8Config:
    """E4M3 in blocks. values: the object as it stands, to be written again unchanged."""

    block: Block
    powers_of_two: bool
    values: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Fp8Config | None:
        """None for a config without quantisation. Raises CheckpointError for a method that is not FP8 in blocks."""
        for key in OTHER_KEYS:
            if config.get(key):
                raise CheckpointError(f"{where}: {key} is not supported, expected FP8 in blocks or no quantisation")
        values = config.get(KEY)
        if values is None:
            return None
        method = values.get("quant_method") if isinstance(values, Mapping) else values
        if not isinstance(values, Mapping) or method != "fp8":
            raise CheckpointError(
                f"{where}: {KEY} names {method!r}, which is not supported here, expected 'fp8' or no quantisation; use "
                "the original checkpoint"
            )
        sizes = values.get("weight_block_size")
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(s) is int and 0 < s < 2**31 for s in sizes):
            raise CheckpointError(
                f"{where}: weight_block_size in {KEY} is {sizes!r}, expected two sizes like [128, 128]"
            )
        if values.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(f"{where}: fmt in {KEY} is {values['fmt']!r}, expected 'e4m3'")
        scale_format = values.get("scale_fmt")
        if scale_format not in (None, "ue8m0", "float"):
            raise CheckpointError(f"{where}: scale_fmt in {KEY} is {scale_format!r}, expected 'ue8m0' or none")
        return cls(Block(*sizes), scale_format == "ue8m0", dict(values))

    @classmethod
    def published(cls) -> Fp8Config:
        """As DeepSeek publishes V3 and R1."""
        values = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
        return cls(Block(128, 128), False, values)


@dataclass(frozen=True)
class Scheme:
    """How a target's modules are quantised. key: of config.json, where it says so. fp8: None for what is not FP8 in
    blocks. ignored: the entries that leave modules out, as they stand: names, in AWQ parts of names, patterns behind
    `re:` or `-:`."""

    method: str
    key: str
    values: Mapping[str, Any]
    fp8: Fp8Config | None
    ignored: tuple[str, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Scheme | None:
        """None for a config without quantisation. Raises CheckpointError for a method that is not known here."""
        key = next((key for key in (KEY, *OTHER_KEYS) if config.get(key)), None)
        if key is None:
            return None
        values = config[key]
        method = values.get("quant_method") if isinstance(values, Mapping) else values
        if key in OTHER_KEYS and method is None:
            method = "compressed-tensors"
        if not isinstance(values, Mapping) or not isinstance(method, str) or method not in LISTS:
            raise CheckpointError(
                f"{where}: {key} names {method!r}, whose list of modules left out is not known here, expected "
                f"{', '.join(LISTS)} or no quantisation"
            )
        fp8 = Fp8Config.read(config, where) if method == "fp8" and values.get("weight_block_size") else None
        return cls(method, key, dict(values), fp8, _ignored(method, values, f"{where}: {key}"))

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern of this scheme's list takes a name from its start. A name that is no pattern: False."""
        sign = {"compressed-tensors": REGEX, "gptq": GPTQ_OUT}.get(self.method)
        return sign is not None and pattern.startswith(sign) and bool(re.match(pattern.removeprefix(sign), name))


def _ignored(method: str, values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    for key in LISTS[method]:
        entries = values.get(key)
        if not entries:
            continue
        if method == "gptq" and isinstance(entries, Mapping):
            entries = [pattern for pattern in entries if isinstance(pattern, str) and pattern.startswith(GPTQ_OUT)]
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(f"{where}: {key} is {str(entries)[:80]!r}, expected names of modules")
        for entry in entries:
            _check_pattern(method, entry, f"{where}: {key}")
        return tuple(entries)
    return ()


def _check_pattern(method: str, entry: str, where: str) -> None:
    """A pattern from a file is data: it has to be one, and one that cannot take for ever."""
    sign = {"compressed-tensors": REGEX, "gptq": GPTQ_OUT}.get(method)
    if sign is None or not entry.startswith(sign):
        return
    pattern = entry.removeprefix(sign)
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: {entry[:80]!r} is no regular expression: {error}") from None
    # Matching may take exponential time where a group is repeated, and long where many things are.
    repeats = len(re.findall(r"[*+{]", pattern))
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        raise CheckpointError(f"{where}: {entry[:80]!r} is too long or repeats too much to be tried; write it simpler")
