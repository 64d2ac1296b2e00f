"""How commands show what they found: facts as two columns, byte counts as people write them. No logic of theirs."""

from __future__ import annotations

from collections.abc import Iterable


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Labels and values in two columns."""
    kept = list(rows)
    width = max((len(label) for label, _ in kept), default=0)
    return "\n".join(f"{label:<{width}}  {value}".rstrip() for label, value in kept)


def size(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def count(number: float) -> str:
    """A large number in thousands, millions or billions."""
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.0f}" if unit == "" else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} B"
