"""Run as a program: `specctl convert-mtp` with these arguments, and its greatest anonymous memory above the start's.

The output is JSON, in bytes. What torch and the program itself take before is not counted.
"""

from __future__ import annotations

import json
import sys

import torch
from peak_memory import Peak, anonymous

import specctl.convert_mtp.command
from specctl.cli.main import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    assert specctl.convert_mtp.command is not None
    before, peak = anonymous(), Peak()
    peak.start()
    code = main(["convert-mtp", *sys.argv[1:]])
    peak.stop()
    sys.stdout.write(json.dumps({"code": code, "above": peak.bytes - before, "looks": peak.looks}) + "\n")
