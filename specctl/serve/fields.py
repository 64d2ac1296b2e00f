"""Fields: the parameters of one request body, taken out one by one with their types checked, until none is left.

A known parameter that is null counts as absent. One that nobody took is unknown and refused by name: nothing that was
sent is ignored.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from specctl.errors import RequestError
from specctl.text.shown import shown

_MAX = sys.float_info.max
_Default = TypeVar("_Default", int, None)


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises RequestError for all else, NaN, infinities and half surrogates too."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is {shown(body)}, expected a JSON object")
    if b"\\ud" in raw.lower():
        for name, value in body.items():
            _refuse_surrogates(name, value)
    return body


class Fields:
    """What is left of a body. Every reader raises RequestError naming the parameter, its value and what was expected.

    inside: the parameter whose value is the object read here; it is the one that errors name.
    """

    def __init__(self, body: Mapping[str, Any], inside: str | None = None) -> None:
        self._left = dict(body)
        self._taken: set[str] = set()
        self._inside = inside

    def take(self, name: str) -> Any:
        """The value, or None when it was not sent; whoever takes it checks it."""
        self._taken.add(name)
        return self._left.pop(name, None)

    def integer(self, name: str, default: _Default, least: int, most: int = sys.maxsize) -> int | _Default:
        """An integer between two bounds, both included; 5.0 is the integer 5, as JSON does not tell them apart."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            too_large = isinstance(value, int) and value > most
            bounds = f"from {least} to {most}" if too_large or most < sys.maxsize else f"of at least {least}"
            self.refuse(name, value, f"expected an integer {bounds}")
        return value

    def number(self, name: str, default: float, low: float, high: float = _MAX, *, above: bool = False) -> float:
        """A finite number from `low` (or, with `above`, greater than it) to `high`."""
        value = self.take(name)
        if value is None:
            return default
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (above and value == low):
            lower = f"above {low:g}" if above else f"of at least {low:g}"
            upper = "" if high == _MAX else f" and at most {high:g}"
            self.refuse(name, value, f"expected a finite number {lower}{upper}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, value, "expected true or false")
        return default if value is None else value

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, value, "expected a string")
        return value

    def unsupported(self, names: Mapping[str, tuple[Any, ...]]) -> None:
        """Parameters of the API that are not implemented: only the values that ask for nothing pass."""
        for name, harmless in names.items():
            value = self.take(name)
            if value is not None and not any(_same(value, allowed) for allowed in harmless):
                self.refuse(name, value, "which is not supported; leave it out")

    def done(self) -> None:
        """Refuse what nobody took."""
        for name in self._left:
            near = difflib.get_close_matches(name[:100], sorted(self._taken), n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            where = f"{self._inside}: " if self._inside else ""
            raise RequestError(f"{where}{shown(name)} is not a known parameter; {hint}", self._inside or name[:100])

    def refuse(self, name: str, value: object, expected: str) -> NoReturn:
        refuse(f"{self._inside}.{name}" if self._inside else name, value, expected, self._inside or name)


def refuse(name: str, value: object, expected: str, param: str | None = None) -> NoReturn:
    raise RequestError(f"{name} is {shown(value)}, {expected}", param or name)


def _same(value: Any, allowed: Any) -> bool:
    """Equal, though true is not 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_surrogates(name: str, value: object) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except RecursionError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except UnicodeEncodeError as error:
        param = name.encode("ascii", "replace").decode()[:100]
        raise RequestError(f"{param} has half a surrogate pair, which is no character", param) from error
