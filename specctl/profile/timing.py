"""Medians of repeats and the order in which things take turns. It knows nothing about what is timed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)

NEIGHBOURS = 15
"""Passes in a row over which the machine's pace is taken to be the same."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds. spread: one standard error of the median."""

    ms: float
    spread: float


def timing_of(milliseconds: list[float]) -> Timing:
    """The median, and its standard error from the quartiles as for normally distributed repeats: deviation = quartile
    range / 1.349, error of the median = sqrt(pi / 2) deviation / sqrt(n)."""
    low, median, high = np.percentile(milliseconds, [25, 50, 75])
    deviation = (high - low) / 1.349
    return Timing(float(median), float(math.sqrt(math.pi / 2) * deviation / math.sqrt(len(milliseconds))))


def timings_of(log: Sequence[tuple[Key, float]]) -> dict[Key, Timing]:
    """Of every key in a log of what was timed, in the order in which it was: milliseconds at the machine's usual pace.

    A machine that is busy for some seconds slows all passes of these seconds alike. The pace at a pass is the median,
    over its neighbours in time, of milliseconds over the median of their key; it is divided out.
    """
    by_key: dict[Key, list[int]] = {}
    for index, (key, _) in enumerate(log):
        by_key.setdefault(key, []).append(index)
    ms_N = np.array([ms for _, ms in log])
    ratio_N = ms_N.copy()
    for indices in by_key.values():
        ratio_N[indices] /= np.median(ms_N[indices])
    half = min(NEIGHBOURS, len(by_key)) // 2  # of other keys: what is alone has no neighbour to tell its noise by
    if not half:
        return {key: timing_of(ms_N[indices].tolist()) for key, indices in by_key.items()}
    pace_N = np.array([np.median(ratio_N[max(0, i - half) : i + half + 1]) for i in range(len(log))])
    usual_N = ms_N / (pace_N / np.median(pace_N))
    return {key: timing_of(usual_N[indices].tolist()) for key, indices in by_key.items()}


def rounds(order: Sequence[Key], repeats: int) -> Iterator[list[Key]]:
    """`repeats` rounds of all of them, each begun further on in their order."""
    for number in range(repeats):
        first = number * len(order) // repeats
        yield [*order[first:], *order[:first]]


def time_left(number: int, repeats: int, seconds: float) -> str:
    """A sentence about how far `repeats` rounds have come, after round `number` from 0."""
    left = seconds / (number + 1) * (repeats - number - 1)
    return f"round {number + 1} of {repeats} after {seconds:.0f} s, about {left:.0f} s to go"
