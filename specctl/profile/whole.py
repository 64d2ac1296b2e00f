"""A profile in parts (target, draft, engine) as one of whole steps, so that steps timed from outside can stand beside
its own. What a whole step of it takes is what `tune` adds up from the parts; see docs/design.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from specctl.errors import UsageError
from specctl.schemas.profile import Overheads, PrefillCell, Profile, StepCell, TargetCell
from specctl.schemas.roofline import CellSource


def whole(profile: Profile, where: str) -> Profile:
    """Each cell keeps its class. Raises UsageError where the draft has no cell that a block would need."""
    if profile.whole_steps:
        return profile
    parts = _Parts(profile, where)
    return profile.model_copy(
        update={
            "whole_steps": True,
            "steps": [parts.step(cell) for cell in profile.steps],
            "draft": [],
            "draft_follow": [cell for cell in profile.draft_follow if cell.q == 1],
            "prefill": list(_prefill(profile)),
            "overheads_ms": Overheads(base=0.0, spec=0.0, per_draft_step=0.0),
        }
    )


class _Parts:
    """follow: after blocks, by place and number of rows."""

    def __init__(self, profile: Profile, where: str) -> None:
        self._over = profile.overheads_ms
        self._where = where
        self._draft = {(cell.batch, cell.context): cell for cell in profile.draft}
        self._follow: dict[tuple[int, int], dict[int, StepCell]] = {}
        for cell in profile.draft_follow:
            if cell.q > 1:
                self._follow.setdefault((cell.batch, cell.context), {})[cell.q] = cell

    def step(self, cell: TargetCell) -> TargetCell:
        """With K = q - 1: steps(q) + spec + (K - 1) (draft + per_draft_step) + draft_follow(q) + per_draft_step."""
        k = cell.q - 1
        if k == 0:
            return cell.model_copy(update={"ms": cell.ms + self._over.base})
        passes = [*[self._draft_step(cell)] * (k - 1), self._after(cell)]
        drafts = [each for each in passes if each is not None]
        engine = self._over.spec + k * self._over.per_draft_step
        ms = cell.ms + engine + sum(each.ms for each in drafts)
        # The same draft step over and over is off by the same, and so are cells that have a share in common.
        spread = math.hypot(cell.spread, sum(each.spread for each in drafts))
        return cell.model_copy(update={"ms": ms, "spread": min(spread, ms)})

    def _draft_step(self, cell: TargetCell) -> StepCell | None:
        if not self._draft:
            return None
        found = self._draft.get((cell.batch, cell.context))
        if found is None:
            raise UsageError(
                f"{self._where}: has no draft step for batch {cell.batch}, context {cell.context}, which its steps "
                "there need; profile it anew"
            )
        return found

    def _after(self, cell: TargetCell) -> StepCell | None:
        """Of as many rows as were measured next to those of the block; a draft step where none were."""
        rows = self._follow.get((cell.batch, cell.context))
        if not rows:
            return self._draft_step(cell)
        return rows[min(rows, key=lambda q: (abs(q - cell.q), q))]


def _prefill(profile: Profile) -> Iterator[PrefillCell]:
    for cell in profile.prefill:
        source = cell.source or _class_of(profile.steps)
        yield cell.model_copy(update={"target_ms": cell.target_ms + profile.overheads_ms.base, "source": source})


def _class_of(cells: Sequence[TargetCell]) -> CellSource | None:
    kinds = {cell.source for cell in cells}
    return kinds.pop() if len(kinds) == 1 else None
