"""TRACE.json: what became of every draft of one run, by class of prompt. The source of acceptance for `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specctl.schemas.base import Checked, Document, Provenance, read_document
from specctl.schemas.counts import Count, PositionCounts, Rate
from specctl.schemas.policy import Bound, BoundDraft

SCHEMA = "specctl.trace/1"

Place = Annotated[int, Field(ge=1)]


class RequestTrace(Checked):
    """histogram[j]: drafts of the request of which exactly j tokens were accepted, j from 0 to k. steps: its steps that
    could have drafted, those in which nothing was proposed among them; null when they were not counted."""

    histogram: list[Count]
    steps: Count | None = None

    @model_validator(mode="after")
    def _drafts_are_steps(self) -> Self:
        if self.steps is not None and self.steps < sum(self.histogram):
            raise ValueError(f"steps is {self.steps}, and there are {sum(self.histogram)} drafts")
        return self


class TraceClass(PositionCounts):
    """context: mean number of tokens before a draft. confidence and rank have a list for every draft, with a number for
    every token of it: the draft's largest probability before it drew, and the token's place by the target's scores
    (1: the target's own choice) after the drafted tokens before it. Empty where the draft has no probabilities.
    accepted: of how many tokens, for every draft. Drafts are in the order of the requests."""

    class_: str = Field(alias="class")
    context: Annotated[float, Field(ge=0)]
    requests: list[RequestTrace]
    confidence: list[list[Rate]]
    rank: list[list[Place]]
    accepted: list[Count] = Field(default_factory=list)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        drafted = sum(self.drafted_per_position)
        for name, lists in (("confidence", self.confidence), ("rank", self.rank)):
            if lists and (len(lists) != self.num_drafts or sum(map(len, lists)) != drafted):
                raise ValueError(f"{name} has not one number for each of {drafted} tokens in {self.num_drafts} drafts")
        if self.accepted and not self._fits_histograms():
            raise ValueError("accepted is not what the histograms of the requests hold, in their order")
        return self

    def _fits_histograms(self) -> bool:
        done = 0
        for request in self.requests:
            mine = self.accepted[done : done + sum(request.histogram)]
            done += len(mine)
            if [mine.count(j) for j in range(len(request.histogram))] != request.histogram:
                return False
        return done == len(self.accepted)


class Trace(Document):
    """k: the longest draft of the run. target, draft: whose it is. accept: how its tokens were accepted.
    min_confidence: the highest bound under which drafting stopped, 0 for none. Null where it is not known."""

    provenance: Provenance
    target: Bound | None = None
    draft: BoundDraft | None = None
    accept: str | None = None
    min_confidence: Rate | None = None
    k: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    classes: Annotated[list[TraceClass], Field(min_length=1)]

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.schema_ != SCHEMA:
            raise ValueError(f"schema is {self.schema_!r}, expected {SCHEMA!r}")
        for entry in self.classes:
            if len(entry.drafted_per_position) > self.k:
                raise ValueError(f"class {entry.class_}: {len(entry.drafted_per_position)} positions, k is {self.k}")
            _check_histograms(entry, self.k)
        return self


def read_trace(path: Path) -> Trace:
    return read_document(path, Trace)


def _check_histograms(entry: TraceClass, k: int) -> None:
    if any(len(request.histogram) != k + 1 for request in entry.requests):
        raise ValueError(f"class {entry.class_}: a histogram has not the {k + 1} numbers that k = {k} asks for")
    totals = [sum(column) for column in zip(*(request.histogram for request in entry.requests), strict=True)]
    if sum(totals) != entry.num_drafts:
        raise ValueError(
            f"class {entry.class_}: histograms hold {sum(totals)} drafts, num_drafts is {entry.num_drafts}"
        )
    for position, accepted in enumerate(entry.accepted_per_position, start=1):
        if sum(totals[position:]) != accepted:
            raise ValueError(
                f"class {entry.class_}: histograms and accepted_per_position differ at position {position}"
            )
