"""Does a real vLLM draft and accept what our engine does? Greedy, float32, block by block.

    python benchmarks/interop_vllm.py TARGET ... --vllm PYTHON_WITH_VLLM [--draft mtp|DIR] [--export LAYOUT] [--k K ...]
        [--control] [--prompts FILE.jsonl] [--count N] [--max-tokens N] [--output RESULT.json]

Both run every prompt alone to its end, end of text ignored, and what is compared is the text, every block (the drafted
tokens and how many of them were accepted) and the counters of the whole run. Without --prompts they are random tokens,
1 to 80 of them. --export: vLLM loads what `specctl export --to LAYOUT` writes of the draft, ours the draft itself.
--control: the same with a draft of the same shape whose matrices are random, which shows what counters look like that
come from a wrong reading. `make interop` does all of it.

Exit 1 for any difference that no near-tie explains. Two programs add the same numbers in another order, so where the
two best scores of the draft or of the target are closer than 1e-3 they may choose differently, and what follows in that
text is then another text; every such place is listed.

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
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.drafts import Draft
from specctl.drafts.head import HeadDrafter
from specctl.drafts.mtp import Mtp
from specctl.engine.sequence import Sequence as Text
from specctl.engine.stats import SpeculationCounters
from specctl.engine.verify import Verdict
from specctl.export.command import export
from specctl.kv.batch import Batch
from specctl.options import ModelOptions
from specctl.pair import OpenedDraft, Target, build_engine, constant, open_draft, open_target
from specctl.prompts import read_prompts
from specctl.sampling.batch import SamplingBatch
from specctl.sampling.params import SamplingParams
from specctl.schemas.base import Provenance

Block = tuple[list[int], int]
NEAR = 1e-3
METHODS = {"llama": "draft_model", "mtp": "mtp", "eagle3": "eagle3"}
COUNTERS = {
    "num_drafts": "num_drafts",
    "num_draft_tokens": "num_draft_tokens",
    "num_accepted_tokens": "num_accepted_tokens",
    "num_accepted_tokens_per_pos": "accepted_per_position",
}


@dataclass(frozen=True)
class Run:
    """Of each prompt the text and the blocks; counters: what the program itself says. gaps: for every block, by its
    place in the text, how far apart the two best scores were: the draft's for each slot, then the target's for each
    row."""

    outputs: list[list[int]]
    blocks: list[list[Block]]
    counters: dict[str, Any]
    gaps: list[dict[int, Gaps]] = field(default_factory=list)


@dataclass(frozen=True)
class Gaps:
    draft: list[float]
    target: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the python of an environment with vLLM")
    parser.add_argument("--draft", default="mtp", help="mtp, or the directory of a draft that is a model")
    parser.add_argument("--export", choices=["vllm", "speculators", "original"], help="what vLLM loads")
    parser.add_argument("--control", action="store_true", help="with random matrices in the draft")
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
        prompts = prompts_for(target, args)
        with tempfile.TemporaryDirectory() as scratch:
            asked, loaded = drafts_for(target, args, Path(scratch))
            draft = open_draft(asked, target)
            for k in args.k:
                row, version = compare(target, draft, loaded, prompts, k, args)
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


def drafts_for(target: Target, args: argparse.Namespace, scratch: Path) -> tuple[str, Path | None]:
    """What ours opens, and the directory that vLLM loads; None for the layer inside the target."""
    asked = args.draft
    if args.control:
        asked = str(at_random(Path(asked), scratch / "control"))
    if asked == "mtp":
        return asked, None
    loaded = Path(asked)
    if args.export:
        loaded = scratch / "export"
        export(asked, loaded, args.export, target.name, force=False)
    return asked, loaded.resolve()


def at_random(source: Path, out: Path) -> Path:
    """The same draft with other numbers in its matrices, as large as they were."""
    shutil.copytree(source, out)
    generator = torch.Generator().manual_seed(0)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                tensors[name] = noise.to(tensor.dtype)
        save_file(tensors, file)
    return out


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
    target: Target,
    draft: OpenedDraft,
    loaded: Path | None,
    prompts: list[list[int]],
    k: int,
    args: argparse.Namespace,
) -> tuple[dict[str, Any], str]:
    """One line of the result, and vLLM's version."""
    mine = ours(target, draft, prompts, k, args.max_tokens)
    theirs, version = vllm(target, draft, loaded, prompts, k, args, unmasked=False)
    runs = {"ours": mine, "vllm": theirs}
    pairs = [("ours", "vllm")]
    if draft.drafter.kind == "mtp":
        runs["vllm unmasked"], _ = vllm(target, draft, loaded, prompts, k, args, unmasked=True)
        runs["ours masked"] = ours(target, draft, prompts, k, args.max_tokens, masked=True)
        pairs = [("ours", "vllm unmasked"), ("ours masked", "vllm"), ("ours", "vllm")]
    different = {f"{a} / {b}": differences(runs[a], runs[b]) for a, b in pairs}
    held = {pair: found for pair, found in different.items() if len(pairs) == 1 or pair != "ours / vllm"}
    same_text = sum(len({tuple(run.outputs[i]) for run in runs.values()}) == 1 for i in range(len(prompts)))
    row = {
        "target": Path(target.name).name,
        "draft": Path(args.draft).name,
        "kind": draft.drafter.kind,
        "export": args.export,
        "control": args.control,
        "k": k,
        "tokens": sum(map(len, mine.outputs)),
        "same_text": same_text,
        "runs": {name: run.counters for name, run in runs.items()},
        "different_blocks": different,
        "ok": all(not found["unexplained"] for found in held.values()),
    }
    return row, version


