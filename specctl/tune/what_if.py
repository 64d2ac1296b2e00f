"""--what-if: the same tuning in a world that differs in what is named, answered beside the one there is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from specctl.errors import UsageError
from specctl.schemas.profile import Profile, StepCell
from specctl.tune.choice import Decision
from specctl.tune.evidence import Evidence
from specctl.tune.run import Tuning, run_tune

SHARES = {
    "acceptance": "the chance of every token, given those before it",
    "draft": "what the draft's passes take",
    "overhead": "what the engine adds to every step",
}
_SHARE = re.compile(r"([-+]\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class WhatIf:
    """acceptance, draft, overhead: changes as a share. tp: devices that share every layer."""

    text: str
    acceptance: float = 0.0
    draft: float = 0.0
    overhead: float = 0.0
    tp: int | None = None

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """acceptance=+10%,draft=-20%,overhead=+50%,tp=4, any of them."""
        shares: dict[str, float] = {}
        tp: int | None = None
        seen: set[str] = set()
        for part in text.split(","):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key in seen:
                raise UsageError(f"--what-if {text}: names {key} twice")
            seen.add(key)
            if key == "tp" and re.fullmatch(r"[1-9]\d{0,3}", value):
                tp = int(value)
            elif key in SHARES and (share := _SHARE.fullmatch(value)) and float(share[1]) > -100:
                shares[key] = float(share[1]) / 100
            else:
                raise UsageError(
                    f"--what-if {text}: cannot read {part.strip() or 'nothing'!r}, expected "
                    f"{', '.join(f'{name}=+10%' for name in SHARES)} or tp=4, separated by commas"
                )
        return cls(text, **shares, tp=tp)


@dataclass(frozen=True)
class Changed:
    """One place, as it is and as it would be. None: there are no such steps in the other world."""

    batch: int
    context: int
    now: Decision
    then: Decision | None


@dataclass(frozen=True)
class Answer:
    """tuning: of the other world."""

    what_if: WhatIf
    tuning: Tuning
    places: list[Changed]


def answer(tuning: Tuning, what_if: WhatIf, profile: Profile, profile_name: str) -> Answer:
    """profile: of the other world's tp, or the one there is."""
    then = run_tune(
        changed_profile(profile, what_if),
        profile_name,
        changed_evidence(tuning.evidence, what_if),
        "",
        None,
        tuning.asked,
    )
    there = {(decision.batch, decision.context): decision for decision in then.decisions}
    places = [Changed(d.batch, d.context, d, there.get((d.batch, d.context))) for d in tuning.decisions]
    return Answer(what_if, then, places)


def changed_evidence(evidence: Evidence, what_if: WhatIf) -> Evidence:
    if not what_if.acceptance:
        return evidence
    by_context = tuple((at, each.scaled(what_if.acceptance)) for at, each in evidence.by_context)
    return replace(evidence, acceptance=evidence.acceptance.scaled(what_if.acceptance), by_context=by_context, kinds=())


def changed_profile(profile: Profile, what_if: WhatIf) -> Profile:
    if profile.whole_steps and (what_if.draft or what_if.overhead):
        raise UsageError(
            f"--what-if {what_if.text}: the profile's steps were timed as a whole, so what the draft or the engine has "
            "in them is not known; leave out draft and overhead"
        )

    def slower(cells: list[StepCell]) -> list[StepCell]:
        factor = 1 + what_if.draft
        return [cell.model_copy(update={"ms": cell.ms * factor, "spread": cell.spread * factor}) for cell in cells]

    over, factor = profile.overheads_ms, 1 + what_if.overhead
    assert math.isfinite(factor)
    added = {"base": over.base * factor, "spec": over.spec * factor, "per_draft_step": over.per_draft_step * factor}
    return profile.model_copy(
        update={
            "draft": slower(profile.draft),
            "draft_follow": slower(profile.draft_follow),
            "overheads_ms": over.model_copy(update=added),
        }
    )
