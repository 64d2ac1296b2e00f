"""Which file the name of a profile stands for. It does not open it."""

from __future__ import annotations

import difflib
from pathlib import Path

from specctl.errors import UsageError
from specctl.shipped import shipped


def find_profile(name: str, flag: str) -> Path:
    """A file, or the name of a shipped one. Raises UsageError with the names that are near. flag: that named it."""
    path = Path(name)
    if path.is_file():
        return path
    shipped_path = shipped("profiles") / f"{name}.yaml"
    if shipped_path.is_file():
        return shipped_path
    names = sorted(path.stem for path in shipped("profiles").glob("*.yaml"))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    told = f"nearest: {', '.join(near)}" if near else f"shipped: {', '.join(names)}"
    raise UsageError(f"{flag} {name}: is no file and no shipped profile ({told}); profiles/README.md has them all")
