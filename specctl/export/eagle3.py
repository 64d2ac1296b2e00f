"""EAGLE-3 heads, from any of their layouts to any other that can say them.

The numbers stay as they are. What changes is how the head is described, and whether the description is understood is
seen by its reader's own rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.drafts import eagle3_checkpoint
from specctl.drafts.eagle3_checkpoint import Stored
from specctl.errors import CheckpointError, UsageError
from specctl.export.job import TOLERANCE, Job, Proof, compare_tensors, copied, fits_twice
from specctl.export.source import Draft, Engine
from specctl.export.standin import ROWS, STEPS, chain_logits, stand_in
from specctl.heads.eagle3 import Eagle3Head
from specctl.heads.vocabulary import D2T, T2D, members, offsets
from specctl.models import ModelConfig
from specctl.pair import stored_head
from specctl.schemas.draft import Head
from specctl.shard_writer import Entry
from specctl.shards import TensorInfo

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Eagle3Job(Job):
    """found: the head's layout in the source; stored: the head itself."""

    found: layouts.Stored = field(repr=False)
    stored: Stored = field(repr=False)

    @property
    def head(self) -> Head:
        return Head(**self.stored.head.facts())

    @property
    def k(self) -> int:
        return self.source.k(self.found.k)

    def prove(self, directory: Path) -> Proof:
        written, source = Checkpoint(directory), self.stored.checkpoint
        target = self.source.target
        num_layers, architectures = (None, ()) if target is None else (target.num_layers, target.architectures)
        own = replace(self.found.view, taps=self.stored.head.taps, tensors=_named(self.stored, self.to))
        again = layouts.read(written, self.stored.head.taps, num_layers)
        difference = 0.0
        for view in layouts.readers(again, self.to, architectures):
            for wrong in layouts.differences(own, view, num_layers):
                raise CheckpointError(f"{self.source.name}: {wrong}")
            parameters = {ours: name for name, ours in view.tensors.items()}
            compare_tensors(source, written, self.stored.names, view.reader, parameters)
            theirs = Stored(written, view.head(num_layers), parameters, again.ids())
            _compare_ids(self.stored, theirs, view.reader)
            if fits_twice(self.num_bytes // 2):
                difference = max(difference, _difference(self.stored, theirs))
                if not difference <= TOLERANCE:
                    raise CheckpointError(
                        f"{self.source.name}: logits of the head as {view.reader} reads it differ by {difference:.2g} "
                        f"from the draft's, expected at most {TOLERANCE:g}"
                    )
        return Proof(difference if fits_twice(self.num_bytes // 2) else None, ROWS * STEPS)


def plan(source: Draft, to: Engine) -> Eagle3Job:
    """Raises UsageError for what the layout cannot say, IncompatiblePair for a target that the head is not of."""
    target = source.target
    num_layers = None if target is None else target.num_layers
    said = None if source.said is None else source.said.taps
    found = layouts.read(source.checkpoint, said, num_layers)
    if found.view.needs_layers and num_layers is None:
        raise UsageError(
            f"{source.name}: names no taps, which then follow from the target's number of layers; pass --target"
        )
    stored = stored_head(found, num_layers)
    if target is not None:
        eagle3_checkpoint.check_fit(stored, target.sizes)
    stored, notices = _embedding(source, stored)
    head = stored.head
    about = layouts.Target(
        None if source.named_target is None else source.named_target.name,
        num_layers,
        () if target is None else target.architectures,
    )
    if refused := layouts.refusals(to, head, about):
        raise UsageError(f"--to {to}: {refused[0]}")
    config = layouts.written(to, head, about, source.k(found.k)) | _dtype(source, stored)
    entries = tuple(_entries(stored, to))
    notices += [f"{source.name}: {note}" for note in found.view.notes]
    if target is not None and (read := target.model_config) is not None:
        notices += eagle3_checkpoint.notices(head, read, source.name)
    return Eagle3Job(source, to, config, entries, tuple(notices), found, stored)


def _embedding(source: Draft, stored: Stored) -> tuple[Stored, list[str]]:
    """Without an embedding that is the target's own, and what there is to say about one that is not."""
    if not stored.head.own_embedding:
        return stored, []
    theirs = None if source.target is None else source.target.embedding()
    if theirs is None:
        return stored, [
            f"{source.name}: has an embedding, which is kept without a comparison (--target gives the target's)"
        ]
    bare = eagle3_checkpoint.without_copy(stored, theirs)
    if bare is not stored:
        return bare, [f"{source.name}: its embedding is the target's and is left out"]
    return stored, []


def _dtype(source: Draft, stored: Stored) -> dict[str, Any]:
    config = source.checkpoint.config
    named = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(named, str):
        named = str(source.checkpoint.dtype(stored.names["fc.weight"]))
    return {"dtype": named.removeprefix("torch.")}


def _entries(stored: Stored, to: Engine) -> Iterator[Entry]:
    yield from copied(stored.checkpoint, {name: written for written, name in _written_names(stored, to).items()})
    if stored.ids_D is not None:
        tables = {D2T: offsets(stored.ids_D), T2D: members(stored.ids_D, stored.head.target_vocab)}
        for name, table in tables.items():
            yield Entry(name, TensorInfo(table.dtype, tuple(table.shape)), partial(iter, [table]))


def _written_names(stored: Stored, to: Engine) -> dict[str, str]:
    """What tensors are called in the output, to what they are called in the source."""
    return {layouts.stored_name(to, ours): name for ours, name in stored.names.items()}


def _named(stored: Stored, to: Engine) -> dict[str, str]:
    return {layouts.stored_name(to, ours): ours for ours in stored.names}


def _compare_ids(ours: Stored, theirs: Stored, reader: str) -> None:
    one, other = ours.ids_D, theirs.ids_D
    if (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other)):
        raise CheckpointError(f"{theirs.where}: by {D2T}, {reader} would take rows of the head for other token ids")


def _difference(ours: Stored, theirs: Stored) -> float:
    return float((_logits(ours) - _logits(theirs)).abs().max())


def _logits(stored: Stored) -> Tensor:
    """Of a chain, from a stand-in for the target."""
    head: Eagle3Head = stored.head
    config = ModelConfig.read(head.layer, stored.where)
    model = eagle3_checkpoint.build(stored, stand_in(config), torch.float32, CPU, "train")
    return chain_logits(model, config.vocab_size, config.max_position, head.target_hidden)
