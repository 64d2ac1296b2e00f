"""What the draft takes of the memory that caches could have: how many texts fit with it and without."""

from __future__ import annotations

from dataclasses import replace

from specctl.options import Offer
from specctl.schemas.profile import Profile
from specctl.tune.profiles import load_profile


def without_draft(name: str, offer: Offer) -> Profile | None:
    """The same profile for the target alone. None where steps are not computed: of others it is not known what fits."""
    if offer.draft_config is None or offer.model_config is None:
        return None
    return load_profile(name, replace(offer, draft_config=None))[0]


def memory_notice(profile: Profile, alone: Profile) -> str:
    """profile: of steps that fit with the draft's weights and caches charged."""
    here, most = largest(profile), largest(alone)
    less = {context: (here.get(context, 0), batch) for context, batch in most.items() if here.get(context, 0) < batch}
    if not less:
        return "the draft's weights and caches are charged; no profiled batch that fits without it is lost"
    words = ", ".join(f"{few} in place of {many} at context {context:,}" for context, (few, many) in less.items())
    return f"the draft's weights and caches are charged: the largest batch that fits is {words}"


def largest(profile: Profile) -> dict[int, int]:
    """The largest batch with steps at each context."""
    found: dict[int, int] = {}
    for cell in profile.steps:
        found[cell.context] = max(found.get(cell.context, 0), cell.batch)
    return dict(sorted(found.items()))
