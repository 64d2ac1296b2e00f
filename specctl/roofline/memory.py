"""What a model takes of each device's memory, and how many tokens of caches are left room for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specctl.roofline.passes import BYTES, CACHE_BYTES, Passes
from specctl.roofline.shape import Grouped, ModelShape, attention_parameters, mlp_parameters
from specctl.schemas.roofline import Roofline

GB = 1e9


@dataclass(frozen=True)
class Room:
    """Of one device, in bytes. weights: of target and draft. cache: what is left for caches. per_token: of them."""

    weights: float
    cache: float
    per_token: float

    @property
    def tokens(self) -> int:
        return max(0, math.floor(self.cache / self.per_token))


def weight_bytes(passes: Passes) -> float:
    """On the device that has most. Embedding and head have 16 bits however the rest is stored."""
    shape, tp, each = passes.shape, passes.place.tp, BYTES[passes.place.weights]
    dense, sparse = mlp_parameters(shape)
    layers = shape.layers * attention_parameters(shape) + shape.dense_layers * dense + shape.sparse_layers * sparse
    entry = sum(out * inner for out, inner in passes.entry)
    ends = (shape.head_vocab + (0 if shape.tied else shape.vocab)) * shape.hidden
    return (layers * each + ends * 2) / tp + entry * 2


def layer_bytes(passes: Passes) -> float:
    """Without embedding and head, which some drafts share with their target."""
    shape = passes.shape
    ends = (shape.head_vocab + (0 if shape.tied else shape.vocab)) * shape.hidden
    return weight_bytes(passes) - ends * 2 / passes.place.tp


def cache_bytes(shape: ModelShape, passes: Passes) -> float:
    """Of one token: a device has at least one group's keys and values, and all of a latent."""
    attention, each = shape.attention, CACHE_BYTES[passes.place.cache]
    if isinstance(attention, Grouped):
        return shape.layers * 2 * max(1.0, attention.kv_heads / passes.place.tp) * attention.head_dim * each
    return shape.layers * (attention.kv_rank + attention.rotated) * each


def room(roofline: Roofline, target: Passes, draft_weights: float = 0.0, draft_cache: float = 0.0) -> Room:
    weights = weight_bytes(target) + draft_weights
    given = roofline.peaks.memory_gb * roofline.memory_share - roofline.reserve_gb
    return Room(weights, given * GB - weights, cache_bytes(target.shape, target) + draft_cache)
