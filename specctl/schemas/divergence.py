"""DIVERGENCE.json: what lossy acceptance rules accept, and how far they move what the target would have said."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.sampling.params import Accept
from specctl.schemas.base import Checked, Document, Provenance, read_document
from specctl.schemas.counts import Count
from specctl.schemas.policy import Bound, BoundDraft

SCHEMA = "specctl.divergence/1"

Nats = Annotated[float, Field(ge=0)]


class RequestDivergence(Checked):
    """histogram[j]: drafts of the request of which exactly j tokens were accepted. kl[k - 1]: summed over the drafts
    whose first k - 1 tokens were accepted, the divergence of what was really said in the k-th place from what the
    target would have said there after the same tokens, in nats."""

    histogram: list[Count]
    kl: list[Nats]


class RuleDivergence(Checked):
    """accept: the rule, as --accept names it."""

    accept: str
    requests: Annotated[list[RequestDivergence], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_lossy(self) -> Self:
        try:
            lossy = Accept.parse(self.accept).lossy
        except UsageError as error:
            raise ValueError(str(error)) from None
        if not lossy:
            raise ValueError(f"accept {self.accept} is lossless, it has no divergence")
        return self


class Divergence(Document):
    """k: the longest draft of the runs. target, draft: whose they are, null where it is not known."""

    provenance: Provenance
    target: Bound | None = None
    draft: BoundDraft | None = None
    k: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(gt=0)]
    rules: Annotated[list[RuleDivergence], Field(min_length=1)]

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        if self.schema_ != SCHEMA:
            raise ValueError(f"schema is {self.schema_!r}, expected {SCHEMA!r}")
        names = [rule.accept for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError(f"two rules have one name: {', '.join(names)}")
        for rule in self.rules:
            for request in rule.requests:
                if len(request.histogram) != self.k + 1 or len(request.kl) != self.k:
                    raise ValueError(
                        f"rule {rule.accept}: a request has not the {self.k + 1} counts and {self.k} divergences that "
                        f"k = {self.k} asks for"
                    )
        return self


def read_divergence(path: Path) -> Divergence:
    return read_document(path, Divergence)
