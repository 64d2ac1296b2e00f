"""Which modules of an MTP layer a reader builds without quantisation, by the list in the target's config.

Readers differ in what they compare: the checkpoint's own names or those of the modules they join them into, whole names
or what names begin with. Each reader's way is in its own file; what the ways have in common is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specctl.heads.quantisation import Scheme

EXPERTS = "mlp.experts"


@dataclass(frozen=True)
class Module:
    """A module with matrices. name: in the reader, within the layer. members: the checkpoint's modules that it joins,
    itself when it joins none."""

    name: str
    members: tuple[str, ...]


def modules(matrices: Iterable[str], joined: Mapping[str, str]) -> list[Module]:
    """The modules that a layer's matrices belong to. joined: a module's last name to that of the joint one."""
    found: dict[str, list[str]] = {}
    for matrix in matrices:
        member = matrix.removesuffix(".weight")
        parent, _, last = member.rpartition(".")
        name = EXPERTS if member.startswith(f"{EXPERTS}.") else f"{parent}.{joined.get(last, last)}"
        found.setdefault(name, []).append(member)
    return [Module(name, tuple(members)) for name, members in found.items()]


def begins_with_any(name: str, entries: Iterable[str]) -> bool:
    """Whether an entry is the name or what stands before one of its dots."""
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)


def is_listed(scheme: Scheme, name: str, entries: Iterable[str]) -> bool:
    """The name itself, or a pattern that takes it. Names are looked at first: they cost less."""
    found = tuple(entries)
    return name in found or any(scheme.matches(entry, name) for entry in found)
