"""The clock of a benchmark: wall time, after the device has done what it was asked for."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds from some fixed point; on CUDA once all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
