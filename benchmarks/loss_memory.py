"""How much memory does the loss over a large vocabulary take, by the size of its chunks?

    python benchmarks/loss_memory.py [--tokens 8192] [--vocab 128256] [--hidden 2048] [--chunks 256,512,1024,2048,4096]
                                     [--losses ce,kl] [--output RESULT.json]

Forward and backward of the loss alone, in float32 as training does it, in a process of its own for each size: final
hidden states of that many labelled tokens, an output head with its gradient, and for kl the target's states and head.
What is there before the loss is not counted: states, heads and their gradients. "autograd" is the same sum written out
over all tokens at once. What would not fit into the memory that is free is left out, and that is said. Needs minutes a
size: the multiplications are those of training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specctl.drafts import OutputHead, Scored
from specctl.finetune.memory import SMALLEST_CHUNK_BUFFERS, TEACHER_BUFFERS, anonymous
from specctl.schemas.base import Provenance
from specctl.train.losses import Objective

GIB = 2**30
SPARE = 4 * GIB  # for whoever else is there
BUFFERS = {"ce": SMALLEST_CHUNK_BUFFERS, "kl": TEACHER_BUFFERS}  # of a chunk's logits, as --plan reckons
AUTOGRAD = {"ce": 4, "kl": 9}  # the same of sums written out; only to see whether they fit


@dataclass(frozen=True)
class Rows:
    """Labelled rows, and what they are scored with. teacher_RD, teacher_head: the target's, for kl."""

    final_RD: Tensor
    weight: nn.Parameter
    label_R: Tensor
    teacher_RD: Tensor | None
    teacher_head: Tensor | None

    def first(self, count: int) -> Rows:
        teacher_RD = None if self.teacher_RD is None else self.teacher_RD[:count]
        return replace(self, final_RD=self.final_RD[:count], label_R=self.label_R[:count], teacher_RD=teacher_RD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--chunks", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--losses", default="ce,kl")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    parser.add_argument("--one", metavar="LOSS,CHUNK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        loss, chunk = args.one.split(",")
        print(json.dumps(measure(loss, int(chunk), args.tokens, args.vocab, args.hidden)))
        return
    rows = []
    for loss in args.losses.split(","):
        for chunk in [*map(int, args.chunks.split(",")), 0]:
            rows.append(apart(loss, chunk, args.tokens, args.vocab, args.hidden))
            print(line(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "provenance": Provenance.here("cpu", torch.get_num_threads()).model_dump(),
        "tokens": args.tokens,
        "vocab": args.vocab,
        "hidden": args.hidden,
        "dtype": "float32",
        "rows": rows,
    }
    print("\n".join(["| loss | chunk | GiB | of them by --plan | seconds |", "| --- | --- | --- | --- | --- |"]))
    print("\n".join(map(line, rows)))
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)


def apart(loss: str, chunk: int, tokens: int, vocab: int, hidden: int) -> dict[str, Any]:
    """One size, measured in a process of its own. chunk: 0 for autograd without chunks."""
    logits = 4 * vocab * min(chunk or tokens, tokens)
    planned = None if chunk == 0 else round(BUFFERS[loss] * logits / GIB, 3)
    head = 4 * vocab * hidden
    needed = (BUFFERS[loss] if chunk else AUTOGRAD[loss]) * logits + 4 * head + 4 * 4 * tokens * hidden + GIB
    row = {"loss": loss, "chunk": chunk, "planned_gib": planned}
    if needed > available() - SPARE:
        return row | {
            "left_out": f"takes about {needed / GIB:.1f} GiB, {(available() - SPARE) / GIB:.1f} are to be had"
        }
    command = [sys.executable, __file__, "--one", f"{loss},{chunk}"]
    command += ["--tokens", str(tokens), "--vocab", str(vocab), "--hidden", str(hidden)]
    return row | json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(loss: str, chunk: int, tokens: int, vocab: int, hidden: int) -> dict[str, Any]:
    """Of this process: what it held before, and the most it held besides."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int) -> Tensor:
        return torch.empty(rows, hidden).normal_(0.0, 0.02, generator=generator)

    final_RD = drawn(tokens).mul_(50).requires_grad_()
    weight = nn.Parameter(drawn(vocab))
    final_RD.grad, weight.grad = torch.zeros_like(final_RD), torch.zeros_like(weight)
    label_R = torch.randint(0, vocab, (tokens,), generator=generator)
    teacher = (drawn(tokens).mul_(50), drawn(vocab)) if loss == "kl" else (None, None)
    rows = Rows(final_RD, weight, label_R, *teacher)
    run = plain if chunk == 0 else chunked
    # What torch makes when it first multiplies is there before, too.
    run(loss, 8, rows.first(8))
    before = anonymous()
    with Peak() as peak:
        begin = time.perf_counter()
        run(loss, chunk, rows)
        seconds = time.perf_counter() - begin
    return {
        "before_gib": round(before / GIB, 3),
        "peak_gib": round((peak.bytes - before) / GIB, 3),
        "seconds": round(seconds, 1),
        "looks": peak.looks,
    }


def chunked(loss: str, chunk: int, rows: Rows) -> None:
    """As specctl trains."""
    head = None if rows.teacher_head is None else (lambda rows_RD: rows_RD @ rows.teacher_head.T)
    objective = Objective(**{"ce": 0.0, loss: 1.0}, chunk=chunk, teacher_head=head)
    weight_R = torch.full((len(rows.label_R),), 1 / len(rows.label_R), dtype=torch.float64)
    scored = Scored(rows.final_RD, rows.label_R, weight_R, rows.teacher_RD)
    total, _ = objective(scored, OutputHead(rows.weight, len(rows.weight)))
    total.backward()


def plain(loss: str, chunk: int, rows: Rows) -> None:
    """As one writes it down."""
    logits_RV = rows.final_RD @ rows.weight.T
    if rows.teacher_RD is None or rows.teacher_head is None:
        F.cross_entropy(logits_RV, rows.label_R).backward()
        return
    log_p_RV = (rows.teacher_RD @ rows.teacher_head.T).log_softmax(-1)
    F.kl_div(logits_RV.log_softmax(-1), log_p_RV, reduction="batchmean", log_target=True).backward()


class Peak:
    """Looks at this process's anonymous memory every half millisecond."""

    def __enter__(self) -> Peak:
        self.bytes, self.looks, self._end = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.0005):
            self.bytes, self.looks = max(self.bytes, anonymous()), self.looks + 1


def available() -> int:
    """Bytes that can be had on this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def line(row: dict[str, Any]) -> str:
    chunk = "autograd" if row["chunk"] == 0 else f"{row['chunk']:,}"
    if "left_out" in row:
        return f"| {row['loss']} | {chunk} | {row['left_out']} | | |"
    planned = "" if row["planned_gib"] is None else f"{row['planned_gib']:.2f}"
    return f"| {row['loss']} | {chunk} | {row['peak_gib']:.2f} | {planned} | {row['seconds']:.0f} |"


if __name__ == "__main__":
    main()
