"""An EAGLE-3 head held against its target, and filled from the tensors of a directory whose layout is already known.

A head has a layer of its own, so little of it has to be the target's: the width and the number of what it taps, and the
vocabulary. What may differ and should not go unsaid (a shorter context, another rotation) is told and not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from specctl import models
from specctl.checkpoint import Checkpoint
from specctl.drafts.eagle3 import Eagle3
from specctl.drafts.head import HeadDrafter
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.heads.eagle3 import EMBEDDING, Eagle3Head
from specctl.layers import Purpose
from specctl.models import CausalLM, CommonConfig, ModelConfig, Weights


class Sizes(Protocol):
    """What a head has to agree with."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True)
class Stored:
    """names: of the module's parameters in the checkpoint. ids_D: the target ids of the head's rows, None for a head
    with a row for every id."""

    checkpoint: Checkpoint
    head: Eagle3Head
    names: Mapping[str, str] = field(repr=False)
    ids_D: Tensor | None = field(repr=False)

    @property
    def where(self) -> str:
        return str(self.checkpoint.path)


def load_eagle3(
    stored: Stored,
    target: CausalLM,
    original: Checkpoint,
    device: torch.device,
    *,
    depth: int | None = None,
    purpose: Purpose = "serve",
) -> HeadDrafter:
    """The head, ready to run beside `target`, which was loaded from `original`. depth: steps it was trained for.

    An embedding stored with it that is the target's own, number for number, is left out. Raises IncompatiblePair for a
    head of another target.
    """
    check_fit(stored, target.config)
    if models.EMBEDDING in original and stored.head.own_embedding:
        stored = without_copy(stored, original.tensor(models.EMBEDDING))
    dtype = target.model.norm.weight.dtype
    return HeadDrafter("eagle3", build(stored, target, dtype, device, purpose), depth=depth)


def build(stored: Stored, target: CausalLM, dtype: torch.dtype, device: torch.device, purpose: Purpose) -> Eagle3:
    """The module, filled; `target` gives it the embedding if it has none of its own. Raises CheckpointError for numbers
    that cannot be read."""
    head, weights = stored.head, Weights(stored.checkpoint)
    for name in stored.names.values():
        if fault := weights.fault(name):
            raise CheckpointError(f"{stored.where}: {fault}")
    config = ModelConfig.read(head.layer, f"{stored.where}/config.json")
    ids_D = None if stored.ids_D is None else stored.ids_D.to(device)
    with torch.device("meta"):
        model = Eagle3(head, config, target, ids_D)

    def fill(prefix: str, part: nn.Module) -> None:
        models.give_back_freed_memory()
        for name, parameter in list(part.named_parameters()):
            if parameter.is_meta:
                owner, _, leaf = name.rpartition(".")
                tensor = weights.tensor(stored.names[f"{prefix}.{name}"], dtype).to(device=device)
                setattr(part.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=purpose == "train"))

    model.prepare(purpose, fill)
    models.give_back_freed_memory()
    return model


def check_fit(stored: Stored, config: Sizes) -> None:
    """Raises IncompatiblePair naming what the head reads and the target does not have."""
    head, width = stored.head, int(stored.head.layer["hidden_size"])
    for what, ours, theirs in (
        ("target_hidden_size", head.target_hidden, config.hidden_size),
        ("vocab_size", head.target_vocab, config.vocab_size),
    ):
        if ours != theirs:
            raise IncompatiblePair(
                f"{stored.where}: {what} is {ours}, the target has {theirs}: the head is of another model"
            )
    if head.taps[-1] > config.num_layers:
        raise IncompatiblePair(
            f"{stored.where}: reads tap {head.taps[-1]}, and the target has {config.num_layers} layers, whose last tap "
            f"is {config.num_layers}, what leaves the last of them: the head is of another model"
        )
    if not head.own_embedding and width != config.hidden_size:
        raise IncompatiblePair(
            f"{stored.where}: tensor {EMBEDDING} is missing, and the target's is {config.hidden_size} wide, the head "
            f"{width}"
        )


def notices(head: Eagle3Head, config: CommonConfig, name: str) -> list[str]:
    """What differs from the target without being wrong."""
    ours, found = ModelConfig.read(head.layer, name), []
    if ours.max_length < config.max_length:
        found.append(
            f"{name}: has a context of {ours.max_length}, the target one of {config.max_length}: beyond it nothing is "
            "drafted"
        )
    if ours.rope != config.rope and _turns(ours) != _turns(config):
        found.append(
            f"{name}: is rotated otherwise than the target ({_words(ours)}; the target: {_words(config)}); if it was "
            "not trained so, it accepts little beyond short texts"
        )
    return found


def without_copy(stored: Stored, embedding: Tensor) -> Stored:
    """The same head, without an embedding of its own if that is the target's number for number."""
    ours = stored.names[EMBEDDING]
    if stored.checkpoint.shape(ours) != embedding.shape or not _same(stored.checkpoint.tensor(ours), embedding):
        return stored
    names = {parameter: name for parameter, name in stored.names.items() if parameter != EMBEDDING}
    return replace(stored, head=replace(stored.head, own_embedding=False), names=names)


def _same(one: Tensor, other: Tensor) -> bool:
    """Of other dtypes too, if no number differs."""
    wide = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(wide), other.to(wide))


def _turns(config: CommonConfig) -> tuple[object, ...]:
    rope = config.rope
    if rope.kind == "default":
        return rope.kind, rope.theta
    return tuple(vars(rope).values())


def _words(config: CommonConfig) -> str:
    rope = config.rope
    scaled = "" if rope.kind == "default" else f" x {rope.factor:g} from {rope.original_length}"
    return f"{rope.kind}{scaled}, theta {rope.theta:g}"
