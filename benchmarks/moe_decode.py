"""Does a model with experts decode as fast as the weights that a token goes through allow? And does its MTP layer pay?

    python benchmarks/moe_decode.py DIRECTORY [--threads N] [--scale S] [--rounds N] [--prompts N] [--max-tokens N]
        [--repeats N] [--output RESULT.json]

Makes in DIRECTORY, or finds there from an earlier run, two models with synthetic bfloat16 weights. One is a DeepSeek of
V2-Lite's shape at half its widths, 1.56 B parameters and an MTP layer of 0.15 B; the other is a Llama with about as
many weights as the DeepSeek reads for a token. Both are run in float32, one sequence at a time:

  rate      bare passes of one row, one of each model in turn. The active bytes of a model are the weights that a token
            goes through: attention, router, head, norms, shared experts and the chosen ones of the others. Goal: the
            DeepSeek reads at least 0.9 times as many active bytes a second as the Llama.
  memory    anonymous memory that loading the DeepSeek adds, its MTP layer not counted and counted, against the bytes of
            the weights. Goal: at most 1.05 times.
  experts   during passes of one row, which experts' weights were given to any torch operation, whatever module it is
            in. Goal: those that the router chose and no other. Then from outside: the bytes of all memory pages that
            one pass touches, as the kernel counts them (Linux), against the active bytes. Goal: at most 1.05 times.
  mtp       `specctl bench` with the MTP layer at K = 1 and 2, on prompts of random tokens. Goals: an efficiency of at
            least 0.9 (the measured speed-up, over the one that acceptance and bare passes imply), and the same text as
            plain decoding.

Exit 1 when a goal is missed. --scale below 1 makes miniatures, to try the script: there only the experts that were
given and the text are judged. Needs 4 GB of disk and 9 GB of memory, and minutes, on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe_models import active_parameters, build, count, make_models
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specctl.bench.options import BenchOptions
from specctl.bench.passes import BareModel, rows_after
from specctl.bench.run import run_bench
from specctl.kv.batch import Batch
from specctl.moe import MoE
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import write_json
from specctl.pair import OpenedDraft, Target, open_draft, open_target
from specctl.prompts import Prompt
from specctl.schemas.base import Provenance
from specctl.schemas.report import Report

RATE_GOAL, EFFICIENCY_GOAL = 0.9, 0.9  # at least
MEMORY_GOAL, TOUCHED_GOAL = 1.05, 1.05  # at most
KS = (1, 2)
CONTEXT = 32  # of the bare passes: short, so that weights are what is read
PROMPT_LENGTH = 4  # a longer prompt goes through nearly all experts, and its time is no decoding
WATCHED = 8  # passes
ITEM = 4  # bytes of a float32


def main() -> None:
    args = arguments()
    models = make_models(args.directory, args.scale)
    options = ModelOptions(dtype="float32", device="cpu", threads=args.threads)
    torch.set_num_threads(args.threads)
    before = anonymous()
    deepseek = open_target(str(models["deepseek"]), options)
    between = anonymous()
    draft = open_draft("mtp", deepseek)
    loaded = {"target": between - before, "with_draft": anonymous() - before}
    # Last, as it may be given memory that loading the others left free.
    targets = {"deepseek": deepseek, "llama": open_target(str(models["llama"]), options)}
    bare = {name: Bare(target) for name, target in targets.items()}
    say("timing bare passes")
    ms = time_passes(bare, args.rounds)
    rows = {name: describe(target, ms[name], bare[name]) for name, target in targets.items()}
    per_byte = rows["llama"]["active_bytes"] / rows["deepseek"]["active_bytes"]
    rates = [ours / (theirs * per_byte) for ours, theirs in zip(ms["llama"], ms["deepseek"], strict=True)]
    result = {
        "schema": "specctl.moe_decode/1",
        "provenance": Provenance.here("cpu", torch.get_num_threads()).model_dump() | {"command": " ".join(sys.argv)},
        "scale": args.scale,
        "models": rows,
        "rate": {"median": statistics.median(rates), "quartiles": statistics.quantiles(rates, n=4)[::2]},
        "memory": compare_memory(deepseek, loaded),
        "experts": watch(deepseek, bare["deepseek"]),
        "mtp": measure_mtp(deepseek, draft, args),
        "goals": {
            "rate": RATE_GOAL,
            "memory": MEMORY_GOAL,
            "touched": TOUCHED_GOAL,
            "efficiency": EFFICIENCY_GOAL,
        },
    }
    result["reached"] = reached(result)
    show(result)
    if args.output is not None:
        write_json(args.output, result, force=True)
    sys.exit(not all(result["reached"].values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="of the two models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--scale", type=float, default=1.0, help="of widths, vocabulary and depth")
    parser.add_argument("--rounds", type=int, default=60, help="of bare passes")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2, help="of the run with drafts")
    parser.add_argument("--output", type=Path, metavar="RESULT.json")
    args = parser.parse_args()
    if min(args.threads, args.rounds - 1, args.prompts, args.max_tokens - 1, args.repeats) < 1:
        parser.error("expected whole numbers from 1 up, --rounds and --max-tokens from 2 up")
    if not 0 < args.scale <= 1:
        parser.error("--scale: expected a number above 0, at most 1")
    return args


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


# -- bytes -------------------------------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    return 1024 * kilobytes(Path("/proc/self/status"), "RssAnon:")


def kilobytes(path: Path, key: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(key))


def touched(run: Any) -> int | None:
    """Bytes of the memory pages that `run` touches; None where the kernel does not say."""
    clear = Path("/proc/self/clear_refs")
    try:
        clear.write_text("1")
        run()
        return 1024 * kilobytes(Path("/proc/self/smaps_rollup"), "Referenced:")
    except (OSError, StopIteration):
        return None


def compare_memory(target: Target, loaded: Mapping[str, int]) -> dict[str, Any]:
    """What loading took, and that over the bytes of the weights."""
    stored = sum(target.checkpoint.info(name).num_parameters for name in target.checkpoint.names())
    weights = {"target": ITEM * count(build(target.checkpoint.config)), "with_draft": ITEM * stored}
    return {
        name: {"loaded_bytes": taken, "weight_bytes": weights[name], "ratio": taken / weights[name]}
        for name, taken in loaded.items()
    }


def describe(target: Target, ms: list[float], bare: Bare) -> dict[str, Any]:
    whole = build(target.checkpoint.config)
    active = ITEM * active_parameters(whole)
    median = statistics.median(ms)
    seen = touched(partial(bare.run, 0))
    return {
        "parameters": count(whole),
        "weight_bytes": ITEM * count(whole),
        "active_bytes": active,
        "pass_ms": median,
        "active_gb_s": active / median / 1e6,
        "touched_bytes": seen,
        "touched": None if seen is None else seen / active,
    }


# -- passes ------------------------------------------------------------------------------------------------------------


class Bare:
    """Passes of one row, a different token each time."""

    def __init__(self, target: Target) -> None:
        self._model = BareModel.of_target(target, CONTEXT + 1)
        self._rows: Batch = rows_after(CONTEXT, 1, 1, CONTEXT + 1, target)
        self._vocabulary = target.model.config.vocab_size

    def run(self, number: int) -> None:
        token = 7919 * (number + 1) % self._vocabulary
        self._model.run(replace(self._rows, token_T=torch.tensor([token])))


def time_passes(bare: Mapping[str, Bare], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each model and round, after two rounds that do not count; who begins changes."""
    ms: dict[str, list[float]] = {name: [] for name in bare}
    for number in range(-2, rounds):
        for name in list(bare)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            bare[name].run(number + 2)
            if number >= 0:
                ms[name].append(1000 * (time.perf_counter() - start))
    return ms


