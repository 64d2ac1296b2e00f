"""What the rooflines and the interpolated profiles say about published measurements of H100, against these.

    python benchmarks/tune_h100.py --data DIRECTORY [--output RESULT.json]

DIRECTORY holds the CSV extracts (docs/results.md says of what). Printed per class of profile, engine and model: mean
absolute error, bias and 90th percentile of step times, of t(q) / t(1) and of speed-ups; then the goals, reached or
missed. `uncalibrated` means that no constant was fitted to what it is judged by: kernels are of operator tables, the
host's part of other points. `held out` means fitted to one half and judged by the other. The result has figures only,
no rows of the data. Exit 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "profiles"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from h100 import curves, dense, speculative, tables  # noqa: E402
from h100.figures import Errors, Goal, table  # noqa: E402

from specctl.schemas.base import Provenance  # noqa: E402
from specctl.schemas.profile import Constants, read_either  # noqa: E402

SYSTEMS = ("h100-sxm", "h200-sxm")
CURVE_PROFILES = {
    "eagle3": "h100-sxm-llama-3.x-70b-fp8-tp8-sglang-eagle3",
    "mtp": "h200-sxm-deepseek-r1-fp8-block-tp8-sglang-mtp",
}
SHORT_ROOFLINE = "kernels of one call are 7 to 15 % off, and what the host adds for each sequence is not in an "
SHORT_ROOFLINE += "uncalibrated prediction"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory of the CSV extracts")
    parser.add_argument("--output", type=Path, help="RESULT.json")
    args = parser.parse_args()
    constants = {name: read_constants(name) for name in SYSTEMS}
    result: dict[str, Any] = {}
    goals: list[Goal] = []
    for part in (replay_tables, replay_dense, replay_speculative, replay_r1, replay_doubt, replay_curves):
        result[part.__name__.removeprefix("replay_")] = part(args.data, constants, goals)
    print("goals")
    for goal in goals:
        print(f"  {goal}")
    value = {
        "schema": "specctl.tune_h100/1",
        "provenance": Provenance.here().model_dump() | {"command": "python benchmarks/tune_h100.py --data DIRECTORY"},
        "sources": [source.model_dump(exclude_none=True) for source in constants["h100-sxm"].sources],
        **result,
        "goals": [goal.as_json() for goal in goals],
    }
    if args.output is not None:
        args.output.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(goal.reached for goal in goals))


def read_constants(name: str) -> Constants:
    found = read_either(ROOT / "profiles" / f"{name}.yaml")
    assert isinstance(found, Constants)
    return found


def shown(title: str, rows: list[tuple[str, Errors]]) -> dict[str, Any]:
    print(table(title, rows))
    return {name: asdict(errors) for name, errors in rows}


# -- what the kernels' sums say ----------------------------------------------------------------------------------------


def replay_tables(data: Path, constants: dict[str, Constants], goals: list[Goal]) -> dict[str, Any]:
    compared = tables.compare(data, constants)
    return {
        "steps": shown("roofline against operator sums, steps of q <= 9", list(tables.by_lane(compared, nodes=1))),
        "two_nodes": shown(
            "the same on two nodes, whose exchange is the database's own estimate and not in the roofline",
            list(tables.by_lane(compared, nodes=2)),
        ),
        "ratio_dense": shown("t(q) / t(1), dense", list(tables.ratios(compared, sparse=False))),
        "ratio_experts": shown("t(q) / t(1), experts, one node", list(tables.ratios(compared, sparse=True))),
    }


# -- dense models ------------------------------------------------------------------------------------------------------


def replay_dense(data: Path, constants: dict[str, Constants], goals: list[Goal]) -> dict[str, Any]:
    rows = dense.read(data, constants["h100-sxm"].roofline)
    found: dict[str, Any] = {}
    for kind in dense.KINDS:
        known = [row for row in rows if not row.odd]
        every = [
            ("all rows", dense.errors(rows, kind)),
            ("all but seven odd ones", dense.errors(known, kind)),
            ("all, prompts as t * (B - 1) / osl", dense.errors(rows, kind, crude=True)),
        ]
        title = f"milliseconds a token, {len(rows)} rows, uncalibrated, {kind}"
        found[kind] = shown(title, [*every, *dense.groups(rows, kind)])
        goals.append(Goal(f"{kind}: dense milliseconds a token, uncalibrated", every[0][1].mape, 0.13, SHORT_ROOFLINE))
    for model, limit in (("llama-3.1-8b", 0.05), ("llama-3.x-70b", 0.07)):
        lines = []
        for kind in dense.KINDS:
            for words, wanted in CALIBRATIONS.items():
                held = dense.calibrated(rows, kind, model, **wanted)
                floor = f", {held.floor:.2f} ms a layer" if wanted.get("floor") else ""
                lines.append((f"{kind}: {words}{floor} (worst split {held.worst:.1%})", held.errors))
            what = f"{kind}: {model}, answers of 512 tokens and more, held out, four constants"
            goals.append(Goal(what, held.errors.mape, limit, "four constants do not tell TP sizes apart"))
        found[model] = shown(f"{model}, held out half, mean of {dense.SPLITS} splits", lines)
    return found


CALIBRATIONS: dict[str, dict[str, bool]] = {
    "offset, scale": {},
    "and per sequence": {"per_sequence": True},
    "and a floor of steps with prompts": {"per_sequence": True, "floor": True},
}
"""What is fitted to one half of the rows. These forms were chosen with the rows in view, only their constants were not:
errors grow with devices and requests where steps are short, as if steps with a prompt, which run without graphs, waited
for the host to start their kernels."""


# -- speculative steps -------------------------------------------------------------------------------------------------


def replay_speculative(data: Path, constants: dict[str, Constants], goals: list[Goal]) -> dict[str, Any]:
    roofline = constants["h100-sxm"].roofline
    points = speculative.read_points(data)
    steps = speculative.eagle3_steps(points, roofline)
    plain = [speculative.with_base(each, roofline) for each in speculative.plain_steps(points, roofline)]
    golden = {curve.name: curve.projected for curve in curves.read(data)}
    found: dict[str, Any] = {}
    for kind in speculative.KINDS:
        held = speculative.left_out(steps, kind)
        measured = [step.measured for step in steps]
        whole = speculative.Overhead.fitted(steps, kind)
        errors = Errors.of(held, measured)
        own = Errors.of((each.passes[kind] for each in plain), (each.measured for each in plain))
        four = next(each for each in plain if (each.engine, each.weights, each.batch) == ("sglang", "fp8-block", 4))
        ratio = [
            (ms / four.passes[kind], step.measured / four.measured)
            for ms, step in zip(held, steps, strict=True)
            if step.batch == 4
        ]
        lost = speculative.regrets(steps, four, kind, golden)
        found[kind] = shown(
            f"Qwen3-8B with EAGLE-3 on SGLang 0.5.3, {kind}; o = {whole.spec:.2f} + {whole.per_draft_step:.2f} steps "
            f"+ {whole.tree:.2f} if tree",
            [
                ("plain steps, base their median", own),
                ("speculative steps, each left out once", errors),
                ("t(drafting) / t(plain), batch 4", Errors.of(*zip(*ratio, strict=True))),
            ],
        ) | {"overheads_ms": asdict(whole), "regret": lost}
        worst = max(lost.values())
        print(f"  regret of 0, 2, 4 or 8 draft steps at batch 4 over {len(lost)} curves: {worst:.1%} at most\n")
        goals.append(Goal(f"{kind}: speculative steps, each left out once", errors.mape, 0.08))
        goals.append(Goal(f"{kind}: regret where steps were measured", worst, 0.03))
    return found


def replay_r1(data: Path, constants: dict[str, Constants], goals: list[Goal]) -> dict[str, Any]:
    """What an all-reduce takes more between nodes is fitted on the other points of the same engine."""
    points = speculative.read_points(data)
    pairs = speculative.mtp_pairs(points, data, constants["h100-sxm"].roofline)
    one_node = speculative.h200_plain(points, constants["h200-sxm"].roofline)
    found: dict[str, Any] = {}
    for kind in speculative.KINDS:
        across = speculative.left_out_across(pairs, kind)
        both = list(zip(pairs, across, strict=True))
        named, inferred = ([each for each in both if each[0].inferred is flag] for flag in (False, True))
        length = speculative.fitted_length(*zip(*named, strict=True), kind)
        rows = [
            (f"plain steps, {engine}, each left out once", speculative.plain_errors(both, engine, kind))
            for engine in ("trtllm", "sglang")
        ]
        rows += [
            ("speed-up, TensorRT-LLM", speculative.speedup_errors(*zip(*named, strict=True), kind, length)),
            (
                "speed-up, SGLang (inferred rows)",
                speculative.speedup_errors(*zip(*inferred, strict=True), kind, length),
            ),
            ("plain steps, sglang, 8 H200", one_node[kind]),
        ]
        title = (
            f"DeepSeek-R1 on 16 H100, MTP K = 3, {kind}; acceptance length {length:.2f}, fitted to TensorRT-LLM's rows"
        )
        found[kind] = shown(title, rows) | {"acceptance_length": length, "fitted": True}
    return found


# -- doubt -------------------------------------------------------------------------------------------------------------


def replay_doubt(data: Path, constants: dict[str, Constants], goals: list[Goal]) -> dict[str, Any]:
    """What the profiles' spreads are of: one standard deviation of a step, and the part that all steps share."""
    compared = tables.compare(data, constants)
    rows = [row for row in dense.read(data, constants["h100-sxm"].roofline) if not row.odd]
    points = speculative.read_points(data)
    pairs = speculative.mtp_pairs(points, data, constants["h100-sxm"].roofline)
    found = {}
    for kind in speculative.KINDS:
        across = speculative.left_out_across(pairs, kind)
        r1 = [(pair.predicted_ms(kind, us), pair.plain_ms) for pair, us in zip(pairs, across, strict=True)]
        r1 += [
            (ms, float(row["measured"]))
            for row, ms in speculative.h200_steps(points, constants["h200-sxm"].roofline)[kind]
        ]
        steps = {"dense": dense.errors(rows, kind).rms, "experts": Errors.of(*zip(*r1, strict=True)).rms}
        for name, step in steps.items():
            apart = tables.ratio(compared, sparse=name == "experts", rows=range(2, 10)).rms
            shared = max(0.0, step**2 - apart**2 / 2) ** 0.5  # both steps of a ratio are off by themselves
            found[f"{kind}, {name}"] = {"step": step, "apart": apart, "shared": shared}
            print(f"  {kind}, {name}: a step {step:.1%}, t(q) / t(1) of the roofline {apart:.1%}, shared {shared:.1%}")
    print()
    return found


