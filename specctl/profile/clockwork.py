"""Timing many things in turn, round after round, so that what changes on the machine meanwhile falls on all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specctl.bench.clock import now
from specctl.profile.timing import Key, Timing, rounds, time_left, timings_of


@torch.inference_mode()
def time_all(
    runs: Mapping[Key, Callable[[], object]], repeats: int, device: torch.device, progress: Callable[[str], None]
) -> dict[Key, Timing]:
    """Every run once to warm up, then `repeats` rounds of all of them, each round begun further on in their order."""
    for run in runs.values():
        run()
    log: list[tuple[Key, float]] = []
    begin = now(device)
    for number, order in enumerate(rounds(list(runs), repeats)):
        for key in order:
            start = now(device)
            runs[key]()
            log.append((key, 1000 * (now(device) - start)))
        progress(time_left(number, repeats, now(device) - begin))
    return timings_of(log)
