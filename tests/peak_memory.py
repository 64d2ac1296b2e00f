"""Run as a program: loads a checkpoint for serving and prints its anonymous memory before, at most and after.

usage: peak_memory.py DIRECTORY DTYPE      (the output is JSON, in bytes)
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

import torch

from specctl.checkpoint import Checkpoint
from specctl.models import load


def anonymous() -> int:
    """RssAnon of this process. Mapped file pages are not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Looks every half millisecond: the kernel keeps a peak of all resident memory only, mapped files included."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = anonymous()
        self.looks = 0
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.0005):
            self.bytes = max(self.bytes, anonymous())
            self.looks += 1

    def stop(self) -> None:
        self._end.set()
        self.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    before, peak = anonymous(), Peak()
    peak.start()
    model = load(Checkpoint(Path(sys.argv[1])), getattr(torch, sys.argv[2]), torch.device("cpu"))
    peak.stop()
    gc.collect()
    report = {"before": before, "peak": peak.bytes, "after": anonymous(), "looks": peak.looks}
    sys.stdout.write(json.dumps(report) + "\n")
