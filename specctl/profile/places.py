"""At which batches and contexts is measured: those asked for, or the usual ones as far as they go."""

from __future__ import annotations

from collections.abc import Iterable

from specctl.errors import UsageError
from specctl.profile.base import Base


def choose_contexts(
    batches: tuple[int, ...], contexts: tuple[int, ...] | None, usual: Iterable[int], holds: int, why: str
) -> tuple[int, ...]:
    """The contexts asked for, rising; None: those of `usual` that fit into what is held, half of that if none does.
    why: what else has to fit, and where, in words.

    Raises UsageError for a batch or a context that is named twice, and for a context that does not fit.
    """
    if contexts is None:
        contexts = tuple(c for c in usual if c <= holds) or (max(1, holds // 2),)
    for flag, values in (("--batches", batches), ("--contexts", contexts)):
        if len(set(values)) < len(values):
            raise UsageError(f"{flag} {','.join(map(str, values))}: names one twice")
    if max(contexts) > holds:
        raise UsageError(f"--contexts {max(contexts)}: {why} is {holds}")
    return tuple(sorted(contexts))


def usual_batches(base: Base | None, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `usual` that the profile has, its smallest if none."""
    if base is None:
        return usual
    return tuple(b for b in usual if b in base.batches) or tuple(base.batches[:1])
