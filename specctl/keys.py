"""Keys: the values of one JSON object, read with their types checked. It knows nothing about what they mean.

A key that is null counts as absent, as it does in the config.json files that transformers writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from specctl.errors import CheckpointError


@dataclass(frozen=True)
class Keys:
    """values: the object. where: the file (and the key, for an object inside it) that errors name.

    Every reader raises CheckpointError for a value of another kind, and for an absent key that has no default.
    """

    values: Mapping[str, Any]
    where: str

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, "expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            self.refuse(key, "expected a finite number")
        return float(value)

    def above(self, least: float, key: str, default: float | None = None) -> float:
        """A finite number greater than `least`."""
        value = self.number(key, default)
        if value <= least:
            self.refuse(key, f"expected a number greater than {least:g}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            self.refuse(key, "expected true or false")
        return value

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key} is {self.values.get(key)!r}, {expected}")

    def _value(self, key: str, default: Any, expected: str) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.where}: key {key} is missing, expected {expected}")
        return value
