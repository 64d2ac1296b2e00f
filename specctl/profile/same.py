"""Whether measured steps are of what a profile is of: its model, hardware, engine and draft, as far as both tell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.schemas.policy import BoundDraft
from specctl.schemas.profile import Measured, Profile

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8-block": "fp8"}
"""Other words for the same, and what an engine does not tell apart."""
_WORD = re.compile(r"[a-z0-9.]+")


@dataclass(frozen=True)
class Identity:
    """What steps are of. drafter: None for none or an unknown one."""

    hardware: str
    engine: str
    model: Measured
    drafter: BoundDraft | None

    @classmethod
    def of(cls, profile: Profile) -> Identity:
        return cls(profile.hardware.name, profile.engine.name, profile.model, profile.drafter)


def check_same(base: Identity, where: str, found: Identity, same_model: bool) -> None:
    """Raises UsageError naming what differs. same_model: models are taken to be the same, whatever they are called."""
    if not _one_holds_other(base.hardware, found.hardware):
        raise UsageError(
            f"{where}: is of hardware {base.hardware!r}, and what is measured is {found.hardware!r}; merge into a "
            "profile of that"
        )
    if base.engine.casefold() != found.engine.casefold():
        raise UsageError(f"{where}: is of the engine {base.engine}, and what is measured is {found.engine}")
    if not same_model:
        _check_model(base.model, where, found.model)
    for name in ("dtype", "kv_dtype", "tp", "ep"):
        ours, theirs = getattr(base.model, name), getattr(found.model, name)
        if None not in (ours, theirs) and _dtype(ours) != _dtype(theirs):
            raise UsageError(f"{where}: is of {name} {ours}, and what is measured has {name} {theirs}")
    _check_draft(base.drafter, where, found.drafter)


def _check_model(base: Measured, where: str, found: Measured) -> None:
    """By weights, else by config, else by name: `llama-3.1-8b` is part of `meta-llama/Llama-3.1-8B-Instruct`."""
    if base.digest is not None and found.digest is not None:
        same, by = base.digest == found.digest, "tensors_sha"
    elif base.config_sha is not None and found.config_sha is not None:
        same, by = base.config_sha == found.config_sha, "config_sha"
    elif base.name is not None and found.name is not None:
        same, by = _is_part(base.name, found.name) or _is_part(found.name, base.name), "name"
    else:
        return
    if not same:
        raise UsageError(
            f"{where}: is of the model {base.name}, and what is measured is {found.name} ({by} differs); where both "
            "have the same shape and numbers of the same kind, say so with --same-model"
        )


def _check_draft(ours: BoundDraft | None, where: str, theirs: BoundDraft | None) -> None:
    if ours is None or theirs is None:
        return
    for name in ("kind", "digest"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if None not in (one, other) and one != other:
            raise UsageError(f"{where}: is of a draft of {name} {one}, and what is measured has one of {name} {other}")


def _dtype(value: object) -> object:
    return DTYPES.get(value, value) if isinstance(value, str) else value


def _one_holds_other(one: str, other: str) -> bool:
    a, b = one.casefold(), other.casefold()
    return a in b or b in a


def _is_part(part: str, whole: str) -> bool:
    """All words of one name are in the other; x stands for any number, as in llama-3.x."""
    words = _WORD.findall(whole.casefold())

    def there(word: str) -> bool:
        pattern = re.escape(word).replace(r"\.x", r"\.[0-9]+")
        return any(re.fullmatch(pattern, each) for each in words)

    return all(there(word) for word in _WORD.findall(part.casefold()))
