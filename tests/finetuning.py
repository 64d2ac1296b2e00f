"""What the tests of fine-tuning runs share: rows, recipes, what a run leaves, and an interruption at a given place."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

ANSWERS = ["ABCD", "EFGH", "IJKL"]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": f"r{n}",
            "messages": [
                {"role": "user", "content": f"{(n + seed) % 10}?"},
                {"role": "assistant", "content": ANSWERS[(n + seed) % 3]},
            ],
        }
        for n in range(count)
    ]


def jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def recipe(path: Path, kind: str = "llama", **values: Any) -> Path:
    """A recipe of eight steps over two epochs that validates and saves on the way."""
    own: dict[str, Any] = {"llama": {"draft": {"width": 16, "depth": 1, "heads": 2}}}.get(kind, {})
    chain = {} if kind == "llama" else {"steps": 2}
    value: dict[str, Any] = own | {
        "kind": kind,
        "epochs": 2,
        "data": {"train": str(jsonl(path.with_suffix(".jsonl"), rows(12))), "held_out_fraction": 0.2, "max_length": 64},
        "loss": {"ce": 0.5, "kl": 0.3, "tv": 0.2, "chunk": 7} | chain,
        "optimiser": {"lr": 1e-2, "warmup_steps": 2, "tokens_per_batch": 64, "accumulate": 1},
        "validation": {"every_steps": 3, "prompts": 2, "max_tokens": 6, "k": 2},
        "checkpoint": {"every_steps": 2},
    }
    for key, inner in values.items():
        value[key] = value[key] | inner if isinstance(inner, dict) and isinstance(value.get(key), dict) else inner
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in json.loads(line).items() if key != "time"}
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def assert_same(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    ours, theirs = (json.loads((path / "specctl.json").read_text()) for path in (one, other))
    assert ours["acceptance"] == theirs["acceptance"]
    of_one, of_other = (lines(path.with_name(f"{path.name}.run") / "metrics.jsonl") for path in (one, other))
    assert of_one == of_other


def interrupt_after(metrics: Path, count: int) -> threading.Thread:
    """Sends this process a SIGINT when so many lines are written."""

    def watch() -> None:
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < count:
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
