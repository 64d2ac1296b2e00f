"""Is the text the target's own? Greedy text of a real model, token for token against transformers.

    python benchmarks/exactness.py TARGET --prompts FILE:FIELD ... [--reference CACHE.json] [--output RESULT.json]

Takes prompts from foreign files in turn (a string field, or the first string of a list field), has transformers answer
them greedily one by one, then runs our engine over the grid below and lists every first difference with the gap between
the reference's two best logits there. A gap of 1e-3 or more is a failure: exit 1. Run by hand; it takes an hour on two
cores, most of it transformers', so --reference keeps its answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specctl.checkpoint import Checkpoint
from specctl.options import ModelOptions
from specctl.pair import Target, build_engine, constant, open_draft, open_target
from specctl.prompts import Prompt, read_prompts
from specctl.sampling.params import SamplingParams
from specctl.schemas.base import Provenance
from specctl.text.messages import Message

NEAR_TIE = 1e-3
# name, draft, K, batch, how many of the prompts
GRID = (
    ("plain", None, 0, 1, None),
    ("ngram k=3", "ngram", 3, 1, None),
    ("ngram k=1", "ngram", 1, 1, 12),
    ("ngram k=5", "ngram", 5, 1, 12),
    ("plain batch 8", None, 0, 8, 12),
    ("ngram k=3 batch 8", "ngram", 3, 8, 12),
    ("layers k=3", "layers", 3, 1, 12),
    ("layers k=3 batch 8", "layers", 3, 8, 12),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE:FIELD")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target = open_target(args.target, ModelOptions(dtype="float32", device="cpu"))
    prompts = [target.encode(prompt) for prompt in mixed(args.prompts, args.count, target)]
    reference = read_reference(args, prompts)
    with tempfile.TemporaryDirectory() as scratch:
        few = few_layers(Checkpoint(Path(args.target)), Path(scratch) / "layers")
        rows = [run(target, row, prompts, reference, args.max_tokens, few) for row in GRID]
    result = {
        "provenance": Provenance.here("cpu", torch.get_num_threads()).model_dump(),
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "tokens": sum(map(len, reference["output"])),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    sys.exit(any(row["failures"] for row in rows))


def mixed(sources: list[str], count: int, target: Target) -> list[Prompt]:
    """`count` prompts, taken in turn from the files, evenly through each; as a chat where the model has a template."""
    files = [read_prompts(*source.rsplit(":", 1)) for source in sources]
    each = -(-count // len(files))
    spread = [file[:: max(1, len(file) // each)][:each] for file in files]
    prompts = [prompt for group in zip(*spread, strict=True) for prompt in group][:count]
    if target.tokenizer is None or not target.tokenizer.has_chat_template:
        return prompts
    return [Prompt(id=p.id, messages=(Message("user", p.prompt or ""),)) for p in prompts]


def read_reference(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """transformers' greedy answers and, for each of their tokens, the gap between the two best logits."""
    if args.reference and args.reference.exists():
        kept: dict[str, Any] = json.loads(args.reference.read_text())
        if kept["prompts"] == prompts and kept["max_tokens"] == args.max_tokens:
            return kept
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    reference: dict[str, Any] = {"prompts": prompts, "max_tokens": args.max_tokens, "output": [], "gap": []}
    for number, ids in enumerate(prompts, 1):
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=args.max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = [step[0].float().topk(2).values for step in out.logits]
        reference["output"].append(out.sequences[0, len(ids) :].tolist())
        reference["gap"].append([float(top[0] - top[1]) for top in best])
        print(f"reference {number}/{len(prompts)}", file=sys.stderr)
    if args.reference:
        args.reference.write_text(json.dumps(reference))
    return reference


def few_layers(source: Checkpoint, path: Path) -> Path:
    """A draft made of the target's first two and last two layers, untrained."""
    depth = source.config["num_hidden_layers"]
    keep = [0, 1, depth - 2, depth - 1]
    tensors = {}
    for name in source.names():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) not in keep:
                continue
            parts[2] = str(keep.index(int(parts[2])))
        tensors[".".join(parts)] = source.tensor(name).clone()
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**source.config, "num_hidden_layers": len(keep)}))
    for file in source.path.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def run(
    target: Target,
    row: tuple[Any, ...],
    prompts: list[list[int]],
    reference: dict[str, Any],
    max_tokens: int,
    few: Path,
) -> dict[str, Any]:
    name, draft_name, k, batch, count = row
    draft = None if draft_name is None else open_draft(str(few) if draft_name == "layers" else draft_name, target)
    engine = build_engine(target, draft, constant(k), max_sequences=batch)
    chosen = prompts[:count]
    choices = engine.run([(ids, SamplingParams(max_tokens=max_tokens)) for ids in chosen])
    differences = []
    for number, (choice,) in enumerate(choices):
        expected, gaps = reference["output"][number], reference["gap"][number]
        if choice.output != expected:
            at = next(i for i, (a, b) in enumerate(zip([*choice.output, -1], [*expected, -1], strict=False)) if a != b)
            differences.append({"prompt": number, "position": at, "gap": gaps[at]})
    counters = engine.stats.speculation
    print(f"{name}: {len(chosen)} prompts, {len(differences)} differ", file=sys.stderr)
    return {
        "run": name,
        "prompts": len(chosen),
        "tokens": counters.emitted_tokens,
        "identical": len(chosen) - len(differences),
        "near_ties": [d for d in differences if d["gap"] < NEAR_TIE],
        "failures": [d for d in differences if d["gap"] >= NEAR_TIE],
        "accepted_per_position": counters.accepted_per_position,
        "num_drafts": counters.num_drafts,
    }


if __name__ == "__main__":
    main()
