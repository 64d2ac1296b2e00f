"""The files that tell what a run was given and what became of it: --dump and --report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specctl.finetune.data import DataSet
from specctl.output import to_json


def report(data: DataSet, losses: Sequence[float] = (), lrs: Sequence[float] = ()) -> dict[str, Any]:
    """losses, lrs: of every optimiser step, none of a run that trained nothing."""
    return {
        "rows": data.rows,
        "kept": data.kept,
        "skips": [{"id": skip.id, "line": skip.line, "reason": skip.reason} for skip in data.skips],
        "label_tokens": data.label_tokens,
        "loss": list(losses),
        "lr": list(lrs),
    }


def write_report(file: Path, value: dict[str, Any]) -> None:
    file.write_text(to_json(value) + "\n", encoding="utf-8")


def write_dump(file: Path, data: DataSet) -> None:
    """One training example a line: id, token ids, and labels, of which -100 is none."""
    with file.open("w", encoding="utf-8") as lines:
        for example in data.train:
            value = {"id": example.id, "ids": list(example.ids), "labels": list(example.labels)}
            lines.write(json.dumps(value, separators=(",", ":")) + "\n")
