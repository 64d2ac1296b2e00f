"""Whose numbers a profile and acceptance are, and whether they may be put together."""

from __future__ import annotations

from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.schemas.policy import Bound, BoundDraft
from specctl.schemas.profile import Profile


@dataclass(frozen=True)
class Pair:
    """Target and draft as far as they are known."""

    target: Bound
    draft: BoundDraft


def check_pair(profile: Profile, where: str, target: Bound | None, draft: BoundDraft | None) -> Pair:
    """Whose numbers these are. target, draft: whose acceptance it is, as far as that is known.

    Raises UsageError where the profile is of other models, or lacks the steps of a draft that has some.
    """
    profiled = Bound(name=profile.model.name, digest=profile.model.digest)
    drafter = profile.drafter or BoundDraft(kind=None)
    if target is not None:
        _check_same(where, "target", profiled.digest, target.digest)
        profiled = target if profiled.digest is None else profiled
    if draft is not None:
        if None not in (drafter.kind, draft.kind) and drafter.kind != draft.kind:
            raise UsageError(
                f"{where}: is the profile of a draft of kind {drafter.kind}, acceptance is of kind {draft.kind}"
            )
        if draft.kind not in (None, "ngram") and not profile.draft and not profile.whole_steps:
            raise UsageError(
                f"{where}: has no draft steps, and a draft of kind {draft.kind} takes some; profile with --draft"
            )
        _check_same(where, "draft", drafter.digest, draft.digest)
        drafter = draft if drafter.digest is None else drafter
    return Pair(profiled, drafter)


def _check_same(where: str, what: str, profiled: str | None, traced: str | None) -> None:
    if profiled is not None and traced is not None and profiled != traced:
        raise UsageError(
            f"{where}: is the profile of a {what} with tensors_sha {profiled[:12]}, acceptance is of one with "
            f"{traced[:12]}; profile the pair that is to be tuned"
        )
