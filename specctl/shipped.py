"""Where the files that come with specctl are: profiles/ and templates/. It knows nothing about what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def shipped(kind: Literal["profiles", "templates"]) -> Path:
    """The directory called `kind`: inside the package when installed from a wheel, beside it in a checkout."""
    installed = _PACKAGE / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind
