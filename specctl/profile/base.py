"""The profile that --merge names: a file, a shipped one, or constants with the model whose steps they give. Raw, as its
cells stand in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.options import Offer
from specctl.profile.merge import check_places
from specctl.profile.names import find_profile
from specctl.profile.same import Identity, check_same
from specctl.roofline.offer import profile_for
from specctl.schemas.profile import Constants, Profile, read_either

FLAG = "--merge"
FACTS = ("engine", "tp", "ep", "quantisation", "kv_dtype")
"""Of an offer: true of the engine that is measured, whatever its steps are merged into."""


@dataclass(frozen=True)
class Base:
    """where: names it in errors."""

    profile: Profile
    where: str

    def check(self, found: Identity, same_model: bool, places: Iterable[tuple[int, int]]) -> None:
        """Before anything is measured. Raises UsageError as `merge` would."""
        check_same(Identity.of(self.profile), self.where, found, same_model)
        check_places(self.profile, self.where, places)

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for cell in self.profile.steps})

    @property
    def contexts(self) -> list[int]:
        return sorted({cell.context for cell in self.profile.steps})


def open_base(name: str, offer: Offer) -> Base:
    """Raises UsageError where a profile with cells of its own is asked for another model."""
    path = find_profile(name, FLAG)
    found = read_either(path)
    if isinstance(found, Constants):
        return Base(profile_for(found, f"{FLAG} {name}", offer), str(path))
    for key, value in vars(offer).items():
        if value is not None and key not in FACTS:
            flag = f"--{key.replace('_', '-')}"
            raise UsageError(f"{flag}: {path} has steps of its own model, so leave it out")
    return Base(found, str(path))
