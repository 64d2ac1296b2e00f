"""What a draft adds to a step, from its own config.json or from its target's: a small model, or a head of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specctl.errors import UsageError
from specctl.roofline.memory import cache_bytes, layer_bytes, weight_bytes
from specctl.roofline.passes import Passes, Placement
from specctl.roofline.shape import Grouped, ModelShape
from specctl.schemas.roofline import Lane, Peaks

HEADS = ("mtp", "eagle3")
"""What can be named without a config of its own."""

EAGLE3_VOCAB = 32000
TAPS = 3


@dataclass(frozen=True)
class DraftCosts:
    """step: one draft step of one row. follow: the pass over what a step committed. reads_hidden: it has to follow
    plain     steps too. weights, cache: bytes on a device, the second for a token."""

    kind: str
    step: Passes
    follow: Passes
    reads_hidden: bool
    weights: float
    cache: float


def small_model(shape: ModelShape, lane: Lane, peaks: Peaks, place: Placement) -> DraftCosts:
    """Run by one device, the leader; what it knows of a step are its tokens. place: the target's, for its cache."""
    own = Passes(shape, Placement(weights=shape.weights, cache=place.cache), lane, peaks)
    return DraftCosts("llama", own, own, False, weight_bytes(own), cache_bytes(shape, own))


def mtp_layer(target: Passes) -> DraftCosts:
    """One layer like the target's last, over two hidden states projected to one; embedding and head are its."""
    shape = target.shape
    if not shape.mtp_layers:
        raise UsageError(
            f"--draft-config mtp: {shape.name} has no num_nextn_predict_layers, so no MTP layer; give the config.json "
            "of "
            "a draft"
        )
    experts = None if shape.experts is None else replace(shape.experts, dense_layers=0)
    layer = replace(shape, layers=1, experts=experts)
    own = replace(target, shape=layer, entry=((shape.hidden, 2 * shape.hidden),))
    return DraftCosts("mtp", own, own, True, layer_bytes(own), cache_bytes(layer, own))


def eagle3_like(target: Passes) -> DraftCosts:
    """The published form: a layer of the target's sizes and a vocabulary of 32,000."""
    shape = target.shape
    if not isinstance(shape.attention, Grouped):
        raise UsageError(
            f"--draft-config eagle3: {shape.name} has latent attention, so the sizes of its head do not follow from it"
            "; "
            "give the head's config.json"
        )
    vocab = min(EAGLE3_VOCAB, shape.vocab)
    layer = replace(shape, layers=1, experts=None, head_vocab=vocab, mtp_layers=0, weights="bf16")
    return eagle3_head(layer, target)


def eagle3_head(shape: ModelShape, target: Passes) -> DraftCosts:
    """Its layer reads token and hidden state side by side; after a step the states of three of the target's layers are
    projected to one (EAGLE-3, section 3.1)."""
    place = replace(target.place, weights=shape.weights, ep=1)
    step = Passes(shape, place, target.lane, target.peaks, wide=True)
    follow = replace(step, entry=((shape.hidden, TAPS * target.shape.hidden),))
    weights = layer_bytes(follow) + shape.head_vocab * shape.hidden * 2 / place.tp
    return DraftCosts("eagle3", step, follow, True, weights, cache_bytes(shape, step))


def read_draft(config: Mapping[str, Any], where: str, target: Passes) -> DraftCosts:
    """What a config.json is of: a head of EAGLE-3 (by its architecture or its own vocabulary), or a small model."""
    shape = ModelShape.read(config, where)
    architectures = config.get("architectures") or []
    if "draft_vocab_size" in config or any("eagle3" in str(each).lower() for each in architectures):
        return eagle3_head(shape, target)
    if shape.vocab != target.shape.vocab and abs(shape.vocab - target.shape.vocab) > PADDING:
        raise UsageError(
            f"--draft-config {where}: vocab_size {shape.vocab} is not the target's {target.shape.vocab}, so it cannot "
            "draft for it"
        )
    return small_model(shape, target.lane, target.peaks, target.place)


PADDING = 1024
"""Vocabularies are padded; what is within this of another may be the same. Whether it is, only the tokenizers tell."""
