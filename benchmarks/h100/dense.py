"""579 measured milliseconds a token of dense models, and what is said about them: by the roofline, and by an operator
database's sums. Both go through the same account of the prompts of other users (specctl.roofline.serving).

The measured time to a first token is in the rows and is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import extracts
import numpy as np
from extracts import Placement

from specctl.roofline import memory
from specctl.roofline.passes import Passes
from specctl.roofline.serving import Load, tpot_mixed_ms, tpot_prefill_first_ms
from specctl.schemas.roofline import Roofline

from .figures import Errors

MODELS = {"Meta-Llama-3.1-8B": "llama-3.1-8b", "Meta-Llama-3.1-70B": "llama-3.x-70b", "Qwen3-32B": "qwen3-32b"}
KINDS = ("roofline", "interpolated")
LONG = 512
SPLITS, SEED = 20, 0


@dataclass(frozen=True)
class Row:
    """A measured point and both predictions, in milliseconds a token. running: of its requests, how many fit into
    memory at once. odd: one of seven single rows that nobody can explain."""

    model: str
    engine: str
    version: str
    weights: str
    tp: int
    load: Load
    running: int
    odd: bool
    measured: float
    predicted: dict[str, float]
    crude: dict[str, float]

    @property
    def group(self) -> str:
        return f"{self.model} {self.weights} {self.engine} {self.version}".strip()


def read(data: Path, roofline: Roofline) -> list[Row]:
    return [_row(row, roofline) for row in extracts.rows(data / "aic_vs_silicon_dense.csv")]


def _row(row: dict[str, str], roofline: Roofline) -> Row:
    weights = row["q"]
    place = Placement(tp=int(row["tp"]), weights=weights, cache=weights)  # type: ignore[arg-type]
    lane = roofline.lanes[row["backend"]]
    target = extracts.passes_of(MODELS[row["model"]], place, lane, roofline.peaks)
    load = Load(int(float(row["B"])), int(row["isl"]), int(row["osl"]))
    fits = Load(load.running(memory.room(roofline, target).tokens), load.isl, load.osl)
    tables = float(row["aic_dec"]), float(row["aic_pre"])
    return Row(
        model=MODELS[row["model"]],
        engine=row["backend"],
        version=row["ver"],
        weights=weights,
        tp=place.tp,
        load=load,
        running=fits.batch,
        odd=row["odd"] == "1",
        measured=float(row["meas_tpot"]),
        predicted={"roofline": _roofline(target, fits), "interpolated": _interpolated(target, load, fits, *tables)},
        crude={
            "roofline": _decode(target, load) + _prompts(target, 1, load) * (load.batch - 1) / load.osl,
            "interpolated": float(row["pred_tpot"]),
        },
    )


def _roofline(target: Passes, load: Load) -> float:
    base = target.lane.overheads_ms.base
    decode = _decode(target, load) + base
    if target.lane.scheduling == "mixed":
        return tpot_mixed_ms(decode, _mixed(target, load) + base, load)
    return tpot_prefill_first_ms(decode, lambda n: _prompts(target, n, load) + base, load, target.lane.chunk)


def _interpolated(target: Passes, load: Load, fits: Load, decode_ms: float, prompt_ms: float) -> float:
    """The database's sums; where a step is wanted that the rows do not have (fewer requests, several prompts, a prompt
    beside decoding), the roofline says by how much it differs from one they have."""
    base = target.lane.overheads_ms.base
    decode = decode_ms * _decode(target, fits) / _decode(target, load)
    if target.lane.scheduling == "mixed":
        together = _mixed(target, fits) / (_decode(target, fits) + _prompts(target, 1, fits))
        return tpot_mixed_ms(decode + base, (decode + prompt_ms) * together + base, fits)

    def chunk_ms(n: int) -> float:
        return prompt_ms * _prompts(target, n, fits) / _prompts(target, 1, fits) + base

    return tpot_prefill_first_ms(decode + base, chunk_ms, fits, target.lane.chunk)


def _decode(target: Passes, load: Load) -> float:
    return float(target.step(_one(load.batch), _one(1), _one(load.context)).total[0])


def _mixed(target: Passes, load: Load) -> float:
    return float(target.mixed(_one(load.isl), _one(load.batch), _one(load.context)).total[0])


def _prompts(target: Passes, n: int, load: Load) -> float:
    return float(target.prompts(_one(n * load.isl), _one(load.isl)).total[0])


def _one(value: float) -> np.ndarray:
    return np.array([value], dtype=float)


# -- figures -----------------------------------------------------------------------------------------------------------


def errors(rows: Sequence[Row], kind: str, *, crude: bool = False) -> Errors:
    return Errors.of(((row.crude if crude else row.predicted)[kind] for row in rows), (row.measured for row in rows))


def groups(rows: Sequence[Row], kind: str) -> Iterator[tuple[str, Errors]]:
    for name in sorted({row.group for row in rows}):
        yield name, errors([row for row in rows if row.group == name], kind)


@dataclass(frozen=True)
class Calibration:
    """Held-out errors over the splits: mean of their MAPEs, of their biases and of their p90s. constants: fitted."""

    errors: Errors
    worst: float


def calibrated(rows: Sequence[Row], kind: str, model: str, *, per_sequence: bool) -> Calibration:
    """measured = offset + scale * predicted (+ per_sequence * running requests), fitted on a random half of the model's
    rows with long answers by least squares of relative errors, judged by the other half."""
    chosen = [row for row in rows if row.model == model and row.load.osl >= LONG and row.engine in ("trtllm", "vllm")]
    measured = np.array([row.measured for row in chosen])
    columns = [np.ones(len(chosen)), np.array([row.predicted[kind] for row in chosen])]
    if per_sequence:
        columns.append(np.array([float(row.running) for row in chosen]))
    features = np.stack(columns, axis=1)
    random = np.random.default_rng(SEED)
    found = []
    for _ in range(SPLITS):
        order = random.permutation(len(chosen))
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        weights, *_ = np.linalg.lstsq(features[first] / measured[first, None], np.ones(len(first)), rcond=None)
        found.append(Errors.of(features[second] @ weights, measured[second]))
    mean = Errors(
        found[0].n,
        float(np.mean([each.mape for each in found])),
        float(np.mean([each.bias for each in found])),
        float(np.mean([each.p90 for each in found])),
    )
    return Calibration(mean, max(each.mape for each in found))
