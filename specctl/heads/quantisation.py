"""What config.json says about FP8 weights, checked; and the same for a checkpoint that we make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.errors import CheckpointError
from specctl.fp8 import Block

KEY = "quantization_config"
OTHER_KEYS = ("compression_config",)


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
