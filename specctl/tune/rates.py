"""Rates of acceptance, of which there are two that must never be mixed: of drafts, up to a position, and of tokens,
given the ones before them. It knows nothing about where they were counted.

Of one run, survival cannot rise with the position. Mean lengths of separate runs differ by chance, so what they imply
may rise; it is projected on what is possible, and how far it was moved is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from specctl.errors import UsageError

TINY = 1e-9


@dataclass(frozen=True)
class Survival:
    """values[k - 1]: the share of drafts whose first k tokens were all accepted, of those that could reach k."""

    values: tuple[float, ...]

    @classmethod
    def checked(cls, values: Sequence[float], where: str) -> Survival:
        """Of one run. Raises UsageError naming the position that is impossible."""
        _check_rates(values, where, "survival")
        for k, (before, after) in enumerate(pairwise(values), start=2):
            if after > before + TINY:
                raise UsageError(
                    f"{where}: survival rises at position {k}, from {before:g} to {after:g}, and of one run it can "
                    "only fall; give mean lengths of separate runs as lengths, and rates of single tokens as "
                    "conditional"
                )
        return cls(tuple(float(value) for value in values))

    @property
    def length(self) -> float:
        """Tokens of a step, the definite one counted."""
        return 1 + sum(self.values)

    def conditional(self) -> Conditional:
        before = (1.0, *self.values[:-1])
        return Conditional(tuple(b / a if a > 0 else 0.0 for a, b in zip(before, self.values, strict=True)))

    def extended(self, k_max: int) -> Survival:
        """On to k_max, as if each further token were accepted as often as the last one that was seen."""
        last = self.conditional().values[-1]
        more = [self.values[-1] * last**n for n in range(1, k_max - len(self.values) + 1)]
        return Survival((*self.values, *more))


@dataclass(frozen=True)
class Conditional:
    """values[k - 1]: the share of k-th tokens that were accepted, of those that all tokens before them were."""

    values: tuple[float, ...]

    @classmethod
    def checked(cls, values: Sequence[float], where: str) -> Conditional:
        _check_rates(values, where, "conditional")
        return cls(tuple(float(value) for value in values))

    def survival(self) -> Survival:
        return Survival(tuple(accumulate(self.values, lambda a, b: a * b)))

    def scaled(self, change: float) -> Conditional:
        """Every rate changed by this share of itself, 1 at most."""
        return Conditional(tuple(min(1.0, value * (1 + change)) for value in self.values))


@dataclass(frozen=True)
class Projection:
    """Survival from mean lengths. moved: the most a length was changed, at_k: of which K. between: lengths that were
    not given and lie between those that were."""

    survival: Survival
    moved: float
    at_k: int
    between: tuple[int, ...]


def of_lengths(lengths: Mapping[int, float], drafts: Mapping[int, float], where: str) -> Projection:
    """lengths: mean tokens a step by K, of separate runs, the definite token counted. drafts: how many each is the mean
    of, where that is known. Raises UsageError for a length that its K cannot have."""
    ks = sorted(lengths)
    if not ks or ks[0] < 1:
        raise UsageError(f"{where}: expected lengths for K from 1 up, found {ks or 'none'}")
    for k in ks:
        if not (math.isfinite(lengths[k]) and 1 <= lengths[k] <= k + 1):
            raise UsageError(f"{where}: K = {k} cannot bring {lengths[k]:g} tokens a step, expected 1 to {k + 1}")
    gains, weights, widths = [], [], []
    last_k, last_length, last_noise = 0, 1.0, 0.0
    for k in ks:
        noise = 1 / max(drafts.get(k, 1.0), TINY)
        width = k - last_k
        gains.append((lengths[k] - last_length) / width)
        weights.append(width**2 / (noise + last_noise))
        widths.append(width)
        last_k, last_length, last_noise = k, lengths[k], noise
    fitted = [min(1.0, max(0.0, gain)) for gain in falling(gains, weights)]
    values = [gain for gain, width in zip(fitted, widths, strict=True) for _ in range(width)]
    survival = Survival(tuple(values))
    moved = {k: abs(1 + sum(values[:k]) - lengths[k]) for k in ks}
    worst = max(moved, key=lambda k: moved[k])
    return Projection(survival, moved[worst], worst, tuple(k for k in range(1, ks[-1]) if k not in lengths))


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The sequence that nowhere rises and is nearest, in weighted squares: neighbours out of order share their mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            (b, v, m), (a, w, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * w + b * v) / (w + v), w + v, n + m))
    return [value for value, _, count in blocks for _ in range(count)]


def geometric_rate(length: float, k: int, where: str) -> float:
    """The rate that, the same at every position, brings this many tokens a step with K = k."""
    if not 1 <= length <= k + 1 + TINY:
        raise UsageError(f"{where}: K = {k} cannot bring {length:g} tokens a step, expected 1 to {k + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(k + 1)) < length else (low, middle)
    return (low + high) / 2


def _check_rates(values: Sequence[float], where: str, what: str) -> None:
    if not values:
        raise UsageError(f"{where}: {what} has no position, expected a rate for each from the first on")
    for k, value in enumerate(values, start=1):
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise UsageError(f"{where}: {what} at position {k} is {value:g}, expected a rate from 0 to 1")
