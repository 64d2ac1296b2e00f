"""Times torch's own linear against the packed one, for the weights of a small model and a few rows. Run by hand:

    python benchmarks/linear.py [--threads N] [--repeats N] [--output FILE]

The two are timed in turn, pass by pass, so that a busy machine slows both alike. A pass goes over as many weights as
outgrow the caches, as a decoding step does. Prints JSON: milliseconds for one weight, the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specctl
from specctl.layers import PACKED_FOR_ROWS, Linear

# SmolLM2-135M: inputs and outputs of its fused and single projections, and of its head.
SHAPES = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
ROWS = [*range(1, 17), 32, 512]
WEIGHTS_BYTES = 128 * 2**20


def layers(inputs: int, outputs: int, packed: bool) -> list[Linear]:
    """As many layers of one shape as a pass goes over."""
    made = []
    for _ in range(max(1, WEIGHTS_BYTES // (4 * inputs * outputs))):
        layer = Linear(inputs, outputs).requires_grad_(False)
        layer.weight.normal_()
        if packed:
            layer.prepare("serve")
        made.append(layer)
    return made


def time_in_turn(ways: dict[str, list[Linear]], x_TD: Tensor, repeats: int) -> dict[str, list[float]]:
    """Milliseconds for one weight, for each way and repeat; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, made in ways.items():
            start = time.perf_counter()
            for layer in made:
                layer(x_TD)
            elapsed = time.perf_counter() - start
            if repeat:
                found[name].append(1000 * elapsed / len(made))
    return found


def measure(repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    points = []
    for shape, (inputs, outputs) in SHAPES.items():
        ways = {"plain": layers(inputs, outputs, False), "packed": layers(inputs, outputs, True)}
        for rows in ROWS:
            taken = time_in_turn(ways, torch.randn(rows, inputs), repeats)
            plain, packed = (statistics.median(taken[name]) for name in ways)
            ratio = statistics.median(a / b for a, b in zip(taken["plain"], taken["packed"], strict=True))
            say(f"{shape:8} {rows:4} rows   plain {plain:8.3f} ms   packed {packed:8.3f} ms   {ratio:5.2f} x")
            points.append(
                {
                    "shape": shape,
                    "inputs": inputs,
                    "outputs": outputs,
                    "rows": rows,
                    "plain_ms": round(plain, 4),
                    "packed_ms": round(packed, 4),
                    "plain_over_packed": round(ratio, 3),
                }
            )
    return points


def device() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.processor()}, {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times torch's own linear against the packed one on this CPU.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="write the JSON there instead of to stdout; must not exist")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.threads < 1:
        parser.error("--threads and --repeats must be at least 1")
    if arguments.output is not None and arguments.output.exists():
        parser.error(f"{arguments.output} exists")
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        points = measure(arguments.repeats, lambda line: print(line, file=sys.stderr))
    report = {
        "schema": "specctl.benchmark.linear/1",
        "provenance": {
            "specctl": specctl.__version__,
            "torch": torch.__version__,
            "device": device(),
            "threads": arguments.threads,
            "command": " ".join(["python", "benchmarks/linear.py", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "packed_for_rows": PACKED_FOR_ROWS,
        "dtype": "float32",
        "points": points,
    }
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
