"""What is exported: the draft and its kind, what its specctl.json says, and the target as far as layouts name it.

Of the target, config and headers are read, and the embedding where a copy is compared with it. It is never run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from specctl import models
from specctl.checkpoint import Checkpoint, read_json
from specctl.convert_mtp.facts import config_sha, digest, recorded_target
from specctl.convert_mtp.files import Files, find_files
from specctl.dialects import eagle3 as layouts
from specctl.drafts.mtp_checkpoint import is_mtp_alone
from specctl.errors import CheckpointError, UsageError
from specctl.hub import identity, locate
from specctl.keys import Keys
from specctl.models import ARCHITECTURES
from specctl.schemas.draft import DraftFile, DraftTarget, recorded

Kind = Literal["llama", "mtp", "eagle3"]
Engine = Literal["vllm", "sglang", "speculators", "original"]
DEFAULT_K = 3


@dataclass(frozen=True)
class Sizes:
    """What a draft has to agree with."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class TargetFacts:
    """name: as it is written into layouts and commands: a hub id, or an absolute path."""

    name: str
    files: Files
    config: Mapping[str, Any] = field(repr=False)

    @property
    def num_layers(self) -> int:
        return self.sizes.num_layers

    @property
    def sizes(self) -> Sizes:
        keys = Keys(self.config, self.where)
        return Sizes(*map(keys.integer, ("hidden_size", "vocab_size", "num_hidden_layers")))

    @property
    def where(self) -> str:
        return str(self.files.path / "config.json")

    @property
    def architectures(self) -> tuple[str, ...]:
        named = self.config.get("architectures")
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()

    def embedding(self) -> Tensor | None:
        """None where its file is not here."""
        index, name = self.files.index, models.EMBEDDING
        if index is not None and (name not in index or not self.files.is_here(index[name])):
            return None
        try:
            checkpoint = self.files.open(None if index is None else {index[name]})
            return checkpoint.tensor(name) if name in checkpoint else None
        except CheckpointError:
            return None

    @property
    def model_config(self) -> models.CommonConfig | None:
        """None for a kind of model that this project does not run."""
        if self.config.get("model_type") not in ARCHITECTURES:
            return None
        return models.read_config(self.config, self.where)

    def recorded(self) -> DraftTarget:
        path = self.files.path
        return DraftTarget(
            name=self.name, revision=self.files.revision, config_sha=config_sha(path), tensors_sha=digest(path)
        )


@dataclass(frozen=True)
class Draft:
    """name: as the user wrote it. said: its specctl.json, None where there is none."""

    name: str
    checkpoint: Checkpoint
    kind: Kind
    said: DraftFile | None
    target: TargetFacts | None

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def named_target(self) -> DraftTarget | None:
        """The target given or found, else what the draft's own specctl.json says of it."""
        if self.target is not None:
            return self.target.recorded()
        return None if self.said is None else self.said.target

    def k(self, of_layout: int | None = None) -> int:
        """Drafted tokens that commands ask for: the chain it was trained for, where there is one and it is known."""
        depth = None if self.said is None else self.said.depth
        return depth or of_layout or (1 if self.kind == "mtp" else DEFAULT_K)


def open_source(name: str, target: str | None) -> Draft:
    """Raises CheckpointError for what is no draft, and for a --target that is none."""
    checkpoint = Checkpoint(locate(name))
    facts = known_target(checkpoint) if target is None else _target(target)
    return Draft(name, checkpoint, _kind(checkpoint), recorded(checkpoint.path), facts)


def _kind(checkpoint: Checkpoint) -> Kind:
    config = checkpoint.config
    if is_mtp_alone(checkpoint.names()):
        return "mtp"
    if layouts.is_eagle3(checkpoint):
        return "eagle3"
    if config.get("num_nextn_predict_layers") not in (None, 0):
        raise UsageError(
            f"{checkpoint.path}: is a whole model with an MTP layer, which engines find in it by themselves; to take "
            "the layer out, use specctl convert-mtp"
        )
    if config.get("model_type") in ARCHITECTURES:
        return "llama"
    raise CheckpointError(
        f"{checkpoint.path / 'config.json'}: model_type {config.get('model_type')!r} is no draft this version can "
        "export"
    )


def _target(name: str) -> TargetFacts:
    files = find_files(name)
    return TargetFacts(identity(name, files.path)[0], files, read_json(files.path / "config.json"))


def known_target(checkpoint: Checkpoint) -> TargetFacts | None:
    """The target of a draft as far as its directory names one that is here: by specctl.json, with the same config, or
    where that names none by a layout that names the target."""
    said = recorded_target(checkpoint.path)
    if said is not None and said.name is not None:
        same = _is_here(said.name) and config_sha(Path(said.name)) == said.config_sha
        return _target(said.name) if same else None
    name = layouts.named_target(checkpoint.config)
    return _target(name) if name is not None and _is_here(name) else None


def _is_here(name: str) -> bool:
    return os.path.isfile(os.path.join(name, "config.json"))
