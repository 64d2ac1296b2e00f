"""How fast is convert-mtp against cp?

    python benchmarks/convert_mtp.py [--scale S] [--dtype keep|bf16 ...] [--repeats N] [--dir DIR]
        [--output RESULT.json]

Makes an MTP layer of DeepSeek-R1's shape (S = 1: 15.4 GB of FP8; experts and vocabulary are scaled, the rest is as it
is) and runs, in turn, `cp --reflink=never` of the source, convert-mtp --dtype keep, convert-mtp --dtype bf16, and cp of
that result. Each ends with fsync, and before each the files it reads are dropped from the page cache as far as the
system lets them. Bounds from S = 0.25 on: keep at most 1.3 times cp of the source, bf16 at most 3 times cp of its
output; beyond them the exit code is 1. Needs S * 100 GB of disk, S * 48 GB for keep alone. Times are without the start
of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from specctl.convert_mtp.convert import Wishes, prepare, write
from specctl.fp8 import E4M3, Block
from specctl.heads.mtp import Expected, MtpConfig, scale_of
from specctl.heads.quantisation import KEY, Fp8Config
from specctl.schemas.base import Provenance
from specctl.shard_writer import Entry, write_shards
from specctl.shards import TensorInfo

BOUNDS = {"keep": 1.3, "bf16": 3.0}
PAIRS = (("keep", "cp source"), ("bf16", "cp bf16"))
R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--dtype", nargs="+", choices=tuple(BOUNDS), default=list(BOUNDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        result = measure(Path(scratch), args.scale, args.dtype, args.repeats)
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    sys.exit(args.scale >= 0.25 and not all(row["ok"] for row in result["ratios"].values()))


def measure(scratch: Path, scale: float, dtypes: list[str], repeats: int) -> dict[str, object]:
    source = make_layer(scratch / "source", scale)
    pairs = [(name, against) for name, against in PAIRS if name in dtypes]
    seconds: dict[str, list[float]] = {name: [] for pair in pairs for name in pair}
    outputs = {name: scratch / name.replace(" ", "-") for name in seconds}
    for _ in range(repeats):
        for name, step in steps(source, outputs):
            if name not in seconds:
                continue
            shutil.rmtree(outputs[name], ignore_errors=True)
            forget(source, *outputs.values())
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    ratios = {}
    for name, against in pairs:
        each = [ours / theirs for ours, theirs in zip(seconds[name], seconds[against], strict=True)]
        ratio = statistics.median(each)
        ratios[name] = {"against": against, "median": ratio, "each": each, "ok": ratio <= BOUNDS[name]}
    return {
        "provenance": Provenance.here("cpu", torch.get_num_threads()).model_dump(),
        "scale": scale,
        "bytes": {"source": size(source), **{name: size(outputs[name]) for name, _ in pairs}},
        "seconds": seconds,
        "ratios": ratios,
    }


def steps(source: Path, outputs: dict[str, Path]) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "cp source", lambda: copy(source, outputs["cp source"])
    yield "keep", lambda: convert(source, outputs["keep"], "keep")
    yield "bf16", lambda: convert(source, outputs["bf16"], "bf16")
    yield "cp bf16", lambda: copy(outputs["bf16"], outputs["cp bf16"])


def convert(source: Path, output: Path, dtype: str) -> None:
    job = prepare(Wishes(str(source), dtype=dtype))
    write(job, output, force=False, progress=lambda num_bytes: None)


def copy(source: Path, output: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, output], check=True)
    for file in output.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(*directories: Path) -> None:
    for directory in directories:
        for file in directory.glob("*.safetensors"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def make_layer(path: Path, scale: float) -> Path:
    """A directory with one MTP layer of random numbers."""
    path.mkdir()
    values = dict(Fp8Config.published().values)
    config = R1 | {"n_routed_experts": max(1, round(256 * scale)), "vocab_size": round(129280 * scale), KEY: values}
    entries = []
    for name, expected in MtpConfig.read(config, "config.json").tensors().items():
        entries += list(tensor(f"model.layers.61.{name}", expected))
    write_shards(path, entries, stem="model")
    (path / "config.json").write_text(json.dumps(config))
    return path


def tensor(name: str, expected: Expected) -> Iterator[Entry]:
    shape = expected.shape
    if expected.role == "matrix":
        yield Entry(name, TensorInfo(E4M3, shape), lambda: noise(TensorInfo(E4M3, shape)))
        grid = Block().grid(shape)
        yield Entry(scale_of(name), TensorInfo(torch.float32, grid), lambda: [torch.full(grid, 2e-4)])
    elif expected.role == "bias":
        yield Entry(name, TensorInfo(torch.float32, shape), lambda: [torch.zeros(shape)])
    else:
        yield Entry(name, TensorInfo(torch.bfloat16, shape), lambda: noise(TensorInfo(torch.bfloat16, shape)))


def noise(info: TensorInfo) -> Iterator[torch.Tensor]:
    """Random bytes without NaN or large exponents, so that nothing is special about them."""
    generator = np.random.default_rng(info.num_bytes)
    for begin in range(0, info.num_bytes, 1 << 24):
        count = min(1 << 24, info.num_bytes - begin)
        raw = generator.integers(0, 256, count, dtype=np.uint8)
        yield torch.from_numpy(raw & 0xBF).view(info.dtype)


if __name__ == "__main__":
    main()
