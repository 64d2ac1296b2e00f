"""An MTP layer found in a checkpoint, held against its target, and filled: the one inside the target, or one in a
directory of its own, as convert-mtp writes it for any reader.

An engine builds the layer from the target's config, so what the layer was made for has to be the same there. What
differs is named by the tensor that shows it, or by the key of config.json where no tensor does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from specctl import models
from specctl.checkpoint import Checkpoint
from specctl.drafts.mtp import Mtp, MtpDrafter
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.heads.mtp import EMBEDDING, HEAD, MARKS, SHARED, claimed_layers
from specctl.keys import Keys
from specctl.layers import Purpose
from specctl.models import CausalLM, CommonConfig, Weights

# Of a model as a whole, or shown by the tensors: whatever they are, a layer is the same.
_ELSEWHERE = ("num_layers", "max_position", "tied", "intermediate_size", "first_dense")
_KEYS = {
    "norm_eps": "rms_norm_eps",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias (o_proj)",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
}
_NEXTN = "NextN"


@dataclass(frozen=True)
class Found:
    """Where an MTP layer is. number: it has in its checkpoint. count: of MTP layers there. num_layers: of the model it
    was made for, None when that is not said."""

    checkpoint: Checkpoint
    number: int
    count: int
    num_layers: int | None

    @property
    def where(self) -> str:
        return str(self.checkpoint.path)

    def name(self, tensor: str) -> str:
        return f"model.layers.{self.number}.{tensor}"


def is_mtp_alone(names: Collection[str]) -> bool:
    """Whether a checkpoint is an MTP layer without a model around it."""
    model = ("model.norm.weight", SHARED[EMBEDDING], SHARED[HEAD])
    return any(name.endswith(tuple(f".{mark}" for mark in MARKS)) for name in names) and not any(
        name in names for name in model
    )


def find_mtp(checkpoint: Checkpoint) -> Found:
    """Raises CheckpointError when the config claims no MTP layer, or none is where it says."""
    where = str(checkpoint.path / "config.json")
    keys = Keys(checkpoint.config, where)
    count, first = claimed_layers(keys), keys.integer("num_hidden_layers")
    alone = is_nextn(checkpoint.config)
    if not count:
        raise CheckpointError(f"{where}: num_nextn_predict_layers is 0 or absent: no MTP layer is declared")
    found = Found(checkpoint, 0 if alone else first, count, None if alone else first)
    names = checkpoint.names()
    if not any(name.startswith(found.name("")) for name in names):
        marked = sorted(name for name in names if name.endswith(tuple(f".{mark}" for mark in MARKS)))
        but = f"found tensor {marked[0]}" if marked else "saving may have lost it; use the original checkpoint"
        raise CheckpointError(f"{checkpoint.path}: expected an MTP layer in {found.name('*')}, {but}")
    return found


def is_nextn(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a NextN export, in which the MTP layer has number 0."""
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and name.endswith(_NEXTN) for name in named)


def load_mtp(
    found: Found, target: CausalLM, original: Checkpoint, device: torch.device, purpose: Purpose = "serve"
) -> MtpDrafter:
    """The layer, ready to run beside `target`, which was loaded from `original`.

    An embedding or head stored with it that is the target's own, number for number, is left out. Raises
    IncompatiblePair for a layer of another model and CheckpointError for one that is not whole, naming tensor or key.
    """
    _check_number(found, target.config.num_layers)
    weights = Weights(found.checkpoint)
    own = {copy: _differs(found, copy, original, target.config) for copy in SHARED}
    with torch.device("meta"):
        model = Mtp(target, found.number, own_embedding=own[EMBEDDING], own_head=own[HEAD])
    _check_tensors(found, model, weights, target.config)
    if found.checkpoint is not original:
        _check_config(found, target.config)
    dtype = target.model.norm.weight.dtype

    def fill(prefix: str, part: nn.Module) -> None:
        models.fill_part(weights, prefix, part, dtype, device, purpose)

    model.prepare(purpose, fill)
    models.give_back_freed_memory()
    return MtpDrafter(model, found.count)


