"""Timing many things in turn, round after round, so that what changes on the machine meanwhile falls on all alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from specctl.bench.clock import now

Key = TypeVar("Key", bound=Hashable)


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


@torch.inference_mode()
def time_all(
    runs: Mapping[Key, Callable[[], object]], repeats: int, device: torch.device, progress: Callable[[str], None]
) -> dict[Key, Timing]:
    """Every run once to warm up, then `repeats` rounds of all of them, each round begun further on in their order."""
    for run in runs.values():
        run()
    milliseconds: dict[Key, list[float]] = {key: [] for key in runs}
    order = list(runs)
    begin = now(device)
    for number in range(repeats):
        first = number * len(order) // repeats
        for key in order[first:] + order[:first]:
            start = now(device)
            runs[key]()
            milliseconds[key].append(1000 * (now(device) - start))
        seconds = now(device) - begin
        left = seconds / (number + 1) * (repeats - number - 1)
        progress(f"round {number + 1} of {repeats} after {seconds:.0f} s, about {left:.0f} s to go")
    return {key: timing_of(values) for key, values in milliseconds.items()}
