"""The output: a plain Hugging Face directory with the target's tokenizer, and specctl.json, which says where it is
from.

It is loaded again as serving loads it, and what it says of its acceptance was measured on that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from specctl.checkpoint import COMPANIONS, Checkpoint, dtype_of
from specctl.convert_mtp.facts import config_sha
from specctl.digest import tensors_sha
from specctl.errors import CheckpointError
from specctl.finetune.start import Start
from specctl.finetune.validation import Measured, Validator
from specctl.heads.mtp import BIAS_LEAF
from specctl.hub import identity
from specctl.output import write_json
from specctl.pair import open_draft
from specctl.schemas.base import Provenance
from specctl.schemas.draft import DraftFile, DraftTarget
from specctl.schemas.recipe import Recipe
from specctl.train.checkpoint import save_model


@dataclass(frozen=True)
class Result:
    """What goes into the directory. target: its checkpoint; data_sha: of the examples."""

    recipe: Recipe
    start: Start
    model: nn.Module
    target: Checkpoint
    data_sha: str | None
    device: str
    threads: int | None

    def write(self, path: Path, validator: Validator | None) -> list[Measured]:
        """Fill an empty directory; what the draft in it was measured to do, if it can be measured."""
        dtype = dtype_of(self.start.config, str(self.target.path / "config.json"))
        config = dict(self.start.config) | {"dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        weights, kept = dict(self.model.named_parameters()), dict(self.start.tables)
        for name in [name for name in weights if name.endswith(BIAS_LEAF)]:  # choices hang on it: it is not narrowed
            kept[name] = weights.pop(name).detach().float()
        save_model(path, weights, config, dtype, kept)
        for name in COMPANIONS:
            if (self.target.path / name).is_file():
                shutil.copyfile(self.target.path / name, path / name)
        measured: list[Measured] = []
        if validator is not None:
            drafter = open_draft(str(path), validator.target).drafter
            measured = validator.measure(drafter)
        write_json(path / "specctl.json", self._facts(measured), force=True)
        return measured

    def _facts(self, measured: Sequence[Measured]) -> Mapping[str, Any]:
        provenance = Provenance.here(self.device, self.threads)
        name, revision = identity(self.recipe.target, self.target.path)
        facts = DraftFile(
            provenance=provenance,
            kind=self.recipe.kind,
            head=self.start.head,
            target=DraftTarget(
                name=name,
                revision=revision,
                config_sha=config_sha(self.target.path),
                tensors_sha=target_identity(self.target),
            ),
            data_sha=self.data_sha,
            recipe=self.recipe.model_dump(mode="json", by_alias=True),
            versions={package: getattr(provenance, package) for package in ("specctl", "torch", "transformers")},
            acceptance=[each.as_acceptance() for each in measured] or None,
        )
        value: dict[str, Any] = facts.model_dump(mode="json", by_alias=True)
        return value


def target_identity(target: Checkpoint) -> str | None:
    """tensors_sha; None when not all shards are here."""
    try:
        return tensors_sha(target)
    except CheckpointError:
        return None
