"""Which profile `--profile` names, and its steps as they are taken: read from a file or computed from constants."""

from __future__ import annotations

import difflib
from pathlib import Path

from specctl.errors import UsageError
from specctl.options import Offer
from specctl.roofline.offer import profile_for
from specctl.roofline.reading import as_read
from specctl.schemas.profile import Constants, Profile, read_either
from specctl.shipped import shipped


def find_profile(name: str) -> Path:
    """A file, or the name of a shipped one. Raises UsageError with the names that are near."""
    path = Path(name)
    if path.is_file():
        return path
    shipped_path = shipped("profiles") / f"{name}.yaml"
    if shipped_path.is_file():
        return shipped_path
    names = sorted(path.stem for path in shipped("profiles").glob("*.yaml"))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    told = f"nearest: {', '.join(near)}" if near else f"shipped: {', '.join(names)}"
    raise UsageError(f"--profile {name}: is no file and no shipped profile ({told}); profiles/README.md has them all")


def load_profile(name: str, offer: Offer) -> tuple[Profile, str]:
    """A profile as its steps are taken, and what it is called; of constants, that of what is offered.

    Raises UsageError where a profile with cells of its own is asked for another model.
    """
    path = find_profile(name)
    found = read_either(path)
    if isinstance(found, Constants):
        return as_read(profile_for(found, str(path), offer)), str(path)
    if offer != Offer():
        flag = next(f"--{key.replace('_', '-')}" for key, value in vars(offer).items() if value is not None)
        raise UsageError(f"{flag}: {path} has measured or interpolated steps of its own model, so leave it out")
    return as_read(found), str(path)
