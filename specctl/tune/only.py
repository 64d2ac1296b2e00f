"""--only: which part of a file counts, by what its rows, runs, classes or labels are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specctl.errors import UsageError


@dataclass(frozen=True)
class Only:
    """wanted: the values that each key may have."""

    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Iterable[str]) -> Only:
        """Of KEY=VALUE each; a key given twice may have either value."""
        wanted: dict[str, tuple[str, ...]] = {}
        for part in given:
            key, found, value = part.partition("=")
            if not (found and key.strip() and value.strip()):
                raise UsageError(f"--only {part}: expected KEY=VALUE, like class=code")
            wanted[key.strip()] = (*wanted.get(key.strip(), ()), value.strip())
        return cls(wanted)

    def takes(self, where: str, keys: Sequence[str]) -> None:
        """Raises UsageError when a key is asked for that there is not."""
        for key in self.wanted:
            if key not in keys:
                there = f"it can be told apart by {', '.join(keys)}" if keys else "there is nothing to choose by"
                raise UsageError(f"--only {key}={self.wanted[key][0]}: {where} has no {key}; {there}")

    def values(self, key: str) -> tuple[str, ...]:
        return self.wanted.get(key, ())

    def allows(self, key: str, value: object) -> bool:
        wanted = self.wanted.get(key)
        return wanted is None or any(_same(value, each) for each in wanted)

    def words(self) -> str:
        parts = [f"{key}={value}" for key, values in self.wanted.items() for value in values]
        return f" with {', '.join(parts)}" if parts else ""


def _same(value: object, text: str) -> bool:
    try:
        return float(str(value)) == float(text)
    except ValueError:
        return str(value) == text
