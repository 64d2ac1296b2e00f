"""The constants of h100-sxm.yaml, h200-sxm.yaml and a100-sxm.yaml, fitted to a published operator database. By hand:

    python profiles/fit.py --data DIRECTORY [--output profiles]

DIRECTORY holds the CSV extracts of aiconfigurator-core 0.12.0 (operator sums of decoding steps by part, prefill) and
the published measurements. Kernels' constants are fitted to the operator sums alone, part by part and engine by engine,
never to measured steps. What the host adds is of the measured points named in `sources` (profiles/hosts.py), and is
left out where they judge (benchmarks/tune_h100.py). The loss is the mean of |log(predicted / tabled)|; its value is
printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import constants
import extracts
import hosts
from extracts import ENGINES, Step, passes_of

from specctl.roofline.passes import Parts
from specctl.schemas.roofline import AllReduce, Attention, Lane, Peaks, Product

Params = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    date = datetime.now(UTC).date().isoformat()
    steps = list(extracts.steps(args.data))
    prefill = list(extracts.rows(args.data / "aic_prefill.csv"))
    lanes = {}
    for engine in ENGINES:
        say(engine)
        lanes[engine] = fit_lane(engine, steps, [row for row in prefill if row["backend"] == engine])
    lanes = hosts.hosted(constants.with_blocks(lanes), args.data)
    for engine, lane in lanes.items():
        over = lane.overheads_ms
        say(
            f"{engine}: base {over.base:.2f} ms, spec {over.spec:.2f}, per draft step {over.per_draft_step:.2f}, tree "
            f"{over.tree:.2f}; {lane.per_sequence_us:.0f} us a sequence, {lane.across_us:.0f} us across nodes"
        )
    for name, value in constants.files(lanes, date).items():
        text = yaml.safe_dump(constants.rounded(value), sort_keys=False, default_flow_style=None, width=118)
        (args.output / f"{name}.yaml").write_text(text, encoding="utf-8")
        say(f"written: {name}.yaml")


def say(words: str) -> None:
    sys.stderr.write(words + "\n")


# -- one engine --------------------------------------------------------------------------------------------------------


def fit_lane(engine: str, steps: Sequence[Step], prefill: Sequence[dict[str, str]]) -> Lane:
    lane = constants.lane(engine)
    own = [step for step in steps if step.engine == engine]
    dense = [step for step in own if step.system == "h100-sxm" and step.model.startswith("llama")]
    for weights in ("bf16", "fp8"):
        lane = fit_products(lane, [step for step in dense if step.place.weights == weights], weights)
    for cache in ("bf16", "fp8"):
        chosen = [step for step in dense if step.place.cache == cache and step.q == 1]
        lane = fit_attention(lane, chosen, cache)
    lane = fit_exchange(lane, [step for step in dense if step.exchange > 0])
    sparse = [step for step in own if step.model == "deepseek-r1" and step.place.nodes == 1]
    lane = fit_latent(lane, [step for step in sparse if step.q == 1])
    lane = fit_experts(lane, [step for step in sparse if step.place.ep == 1], "experts")
    lane = fit_experts(lane, [step for step in sparse if step.place.ep > 1], "whole_experts")
    return fit_prompts(lane, prefill)


def fit_products(lane: Lane, steps: Sequence[Step], weights: str) -> Lane:
    def with_(params: Params) -> Lane:
        kind = Product(tile=128 if weights == "fp8" else 64, **capped(params))
        return lane.model_copy(update={"products": {**lane.products, weights: kind}})

    chosen = [step for step in steps if step.batch * step.q <= 2048 and step.context == 1024]
    start = {"bandwidth": 0.85, "flops": 0.7, "start_us": 5.0, "norm": 2.5}
    return best(
        with_,
        start,
        chosen,
        lambda parts: parts.products + parts.projections,
        lambda s: s.products,
        f"products {weights}",
    )


def fit_attention(lane: Lane, steps: Sequence[Step], cache: str) -> Lane:
    def with_(params: Params) -> Lane:
        kind = Attention(flops=lane.attention[cache].flops, **capped(params))
        return lane.model_copy(update={"attention": {**lane.attention, cache: kind}})

    start = {"bandwidth": 0.85, "start_us": 11.0}
    return best(with_, start, steps, lambda parts: parts.attention, lambda step: step.attention, f"attention {cache}")


def fit_exchange(lane: Lane, steps: Sequence[Step]) -> Lane:
    for devices in (4, 8):
        chosen = [step for step in steps if step.place.tp == devices and step.context == 1024]
        if not chosen:
            say(f"  exchange {devices}: not in the database, that of another engine is kept")
            continue

        def with_(params: Params, devices: int = devices, lane: Lane = lane) -> Lane:
            others = [kind for kind in lane.all_reduce if kind.devices != devices]
            mine = AllReduce(devices=devices, **params)
            return lane.model_copy(update={"all_reduce": [*others, mine]})

        start = {"start_us": 5.0, "small_gbps": 50.0, "switch_us": 8.0, "gbps": 220.0}
        lane = best(with_, start, chosen, lambda parts: parts.exchange, lambda s: s.exchange, f"exchange {devices}")
    return lane.model_copy(update={"all_reduce": sorted(lane.all_reduce, key=lambda kind: kind.devices)})


def fit_latent(lane: Lane, steps: Sequence[Step]) -> Lane:
    """The database's attention of this model is the whole module, its products in blocks included: these read as those
    with one scale do, and what a call of them takes to start is fitted."""

    def with_(params: Params) -> Lane:
        values = capped(params)
        latent = Attention(bandwidth=values["bandwidth"], flops=values["flops"], start_us=values["start_us"])
        block = lane.products["fp8"].model_copy(update={"start_us": values["block_start_us"]})
        return lane.model_copy(update={"latent": latent, "products": {**lane.products, "fp8-block": block}})

    start = {"bandwidth": 0.7, "flops": 0.5, "start_us": 20.0, "block_start_us": lane.products["fp8"].start_us}
    return best(with_, start, steps, module, lambda step: step.attention, "latent attention, products in blocks")


def module(parts: Parts) -> np.ndarray:
    """Attention with its products."""
    return parts.attention + parts.projections


def feed_forward(parts: Parts) -> np.ndarray:
    """The database counts shared experts, routers and exchanges to the experts; the head is not in it, but small."""
    return parts.experts + parts.products + parts.exchange


def fit_experts(lane: Lane, steps: Sequence[Step], key: str) -> Lane:
    """On one node: what the database has of two is its own estimate of the exchange between them."""

    def with_(params: Params) -> Lane:
        return lane.model_copy(update={key: Product(tile=64, **capped(params))})

    chosen = [step for step in steps if step.batch * step.q <= 2048 and step.context == 1024]
    start = {"bandwidth": 0.5, "flops": 0.3, "start_us": 40.0, "norm": 1.5}
    return best(with_, start, chosen, feed_forward, lambda step: step.experts + step.exchange, key)


def fit_prompts(lane: Lane, prefill: Sequence[dict[str, str]]) -> Lane:
    """What is left of prefill when everything else is known: attention's operations."""

    def loss(flops: float) -> float:
        kinds = {key: kind.model_copy(update={"flops": flops}) for key, kind in lane.attention.items()}
        changed = lane.model_copy(update={"attention": kinds})
        return float(np.mean([abs(np.log(prompt_ms(row, changed) / float(row["prefill_ms"]))) for row in prefill]))

    flops = min(np.arange(0.2, 0.96, 0.05), key=loss)
    say(f"  prompts: attention reaches {flops:.2f} of the operations, error {loss(flops):.1%}")
    kinds = {key: kind.model_copy(update={"flops": float(flops)}) for key, kind in lane.attention.items()}
    return lane.model_copy(update={"attention": kinds})


