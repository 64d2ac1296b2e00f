"""Rotary position embeddings: which frequencies a config asks for, and how they turn queries and keys.

Frequencies, angles, cosines and sines are computed in float32 whatever the model's dtype, as transformers does, so that
the same position gives the same bits in every program. Legend: T rows, N heads, H head dim, F = H / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.errors import CheckpointError
from specctl.keys import Keys

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeConfig:
    """What a config.json says about rotation, in one form for both spellings.

    kind "dynamic" is the identity of "default" within the original length and is refused beyond it: its frequencies
    depend on the length of the whole text, so a text fed in one shot and one fed step by step would differ.
    """

    kind: str
    theta: float
    original_length: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str, default_theta: float = 10000.0) -> RopeConfig:
        """Read `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`, from a config.json mapping.

        Raises CheckpointError naming the key for a kind or a value that cannot be honoured.
        """
        outer, keys = Keys(config, where), _parameters(config, where)
        kind = keys.values.get("rope_type") or keys.values.get("type") or "default"
        if kind not in KINDS:
            raise CheckpointError(f"{keys.where}: rope type {kind!r} is not supported, expected {', '.join(KINDS)}")
        for holder in (outer, keys):
            if holder.number("partial_rotary_factor", 1.0) != 1.0:
                holder.refuse("partial_rotary_factor", "expected 1.0: rotating a part of a head is not supported")
        max_length = outer.integer("max_position_embeddings")
        # The key beside rope_parameters outranks the one inside, as in transformers.
        holder = outer if ORIGINAL_LENGTH in outer else keys
        original_length = holder.integer(ORIGINAL_LENGTH, max_length)
        rope = cls(
            kind=kind,
            theta=keys.above(1.0, "rope_theta", outer.above(1.0, "rope_theta", default_theta)),
            original_length=original_length,
            factor=keys.above(0.0, "factor", _default_factor(kind, max_length / original_length)),
            low_freq_factor=keys.above(0.0, "low_freq_factor", None if kind == "llama3" else 1.0),
            high_freq_factor=keys.above(0.0, "high_freq_factor", None if kind == "llama3" else 4.0),
            beta_fast=keys.above(0.0, "beta_fast", 32.0),
            beta_slow=keys.above(0.0, "beta_slow", 1.0),
            attention_factor=keys.above(0.0, "attention_factor") if "attention_factor" in keys else None,
            mscale=keys.number("mscale", 0.0),
            mscale_all_dim=keys.number("mscale_all_dim", 0.0),
            truncate=keys.boolean("truncate", True),
        )
        if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            keys.refuse("high_freq_factor", f"expected more than low_freq_factor, {rope.low_freq_factor:g}")
        return rope

    @property
    def max_length(self) -> int | None:
        """The longest text the rotation is the same for in one shot and step by step; None when there is no limit."""
        return self.original_length if self.kind == "dynamic" else None

    @property
    def score_scale(self) -> float:
        """What DeepSeek multiplies attention scores by, beside the root of the head dim (mscale_all_dim)."""
        scaled = self.kind != "default" and self.mscale_all_dim != 0
        return _mscale(self, self.mscale_all_dim) ** 2 if scaled else 1.0


def _parameters(config: Mapping[str, Any], where: str) -> Keys:
    """The object that describes the rotation, whichever of its two names it goes by."""
    found = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(found) == 2 and config[found[0]] != config[found[1]]:
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling differ, expected one of them")
    if not found:
        return Keys({}, where)
    raw = config[found[0]]
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{where}: {found[0]} is {raw!r}, expected an object")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise CheckpointError(f"{where}: {found[0]} differs by layer type, expected one rotation for all layers")
    return Keys(raw, f"{where}: {found[0]}")


def _default_factor(kind: str, ratio: float) -> float | None:
    """YaRN configs may leave the factor to be the ratio of the lengths; the other scaled kinds must state it."""
    return {"default": 1.0, "yarn": ratio}.get(kind)


class Rope:
    """The frequencies of one config, and cos / sin for given positions.

    interleaved: for `rotate_pairs`, whose pairs are neighbours, in place of `rotate`.
    """

    def __init__(self, config: RopeConfig, head_dim: int, interleaved: bool = False) -> None:
        self._interleaved = interleaved
        with torch.device("cpu"):  # also when the model around it is being built on the meta device
            self._inv_freq_F, self._scale = _frequencies(config, head_dim)

    def cos_sin(self, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every row's angles, both [T, 1, H] so that they broadcast over heads; sin is negated for the
        first of every pair, as `rotate` and `rotate_pairs` want it."""
        if self._inv_freq_F.device != position_T.device:
            self._inv_freq_F = self._inv_freq_F.to(position_T.device)
        angle_TF = position_T[:, None].float() * self._inv_freq_F
        cos_TF, sin_TF = angle_TF.cos() * self._scale, angle_TF.sin() * self._scale
        if self._interleaved:
            cos_TH, sin_TH = (torch.stack(pair, dim=-1).flatten(1) for pair in ((cos_TF, cos_TF), (-sin_TF, sin_TF)))
        else:
            cos_TH, sin_TH = torch.cat((cos_TF, cos_TF), dim=-1), torch.cat((-sin_TF, sin_TF), dim=-1)
        return cos_TH[:, None].to(dtype), sin_TH[:, None].to(dtype)


def rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + H / 2]) by each row's angles: x * cos + (-second half, first half) * sin.

    The sign comes with the sine, so that the halves are only swapped."""
    return x_TNH * cos_T1H + x_TNH.roll(x_TNH.shape[-1] // 2, -1) * sin_T1H


def rotate_pairs(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """The same for the pairs (x[2 i], x[2 i + 1])."""
    swapped_TNH = x_TNH.reshape(*x_TNH.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return x_TNH * cos_T1H + swapped_TNH * sin_T1H


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (float32 [F]) and the factor on cos and sin."""
    inv_freq_F = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == "linear":
        return inv_freq_F / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, inv_freq_F), 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim), _yarn_scale(config)
    return inv_freq_F, 1.0


def _llama3(config: RopeConfig, inv_freq_F: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between are blended."""
    wavelength_F = 2 * math.pi / inv_freq_F
    long = config.original_length / config.low_freq_factor
    short = config.original_length / config.high_freq_factor
    blend_F = (config.original_length / wavelength_F - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended_F = (1 - blend_F) * inv_freq_F / config.factor + blend_F * inv_freq_F
    scaled_F = torch.where(wavelength_F > long, inv_freq_F / config.factor, inv_freq_F)
    return torch.where((wavelength_F >= short) & (wavelength_F <= long), blended_F, scaled_F)


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp between interpolated and kept frequencies over the number of rotations."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(config.original_length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    period_F = config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept_F = 1 - ramp_F
    return 1.0 / (config.factor * period_F) * (1 - kept_F) + 1.0 / period_F * kept_F


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config, config.mscale) / _mscale(config, config.mscale_all_dim)
    return _mscale(config, 1.0)


def _mscale(config: RopeConfig, weight: float) -> float:
    return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0
