"""Does tune predict what bench measures, for several drafts and at several contexts? predicted.py over a grid.

    python benchmarks/tune_here.py --target MODEL --draft HEAD --draft LLAMA --prompts FILE --history CONVERSATIONS \\
        --output DIRECTORY

Every prompt is put behind earlier turns of conversations of the same domain, as many as fit, so that it has nearly
--contexts tokens; the same turns are never before two prompts of one context. For each draft and context then all that
predicted.py does: a profile, a trace and a policy from prompts for tuning, and bench over K = 1..6 and plain decoding
on the judged ones, batch by batch.

Goals: median error of the speed-up at most 5 %; for every draft, context and batch the chosen K loses at most 3 %
against the best one, or cannot be told from it; at least 2,000 tokens a cell, all repeats together. Writes RESULT.json;
exit 1 when a goal is missed. It takes hours: the same command once more goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import predicted

from specctl.options import ModelOptions
from specctl.pair import Target, open_target
from specctl.prompts import Prompt, read_prompts
from specctl.schemas.base import Provenance
from specctl.text.messages import Message

predicted.ERROR_GOAL = 0.05


def main() -> None:
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    target = open_target(args.target, ModelOptions(device="cpu"))
    files = {context: lengthened(args, target, context) for context in args.contexts}
    results = []
    for context in args.contexts:
        for draft in args.draft:
            print(f"{draft} at a context of {context}", file=sys.stderr, flush=True)
            result = predicted.measured_and_judged(asked(args, draft, context, files[context]))
            results.append(result | {"context": context})
            predicted.show(result)
    result = summary(args, results)
    (args.output / "RESULT.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"all: median error {result['median_error']:.1%}; reached: {result['reached']}")
    sys.exit(not all(result["reached"].values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--prompts", required=True, metavar="FILE")
    parser.add_argument("--history", required=True, type=Path, metavar="FILE", help="JSON lines of messages, answered")
    parser.add_argument("--contexts", type=numbers, default=[256, 1024])
    parser.add_argument("--judged", type=int, help="prompts to judge by; default: half of them")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8])
    parser.add_argument("--k-max", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="of the judged run")
    parser.add_argument("--profile-repeats", type=int, default=11)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def asked(args: argparse.Namespace, draft: str, context: int, prompts: Path) -> argparse.Namespace:
    """What predicted.py is to be asked."""
    own = ("target", "judged", "batches", "k_max", "max_tokens", "repeats", "profile_repeats", "threads")
    name = f"{Path(draft).name}-{context}"
    values = {key: getattr(args, key) for key in own}
    return argparse.Namespace(**values, draft=draft, prompts=[str(prompts)], count=None, output=args.output / name)


# -- prompts of a length -----------------------------------------------------------------------------------------------


def lengthened(args: argparse.Namespace, target: Target, context: int) -> Path:
    """A file of the prompts, each behind as many earlier turns as fit into the context."""
    turns = conversations(args.history)
    path = args.output / f"prompts-{context}.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for number, prompt in enumerate(read_prompts(args.prompts, None)):
            longer = behind(prompt, turns, target, context)
            out.write(json.dumps(predicted.line(longer, number)) + "\n")
    return path


def conversations(path: Path) -> Iterator[tuple[Message, ...]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        yield tuple(Message(turn["role"], turn["content"]) for turn in row["messages"])


def behind(prompt: Prompt, turns: Iterator[tuple[Message, ...]], target: Target, context: int) -> Prompt:
    if prompt.messages is None:
        sys.exit(f"prompt {prompt.id}: expected messages, so that turns can be put before them")
    longest = prompt
    while True:
        earlier = next(turns, None)
        if earlier is None:
            sys.exit(f"--history: has too few conversations to put before every prompt at a context of {context}")
        assert longest.messages is not None
        longer = Prompt(id=prompt.id, messages=(*earlier, *longest.messages))
        if len(target.encode(longer)) > context:
            return longest
        longest = longer


# -- the whole ---------------------------------------------------------------------------------------------------------


def summary(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    error = statistics.median(abs(cell["error"]) for result in results for cell in result["cells"])
    return {
        "schema": "specctl.tune_here/1",
        "provenance": Provenance.here("cpu", args.threads).model_dump() | {"command": " ".join(sys.argv)},
        "median_error": error,
        "reached": {
            "median_error": error <= predicted.ERROR_GOAL,
            **{key: all(result["reached"][key] for result in results) for key in ("regret", "tokens")},
        },
        "results": results,
    }


if __name__ == "__main__":
    main()
