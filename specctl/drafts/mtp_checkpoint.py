"""An MTP layer found in a checkpoint, held against its target, and filled: the one inside the target, or one in a
directory of its own, as convert-mtp writes it for any reader. In a directory of its own it may score a part of the
target's vocabulary only: d2t beside it says which ids, and their rows are taken from the target's head.

An engine builds the layer from the target's config, so what the layer was made for has to be the same there. What
differs is named by the tensor that shows it, or by the key of config.json where no tensor does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specctl import models
from specctl.checkpoint import Checkpoint
from specctl.drafts.head import HeadDrafter
from specctl.drafts.mtp import Mtp, mtp_drafter
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.heads.mtp import EMBEDDING, HEAD, MARKS, SHARED, claimed_layers
from specctl.heads.vocabulary import D2T, T2D, read_ids
from specctl.keys import Keys
from specctl.layers import Purpose
from specctl.models import CausalLM, CommonConfig, Weights
from specctl.models.config import spelled

# Of a model as a whole, or shown by the tensors: whatever they are, a layer is the same.
_ELSEWHERE = ("num_layers", "max_position", "tied", "intermediate_size", "first_dense")
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
    found: Found,
    target: CausalLM,
    original: Checkpoint,
    device: torch.device,
    purpose: Purpose = "serve",
    depth: int | None = None,
) -> HeadDrafter:
    """The layer, ready to run beside `target`, which was loaded from `original`. depth: steps it was trained for, None
    where nothing is known, and then one.

    An embedding or head stored with it that is the target's own, number for number, is left out. Raises
    IncompatiblePair for a layer of another model and CheckpointError for one that is not whole, naming tensor or key.
    """
    _check_number(found, target.config.num_layers)
    weights = Weights(found.checkpoint)
    own = {copy: _differs(found, copy, original, target.config) for copy in SHARED}
    ids_V = None if found.checkpoint is original else read_vocabulary(found.checkpoint)
    if ids_V is not None and own[HEAD]:
        raise CheckpointError(f"{found.where}: has both {D2T} and {found.name(HEAD)}; its rows would be of either")
    with torch.device("meta"):
        model = Mtp(target, found.number, own[EMBEDDING], own[HEAD], None if ids_V is None else ids_V.to(device))
    _check_tensors(found, model, weights, target.config)
    if found.checkpoint is not original:
        _check_config(found, target.config)
    dtype = target.model.norm.weight.dtype
    if ids_V is not None:
        rows = models.EMBEDDING if target.config.tied else models.HEAD
        model.use_rows(Weights(original).tensor(rows, dtype)[ids_V].to(device))
    _fill(model, weights, dtype, device, purpose)
    drafter = mtp_drafter(model, found.count)
    if depth is not None and drafter.max_k is None:
        drafter.depth = depth
    return drafter


def build(found: Found, target: CausalLM, dtype: torch.dtype, device: torch.device, purpose: Purpose) -> Mtp:
    """The layer alone, over the embedding and the head of whatever `target` is."""
    with torch.device("meta"):
        model = Mtp(target, found.number)
    _fill(model, Weights(found.checkpoint), dtype, device, purpose)
    return model


def _fill(model: Mtp, weights: Weights, dtype: torch.dtype, device: torch.device, purpose: Purpose) -> None:
    def fill(prefix: str, part: nn.Module) -> None:
        models.fill_part(weights, prefix, part, dtype, device, purpose)

    model.prepare(purpose, fill)
    models.give_back_freed_memory()


def read_vocabulary(checkpoint: Checkpoint) -> Tensor | None:
    """The target ids that an MTP layer in a directory of its own scores, int64 in order; None for all of them.

    Raises CheckpointError where config and tables contradict each other or make no vocabulary.
    """
    where = str(checkpoint.path)
    keys = Keys(checkpoint.config, f"{where}/config.json")
    vocab = keys.integer("vocab_size")
    size = keys.integer("draft_vocab_size", vocab)
    if D2T not in checkpoint:
        if size != vocab:
            raise CheckpointError(
                f"{where}: {D2T} is missing, and the layer has {size} of {vocab} token ids (draft_vocab_size): without "
                "it nobody knows which"
            )
        return None
    d2t_V = checkpoint.tensor(D2T)
    size = keys.integer("draft_vocab_size", max(d2t_V.numel(), 1))
    t2d = checkpoint.tensor(T2D) if T2D in checkpoint else None
    ids_V = read_ids(d2t_V, t2d, size, vocab, where)
    return ids_V if size < vocab else None


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
    mine, theirs = spelled(ours, _ELSEWHERE), spelled(config, _ELSEWHERE)
    for key, value in mine.items():
        if value != (other := theirs.get(key)):
            raise IncompatiblePair(
                f"{where}: {key} is {value}, the target has {other}: the MTP layer is of another model"
            )
