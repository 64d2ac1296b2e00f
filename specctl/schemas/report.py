"""REPORT.json: what `bench` measured, run by run and one run against another. Impossible numbers are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.schemas.base import Checked, Document, Provenance, read_document
from specctl.schemas.counts import Count, PositionCounts, Positive, Rate

SCHEMA = "specctl.report/1"


class Work(Checked):
    """What every run was given. prompts_sha: over the token ids and the longest answer of each prompt."""

    prompts_sha: str
    n: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    seed: int | None


class Percentiles(Checked):
    p50: Annotated[float, Field(ge=0)]
    p95: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p95 < self.p50:
            raise ValueError(f"p95 {self.p95} is below p50 {self.p50}")
        return self


class Speculation(PositionCounts):
    """Counters of one repeat. counts_bonus: mean_acceptance_length counts the token after the accepted ones too."""

    num_draft_tokens: Count
    num_accepted_tokens: Count
    acceptance_rate: Rate | None
    mean_acceptance_length: Annotated[float, Field(ge=1)] | None
    counts_bonus: Literal[True]
    emitted_tokens: Count
    accept: str
    lossy: bool

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        drafts, drafted, accepted = self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens
        if accepted > drafted:
            raise ValueError(f"num_accepted_tokens {accepted} is more than num_draft_tokens {drafted}")
        for name, total in (("drafted", drafted), ("accepted", accepted)):
            if sum(getattr(self, f"{name}_per_position")) != total:
                raise ValueError(f"{name}_per_position does not add up to {total}")
        _check_quotient("acceptance_rate", self.acceptance_rate, accepted / drafted if drafted else None)
        length = 1 + accepted / drafts if drafts else None
        _check_quotient("mean_acceptance_length", self.mean_acceptance_length, length)
        return self


class Run(Checked):
    """One way of decoding the work. k: the draft length, 0 for none, null for a policy's. batch: sequences at a time.

    tokens: of one repeat. seconds: one a repeat. tok_s: over all repeats. ttft_ms, tpot_ms: of single requests; null
    when no request has such a time (tpot: no answer of two tokens).
    """

    name: str
    k: Count | None
    batch: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    seconds: Annotated[list[Positive], Field(min_length=1)]
    tok_s: Positive
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    speculation: Speculation | None


class NearTie(Checked):
    """Where an answer first differs from the one it is compared with. position: index in the answer. gap: how far the
    lower of the two tokens is below the best one there, by the other run's own scores; null when that is no number: one
    answer ends before the other, or a token was ruled out."""

    prompt: str
    position: Count
    gap: Annotated[float, Field(ge=0)] | None


class Comparison(Checked):
    """`run` against `against`. ci95: paired bootstrap over groups of prompts and repeats; null for one of each.

    c, v, u: draft pass, verify pass and catch-up pass, in plain passes; implied: the speed-up that these and the mean
    acceptance length allow; efficiency: speedup / implied. Null where nothing is drafted or the length is a policy's.
    identical: whether the answers are the same, near-ties apart; null when they need not be (sampled or lossy) or when
    16-bit numbers cannot tell a tie from a difference. near_ties: every first difference, the widest gap first.
    """

    run: str
    against: str
    speedup: Positive
    ci95: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None
    c: Annotated[float, Field(ge=0)] | None
    v: Positive | None
    u: Annotated[float, Field(ge=0)] | None
    implied: Positive | None
    efficiency: Positive | None
    identical: bool | None
    near_ties: list[NearTie]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ci95 is not None and self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95 {self.ci95} ends before it begins")
        if self.implied is not None and self.efficiency is not None:
            _check_quotient("efficiency", self.efficiency, self.speedup / self.implied)
        return self


class Report(Document):
    provenance: Provenance
    work: Work
    runs: Annotated[list[Run], Field(min_length=1)]
    comparisons: list[Comparison]

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.schema_ != SCHEMA:
            raise ValueError(f"schema is {self.schema_!r}, expected {SCHEMA!r}")
        names = [run.name for run in self.runs]
        if len(set(names)) != len(names):
            raise ValueError(f"two runs have one name: {', '.join(names)}")
        for comparison in self.comparisons:
            for name in (comparison.run, comparison.against):
                if name not in names:
                    raise ValueError(f"a comparison names the run {name!r}, which is not there")
        return self

    def run(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)


def read_report(path: Path) -> Report:
    return read_document(path, Report)


def _check_quotient(name: str, said: float | None, found: float | None) -> None:
    if (said is None) != (found is None) or (said is not None and not math.isclose(said, found or 0.0, rel_tol=1e-6)):
        raise ValueError(f"{name} is {said}, but the numbers it is made from give {found}")