def check_whole(found: Found) -> None:
    """Raises CheckpointError or IncompatiblePair naming the first tensor of the layer that is not as its own config
    says. Headers only."""
    where = str(found.checkpoint.path / "config.json")
    config = models.read_config(found.checkpoint.config, where)
    stored = {copy: found.name(copy) in found.checkpoint for copy in SHARED}
    try:
        with torch.device("meta"):
            target = models.ARCHITECTURES[config.model_type](replace(config, num_layers=1))
            model = Mtp(target, found.number, own_embedding=stored[EMBEDDING], own_head=stored[HEAD])
    except (RuntimeError, TypeError, OverflowError):  # what torch says about sizes beyond 64 bits
        raise CheckpointError(f"{where}: describes tensors of a size that no machine can hold") from None
    _check_tensors(found, model, Weights(found.checkpoint), config)


def _check_number(found: Found, num_layers: int) -> None:
    if found.num_layers not in (None, num_layers):
        raise IncompatiblePair(
            f"{found.where}: tensor {found.name(MARKS[2])} follows the {found.num_layers} layers of a model, the "
            f"target has {num_layers}: the MTP layer is of another one"
        )


def _differs(found: Found, copy: str, original: Checkpoint, config: CommonConfig) -> bool:
    """Whether the layer has an embedding or head that is not the target's."""
    ours = found.name(copy)
    theirs = SHARED[EMBEDDING] if config.tied else SHARED[copy]
    if ours not in found.checkpoint:
        return False
    if theirs not in original or original.info(theirs) != found.checkpoint.info(ours):
        return True
    return not torch.equal(found.checkpoint.tensor(ours), original.tensor(theirs))


def _check_tensors(found: Found, model: Mtp, weights: Weights, config: CommonConfig) -> None:
    """Names, shapes and formats, from headers alone."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name for name in weights.names() if name.startswith(found.name(""))}
    stored -= {name for name in map(found.name, SHARED) if name not in expected}
    if missing := sorted(expected.keys() - stored):
        raise CheckpointError(f"{found.where}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unexpected := sorted(stored - expected.keys()):
        raise CheckpointError(
            f"{found.where}: tensor {unexpected[0]} is not part of an MTP layer of a {config.model_type} model "
            f"({len(unexpected)} such tensors)"
        )
    for name, shape in expected.items():
        if found.checkpoint.shape(name) != shape:
            raise IncompatiblePair(
                f"{found.where}: tensor {name} has shape {list(found.checkpoint.shape(name))}, the target needs "
                f"{list(shape)}: the MTP layer is of another model"
            )
        if fault := weights.fault(name):
            raise CheckpointError(f"{found.where}: {fault}")


def _check_config(found: Found, config: CommonConfig) -> None:
    """What no tensor shows: rotation, norms, routing, and the vocabulary where the layer has no copy of it."""
    where = str(found.checkpoint.path / "config.json")
    ours = models.read_config(found.checkpoint.config, where)
    mine, theirs = _said(ours), _said(config)
    for key, value in mine.items():
        if value != (other := theirs.get(key)):
            raise IncompatiblePair(
                f"{where}: {key} is {value}, the target has {other}: the MTP layer is of another model"
            )


def _said(config: CommonConfig) -> dict[str, Any]:
    """What a config says of a layer that its tensors do not, by the keys of config.json; rotation and routing spread
    out."""
    found: dict[str, Any] = {}
    for field in fields(config):
        key, value = _KEYS.get(field.name, field.name), getattr(config, field.name)
        if is_dataclass(value):
            found |= {f"{key} ({name})": inner for name, inner in vars(value).items()}
        elif field.name not in _ELSEWHERE:
            found[key] = value
    if config.rope.kind == "default":  # no frequency depends on the length
        del found["rope (original_length)"]
    return found
