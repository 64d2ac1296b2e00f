"""Does tune predict what bench measures? Speed-ups for K = 0..6 at batch 1, 4 and 8, and what the chosen K costs.

    python benchmarks/predicted.py --target MODEL --draft DRAFT|ngram --prompts FILE[:FIELD] ... --output DIRECTORY

Some prompts are judged by, evenly spread over all, and the others are for tuning. In processes of their own: `specctl
profile`, `specctl bench --trace` on the ones for tuning and `specctl tune` on what both gave; then `specctl bench
--sweep-k` on the judged ones, batch by batch. A prediction for the judged run knows its prompts' lengths, the profile
and the trace: groups are played through step by step, prefill and the last sequences of a group included, which is what
bench measures. Beside it stands the policy's own figure, which is for decoding at that batch alone.

Goals: median error of the speed-up at most 7 %; for every batch the chosen K loses at most 3 % against the best one, or
cannot be told from it by the judged run's 95 % intervals; at least 2,000 tokens a cell, all repeats together. The best
K is found in one half of the repeats and the loss in the other. Writes RESULT.json; exit 1 when a goal is missed. The
same command once more goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specctl.options import ModelOptions
from specctl.pair import Target, open_target
from specctl.prompts import Prompt, read_prompts
from specctl.schemas.base import Provenance
from specctl.schemas.policy import read_policy
from specctl.schemas.profile import Profile, read_profile
from specctl.schemas.report import Report, read_report
from specctl.schemas.trace import read_trace
from specctl.text.messages import Message
from specctl.tune.acceptance import Acceptance
from specctl.tune.costs import StepCosts, StepTimes
from specctl.tune.evidence import from_trace
from specctl.tune.goodput import with_draft

ERROR_GOAL, REGRET_GOAL, TOKENS_GOAL = 0.07, 0.03, 2000
CHUNK = 512  # prompt tokens of a prefill step of the engine
PLAYS = 10


def main() -> None:
    result = measured_and_judged(arguments())
    show(result)
    sys.exit(not all(result["reached"].values()))


def measured_and_judged(args: argparse.Namespace) -> dict[str, Any]:
    """RESULT.json, which is left in the directory with all that it came from."""
    goes_on(args)
    lengths, contexts = divide(args)
    result = judge(args, measure(args, contexts), lengths)
    (args.output / "RESULT.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def goes_on(args: argparse.Namespace) -> None:
    """Make the directory, or see that what lies there was asked for in the same words."""
    args.output.mkdir(parents=True, exist_ok=True)
    path, asked = args.output / "ASKED.json", json.dumps(vars(args), default=str, indent=1)
    if path.exists() and path.read_text() != asked:
        sys.exit(f"{args.output}: holds what another command measured; name another --output")
    path.write_text(asked)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE[:FIELD]")
    parser.add_argument("--count", type=int, help="of prompts in all, evenly from the files")
    parser.add_argument("--judged", type=int, help="prompts to judge by; default: half of them")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--k-max", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4, help="of the judged run")
    parser.add_argument("--profile-repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats: two halves need at least 2")
    return args


# -- measuring ---------------------------------------------------------------------------------------------------------


def divide(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Write both sets of prompts. The judged ones' lengths, and the contexts to profile: the least and the
    greatest of the tuned ones."""
    target = open_target(args.target, ModelOptions(device="cpu"))
    files = [list(read(source, target)) for source in args.prompts]
    if args.count is not None:
        each = -(-args.count // len(files))
        files = [file[:: max(1, len(file) // each)][:each] for file in files]
    prompts = [prompt for file in files for prompt in file]
    judged = args.judged or len(prompts) // 2
    if not 0 < judged < len(prompts):
        sys.exit(f"{len(prompts)} prompts: {judged} to judge by leave none to tune on")
    chosen = {(2 * i + 1) * len(prompts) // (2 * judged) for i in range(judged)}
    sets: dict[str, list[Prompt]] = {"tuned": [], "judged": []}
    for number, prompt in enumerate(prompts):
        sets["judged" if number in chosen else "tuned"].append(prompt)
    lengths = {}
    for name, half in sets.items():
        with (args.output / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(line(prompt, number)) + "\n" for number, prompt in enumerate(half))
        lengths[name] = [len(target.encode(prompt)) for prompt in half]
    return lengths["judged"], [min(lengths["tuned"]), max(lengths["tuned"]) + args.max_tokens]


def read(source: str, target: Target) -> Iterator[Prompt]:
    """Prompts of ours, or the named field of a foreign file, as a chat where the model has a template."""
    path, _, name = source.partition(":")
    chats = bool(name) and target.tokenizer is not None and target.tokenizer.has_chat_template
    for prompt in read_prompts(path, name or None):
        yield Prompt(id=prompt.id, messages=(Message("user", prompt.prompt or ""),)) if chats else prompt


def line(prompt: Prompt, number: int) -> dict[str, Any]:
    if prompt.messages is not None:
        return {"id": str(number), "messages": [{"role": m.role, "content": m.content} for m in prompt.messages]}
    if prompt.token_ids is not None:
        return {"id": str(number), "token_ids": list(prompt.token_ids)}
    return {"id": str(number), "prompt": prompt.prompt}


@dataclass(frozen=True)
class Files:
    profile: Path
    trace: Path
    policy: Path
    reports: dict[int, Path]


def measure(args: argparse.Namespace, contexts: list[int]) -> Files:
    out = args.output
    reports = {batch: out / f"JUDGED-{batch}.json" for batch in args.batches}
    files = Files(out / "PROFILE.yaml", out / "TRACE.json", out / "POLICY.yaml", reports)
    pair = ["--target", args.target, "--draft", args.draft]
    threads = [] if args.threads is None else ["--threads", args.threads]
    decode = ["--max-tokens", args.max_tokens, "--ignore-eos", *threads]
    grid = ["--batches", listed(sorted({1, *args.batches})), "--contexts", listed(contexts)]
    specctl(files.profile, "profile", *pair, *grid, *threads, "--repeats", args.profile_repeats)
    tuned = ["--prompts", out / "tuned.jsonl", "--batch", max(args.batches), "--k", args.k_max, "--repeats", 1]
    specctl(out / "TUNED.json", "bench", *pair, *tuned, *decode, "--trace", files.trace)
    forget_confidences(files.trace)
    sources = ["--profile", files.profile, "--acceptance", files.trace, "--k-max", args.k_max]
    specctl(files.policy, "tune", *sources)
    for batch, report in files.reports.items():
        sweep = ["--sweep-k", listed(range(1, args.k_max + 1)), "--batch", batch, "--repeats", args.repeats]
        specctl(report, "bench", *pair, "--prompts", out / "judged.jsonl", *sweep, *decode)
    return files


def specctl(output: Path, *command: object) -> None:
    """Run a command of specctl, unless its output is there."""
    if output.exists():
        return
    words = [*map(str, command), "--output", str(output)]
    print("specctl", *words, file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "specctl", *words], check=True, stdout=sys.stderr)


def listed(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def forget_confidences(path: Path) -> None:
    """The judged sweep has no confidence stop in it, so none is to be tuned."""
    value = json.loads(path.read_text())
    for entry in value["classes"]:
        entry["confidence"] = []
    path.write_text(json.dumps(value))


# -- predicting --------------------------------------------------------------------------------------------------------


@dataclass
class Player:
    """One sequence of a group that is played through. request: of the trace, that it behaves like."""

    prompt: int
    request: int
    prefilled: int = 0
    tokens: int = 0

    @property
    def decoding(self) -> bool:
        return self.prefilled == self.prompt


@dataclass
class World:
    """The engine's schedule over the profile's costs, with drafts as the trace's requests had them."""

    costs: StepCosts
    profile: Profile
    acceptance: Acceptance
    histogram_RJ: np.ndarray
    max_tokens: int
    known: dict[tuple[int, int], StepTimes] = field(default_factory=dict)

    def milliseconds(self, lengths: list[int], batch: int, k: int) -> float:
        """For all prompts, in the groups that bench makes of them."""
        groups = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
        plays = [np.random.default_rng(seed) for seed in range(PLAYS)]
        return statistics.mean(sum(self.play(group, k, random) for group in groups) for random in plays)

    def play(self, prompts: list[int], k: int, random: np.random.Generator) -> float:
        """Milliseconds for one group."""
        weight_R = self.acceptance.tokens_R + self.acceptance.idle_R
        requests = random.choice(len(weight_R), size=len(prompts), p=weight_R / weight_R.sum())
        group = [Player(prompt, int(request)) for prompt, request in zip(prompts, requests, strict=True)]
        total, last_was_prefill = 0.0, False
        while any(each.tokens < self.max_tokens for each in group):
            running = [each for each in group if each.decoding and each.tokens < self.max_tokens]
            waiting = [each for each in group if not each.decoding]
            last_was_prefill = bool(waiting) and not (last_was_prefill and running)
            total += self._prefill(waiting, running, k) if last_was_prefill else self._decode(running, k, random)
        return total

    def _prefill(self, waiting: list[Player], running: list[Player], k: int) -> float:
        """A chunk of prompts, with everybody who decodes riding along."""
        for each in running:
            each.tokens += 1
        left, total = CHUNK, self.profile.overheads_ms.base
        for each in waiting:
            chunk = min(left, each.prompt - each.prefilled)
            each.prefilled += chunk
            each.tokens += chunk > 0 and each.decoding
            left -= chunk
            total += self._prefill_ms(chunk, "draft_ms") if k else 0.0
        return total + self._prefill_ms(CHUNK - left + len(running), "target_ms")

    def _prefill_ms(self, tokens: int, which: str) -> float:
        cells = sorted(self.profile.prefill, key=lambda cell: cell.tokens)
        ms = [getattr(cell, which) or 0.0 for cell in cells]
        if tokens > cells[-1].tokens:
            return float(ms[-1] * tokens / cells[-1].tokens)
        return float(np.interp(tokens, [0, *(cell.tokens for cell in cells)], [0.0, *ms]))

    def _decode(self, running: list[Player], k: int, random: np.random.Generator) -> float:
        context = statistics.mean(each.prompt + each.tokens for each in running)
        anybody = False
        for each in running:
            drafts = k > 0 and random.random() < self._drafting(each.request, k)
            anybody |= drafts
            accepted = self._accepted(each.request, k, random) if drafts else 0
            each.tokens = min(self.max_tokens, each.tokens + 1 + accepted)
        times = self.times(len(running), context)
        return float(times.drafting_S(k, k if anybody else 0)[0] if k else times.plain_S[0])

    def _drafting(self, request: int, k: int) -> float:
        """The share of a request's steps that draft: what it drafted takes more steps when drafts are shorter."""
        of = self.acceptance
        if not of.drafts_R[request]:
            return 0.0
        steps = of.tokens_R[request] / (1 + of.stops[0].accepted_RK[request, :k].sum() / of.drafts_R[request])
        return float(steps / (steps + of.idle_R[request]))

    def _accepted(self, request: int, k: int, random: np.random.Generator) -> int:
        counts_J = self.histogram_RJ[request]
        return min(k, int(random.choice(len(counts_J), p=counts_J / counts_J.sum())))

    def times(self, batch: int, context: float) -> StepTimes:
        key = (batch, 16 * round(context / 16))
        if key not in self.known:
            self.known[key] = self.costs.at(*key, self.acceptance.max_k, 0)
        return self.known[key]

    def steady(self, batch: int, context: float, k: int) -> float:
        """The speed-up of decoding alone, as a policy tells it."""
        if k == 0:
            return 1.0
        weights = np.ones((1, self.acceptance.num_requests))
        outlook = self.acceptance.outlook(self.acceptance.stops[0], k, weights)
        return with_draft(self.times(batch, context), outlook, batch).speedup


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(args: argparse.Namespace, files: Files, lengths: list[int]) -> dict[str, Any]:
    profile, trace = read_profile(files.profile), read_trace(files.trace)
    acceptance = from_trace(trace, str(files.trace)).acceptance
    histogram = np.array([request.histogram for entry in trace.classes for request in entry.requests])
    world = World(StepCosts(profile, str(files.profile)), profile, acceptance, histogram, args.max_tokens)
    policy = read_policy(files.policy)
    context = statistics.mean(lengths) + args.max_tokens / 2
    cells, choices = [], []
    for batch, path in files.reports.items():
        report = read_report(path)
        found = list(compare(world, report, lengths, batch, args.k_max))
        cells += found
        choices.append(choice(report, found, batch, policy.lookup(batch, context).k))
    error = statistics.median(abs(cell["error"]) for cell in cells)
    tokens = min(cell["tokens"] for cell in cells)
    return {
        "schema": "specctl.predicted/1",
        "provenance": Provenance.here("cpu", profile.hardware.threads).model_dump() | {"command": " ".join(sys.argv)},
        "target": args.target,
        "draft": args.draft,
        "prompts": {"tuned": acceptance.num_requests, "judged": len(lengths)},
        "survival": acceptance.survival().tolist(),
        "tokens_a_cell": tokens,
        "cells": cells,
        "choices": choices,
        "median_error": error,
        "goals": {"median_error": ERROR_GOAL, "regret": REGRET_GOAL, "tokens": TOKENS_GOAL},
        "reached": {
            "median_error": error <= ERROR_GOAL,
            "regret": all(each["regret"] <= REGRET_GOAL or each["within_interval"] for each in choices),
            "tokens": tokens >= TOKENS_GOAL,
        },
    }


def compare(world: World, report: Report, lengths: list[int], batch: int, k_max: int) -> Iterator[dict[str, Any]]:
    """Predicted and measured speed-up against plain decoding."""
    context = statistics.mean(lengths) + world.max_tokens / 2
    plain_ms = world.milliseconds(lengths, batch, 0)
    for k in range(1, k_max + 1):
        run = next(run for run in report.runs if run.k == k)
        measured = next(c for c in report.comparisons if c.run == run.name and c.against == "plain")
        predicted = plain_ms / world.milliseconds(lengths, batch, k)
        yield {
            "batch": batch,
            "k": k,
            "tokens": run.tokens * len(run.seconds),
            "predicted": predicted,
            "decoding_alone": world.steady(batch, context, k),
            "measured": measured.speedup,
            "ci95": measured.ci95,
            "error": predicted / measured.speedup - 1,
        }


def choice(report: Report, cells: list[dict[str, Any]], batch: int, chosen: int) -> dict[str, Any]:
    """What the chosen K loses against the one that is best in the first half of the repeats, by the second half."""
    seconds = {run.k: run.seconds for run in report.runs if run.k is not None}
    half = len(next(iter(seconds.values()))) // 2
    first = {k: sum(values[:half]) for k, values in seconds.items()}
    second = {k: sum(values[half:]) for k, values in seconds.items()}
    best = min(first, key=lambda k: first[k])
    of = {cell["k"]: cell for cell in cells}
    return {
        "batch": batch,
        "chosen": chosen,
        "best": best,
        "regret": max(0.0, 1 - second[best] / second[chosen]),
        "within_interval": chosen == best or not told_apart(of, chosen, best),
    }


def told_apart(of: dict[int, dict[str, Any]], chosen: int, best: int) -> bool:
    """Whether the best is outside the chosen one's interval; against plain decoding it is the other's that counts."""
    if chosen:
        high = of[chosen]["ci95"] and of[chosen]["ci95"][1]
        return high is None or high < (of[best]["measured"] if best else 1.0)
    low = of[best]["ci95"] and of[best]["ci95"][0]
    return low is None or low > 1.0


def show(result: dict[str, Any]) -> None:
    print("batch  K  predicted  measured           95 %   error  decoding alone")
    for cell in result["cells"]:
        low, high = cell["ci95"] or (float("nan"), float("nan"))
        print(
            f"{cell['batch']:5}  {cell['k']}  {cell['predicted']:9.3f}  {cell['measured']:8.3f}  "
            f"{low:6.2f} - {high:4.2f}  {cell['error']:+6.1%}  {cell['decoding_alone']:14.3f}"
        )
    for each in result["choices"]:
        told = ", not told apart" if each["within_interval"] else ""
        lengths = f"K = {each['chosen']} chosen, {each['best']} best"
        print(f"batch {each['batch']}: {lengths}, regret {each['regret']:.1%}{told}")
    print(f"median error {result['median_error']:.1%}; reached: {result['reached']}")


if __name__ == "__main__":
    main()
