"""specctl.json of a converted MTP layer: what it reads, and which target it comes from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from specctl.checkpoint import Checkpoint, read_json
from specctl.convert_mtp.source import FACTS, Source
from specctl.digest import tensors_sha
from specctl.errors import CheckpointError
from specctl.heads.mtp import HEAD_FACTS
from specctl.hub import identity
from specctl.schemas.base import Provenance
from specctl.schemas.draft import DraftFile, DraftTarget, Head


def draft_facts(
    name: str, source: Source, checkpoint: Checkpoint, target: Checkpoint | None, recipe: dict[str, Any]
) -> dict[str, Any]:
    """The file's value."""
    provenance = Provenance.here("cpu")
    facts = DraftFile(
        provenance=provenance,
        kind="mtp",
        head=Head.model_validate(HEAD_FACTS),
        target=_target(name, source, checkpoint, target),
        recipe=recipe,
        versions={package: getattr(provenance, package) for package in ("specctl", "torch", "transformers")},
    )
    value: dict[str, Any] = facts.model_dump(mode="json", by_alias=True)
    return value


def _target(name: str, source: Source, checkpoint: Checkpoint, target: Checkpoint | None) -> DraftTarget | None:
    """The target given; else the source, when it is one; else what the source's own specctl.json says."""
    if target is not None:
        return DraftTarget(
            name=str(target.path.resolve()),
            revision=None,
            config_sha=config_sha(target.path),
            tensors_sha=digest(target.path),
        )
    if source.shared:
        path = checkpoint.path
        known, revision = identity(name, source.files.path)
        return DraftTarget(name=known, revision=revision, config_sha=config_sha(path), tensors_sha=digest(path))
    return recorded_target(checkpoint.path)


def recorded_target(path: Path) -> DraftTarget | None:
    """The target that a directory's specctl.json names, None where it names none."""
    try:
        found = read_json(path / FACTS).get("target")
        return DraftTarget.model_validate(found) if found is not None else None
    except (CheckpointError, ValueError):
        return None


def config_sha(path: Path) -> str:
    """sha256 of config.json as it stands."""
    return hashlib.sha256((path / "config.json").read_bytes()).hexdigest()


def digest(path: Path) -> str | None:
    """Of all tensors; None when not all shards are here."""
    try:
        return tensors_sha(Checkpoint(path))
    except CheckpointError:
        return None
