"""TRACE.json: what became of every draft of one run, by class of prompt. The source of acceptance for `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specctl.schemas.base import Checked, Document, Provenance, read_document
from specctl.schemas.counts import Count, PositionCounts, Rate

SCHEMA = "specctl.trace/1"

Place = Annotated[int, Field(ge=1)]


class RequestTrace(Checked):
    """histogram[j]: drafts of the request of which exactly j tokens were accepted, j from 0 to k."""

    histogram: list[Count]


class TraceClass(PositionCounts):
    """context: mean number of tokens before a draft. confidence and rank have a list for every draft, with a number for
    every token of it: the draft's largest probability before it drew, and the token's place by the target's scores
    (1: the target's own choice) after the drafted tokens before it. Empty where the draft has no probabilities."""

    class_: str = Field(alias="class")
    context: Annotated[float, Field(ge=0)]
    requests: list[RequestTrace]
    confidence: list[list[Rate]]
    rank: list[list[Place]]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        drafted = sum(self.drafted_per_position)
        for name, lists in (("confidence", self.confidence), ("rank", self.rank)):
            if lists and (len(lists) != self.num_drafts or sum(map(len, lists)) != drafted):
                raise ValueError(f"{name} has not one number for each of {drafted} tokens in {self.num_drafts} drafts")
        return self


class Trace(Document):
    """k: the longest draft of the run."""

    provenance: Provenance
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
