"""How much memory does a 1B draft take to train, and does --plan say so?

    python benchmarks/finetune_memory.py [--tokens 512] [--steps 3] [--loss ce|kl] [--dir DIR] [--output RESULT.json]

Makes a draft of Llama-3.2-1B's shape (random bfloat16 weights, 128,256 tokens) and a small target with its vocabulary,
asks `specctl finetune --plan` and then runs `specctl finetune` in a process of its own, whose anonymous memory is
looked at all the time. The exit code is 1 when it takes 20 GiB or more, or when the plan is off by more than 20 %.
Needs 25 GB of memory and 8 GB of disk, and minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specctl.models import Llama, ModelConfig
from specctl.schemas.base import Provenance
from specctl.shard_writer import Entry, write_shards
from specctl.shards import TensorInfo

GIB = 2**30
BOUND, TOLERANCE = 20.0, 0.2  # GiB; of the plan
VOCAB, END = 128256, 128009
DRAFT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": END,
    "dtype": "bfloat16",
}
TARGET = DRAFT | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--loss", choices=["ce", "kl"], default="ce")
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        result = measure(Path(scratch), args.tokens, args.steps, args.loss)
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    sys.exit(not result["ok"])


def measure(scratch: Path, tokens: int, steps: int, loss: str) -> dict[str, Any]:
    target, draft = make(scratch / "target", TARGET), make(scratch / "draft", DRAFT)
    data = scratch / "data.jsonl"
    # A byte is a token here: each row fills a batch, and all of it but the first token is trained.
    data.write_text("".join(json.dumps({"text": chr(97 + n) * (tokens - 1)}) + "\n" for n in range(steps)))
    command = [sys.executable, "-m", "specctl", "finetune", "--kind", "llama", "--target", str(target)]
    command += ["--init", str(draft), "--data", str(data), "--output", str(scratch / "out"), "--json"]
    command += ["--max-steps", str(steps), "--max-length", str(tokens)]
    for setting in (
        f"optimiser.tokens_per_batch={tokens}",
        "optimiser.checkpointing=true",
        "loss.chunk=128",
        f"loss.ce={int(loss == 'ce')}",
        f"loss.kl={int(loss == 'kl')}",
    ):
        command += ["--set", setting]
    planned = json.loads(subprocess.run([*command, "--plan"], check=True, capture_output=True, text=True).stdout)
    peak, seconds, trained = watched(command)
    expected = sum(planned["plan"]["memory"].values())
    off = peak / expected - 1
    return {
        "provenance": Provenance.here("cpu", torch.get_num_threads()).model_dump(),
        "tokens": tokens,
        "steps": len(trained["loss"]),
        "loss": trained["loss"],
        "seconds": round(seconds, 1),
        "planned_seconds": planned["plan"]["seconds"],
        "peak_gib": round(peak / GIB, 3),
        "planned_gib": round(expected / GIB, 3),
        "planned_parts_gib": {part: round(size / GIB, 3) for part, size in planned["plan"]["memory"].items()},
        "off": round(off, 4),
        "ok": peak < BOUND * GIB and abs(off) <= TOLERANCE and len(trained["loss"]) == steps,
    }


def watched(command: list[str]) -> tuple[int, float, dict[str, Any]]:
    """Greatest anonymous memory of the command in bytes, its seconds, and what it says."""
    begin, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.002)
        assert process.stdout is not None
        out = process.stdout.read()
    if process.returncode:
        sys.exit(f"the command failed with exit code {process.returncode}")
    return peak, time.perf_counter() - begin, json.loads(out)


def anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def make(path: Path, config: dict[str, Any]) -> Path:
    """A directory with random weights and a tokenizer of the vocabulary's size."""
    path.mkdir()
    with torch.device("meta"):
        model = Llama(ModelConfig.read(config, "the benchmark"))
    generator = torch.Generator().manual_seed(0)
    entries = [entry(name, tuple(parameter.shape), generator) for name, parameter in model.named_parameters()]
    write_shards(path, entries, stem="model", workers=1)
    (path / "config.json").write_text(json.dumps(config))
    tokenizer(path)
    return path


def entry(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Entry:
    def pieces() -> Iterator[torch.Tensor]:
        if len(shape) == 1:
            yield torch.ones(shape, dtype=torch.bfloat16)
            return
        for begin in range(0, shape[0], 4096):
            rows = min(4096, shape[0] - begin)
            yield torch.empty(rows, shape[1]).normal_(0.0, 0.02, generator=generator).bfloat16()

    return Entry(name, TensorInfo(torch.bfloat16, shape), pieces)


def tokenizer(path: Path) -> None:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = symbols + [f"<{n}>" for n in range(len(symbols), VOCAB)]
    found = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([f"<{END}>"])
    found.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"<{END}>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
