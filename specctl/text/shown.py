"""shown: a value that somebody sent, as it may stand in an error message: bounded, and on one line."""

from __future__ import annotations

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlist = _REPR.maxdict = _REPR.maxtuple = 4
_REPR.maxlevel = 3


def shown(value: object) -> str:
    return _REPR.repr(value)
