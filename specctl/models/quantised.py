"""FP8 weights of a target: which schemes are read, and the tensors they hide as the plain numbers they stand for.

Read are E4M3 numbers with float32 scales for blocks (DeepSeek), for each row (fbgemm, compressed-tensors) or for the
whole matrix. Anything else is refused by name. Which modules are quantised is not asked of the config: a tensor is
when it is stored as E4M3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from specctl import fp8
from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.fp8 import E4M3, Block
from specctl.heads.quantisation import KEY, OTHER_KEYS, Fp8Config

# Anything else is a number format that needs scales or a table to be read.
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCALES = ("_scale_inv", "_scale")
"""What follows the weight's name. Both are multiplied by."""
# Of activations and of the KV cache, which are never quantised here.
NOT_OURS = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
# Left in checkpoints by old versions of transformers; computed from the config instead.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
FORMATS = (None, "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Fp8Scheme:
    """method: as the config names it. block: None for one scale a row or a matrix."""

    method: str
    block: Block | None


def read_scheme(config: Mapping[str, Any], where: str) -> Fp8Scheme | None:
    """What a config.json says about quantisation; None when nothing. Raises CheckpointError for what is not read."""
    key = next((key for key in (KEY, *OTHER_KEYS) if config.get(key)), None)
    if key is None:
        return None
    values = config[key]
    method = values.get("quant_method") if isinstance(values, Mapping) else values
    if not isinstance(values, Mapping) or method not in ("fp8", "fbgemm_fp8", "compressed-tensors"):
        _refuse(where, key, method)
    if method == "compressed-tensors":
        return _compressed(values, where, key)
    if method == "fp8" and values.get("weight_block_size") is not None:
        found = Fp8Config.read(config, where)
        assert found is not None
        return Fp8Scheme(method, found.block)
    if values.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse(where, key, f"{method} {values['fmt']}")
    return Fp8Scheme(method, None)


def _compressed(values: Mapping[str, Any], where: str, key: str) -> Fp8Scheme:
    groups = values.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in found]
    if not weights or values.get("format") not in FORMATS or not all(_is_float8(each) for each in weights):
        _refuse(where, key, f"compressed-tensors {values.get('format')}")
    blocks = [each.get("block_structure") for each in weights if isinstance(each, Mapping)]
    if any(block != blocks[0] for block in blocks):
        _refuse(where, key, "compressed-tensors with blocks of several sizes")
    return Fp8Scheme("compressed-tensors", None if blocks[0] is None else _block(blocks[0], where, key))


def _block(sizes: Any, where: str, key: str) -> Block:
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(s) is int and 0 < s < 2**31 for s in sizes):
        raise CheckpointError(f"{where}: block_structure in {key} is {sizes!r}, expected two sizes like [128, 128]")
    return Block(*sizes)


def _is_float8(weights: Any) -> bool:
    if not isinstance(weights, Mapping):
        return False
    kind = (weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True))
    return kind == (8, "float", True) and weights.get("strategy") in ("tensor", "channel", "block")


def _refuse(where: str, key: str, method: object) -> NoReturn:
    raise CheckpointError(
        f"{where}: {key} names {method!r}: quantised checkpoints are not supported but for FP8 (E4M3); use the original"
    )


class Weights:
    """A checkpoint's tensors as plain numbers. Raises CheckpointError naming the tensor at fault."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._scheme = read_scheme(checkpoint.config, str(checkpoint.path / "config.json"))

    def names(self) -> set[str]:
        """Of the weights, without scales and without what the config says better."""
        found = {name for name in self._checkpoint.names() if not name.endswith(IGNORED_SUFFIX)}
        if self._scheme is None:
            return found
        scales = {name + suffix for name in found if self._is_fp8(name) for suffix in SCALES}
        return {name for name in found if name not in scales and not name.endswith(NOT_OURS)}

    def fault(self, name: str) -> str | None:
        """Why a tensor's numbers cannot be read, in one sentence; None when they can. Headers only."""
        dtype = self._checkpoint.dtype(name)
        if dtype in PLAIN:
            return None
        stored = f"tensor {name} is stored as {str(dtype).removeprefix('torch.')}"
        if dtype != E4M3 or self._scheme is None:
            return f"{stored}: quantised checkpoints are not supported but for FP8 (E4M3); use the original"
        scales = [name + suffix for suffix in SCALES if name + suffix in self._checkpoint]
        if len(scales) != 1:
            return f"{stored} and has {len(scales)} tensors of scales, expected {' or '.join(name + s for s in SCALES)}"
        shape, found = self._checkpoint.shape(name), self._checkpoint.shape(scales[0])
        expected = self._scale_shapes(shape)
        if found not in expected or self._checkpoint.dtype(scales[0]) not in PLAIN:
            wanted = " or ".join(str(list(each)) for each in expected)
            return f"tensor {scales[0]} has shape {list(found)}, expected {wanted} plain numbers"
        return None

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The numbers on the CPU: those of the mapped file where they are of that dtype already."""
        stored = self._checkpoint.tensor(name)
        if not self._is_fp8(name):
            return stored.to(dtype)
        scale = self._checkpoint.tensor(next(name + s for s in SCALES if name + s in self._checkpoint)).float()
        fp8.check_scales(scale, name)
        assert self._scheme is not None
        if self._scheme.block is not None:
            bands = fp8.dequantise(stored, scale, self._scheme.block)
        else:
            bands = fp8.dequantise_rows(stored, scale.reshape(-1))
        plain = torch.empty(stored.shape, dtype=dtype)
        first = 0
        for band in bands:
            plain[first : first + len(band)] = band
            first += len(band)
        return plain

    def _is_fp8(self, name: str) -> bool:
        return self._checkpoint.dtype(name) == E4M3

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        assert self._scheme is not None
        if len(shape) != 2:
            return []
        if self._scheme.block is not None:
            return [self._scheme.block.grid(shape)]
        return [(), (1,), (1, 1), (shape[0], 1), (shape[0],)]
