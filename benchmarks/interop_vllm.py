"""Does a real vLLM draft and accept what our engine does? Greedy, float32, block by block.

    python benchmarks/interop_vllm.py TARGET ... --vllm PYTHON_WITH_VLLM [--draft mtp|DIR] [--k K ...]
        [--prompts FILE.jsonl] [--count N] [--max-tokens N] [--output RESULT.json]

Both run every prompt alone to its end, end of text ignored, and what is compared is the text, every block (the drafted
tokens and how many of them were accepted) and the counters of the whole run. Without --prompts they are random tokens,
1 to 80 of them. Run by hand; exit 1 for any difference.

One rule of vLLM's is known to change what is drafted, and it is nobody else's: its DeepSeek MTP layer reads zeros in
place of the embedding at position 0. So there are four runs of an MTP draft: ours and vLLM's as they are, vLLM's
without that rule, which must be ours block for block, and ours with it, which must be vLLM's. Where a text with two
blocks would not fit its context vLLM runs no draft and has tokens of id 0 verified, which it counts; prompts that come
there are refused. vLLM on a CPU wants kv_lora_rank 512 and qk_rope_head_dim 64 of a DeepSeek model, and topk_method in
its config.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.drafts import Draft
from specctl.drafts.mtp import Mtp, MtpDrafter
from specctl.engine.sequence import Sequence as Text
from specctl.engine.stats import SpeculationCounters
from specctl.engine.verify import Verdict
from specctl.kv.batch import Batch
from specctl.options import ModelOptions
from specctl.pair import OpenedDraft, Target, build_engine, constant, open_draft, open_target
from specctl.prompts import read_prompts
from specctl.sampling.params import SamplingParams
from specctl.schemas.base import Provenance

Block = tuple[list[int], int]
COUNTERS = {
    "num_drafts": "num_drafts",
    "num_draft_tokens": "num_draft_tokens",
    "num_accepted_tokens": "num_accepted_tokens",
    "num_accepted_tokens_per_pos": "accepted_per_position",
}


@dataclass(frozen=True)
class Run:
    """Of each prompt the text and the blocks; counters: what the program itself says."""

    outputs: list[list[int]]
    blocks: list[list[Block]]
    counters: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the python of an environment with vLLM")
    parser.add_argument("--draft", default="mtp", help="mtp, or the directory of a draft that is a model")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of random prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    rows, versions = [], set[str]()
    for name in args.targets:
        target = open_target(name, ModelOptions(dtype="float32", device="cpu"))
        draft = open_draft(args.draft, target)
        prompts = prompts_for(target, args)
        for k in args.k:
            row, version = compare(target, draft, prompts, k, args)
            rows.append(row)
            versions.add(version)
            print(json.dumps(row), file=sys.stderr)
    result = {
        "provenance": Provenance.here("cpu", torch.get_num_threads()).model_dump() | {"vllm": sorted(versions)},
        "prompts": args.count,
        "max_tokens": args.max_tokens,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    sys.exit(not all(row["ok"] for row in rows))


def prompts_for(target: Target, args: argparse.Namespace) -> list[list[int]]:
    """Token ids, so that both read the same. Raises SystemExit for what vLLM's context is too short for."""
    if args.prompts:
        prompts = [target.encode(prompt) for prompt in read_prompts(args.prompts)[: args.count]]
    else:
        generator = torch.Generator().manual_seed(args.seed)
        lengths = torch.randint(1, 81, (args.count,), generator=generator).tolist()
        ids = range(target.model.config.vocab_size)
        prompts = [torch.randint(len(ids), (length,), generator=generator).tolist() for length in lengths]
    needed = max(map(len, prompts)) + args.max_tokens + 2 * max(args.k) + 1
    if len(prompts) < args.count or needed > args.max_model_len:
        sys.exit(f"{len(prompts)} of {args.count} prompts; --max-model-len {args.max_model_len}: expected {needed}")
    return prompts


