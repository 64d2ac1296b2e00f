"""Counters of speculation as files carry them, and what makes a set of them impossible. Meanings: docs/design.md."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from specctl.schemas.base import Checked

Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class PositionCounts(Checked):
    """drafted_per_position[k - 1]: drafts with a k-th token; accepted_per_position[k - 1]: those whose first k tokens
    were all accepted. Both can only fall with k."""

    num_drafts: Count
    drafted_per_position: list[Count]
    accepted_per_position: list[Count]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        drafted, accepted = self.drafted_per_position, self.accepted_per_position
        if len(drafted) != len(accepted):
            raise ValueError(
                f"drafted_per_position has {len(drafted)} positions, accepted_per_position {len(accepted)}"
            )
        for name, counts in (("drafted_per_position", drafted), ("accepted_per_position", accepted)):
            if any(later > earlier for earlier, later in pairwise(counts)):
                raise ValueError(f"{name} rises: {counts}, but a token is only reached through those before it")
        if any(a > d for a, d in zip(accepted, drafted, strict=True)):
            raise ValueError(f"accepted_per_position {accepted} is more than drafted_per_position {drafted}")
        if (drafted[0] if drafted else 0) != self.num_drafts:
            raise ValueError(f"num_drafts is {self.num_drafts}, but drafts with a first token are {drafted[:1] or [0]}")
        return self
