"""specctl.json: what a draft's directory says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from specctl.errors import UsageError
from specctl.schemas.base import Checked, Document, Provenance, read_document

FACTS = "specctl.json"


class Head(Checked):
    """What the head reads and where its norms are."""

    reads: str
    taps: list[int]
    norms: dict[str, str]
    vocabulary: dict[str, Any] | None
    feedback: str | None


class DraftTarget(Checked):
    """Which target it drafts for. tensors_sha: null unless all of the target's shards were there to be read."""

    name: str | None
    revision: str | None
    config_sha: str | None
    tensors_sha: str | None


class Acceptance(Checked):
    """Measured acceptance. class: of prompts."""

    class_: str = Field(alias="class")
    temperature: float
    k: int
    accepted_per_position: list[float]
    mean_acceptance_length: float


class DraftFile(Document):
    """specctl.json. recipe: how it was made."""

    schema_: Literal["specctl.draft/1"] = Field(alias="schema", default="specctl.draft/1")
    provenance: Provenance
    kind: str
    head: Head | None
    target: DraftTarget | None
    data_sha: str | None = None
    recipe: dict[str, Any] | None = None
    versions: dict[str, str | None] | None = None
    acceptance: list[Acceptance] | None = None

    @property
    def depth(self) -> int | None:
        """Steps of the chain that it was trained for, where the recipe says so. None for a model that drafts: it is
        trained on one token at a time and drafts any number."""
        if self.kind == "llama":
            return None
        loss = (self.recipe or {}).get("loss")
        steps = loss.get("steps") if isinstance(loss, dict) else None
        return steps if type(steps) is int and steps > 0 else None

    @property
    def taps(self) -> tuple[int, ...] | None:
        """What it reads, for a head that reads residuals."""
        return tuple(self.head.taps) if self.head is not None and self.head.taps else None


def recorded(path: Path) -> DraftFile | None:
    """What the directory of a draft says of itself; None where it says nothing that can be read."""
    try:
        return read_document(path / FACTS, DraftFile)
    except UsageError:
        return None
