"""The CSV extracts that profiles and benchmarks are computed from: rows as values, and the models they are of by their
sizes. Run by hand only; nothing of specctl imports it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.roofline.passes import Passes, Placement
from specctl.roofline.shape import ModelShape
from specctl.schemas.roofline import Lane, Peaks

MODELS = json.loads((Path(__file__).parent / "models.json").read_text())
ENGINES = ("vllm", "sglang", "trtllm")
STEPS = ("aic_llama31_8b", "aic_llama3x_70b", "aic_llama32_1b_draft", "aic_deepseek_r1_h100", "aic_deepseek_r1_h200")
NAMES = {"llama-3.1-70b": "llama-3.x-70b"}
HEADS = {"llama-3.1-8b": "eagle3-llama3.1-8b", "llama-3.x-70b": "eagle3-llama3.3-70b"}
WEIGHTS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block"}
SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}


@dataclass(frozen=True)
class Step:
    """A row of an operator database's sums for one decoding step. Milliseconds by part."""

    system: str
    engine: str
    version: str
    model: str
    place: Placement
    batch: int
    q: int
    context: int
    ms: float
    products: float
    attention: float
    experts: float
    exchange: float
    other: float


def rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def steps(data: Path) -> Iterator[Step]:
    for name in STEPS:
        for row in rows(data / f"{name}.csv"):
            tp = int(row["tp"])
            yield Step(
                system=SYSTEMS[row["system"]],
                engine=row["backend"],
                version=row["backend_version"],
                model=NAMES.get(row["model"], row["model"]),
                place=Placement(
                    tp=tp,
                    ep=int(row["moe_ep"] or 1),
                    nodes=-(-tp // 8),
                    weights=WEIGHTS[row["gemm_dtype"]],  # type: ignore[arg-type]
                    cache="fp8" if row["kv_dtype"] == "fp8" else "bf16",
                ),
                batch=int(row["batch"]),
                q=int(row["q_tokens_per_seq"]),
                context=int(row["ctx"]),
                ms=float(row["t_step_ms"]),
                products=float(row["gemm_ms"]),
                attention=float(row["attn_kvonce_ms"]),
                experts=float(row["moe_ms"]),
                exchange=float(row["comm_ms"]),
                other=float(row["other_ms"]),
            )


def shape_of(model: str) -> ModelShape:
    return ModelShape.read(MODELS[model], model)


def passes_of(model: str, place: Placement, lane: Lane, peaks: Peaks) -> Passes:
    return Passes(shape_of(model), place, lane, peaks)


def number(row: dict[str, Any], key: str) -> float:
    return float(row[key]) if row[key] else float("nan")
