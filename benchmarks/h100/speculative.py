"""Measured speculative steps: ten EAGLE-3 runs of SGLang on one H100, and DeepSeek-R1 with and without its MTP layer on
two nodes of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import extracts
import numpy as np
from extracts import Placement

from specctl.roofline import drafts
from specctl.roofline.passes import Passes
from specctl.roofline.serving import Load, tpot_prefill_first_ms
from specctl.schemas.roofline import Roofline

from .figures import Errors

SPEC = re.compile(r"EAGLE3 steps=(\d+) topk=(\d+) draft_tokens=(\d+)")
CONTEXT = 344  # 233 tokens in and half of 221 out
MTP = 3
KINDS = ("roofline", "interpolated")


@dataclass(frozen=True)
class SpecStep:
    """measured: milliseconds of a step. passes: what target and draft take of it by each kind of profile."""

    batch: int
    steps: int
    width: int
    tokens: int
    measured: float
    passes: dict[str, float]

    @property
    def tree(self) -> bool:
        return self.width > 1


@dataclass(frozen=True)
class Plain:
    """Plain steps of the same model."""

    engine: str
    weights: str
    batch: int
    measured: float
    passes: dict[str, float]


def read_points(data: Path) -> list[dict[str, str]]:
    return list(extracts.rows(data / "measured_h100_points.csv"))


def eagle3_steps(points: Sequence[dict[str, str]], roofline: Roofline) -> list[SpecStep]:
    found = []
    for row in points:
        given = SPEC.fullmatch(row["spec"])
        if given is None:
            continue
        steps, width, tokens = map(int, given.groups())
        batch = int(row["concurrency"])
        # A chain verifies its drafts and the token before them, whatever number of draft tokens was asked for.
        rows = tokens if width > 1 else steps + 1
        passes = {"roofline": _eagle3(roofline, batch, steps, width, rows), "interpolated": float(row["aic_pred"])}
        found.append(SpecStep(batch, steps, width, tokens, float(row["measured"]), passes))
    return found


def plain_steps(points: Sequence[dict[str, str]], roofline: Roofline) -> list[Plain]:
    found = []
    for row in points:
        if row["model"] != "Qwen3-8B" or row["spec"] != "none":
            continue
        engine, weights = row["engine"].split()[0], row["precision"].replace(" ", "-")
        target = _qwen(roofline, engine, weights)
        batch = int(row["concurrency"])
        ms = float(target.step(*_at(batch, 1, CONTEXT)).total[0])
        passes = {"roofline": ms, "interpolated": float(row["aic_pred"])}
        found.append(Plain(engine, weights, batch, float(row["measured"]), passes))
    return found


def _qwen(roofline: Roofline, engine: str, weights: str) -> Passes:
    place = Placement(weights=weights)  # type: ignore[arg-type]
    return extracts.passes_of("qwen3-8b", place, roofline.lanes[engine], roofline.peaks)


def _eagle3(roofline: Roofline, batch: int, steps: int, width: int, rows: int) -> float:
    target = _qwen(roofline, "sglang", "fp8-block")
    head = drafts.eagle3_like(target)
    verify = float(target.step(*_at(batch, rows, CONTEXT)).total[0])
    follow = float(head.follow.step(*_at(batch, rows, CONTEXT)).total[0])
    draft = float(head.step.step(*_at(batch, width, CONTEXT)).total[0])
    return verify + follow + (steps - 1) * draft


def _at(batch: float, rows: float, context: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array([float(batch)]), np.array([float(rows)]), np.array([float(context)])


# -- overheads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overhead:
    """spec + per_draft_step * steps (+ tree), in milliseconds."""

    spec: float
    per_draft_step: float
    tree: float

    @classmethod
    def fitted(cls, steps: Sequence[SpecStep], kind: str) -> Overhead:
        """Least squares. Where every run has a tree or none has, what a tree costs cannot be told apart and is taken to
        be nothing."""
        left = np.array([each.measured - each.passes[kind] for each in steps])
        columns = [np.ones(len(steps)), np.array([float(each.steps) for each in steps])]
        mixed = len({each.tree for each in steps}) > 1
        if mixed:
            columns.append(np.array([float(each.tree) for each in steps]))
        solved, *_ = np.linalg.lstsq(np.stack(columns, axis=1), left, rcond=None)
        return cls(float(solved[0]), float(solved[1]), float(solved[2]) if mixed else 0.0)

    def predict(self, step: SpecStep, kind: str) -> float:
        return step.passes[kind] + self.spec + self.per_draft_step * step.steps + (self.tree if step.tree else 0.0)


def left_out(steps: Sequence[SpecStep], kind: str) -> list[float]:
    """Every step predicted by overheads that were fitted on the others."""
    return [Overhead.fitted([each for each in steps if each is not step], kind).predict(step, kind) for step in steps]


# -- DeepSeek-R1 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MtpPair:
    """One batch with and without MTP, measured; and by kind the passes and the host of a plain step and of one that
    drafts three tokens, without what an all-reduce costs more between nodes. layers: of the target."""

    engine: str
    batch: int
    plain_ms: float
    speedup: float
    inferred: bool
    layers: int
    plain: dict[str, float]
    drafting: dict[str, float]

    def predicted_ms(self, kind: str, across: float) -> float:
        return self.plain[kind] + 2 * self.layers * across / 1e3

    def ratio(self, kind: str, across: float) -> float:
        """A step that drafts over one that does not; each draft step is a layer."""
        return (self.drafting[kind] + 2 * (self.layers + MTP) * across / 1e3) / self.predicted_ms(kind, across)


def mtp_pairs(points: Sequence[dict[str, str]], data: Path, roofline: Roofline) -> list[MtpPair]:
    """K = 3. TensorRT-LLM's rows are named so; SGLang's second series is taken to be of it, as its source does."""
    tables = {
        (s.engine, s.place.ep, s.batch, s.q): s
        for s in extracts.steps(data)
        if s.system == "h100-sxm" and s.model == "deepseek-r1" and s.place.tp == 16 and s.context == 1024
    }
    found = []
    for row in points:
        if row["model"] != "DeepSeek-R1" or row["spec"] != "none" or "TP16" not in row["parallel"]:
            continue
        trtllm = row["engine"].startswith("TRT-LLM")
        speedup = _mtp_speedup(points, row) if trtllm else float(_search(r"speedup ([\d.]+)x", row["note"]))
        batch = int(row["concurrency"]) if trtllm else int(_search(r"batch (\d+)/worker", row["note"]))
        engine, ep = ("trtllm", 16) if trtllm else ("sglang", 1)
        lane = roofline.lanes[engine].model_copy(update={"across_us": 0.0})
        target = extracts.passes_of("deepseek-r1", Placement(16, ep, 2, "fp8-block", "bf16"), lane, roofline.peaks)
        plain, drafting = _mtp_roofline(target, batch)
        one, four = (_table(tables, engine, ep, batch, q) for q in (1, 4))
        base, spec = lane.overheads_ms.base, lane.overheads_ms.spec + MTP * lane.overheads_ms.per_draft_step
        found.append(
            MtpPair(
                engine=engine,
                batch=batch,
                plain_ms=float(row["measured"]),
                speedup=speedup,
                inferred=not trtllm,
                layers=target.shape.layers,
                plain={"roofline": plain + base, "interpolated": one + base},
                drafting={
                    "roofline": drafting + spec,
                    "interpolated": four * (1 + MTP / target.shape.layers) + spec,
                },
            )
        )
    return found


def _mtp_roofline(target: Passes, batch: int) -> tuple[float, float]:
    """Milliseconds of the passes of a plain step and of one that drafts three tokens."""
    head = drafts.mtp_layer(target)
    plain = float(target.step(*_at(batch, 1, 1536)).total[0])
    verify = float(target.step(*_at(batch, 4, 1536)).total[0])
    follow = float(head.follow.step(*_at(batch, 4, 1536)).total[0])
    draft = float(head.step.step(*_at(batch, 1, 1536)).total[0])
    return plain, verify + follow + (MTP - 1) * draft


def h200_steps(points: Sequence[dict[str, str]], roofline: Roofline) -> dict[str, list[tuple[dict[str, str], float]]]:
    """By kind, five plain points of DeepSeek-R1 on 8 H200 and what is predicted without a constant of theirs; prompts
    of others are accounted for by the roofline in both."""
    lane = roofline.lanes["sglang"]
    target = extracts.passes_of("deepseek-r1", Placement(8, 1, 1, "fp8-block", "bf16"), lane, roofline.peaks)
    found: dict[str, list[tuple[dict[str, str], float]]] = {kind: [] for kind in KINDS}
    for row in points:
        if "H200" not in row["engine"]:
            continue
        load = Load(int(row["concurrency"]), int(row["isl"]), int(row["osl"]))
        decode = {
            "roofline": float(target.step(*_at(load.batch, 1, load.context)).total[0]),
            "interpolated": float(row["aic_pred"]),
        }
        for kind in KINDS:
            found[kind].append((row, _behind_prompts(target, load, decode[kind] + lane.overheads_ms.base)))
    return found


def h200_plain(points: Sequence[dict[str, str]], roofline: Roofline) -> dict[str, Errors]:
    return {
        kind: Errors.of((ms for _, ms in rows), (float(row["measured"]) for row, _ in rows))
        for kind, rows in h200_steps(points, roofline).items()
    }


def _behind_prompts(target: Passes, load: Load, decode_ms: float) -> float:
    def chunk_ms(n: int) -> float:
        return float(target.prompts(np.array([float(n * load.isl)]), np.array([float(load.isl)])).total[0])

    return tpot_prefill_first_ms(decode_ms, chunk_ms, load, target.lane.chunk)


def across_us(pairs: Sequence[MtpPair], kind: str) -> float:
    """What all-reduces between nodes take more, each: the median of what plain steps exceed their prediction by."""
    left = [(pair.plain_ms - pair.plain[kind]) / (2 * pair.layers) for pair in pairs]
    return 1e3 * max(0.0, float(np.median(left)))


def left_out_across(pairs: Sequence[MtpPair], kind: str) -> list[float]:
    """For each, of the others of its engine."""
    return [
        across_us([each for each in pairs if each is not pair and each.engine == pair.engine], kind) for pair in pairs
    ]


def _table(tables: dict[tuple[str, int, int, int], extracts.Step], engine: str, ep: int, batch: int, q: int) -> float:
    return tables[engine, ep, batch, q].ms


def _mtp_speedup(points: Sequence[dict[str, str]], plain: dict[str, str]) -> float:
    same = ("model", "engine", "parallel", "concurrency", "isl", "osl")
    (other,) = (row for row in points if row["spec"] == "MTP nextn=3" and all(row[key] == plain[key] for key in same))
    return float(plain["measured"]) / float(other["measured"])


def _search(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


def plain_errors(both: Sequence[tuple[MtpPair, float]], engine: str, kind: str) -> Errors:
    own = [(pair, us) for pair, us in both if pair.engine == engine]
    return Errors.of((pair.predicted_ms(kind, us) for pair, us in own), (pair.plain_ms for pair, _ in own))


def fitted_length(pairs: Sequence[MtpPair], across: Sequence[float], kind: str) -> float:
    """The one acceptance length for all rows with which their speed-ups are told best, from none to all of K = 3."""
    candidates = np.arange(1.0, MTP + 1.0005, 0.005)
    return float(min(candidates, key=lambda length: speedup_errors(pairs, across, kind, float(length)).mape))


def speedup_errors(pairs: Sequence[MtpPair], across: Sequence[float], kind: str, length: float) -> Errors:
    predicted = (length / pair.ratio(kind, us) for pair, us in zip(pairs, across, strict=True))
    return Errors.of(predicted, (pair.speedup for pair in pairs))


# -- choice ------------------------------------------------------------------------------------------------------------


def regrets(steps: Sequence[SpecStep], plain: Plain, kind: str, curves: dict[str, list[float]]) -> dict[str, float]:
    """What is lost by choosing 0, 2, 4 or 8 draft steps by predicted times instead of measured ones, for each curve of
    mean acceptance lengths (curve[k]) as a stand-in: those of the runs are not in the data. Batch 4, 16 tokens of a
    tree 4 wide; a step's own time is predicted by the other runs."""
    same = [step for step in steps if (step.batch, step.width, step.tokens) == (4, 4, 16)]
    by_others = dict(zip(map(id, steps), left_out(steps, kind), strict=True))
    measured = {0: plain.measured} | {step.steps: step.measured for step in same}
    predicted = {0: plain.passes[kind]} | {step.steps: by_others[id(step)] for step in same}
    found = {}
    for name, curve in curves.items():
        goodput = {k: curve[k] / ms for k, ms in measured.items()}
        chosen = max(predicted, key=lambda k: curve[k] / predicted[k])
        found[name] = 1 - goodput[chosen] / max(goodput.values())
    return found


def with_base(plain: Plain, roofline: Roofline) -> Plain:
    base = roofline.lanes[plain.engine].overheads_ms.base
    return replace(plain, passes={kind: ms + base for kind, ms in plain.passes.items()})
