"""PROFILE.yaml: what steps cost on some hardware, cell by cell, each with where its number comes from. It is no model:
what lies between the cells is for the reader to say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specctl.schemas.base import Checked, Document, read_document
from specctl.schemas.counts import Positive
from specctl.schemas.policy import BoundDraft

SCHEMA = "specctl.profile/1"

Milliseconds = Annotated[float, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


def _named(value: Any) -> Any:
    """A bare string is a name with nothing more to say."""
    return {"name": value} if isinstance(value, str) else value


class Hardware(Checked):
    """name: as the machine tells it. threads: of a CPU. devices: that share the work, over all nodes."""

    name: str
    threads: Size | None = None
    devices: Size | None = None
    nodes: Size | None = None
    memory_gbps: Positive | None = None
    interconnect: str | None = None


class Serving(Checked):
    """The engine that runs the steps. Overheads belong to one version of it."""

    name: str
    version: str | None = None
    attention: str | None = None
    cuda_graphs: bool | None = None
    scheduler: str | None = None


class Measured(Checked):
    """The target. digest: its tensors_sha, null where the weights were not there. tp, ep: over how many devices tensors
    and experts are spread."""

    name: str | None = None
    config_sha: str | None = None
    dtype: str | None = None
    tp: Size = 1
    ep: Size = 1
    digest: str | None = None


class StepCell(Checked):
    """A pass over q rows of each of `batch` sequences with `context` tokens before them, its head and the decision on
    its tokens included. ms: the median of interleaved repeats where it was measured. spread: how far ms may be off, as
    one standard deviation in milliseconds."""

    batch: Size
    q: Size = 1
    context: Size
    ms: Positive
    spread: Milliseconds = 0.0
    source: Literal["measured", "interpolated", "roofline"]

    @property
    def place(self) -> tuple[int, int, int]:
        return self.batch, self.q, self.context


class TargetCell(StepCell):
    """q: 1 for a plain step, K + 1 for the verification of K tokens."""

    q: Size


class PrefillCell(Checked):
    """One pass over `tokens` tokens of a prompt. draft_ms: null without a draft that has passes to run."""

    tokens: Size
    target_ms: Positive
    draft_ms: Milliseconds | None = None


class Overheads(Checked):
    """Milliseconds of a step that are no pass. base: of a plain step. spec: of a step that drafts, in place of base.
    per_draft_step: for each of its draft passes besides. tree: for a tree in place of a chain."""

    base: Milliseconds
    spec: Milliseconds
    per_draft_step: Milliseconds
    tree: Milliseconds | None = None


class Validation(Checked):
    """A published or separately measured point, and what the profile says about it."""

    point: str
    measured_ms: Positive
    predicted_ms: Positive


class Profile(Document):
    """steps: of the target. draft: one step of the draft. draft_follow: the draft's pass over what a step committed;
    q = 1: after a plain step, which only drafts that read hidden states have to make; q >= 2: after a block, where it
    costs something else than a draft step. drafter: whose passes these are; null for none or an unknown one. roofline:
    constants, where cells were computed from them."""

    hardware: Annotated[Hardware, BeforeValidator(_named)]
    engine: Annotated[Serving, BeforeValidator(_named)]
    model: Measured
    drafter: BoundDraft | None = None
    steps: Annotated[list[TargetCell], Field(min_length=1)]
    draft: list[StepCell] = Field(default_factory=list)
    draft_follow: list[StepCell] = Field(default_factory=list)
    prefill: list[PrefillCell] = Field(default_factory=list)
    overheads_ms: Overheads
    roofline: dict[str, float | int | str] | None = None
    validated_against: list[Validation] = Field(default_factory=list)

    @model_validator(mode="after")
    def _every_place_once(self) -> Self:
        if self.schema_ != SCHEMA:
            raise ValueError(f"schema is {self.schema_!r}, expected {SCHEMA!r}")
        for key in ("steps", "draft", "draft_follow"):
            _refuse_twice(key, getattr(self, key))
        sizes = sorted(self.prefill, key=lambda cell: cell.tokens)
        for cell, following in pairwise(sizes):
            if cell.tokens == following.tokens:
                raise ValueError(
                    f"prefill lists tokens {cell.tokens} twice: {cell.target_ms:g} and {following.target_ms:g} ms"
                )
        return self


def read_profile(path: Path) -> Profile:
    return read_document(path, Profile)


def _refuse_twice(key: str, cells: Sequence[StepCell]) -> None:
    seen: dict[tuple[int, int, int], float] = {}
    for cell in cells:
        if cell.place in seen:
            batch, q, context = cell.place
            raise ValueError(
                f"{key} lists batch {batch}, q {q}, context {context} twice: {seen[cell.place]:g} and {cell.ms:g} ms"
            )
        seen[cell.place] = cell.ms