def prompt_ms(row: dict[str, str], lane: Lane) -> float:
    weights = extracts.WEIGHTS[row["gemm_dtype"]]
    place = extracts.Placement(tp=int(row["tp"]), weights=weights, cache="fp8" if weights == "fp8" else "bf16")  # type: ignore[arg-type]
    tokens = np.array([float(row["isl"])])
    model = extracts.NAMES.get(row["model"], row["model"])
    return float(passes_of(model, place, lane, constants.PEAKS["h100-sxm"]).prompts(tokens, tokens).total[0])


# -- fitting -----------------------------------------------------------------------------------------------------------


def best(
    with_: Callable[[Params], Lane],
    start: Params,
    steps: Sequence[Step],
    part: Callable[[Parts], np.ndarray],
    tabled: Callable[[Step], float],
    name: str,
) -> Lane:
    groups = grouped(steps)

    def loss(params: Params) -> float:
        lane = with_(params)
        errors = [abs(np.log(part(predicted(group, lane)) / [tabled(step) for step in group])) for group in groups]
        return float(np.mean(np.concatenate(errors)))

    params, found = search(loss, start)
    say(f"  {name}: {', '.join(f'{key} {value:.3g}' for key, value in capped(params).items())}; error {found:.1%}")
    return with_(params)


def grouped(steps: Iterable[Step]) -> list[list[Step]]:
    groups: dict[Any, list[Step]] = {}
    for step in steps:
        groups.setdefault((step.system, step.model, step.place), []).append(step)
    return list(groups.values())


def predicted(group: Sequence[Step], lane: Lane) -> Parts:
    peaks: Peaks = constants.PEAKS[group[0].system]
    batch, q, context = (np.array([getattr(step, key) for step in group]) for key in ("batch", "q", "context"))
    return passes_of(group[0].model, group[0].place, lane, peaks).step(batch, q, context)


def search(loss: Callable[[Params], float], start: Params, rounds: int = 60) -> tuple[Params, float]:
    """One constant after the other is made larger or smaller while that helps; then by smaller steps."""
    params, found, step = dict(start), loss(start), 0.3
    for _ in range(rounds):
        before = found
        for key in params:
            for factor in (1 + step, 1 / (1 + step)):
                trial = {**params, key: params[key] * factor}
                if (value := loss(trial)) < found:
                    params, found = trial, value
        if before - found < 1e-5:
            step /= 2
        if step < 0.004:
            break
    return params, found


def capped(params: Params) -> Params:
    """Shares of a peak are no more than all of it, and a norm is at least 1."""
    caps = {"norm": (1.0, 8.0)} | {key: (0.01, 1.0) for key in params if key.endswith(("bandwidth", "flops"))}
    return {key: float(np.clip(value, *caps[key])) if key in caps else value for key, value in params.items()}


if __name__ == "__main__":
    main()
