"""PROFILE.yaml: what steps cost on some hardware, cell by cell, each with where its number comes from; and the files of
constants that such cells are computed from. It is no model: what lies between the cells is for the reader to say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from specctl.errors import UsageError
from specctl.schemas.base import Checked, Document, read_document, read_mapping
from specctl.schemas.counts import Positive
from specctl.schemas.policy import BoundDraft
from specctl.schemas.roofline import (
    CellSource,
    Graphs,
    Milliseconds,
    Relative,
    Roofline,
    Size,
    Source,
)
from specctl.schemas.roofline import (
    Overheads as Overheads,
)

SCHEMA, CONSTANTS_SCHEMA = "specctl.profile/1", "specctl.roofline/1"

TABLE = ("q", "rows", "source", "spread")


def _named(value: Any) -> Any:
    """A bare string is a name with nothing more to say."""
    return {"name": value} if isinstance(value, str) else value


def _cells(value: Any) -> Any:
    """Cells one by one, or a table of them: {source, spread, q, rows}, where a row is a batch, a context and the
    milliseconds for each q (null: no cell there), and spread is a share of each."""
    if not isinstance(value, dict):
        return value
    if sorted(map(str, value)) != list(TABLE):
        raise ValueError(f"a table of cells has the keys {', '.join(TABLE)}, found {', '.join(map(str, value))}")
    return list(_of_table(value))


def _of_table(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    columns, rows, spread = table["q"], table["rows"], table["spread"]
    if not isinstance(columns, list) or not isinstance(rows, list) or type(spread) not in (int, float):
        raise ValueError("in a table of cells q and rows are lists and spread is a number")
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 + len(columns):
            raise ValueError(
                f"a row of a table with {len(columns)} q has {2 + len(columns)} numbers, found {row!r:.80}"
            )
        batch, context, *milliseconds = row
        for q, ms in zip(columns, milliseconds, strict=True):
            if ms is not None:
                plain = type(ms) in (int, float)
                yield {
                    "batch": batch,
                    "q": q,
                    "context": context,
                    "ms": float(ms) if plain else ms,
                    "spread": float(ms * spread) if plain else 0.0,
                    "source": table["source"],
                }


class Hardware(Checked):
    """name: as the machine tells it. threads: of a CPU. devices: that share the work, over all nodes."""

    name: str
    threads: Size | None = None
    devices: Size | None = None
    nodes: Size | None = None
    memory_gbps: Positive | None = None
    interconnect: str | None = None


class Serving(Checked):
    """The engine that runs the steps. Overheads belong to one version of it. graphs: the sizes it pads steps to; null
    where it pads none, or where measured cells have the padding in them."""

    name: str
    version: str | None = None
    attention: str | None = None
    cuda_graphs: bool | None = None
    scheduler: str | None = None
    graphs: Graphs | None = None


class Measured(Checked):
    """The target. digest: its tensors_sha, null where the weights were not there. tp, ep: over how many devices tensors
    and experts are spread."""

    name: str | None = None
    config_sha: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
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
    source: CellSource

    @property
    def place(self) -> tuple[int, int, int]:
        return self.batch, self.q, self.context


class TargetCell(StepCell):
    """q: 1 for a plain step, K + 1 for the verification of K tokens."""

    q: Size


class PrefillCell(Checked):
    """One pass over `tokens` tokens of a prompt. draft_ms: null without a draft that has passes to run. source: null
    in a profile whose cells are all of one class."""

    tokens: Size
    target_ms: Positive
    draft_ms: Milliseconds | None = None
    source: CellSource | None = None


class Validation(Checked):
    """A published or separately measured point, and what the profile says about it."""

    point: str
    measured_ms: Positive
    predicted_ms: Positive


class Profile(Document):
    """steps: of the target. draft: one step of the draft. draft_follow: the draft's pass over what a step committed;
    q = 1: after a plain step, which only drafts that read hidden states have to make; q >= 2: after a block, where it
    costs something else than a draft step. drafter: whose passes these are; null for none or an unknown one.
    whole_steps: every cell of `steps` has the draft's passes and the engine's part in it, as a step has that is timed
    from outside: q = K + 1 is a step that drafts and verifies K tokens. Then `draft` is empty and overheads are 0.
    shared_spread: the part of every cell's spread that all of them have in common, as a share of the cell. roofline:
    constants, where cells were computed from them. sources: of numbers that the command in `provenance` did not
    measure. notes: what a reader should know, in sentences."""

    hardware: Annotated[Hardware, BeforeValidator(_named)]
    engine: Annotated[Serving, BeforeValidator(_named)]
    model: Measured
    drafter: BoundDraft | None = None
    whole_steps: bool = False
    steps: Annotated[list[TargetCell], BeforeValidator(_cells), Field(min_length=1)]
    draft: Annotated[list[StepCell], BeforeValidator(_cells)] = Field(default_factory=list)
    draft_follow: Annotated[list[StepCell], BeforeValidator(_cells)] = Field(default_factory=list)
    prefill: list[PrefillCell] = Field(default_factory=list)
    overheads_ms: Overheads
    shared_spread: Relative = 0.0
    roofline: Roofline | None = None
    sources: list[Source] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
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

    @model_validator(mode="after")
    def _nothing_beside_whole_steps(self) -> Self:
        over = self.overheads_ms
        passes = self.draft or any(cell.q > 1 for cell in self.draft_follow)
        if self.whole_steps and (passes or over.base or over.spec or over.per_draft_step):
            raise ValueError("whole_steps is true, and the draft or the engine is counted once more beside the steps")
        return self


class Constants(Document):
    """What the cells of any model's profile are computed from: a profile file without cells. Each number's source is in
    `sources`."""

    hardware: Annotated[Hardware, BeforeValidator(_named)]
    roofline: Roofline
    sources: Annotated[list[Source], Field(min_length=1)]
    notes: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _this_form(self) -> Self:
        if self.schema_ != CONSTANTS_SCHEMA:
            raise ValueError(f"schema is {self.schema_!r}, expected {CONSTANTS_SCHEMA!r}")
        return self


def read_profile(path: Path) -> Profile:
    """The cells as they stand in the file. Raises UsageError."""
    found = read_either(path)
    if isinstance(found, Constants):
        raise UsageError(f"{path}: has constants of a roofline and no cells; name a model with --model-config")
    return found


def read_either(path: Path) -> Profile | Constants:
    """Cells, or constants to compute some from. Raises UsageError."""
    constants = read_mapping(path).get("schema") == CONSTANTS_SCHEMA
    return read_document(path, Constants) if constants else read_document(path, Profile)


def _refuse_twice(key: str, cells: Sequence[StepCell]) -> None:
    seen: dict[tuple[int, int, int], float] = {}
    for cell in cells:
        if cell.place in seen:
            batch, q, context = cell.place
            raise ValueError(
                f"{key} lists batch {batch}, q {q}, context {context} twice: {seen[cell.place]:g} and {cell.ms:g} ms"
            )
        seen[cell.place] = cell.ms
