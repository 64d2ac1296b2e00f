"""MTP layers for the engines that have them, in the layouts of convert-mtp, which also says what is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.checkpoint import Checkpoint, read_json
from specctl.convert_mtp import convert
from specctl.convert_mtp.convert import Wishes
from specctl.convert_mtp.families import SUPPORTED
from specctl.dialects import MTP
from specctl.drafts import mtp_checkpoint
from specctl.drafts.mtp_checkpoint import Found, find_mtp
from specctl.errors import CheckpointError, UsageError
from specctl.export.job import TOLERANCE, Job, Proof, compare_tensors, fits_twice
from specctl.export.source import Draft, Engine
from specctl.export.standin import ROWS, STEPS, chain_logits, stand_in
from specctl.heads.mtp import HEAD_FACTS, SHARED
from specctl.models import read_config
from specctl.schemas.draft import FACTS, Head

CPU = torch.device("cpu")
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class MtpJob(Job):
    plan: convert.Job = field(repr=False)

    @property
    def head(self) -> Head:
        return Head(**HEAD_FACTS)

    @property
    def k(self) -> int:
        return self.source.k()

    def write(self, directory: Path, progress: Callable[[int], object]) -> None:
        convert.fill(self.plan, directory, progress)

    def recipe(self, directory: Path) -> dict[str, Any]:
        """With what convert-mtp has to know of a NextN export."""
        made = super().recipe(directory)
        done = convert.recipe_facts(self.plan)
        made["export"] |= {key: done[key] for key in ("layers", "copies")}
        return made | {"num_hidden_layers": done["num_hidden_layers"]}

    def facts(self, directory: Path) -> dict[str, Any]:
        """The target as convert-mtp found it, where none is named otherwise."""
        found = super().facts(directory)
        if found["target"] is None:
            found["target"] = read_json(directory / FACTS).get("target")
        return found

    def prove(self, directory: Path) -> Proof:
        ours, theirs = find_mtp(self.source.checkpoint), find_mtp(Checkpoint(directory))
        reader = MTP[self.to].reader
        prefix = theirs.name("")
        written = {name.removeprefix(prefix): name for name in theirs.checkpoint.names() if name.startswith(prefix)}
        names = {name: ours.name(name) for name in written if ours.name(name) in ours.checkpoint}
        if lacking := sorted(written.keys() - names.keys() - SHARED.keys()):
            raise CheckpointError(
                f"{self.source.name}: {reader} would read a tensor {lacking[0]} that the draft has not"
            )
        compare_tensors(ours.checkpoint, theirs.checkpoint, names, reader, written)
        numbers = sum(theirs.checkpoint.info(name).num_parameters for name in written.values())
        if not fits_twice(numbers):
            return Proof(None, 0)
        difference = float((_logits(ours) - _logits(theirs)).abs().max())
        if not difference <= TOLERANCE:
            raise CheckpointError(
                f"{self.source.name}: logits of the layer as {reader} reads it differ by {difference:.2g} from the "
                f"draft's, expected at most {TOLERANCE:g}"
            )
        return Proof(difference, ROWS * STEPS)


def plan(source: Draft, to: Engine) -> MtpJob:
    """Raises UsageError where no engine has such a layer, and as convert-mtp does."""
    family = source.checkpoint.config.get("model_type")
    if to not in ENGINES:
        raise UsageError(f"--to {to}: has no layout for an MTP layer, expected {' or '.join(ENGINES)}")
    if family != SUPPORTED:
        raise UsageError(
            f"--to {to}: the MTP layer of {source.name} is a {family} layer, and {MTP[to].reader} has MTP layers of "
            f"DeepSeek models ({SUPPORTED}) only: serve it with specctl, or train an eagle3 head"
        )
    target = None if source.target is None else source.target.files.name
    job = convert.prepare(Wishes(str(source.path), to, target=target))
    convert.check_planned(job)
    return MtpJob(source, to, job.config, job.entries, job.notices, job)


def _logits(found: Found) -> Tensor:
    """Of a chain, from a stand-in for the target."""
    config = read_config(_of_target(found), found.where)
    model = mtp_checkpoint.build(found, stand_in(config), torch.float32, CPU, "train")
    return chain_logits(model, config.vocab_size, config.max_position, config.hidden_size)


def _of_target(found: Found) -> dict[str, Any]:
    """A NextN export's config says that there is one layer; which layer of the target it is does not matter to it."""
    return {**found.checkpoint.config, "first_k_dense_replace": 0}