def differences(one: Run, other: Run) -> dict[str, Any]:
    """How many blocks are in one run and not in the other, of each prompt by its place in the text; and where each
    prompt's first difference is, with the gap that explains it or none."""
    count, ties, unexplained = 0, list[dict[str, Any]](), list[int]()
    for number, (a, b) in enumerate(zip(map(placed, one.blocks), map(placed, other.blocks), strict=True)):
        texts = one.outputs[number], other.outputs[number]
        if a == b and texts[0] == texts[1]:
            continue
        places = sorted(place for place in a.keys() | b.keys() if a.get(place) != b.get(place))
        count += len(places)
        tie = near_tie(number, places, a, b, one, other)
        if tie is None:
            unexplained.append(number)
        else:
            ties.append(tie)
    return {"blocks": count, "near_ties": ties, "unexplained": unexplained}


def near_tie(
    number: int, places: list[int], a: dict[int, Block], b: dict[int, Block], one: Run, other: Run
) -> dict[str, Any] | None:
    """The gap behind a prompt's first difference, if there is one that is small enough."""
    if not places or not one.gaps:
        return None
    place = places[0]
    gaps = one.gaps[number].get(place)
    if gaps is None or place not in a or place not in b:
        return None
    (ours, accepted), (theirs, also) = a[place], b[place]
    slot = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
    who, index = ("target", min(accepted, also)) if slot is None else ("draft", slot)
    gap = (gaps.target if slot is None else gaps.draft)[index]
    if gap >= NEAR:
        return None
    return {"prompt": number, "place": place, "slot": index, "of": who, "gap": gap}


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
    gaps: list[dict[int, Gaps]] = [{} for _ in prompts]
    scored = Scored()

    def observe(texts: list[Text], proposed: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        for b, (text, length) in enumerate(zip(texts, proposed.length, strict=True)):
            if length:
                tokens = proposed.token_BK[b, :length].tolist()
                blocks[text.request_id].append((tokens, int(verdict.num_accepted_B[b])))
                gaps[text.request_id][len(text.output)] = Gaps(scored.taken(length), gap(scores_BMV[b]))

    engine.observer = observe
    mask = None
    if masked:
        assert isinstance(draft.drafter, HeadDrafter)
        assert isinstance(draft.drafter.model, Mtp)
        mask = Masked(draft.drafter.model)
    with scored:
        choices = engine.run([(ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True)) for ids in prompts])
    if mask is not None:
        mask.remove()
    said = engine.stats.speculation
    counters = {name: getattr(said, name) for name in COUNTERS.values()}
    return checked(Run([choice.output for (choice,) in choices], blocks, counters, gaps))


def gap(scores_MV: Tensor) -> list[float]:
    best = scores_MV.float().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


class Scored:
    """Notes, while it is entered, how far apart the two best scores are of every token that is drafted. A first token
    may be drawn twice, ahead of its step and in it, and is the same both times."""

    def __init__(self) -> None:
        self._gaps: dict[int, float] = {}

    def __enter__(self) -> None:
        self._draw = SamplingBatch.draw_draft
        noted, right = self._gaps, self._draw

        def draw(batch: SamplingBatch, logits_BV: Tensor, slot: int, *more: Any) -> Any:
            noted[slot] = gap(logits_BV)[0]
            return right(batch, logits_BV, slot, *more)

        SamplingBatch.draw_draft = draw  # type: ignore[method-assign]

    def __exit__(self, *raised: object) -> None:
        SamplingBatch.draw_draft = self._draw  # type: ignore[method-assign]

    def taken(self, length: int) -> list[float]:
        return [self._gaps[slot] for slot in range(length)]


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
    target: Target,
    draft: OpenedDraft,
    loaded: Path | None,
    prompts: list[list[int]],
    k: int,
    args: argparse.Namespace,
    unmasked: bool,
) -> tuple[Run, str]:
    """A run in a process of its own."""
    spec: dict[str, Any] = {"method": METHODS[draft.drafter.kind]}
    if loaded is not None:
        spec["model"] = str(loaded)
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
