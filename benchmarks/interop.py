"""Every kind of draft, exported and loaded by a real vLLM: are its tokens and counters ours? `make interop`.

    python benchmarks/interop.py --vllm PYTHON_WITH_VLLM [--target DIR] [--llama DIR] [--eagle3 DIR] [--work DIR]
        [--prompts FILE.jsonl] [--count 40] [--k 3] [--only KIND ...]

The target is SmolLM2-135M-Instruct as quickstart has it, the prompts are requests for Python classes nobody trained on.
Drafts that are not named are trained here, for some minutes, on the target's own answers. The MTP layer is that of a
small DeepSeek-V3 with made-up weights and the vocabulary of the target, so that the prompts are the same. Each kind is
run twice: with its draft, and with random numbers in the draft's matrices, as a control.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from moe_models import COMMON, LITE, build, numbers
from torch import Tensor

from specctl.drafts.mtp import Mtp
from specctl.output import new_directory
from specctl.quickstart.classes import HELD_OUT, TRAINING
from specctl.quickstart.model import small_model
from specctl.shard_writer import Entry, write_shards
from specctl.shards import TensorInfo

HERE = Path(__file__).parent
LONGEST, TOKENS = 512, 64
ANSWERS, STEPS = 150, 150
BIAS = "e_score_correction_bias"
# vLLM's latent attention on a CPU knows these two widths of latents only, and without YaRN it says other texts than
# transformers and ours.
DEEPSEEK: dict[str, Any] = LITE | COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the python of an environment with vLLM")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--llama", type=Path, help="a draft that is a model")
    parser.add_argument("--eagle3", type=Path, help="an EAGLE-3 head")
    parser.add_argument("--work", type=Path, default=Path("interop"), help="where drafts that are trained here stay")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--k", type=int, nargs="+", default=[3])
    parser.add_argument("--max-tokens", type=int, default=TOKENS)
    parser.add_argument("--only", nargs="+", choices=["llama", "eagle3", "mtp"], default=["llama", "eagle3", "mtp"])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    target = args.target or small_model(lambda sentence: print(sentence, file=sys.stderr))
    prompts = args.prompts or written(args.work / "prompts.jsonl", HELD_OUT.prompts("interop")[: args.count])
    rows = []
    for kind in args.only:
        for control in (False, True):
            rows += run(kind, control, *draft_of(kind, target, args), prompts, args)
    (args.work / "interop.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    sys.exit(not all(row["ok"] for row in rows))


def draft_of(kind: str, target: Path, args: argparse.Namespace) -> tuple[Path, str]:
    """A target and its draft."""
    if kind == "mtp":
        vocab = json.loads((target / "config.json").read_text())["vocab_size"]
        return deepseek(args.work / "deepseek", vocab, target), "alone"
    given = getattr(args, kind)
    return target, str(given or trained(kind, target, args.work / kind))


def run(
    kind: str, control: bool, target: Path, draft: str, prompts: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    if draft == "alone":
        draft = str(alone(target))
    result = args.work / f"{kind}{'-control' if control else ''}.json"
    command = [sys.executable, HERE / "interop_vllm.py", target, "--vllm", args.vllm, "--draft", draft]
    command += ["--export", "vllm", "--prompts", prompts, "--count", args.count, "--max-tokens", args.max_tokens]
    command += ["--max-model-len", LONGEST, "--output", result, "--k", *args.k, *(["--control"] if control else [])]
    print(f"{kind}{', control' if control else ''} ...", file=sys.stderr)
    result.unlink(missing_ok=True)
    subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL)
    if not result.exists():
        sys.exit(f"{kind}: no result")
    found: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return found


def trained(kind: str, target: Path, out: Path) -> Path:
    """A small draft for the target, trained on its own answers; the one of an earlier run if it is there."""
    if out.exists():
        return out
    data = written(out.with_suffix(".jsonl"), TRAINING.prompts("training")[:ANSWERS])
    recipe: dict[str, Any] = {
        "schema": "specctl.recipe/1",
        "kind": kind,
        "target": str(target),
        "output": str(out),
        "max_steps": STEPS,
        "data": {"train": str(data), "regenerate": {"temperature": 0.0, "max_tokens": TOKENS, "batch": 16}},
        "draft": {"width": 192, "depth": 2, "heads": 3} if kind == "llama" else {"vocab_size": 4096},
        "optimiser": {"lr": 2e-3, "warmup_steps": 15, "tokens_per_batch": 1024},
        "validation": {"every_steps": 10 * STEPS, "prompts": 4, "max_tokens": 32, "temperatures": [0.0]},
    }
    if kind == "eagle3":
        recipe["loss"] = {"steps": 3}
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    subprocess.run([sys.executable, "-m", "specctl", "finetune", str(path)], check=True, stdout=subprocess.DEVNULL)
    return out


def written(path: Path, prompts: Any) -> Path:
    lines = [{"id": each.id, "messages": [message.as_dict() for message in each.messages]} for each in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def deepseek(path: Path, vocab: int, tokenizer: Path) -> Path:
    """The model with its MTP layer inside, and the tokenizer of the other one."""
    if path.exists():
        return path
    config = DEEPSEEK | {"vocab_size": vocab, "torch_dtype": "float32"}
    model = build(config)
    with torch.device("meta"):
        parts = [model, Mtp(model, config["num_hidden_layers"])]
    shapes = {name: tuple(parameter.shape) for part in parts for name, parameter in part.named_parameters()}
    with new_directory(path) as temporary:
        write_shards(temporary, [_entry(name, shape) for name, shape in shapes.items()], stem="model")
        (temporary / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for file in tokenizer.iterdir():
            if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
                (temporary / file.name).write_bytes(file.read_bytes())
    return path


def alone(target: Path) -> Path:
    """The MTP layer of a model, in a directory of its own."""
    out = target.with_name(f"{target.name}-mtp")
    if not out.exists():
        command = [sys.executable, "-m", "specctl", "convert-mtp", str(target), str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def _entry(name: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, TensorInfo(torch.float32, shape), lambda: [_numbers(name, shape)])


def _numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith(BIAS):
        return torch.linspace(-0.1, 0.1, math.prod(shape)).view(shape)
    return numbers(name, shape)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| draft | K | run | drafts | accepted by position | same text | differences |", "|" + " --- |" * 7]
    for row in rows:
        name = row["kind"] + (", random" if row["control"] else "")
        for run, counters in row["runs"].items():
            accepted = ", ".join(map(str, counters["accepted_per_position"]))
            found = [f"{pair}: {each['blocks']}" for pair, each in row["different_blocks"].items() if each["blocks"]]
            lines.append(
                f"| {name} | {row['k']} | {run} | {counters['num_drafts']} | {accepted} | {row['same_text']} | "
                f"{'; '.join(found) or 'none'} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
