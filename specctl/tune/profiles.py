"""Which profile `--profile` names, and its steps as they are taken: read from a file or computed from constants."""

from __future__ import annotations

from specctl.errors import UsageError
from specctl.options import Offer
from specctl.profile.names import find_profile
from specctl.roofline.offer import profile_for
from specctl.roofline.reading import as_read
from specctl.schemas.profile import Constants, Profile, read_either


def load_profile(name: str, offer: Offer) -> tuple[Profile, str]:
    """A profile as its steps are taken, and what it is called; of constants, that of what is offered.

    Raises UsageError where a profile with cells of its own is asked for another model.
    """
    path = find_profile(name, "--profile")
    found = read_either(path)
    if isinstance(found, Constants):
        return as_read(profile_for(found, str(path), offer)), str(path)
    if offer != Offer():
        flag = next(f"--{key.replace('_', '-')}" for key, value in vars(offer).items() if value is not None)
        raise UsageError(f"{flag}: {path} has measured or interpolated steps of its own model, so leave it out")
    return as_read(found), str(path)
