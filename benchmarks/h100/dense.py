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
    memory at once. odd: one of seven single rows that nobody can explain. decode, mixed: a step without and with a
    prompt in it."""

    model: str
    engine: str
    version: str
    weights: str
    tp: int
    load: Load
    running: int
    odd: bool
    layers: int
    measured: float
    predicted: dict[str, float]
    crude: dict[str, float]
    decode: dict[str, float]
    mixed: dict[str, float]

    @property
    def group(self) -> str:
        return f"{self.model} {self.weights} {self.engine} {self.version}".strip()

    def with_floor(self, kind: str, floor: float) -> float:
        """Steps with a prompt take at least `floor` milliseconds a layer, of the host."""
        load = Load(self.running, self.load.isl, self.load.osl)
        return tpot_mixed_ms(self.decode[kind], max(self.mixed[kind], floor * self.layers), load)


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
    decode = {
        "roofline": _decode(target, fits),
        "interpolated": tables[0] * _decode(target, fits) / _decode(target, load),
    }
    together = _mixed(target, fits) / (_decode(target, fits) + _prompts(target, 1, fits))
    mixed = {"roofline": _mixed(target, fits), "interpolated": (decode["interpolated"] + tables[1]) * together}
    prompt = {"roofline": _prompts(target, 1, fits), "interpolated": tables[1]}
    return Row(
        model=MODELS[row["model"]],
        engine=row["backend"],
        version=row["ver"],
        weights=weights,
        tp=place.tp,
        load=load,
        running=fits.batch,
        odd=row["odd"] == "1",
        layers=target.shape.layers,
        measured=float(row["meas_tpot"]),
        predicted={kind: _predicted(target, fits, decode[kind], mixed[kind], prompt[kind]) for kind in KINDS},
        crude={
            "roofline": _decode(target, load) + _prompts(target, 1, load) * (load.batch - 1) / load.osl,
            "interpolated": float(row["pred_tpot"]),
        },
        decode=decode,
        mixed=mixed,
    )


def _predicted(target: Passes, fits: Load, decode_ms: float, mixed_ms: float, prompt_ms: float) -> float:
    """Where a step is wanted that the database's rows do not have (fewer requests, several prompts, a prompt beside
    decoding), the roofline says by how much it differs from one they have."""
    base = target.lane.overheads_ms.base
    if target.lane.scheduling == "mixed":
        return tpot_mixed_ms(decode_ms + base, mixed_ms + base, fits)

    def chunk_ms(n: int) -> float:
        return prompt_ms * _prompts(target, n, fits) / _prompts(target, 1, fits) + base

    return tpot_prefill_first_ms(decode_ms + base, chunk_ms, fits, target.lane.chunk)


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
    """Held-out errors over the splits: mean of their MAPEs, of their biases and so on. worst: of the splits.
    floor: the mean of those fitted."""

    errors: Errors
    worst: float
    floor: float


FLOORS = tuple(float(each) for each in np.arange(0, 1.2, 0.05))


def calibrated(
    rows: Sequence[Row], kind: str, model: str, *, per_sequence: bool = False, floor: bool = False
) -> Calibration:
    """measured = offset + scale * predicted (+ per_sequence * running requests), where steps with a prompt take at
    least so much a layer (floor): fitted on a random half of the model's rows with long answers by least squares of
    relative errors, judged by the other half."""
    chosen = [row for row in rows if row.model == model and row.load.osl >= LONG and row.engine in ("trtllm", "vllm")]
    measured = np.array([row.measured for row in chosen])
    features = [(each, _features(chosen, kind, each, per_sequence)) for each in (FLOORS if floor else FLOORS[:1])]
    random = np.random.default_rng(SEED)
    found, floors = [], []
    for _ in range(SPLITS):
        order = random.permutation(len(chosen))
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        fits = [(each, values, *_least_squares(values[first], measured[first])) for each, values in features]
        best, values, weights, _ = min(fits, key=lambda fit: fit[3])
        found.append(Errors.of(values[second] @ weights, measured[second]))
        floors.append(best)
    mean = Errors(
        found[0].n,
        float(np.mean([each.mape for each in found])),
        float(np.mean([each.bias for each in found])),
        float(np.mean([each.p90 for each in found])),
        float(np.mean([each.rms for each in found])),
    )
    return Calibration(mean, max(each.mape for each in found), float(np.mean(floors)))


def _features(rows: Sequence[Row], kind: str, floor: float, per_sequence: bool) -> np.ndarray:
    columns = [np.ones(len(rows)), np.array([row.with_floor(kind, floor) for row in rows])]
    if per_sequence:
        columns.append(np.array([float(row.running) for row in rows]))
    return np.stack(columns, axis=1)


def _least_squares(values: np.ndarray, measured: np.ndarray) -> tuple[np.ndarray, float]:
    relative = values / measured[:, None]
    weights, *_ = np.linalg.lstsq(relative, np.ones(len(values)), rcond=None)
    return weights, float(np.mean((relative @ weights - 1) ** 2))