# -- curves ------------------------------------------------------------------------------------------------------------


def replay_curves(data: Path, constants: dict[str, Constants], goals: list[Goal]) -> dict[str, Any]:
    golden = curves.read(data)
    profiles = {kind: ROOT / "profiles" / f"{name}.yaml" for kind, name in CURVE_PROFILES.items()}
    choices = list(curves.choices(golden, profiles))
    print("one rate for every token against survival by position (times are a profile's, nothing was measured)")
    width = max(len(curve.name) for curve in golden)
    found = {}
    for curve in golden:
        own = [choice for choice in choices if choice.curve == curve.name]
        wrong = [choice for choice in own if choice.by_formula != choice.best]
        cost = [choice.cost for choice in own]
        far = max(choice.by_formula - choice.best for choice in own)
        promised = float(np.mean([choice.promised for choice in own]))
        print(
            f"  {curve.name:{width}}  made monotone by {curve.moved:.2f}  wrong K {len(wrong):2} of {len(own)}, "
            f"up to {far} "
            f"too long  cost {np.mean(cost):5.1%} on average, {max(cost):5.1%} at most  promised {promised:+.0%}"
        )
        found[curve.name] = {
            "profile": own[0].profile,
            "moved": curve.moved,
            "wrong": len(wrong),
            "of": len(own),
            "too_long": far,
            "mean_cost": float(np.mean(cost)),
            "worst_cost": max(cost),
            "promised": promised,
        }
    print()
    return found


if __name__ == "__main__":
    main()