def compare(
    target: Target, draft: OpenedDraft, prompts: list[list[int]], k: int, args: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """One line of the result, and vLLM's version."""
    mine = ours(target, draft, prompts, k, args.max_tokens)
    theirs, version = vllm(target, draft, prompts, k, args, unmasked=False)
    runs = {"ours": mine, "vllm": theirs}
    pairs = [("ours", "vllm")]
    if draft.drafter.kind == "mtp":
        runs["vllm unmasked"], _ = vllm(target, draft, prompts, k, args, unmasked=True)
        runs["ours masked"] = ours(target, draft, prompts, k, args.max_tokens, masked=True)
        pairs = [("ours", "vllm unmasked"), ("ours masked", "vllm"), ("ours", "vllm")]
    different = {f"{a} / {b}": differences(runs[a].blocks, runs[b].blocks) for a, b in pairs}
    held = {pair: found for pair, found in different.items() if len(pairs) == 1 or pair != "ours / vllm"}
    same_text = sum(len({tuple(run.outputs[i]) for run in runs.values()}) == 1 for i in range(len(prompts)))
    row = {
        "target": Path(target.name).name,
        "draft": Path(draft.name).name,
        "k": k,
        "tokens": sum(map(len, mine.outputs)),
        "same_text": same_text,
        "runs": {name: run.counters for name, run in runs.items()},
        "different_blocks": different,
        "ok": same_text == len(prompts) and not any(found["blocks"] for found in held.values()),
    }
    return row, version


def differences(one: Sequence[list[Block]], other: Sequence[list[Block]]) -> dict[str, Any]:
    """How many blocks are in one run and not in the other, of each prompt by its place in the text; and the prompts."""
    count, prompts = 0, []
    for number, (a, b) in enumerate(zip(map(placed, one), map(placed, other), strict=True)):
        if a != b:
            count += sum(a.get(place) != b.get(place) for place in a.keys() | b.keys())
            prompts.append(number)
    return {"blocks": count, "prompts": prompts}


def placed(blocks: list[Block]) -> dict[int, Block]:
    """Blocks by the number of tokens that were there before: the first comes after the prompt's own next token."""
    found, length = {}, 1
    for tokens, accepted in blocks:
        found[length] = (list(tokens), accepted)
        length += accepted + 1
    return found


def checked(run: Run) -> Run:
    """The same run, whose counters are those of its blocks."""
    counted = SpeculationCounters()
    for tokens, accepted in (block for blocks in run.blocks for block in blocks):
        counted.add_block(len(tokens), accepted)
    for name, value in run.counters.items():
        found = getattr(counted, name)
        assert found == value, f"{name} is said to be {value}, the blocks make {found}"
    return run


# Ours


def ours(
    target: Target, draft: OpenedDraft, prompts: list[list[int]], k: int, max_tokens: int, masked: bool = False
) -> Run:
    engine = build_engine(target, draft, constant(k), ignore_tokenizer=True)
    blocks: list[list[Block]] = [[] for _ in prompts]

    def observe(texts: list[Text], proposed: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        for b, (text, length) in enumerate(zip(texts, proposed.length, strict=True)):
            if length:
                tokens = proposed.token_BK[b, :length].tolist()
                blocks[text.request_id].append((tokens, int(verdict.num_accepted_B[b])))

    engine.observer = observe
    mask = None
    if masked:
        assert isinstance(draft.drafter, MtpDrafter)
        mask = Masked(draft.drafter.model)
    choices = engine.run([(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True)) for ids in prompts])
    if mask is not None:
        mask.remove()
    said = engine.stats.speculation
    counters = {name: getattr(said, name) for name in COUNTERS.values()}
    return checked(Run([choice.output for (choice,) in choices], blocks, counters))


class Masked:
    """An MTP layer that reads zeros in place of the embedding at position 0, until remove()."""

    def __init__(self, model: Mtp) -> None:
        self._position_T: Tensor | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._note),
            model.layer.enorm.register_forward_pre_hook(self._mask),
        ]

    def _note(self, model: Any, given: tuple[Batch, Tensor, Any]) -> None:
        self._position_T = given[0].position_T

    def _mask(self, norm: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        assert self._position_T is not None
        return (given[0].masked_fill((self._position_T == 0)[:, None], 0),)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


# vLLM's


def vllm(
    target: Target, draft: OpenedDraft, prompts: list[list[int]], k: int, args: argparse.Namespace, unmasked: bool
) -> tuple[Run, str]:
    """A run in a process of its own."""
    spec: dict[str, Any] = {"method": "mtp"}
    if draft.drafter.kind != "mtp":
        spec = {"method": "draft_model", "model": str(Path(draft.name).resolve())}
    elif draft.name != "mtp":
        spec["model"] = str(Path(draft.name).resolve())
    job = {
        "target": str(target.checkpoint.path.resolve()),
        "speculative_config": spec | {"num_speculative_tokens": k},
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "max_model_len": args.max_model_len,
        "unmasked": unmasked,
    }
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "job.json", Path(scratch) / "result.json"
        asked.write_text(json.dumps(job))
        command = [args.vllm, Path(__file__).with_name("vllm_blocks.py"), asked, answered]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not answered.exists():
            sys.exit(f"vLLM ended with {done.returncode}:\n{done.stdout[-4000:]}")
        found = json.loads(answered.read_text())
    counters = {ours: found["counters"][name] for name, ours in COUNTERS.items()}
    blocks = [[(list(tokens), accepted) for tokens, accepted in each] for each in found["blocks"]]
    return checked(Run(found["outputs"], blocks, counters)), found["vllm"]


if __name__ == "__main__":
    main()
