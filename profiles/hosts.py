"""What an engine's host adds to its passes, and what an exchange between nodes costs: of measured points, as kernels'
tables know neither. Medians and least squares; benchmarks/tune_h100.py judges by other points, or leaves each out once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import constants
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from h100 import dense, speculative

from specctl.schemas.roofline import Lane, Overheads

ENGINES_OF_PLAIN_STEPS = ("vllm", "sglang")
"""TensorRT-LLM has no point but those that judge, so nothing is added to its plain steps."""


def hosted(lanes: dict[str, Lane], data: Path) -> dict[str, Lane]:
    """One after the other, as each is what is left when those before it are known."""
    points = speculative.read_points(data)
    lanes = _with_overheads(lanes, points)
    rows = dense.read(data, constants.roofline("h100-sxm", lanes))
    lanes = {
        engine: lane.model_copy(update={"per_sequence_us": per_sequence_us(rows, engine)})
        for engine, lane in lanes.items()
    }
    across = across_us(data, lanes, "roofline")
    return {engine: lane.model_copy(update={"across_us": across[engine]}) for engine, lane in lanes.items()}


def across_us(data: Path, lanes: dict[str, Lane], kind: str) -> dict[str, float]:
    """What an all-reduce between nodes takes more than kernels' sums have, by engine; vLLM has no points, and gets the
    mean of the others."""
    points = speculative.read_points(data)
    pairs = speculative.mtp_pairs(points, data, constants.roofline("h100-sxm", lanes))
    found = {
        engine: speculative.across_us([pair for pair in pairs if pair.engine == engine], kind)
        for engine in ("sglang", "trtllm")
    }
    return {"vllm": float(np.mean(list(found.values()))), **found}


def _with_overheads(lanes: dict[str, Lane], points: Sequence[dict[str, str]]) -> dict[str, Lane]:
    roofline = constants.roofline("h100-sxm", lanes)
    spec = speculative.Overhead.fitted(speculative.eagle3_steps(points, roofline), "interpolated")
    plain = speculative.plain_steps(points, roofline)
    found = {}
    for engine, lane in lanes.items():
        base = 0.0
        if engine in ENGINES_OF_PLAIN_STEPS:
            own = [each for each in plain if each.engine == engine]
            base = float(np.median([each.measured - each.passes["interpolated"] for each in own]))
        over = Overheads(base=base, spec=spec.spec, per_draft_step=spec.per_draft_step, tree=spec.tree)
        found[engine] = lane.model_copy(update={"overheads_ms": over})
    return found


def per_sequence_us(rows: Sequence[dense.Row], engine: str) -> float:
    """Least squares of relative errors over both classes of prediction, of rows with long answers."""
    chosen = [row for row in rows if row.engine == engine and row.load.osl >= dense.LONG and not row.odd]
    measured = np.array([row.measured for row in chosen])
    running = np.array([float(row.running) for row in chosen]) / measured
    left = np.stack([1 - np.array([row.predicted[kind] for row in chosen]) / measured for kind in dense.KINDS])
    return 1e3 * max(0.0, float((left.mean(axis=0) @ running) / (running @ running)))
