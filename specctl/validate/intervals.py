"""Intervals of 95 % for what gates measure, from counts alone. Plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

Interval = tuple[float, float]

Z95 = 1.959964


def mean_accepted(num_drafts: int, accepted_per_position: Sequence[int]) -> Interval | None:
    """Of the mean number of accepted tokens a draft; None for a single draft.

    accepted_per_position[k - 1] drafts had at least k accepted, which gives the whole distribution: E[n] is the sum of
    P(n >= k), E[n^2] that of (2k - 1) P(n >= k). Drafts are taken for independent.
    """
    if num_drafts < 2:
        return None
    mean = sum(accepted_per_position) / num_drafts
    square = sum((2 * k - 1) * count for k, count in enumerate(accepted_per_position, start=1)) / num_drafts
    error = math.sqrt(max(0.0, square - mean * mean) / (num_drafts - 1))
    return max(0.0, mean - Z95 * error), mean + Z95 * error


def of_difference(first: Interval | None, second: Interval | None) -> float | None:
    """Half the width of the interval of a difference of two independent figures."""
    if first is None or second is None:
        return None
    return math.hypot((first[1] - first[0]) / 2, (second[1] - second[0]) / 2)


def overlap(first: Interval | None, second: Interval | None) -> bool:
    """Whether two figures may be one; figures without intervals are taken as they are."""
    return first is not None and second is not None and first[0] <= second[1] and second[0] <= first[1]
