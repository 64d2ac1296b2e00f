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
from specctl.export.job import TOLERANCE, Job, Proof, compare_configs, compare_tensors, fits_twice
from specctl.export.source import Draft, Engine
from specctl.export.standin import ROWS, STEPS, chain_logits, stand_in
from specctl.fp8 import E4M3
from specctl.heads.mtp import HEAD_FACTS, SHARED
from specctl.heads.quantisation import Scheme
from specctl.models import CommonConfig, read_config
from specctl.models.quantised import IGNORED_SUFFIX as UNREAD
from specctl.schemas.draft import FACTS, Head

CPU = torch.device("cpu")
ENGINES = ("vllm", "sglang")
MADE_UP = ("num_layers",)  # in a NextN export's config


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
        compare_configs(self.source.name, _read(ours), _read(theirs), reader, MADE_UP)
        stored, written = _parts(ours), _parts(theirs)
        names = {name: stored[name] for name in written if name in stored}
        if lost := sorted(stored.keys() - written.keys() - SHARED.keys()):
            raise CheckpointError(f"{self.source.name}: {reader} would not find tensor {lost[0]}, which the draft has")
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
    try:
        convert.check_planned(job)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_remedy(source, job)}") from None
    return MtpJob(source, to, job.config, job.entries, job.notices, job)


def _remedy(source: Draft, job: convert.Job) -> str:
    """For a plain layer whose reader goes by a target that is quantised; nothing is rounded without being asked."""
    plain = not any(entry.info.dtype == E4M3 for entry in job.entries)
    if source.target is None or not plain or Scheme.read(source.target.config, source.target.where) is None:
        return ""
    return (
        f"; the target is quantised and the layer is not: specctl convert-mtp writes it in FP8 (--to {job.wishes.to} "
        "--dtype fp8 --target), or puts it into the target and leaves it out of the quantisation (--attach-to)"
    )


def _logits(found: Found) -> Tensor:
    """Of a chain, from a stand-in for the target."""
    config = _read(found)
    model = mtp_checkpoint.build(found, stand_in(config), torch.float32, CPU, "train")
    return chain_logits(model, config.vocab_size, config.max_position, config.hidden_size)


def _read(found: Found) -> CommonConfig:
    """A NextN export's config says that there is one layer; which layer of the target it is does not matter to it."""
    return read_config({**found.checkpoint.config, "first_k_dense_replace": 0}, f"{found.where}/config.json")


def _parts(found: Found) -> dict[str, str]:
    """The layer's tensors by their names within it, scales among them."""
    prefix, names = found.name(""), found.checkpoint.names()
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix) and not name.endswith(UNREAD)}