# -- experts -----------------------------------------------------------------------------------------------------------


class Given(TorchDispatchMode):
    """Where the numbers are that torch operations were given while this is active. More than what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.places |= {place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        return operation(*args, **kwargs)


def place(tensor: Tensor) -> int:
    """The same for all views of the same numbers. What is packed has no address, and no views."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def held(module: nn.Module) -> Iterator[int]:
    """Where a module's weights are, as parameters or packed."""
    for part in module.modules():
        values = [*part.parameters(recurse=False), *vars(part).values()]
        yield from (place(value) for value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class Watched:
    """A layer's experts: where the weights of each are, and which ones the router chose in this pass."""

    places: list[set[int]]
    chosen: set[int]

    def choose(self, router: Any, args: Any, out: tuple[Tensor, Tensor]) -> None:
        self.chosen.clear()
        self.chosen.update(out[1].flatten().tolist())

    def used(self, given: set[int]) -> set[int]:
        return {index for index, places in enumerate(self.places) if places & given}


def watch(target: Target, bare: Bare) -> dict[str, Any]:
    """Over some passes of one row: chosen experts, those whose weights were given away, and whether they are the
    same ones in every layer of every pass."""
    mixtures = [layer.mlp for layer in target.model.model.layers if isinstance(layer.mlp, MoE)]
    layers = [Watched([set(held(expert)) for expert in mixture.experts.each()], set()) for mixture in mixtures]
    for layer in layers:
        assert all(layer.places), "an expert without weights cannot be watched"
    pairs = zip(mixtures, layers, strict=True)
    hooks = [mixture.gate.register_forward_hook(layer.choose) for mixture, layer in pairs]
    chosen = used = 0
    same, ever = True, set[tuple[int, int]]()
    for number in range(WATCHED):
        with Given() as given:
            bare.run(number)
        for index, layer in enumerate(layers):
            found = layer.used(given.places)
            chosen, used, same = chosen + len(layer.chosen), used + len(found), same and found == layer.chosen
            ever |= {(index, expert) for expert in found}
    for hook in hooks:
        hook.remove()
    return {
        "passes": WATCHED,
        "layers": len(layers),
        "experts_a_layer": len(layers[0].places),
        "chosen": chosen,
        "used": used,
        "used_in_any_pass": len(ever),
        "only_chosen": same,
    }


# -- mtp ---------------------------------------------------------------------------------------------------------------


def measure_mtp(target: Target, draft: OpenedDraft, args: argparse.Namespace) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    shape = (args.prompts, PROMPT_LENGTH)
    ids = torch.randint(2, target.model.config.vocab_size, shape, generator=generator).tolist()
    prompts = [Prompt(id=str(number), token_ids=tuple(each)) for number, each in enumerate(ids)]
    options = BenchOptions(repeats=args.repeats, sweep_k=KS)
    decoding = DecodingOptions(drafts=("mtp",), max_tokens=args.max_tokens, ignore_eos=True)
    report = run_bench(target, [draft], prompts, options, decoding, say)
    return [summary(report, k) for k in KS]


def summary(report: Report, k: int) -> dict[str, Any]:
    run = next(run for run in report.runs if run.k == k)
    against = next(each for each in report.comparisons if each.run == run.name and each.against == "plain")
    assert run.speculation is not None
    return {
        "k": k,
        "tokens": run.tokens,
        "drafts": run.speculation.num_drafts,
        "accepted_per_position": run.speculation.accepted_per_position,
        "mean_acceptance_length": run.speculation.mean_acceptance_length,
        **against.model_dump(include={"speedup", "ci95", "c", "v", "u", "implied", "efficiency", "identical"}),
    }


# -- judging -----------------------------------------------------------------------------------------------------------


def reached(result: Mapping[str, Any]) -> dict[str, bool]:
    models = result["models"].values()
    always = {
        "experts": result["experts"]["only_chosen"],
        "text": all(each["identical"] is True for each in result["mtp"]),
    }
    if result["scale"] < 1:
        return always
    return always | {
        "rate": result["rate"]["median"] >= RATE_GOAL,
        "memory": all(each["ratio"] <= MEMORY_GOAL for each in result["memory"].values()),
        "touched": all(each["touched"] is None or each["touched"] <= TOUCHED_GOAL for each in models),
        "efficiency": all((each["efficiency"] or 0) >= EFFICIENCY_GOAL for each in result["mtp"]),
    }


def show(result: Mapping[str, Any]) -> None:
    for name, each in result["models"].items():
        seen = "" if each["touched"] is None else f", a pass touches {each['touched']:.3f} x the active bytes"
        print(
            f"{name}: {each['parameters'] / 1e6:,.0f} M parameters, active {each['active_bytes'] / 1e6:,.0f} MB, pass "
            f"{each['pass_ms']:.1f} ms, {each['active_gb_s']:.2f} GB/s{seen}"
        )
    low, high = result["rate"]["quartiles"]
    print(f"rate of active bytes against the Llama's: {result['rate']['median']:.3f} (quartiles {low:.3f}, {high:.3f})")
    taken = " and ".join(f"{each['ratio']:.3f}" for each in result["memory"].values())
    print(f"memory after loading, without and with the MTP layer: {taken} x the bytes of the weights")
    found = result["experts"]
    print(f"experts over {found['passes']} passes: {found['chosen']} chosen, weights of {found['used']} used")
    for each in result["mtp"]:
        print(
            f"mtp K = {each['k']}: accepted {each['accepted_per_position']} of {each['drafts']} drafts, speed-up "
            f"{each['speedup']:.3f}, implied {each['implied']:.3f}, efficiency {each['efficiency']:.3f}"
        )
    print(f"reached: {result['reached']}")


if __name__ == "__main__":
    main()
