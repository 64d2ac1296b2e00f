"""The CSV extracts of steps, heads and prefill, asked of an operator database. By hand, with the extra `aic` installed:

    pip install 'specctl[aic]'
    python profiles/query.py --output DIRECTORY

The database is aiconfigurator-core 0.12.0 (Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES): kernels that NVIDIA
timed on H100 and H200, and their interpolation. Its own speculative mode is not used, as it reads a cache again for
every row of a block; instead a block is composed as profiles/build.py says. FP8 is given by name everywhere, as the
database's defaults differ between models. What has been measured end to end is not asked for here.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import extracts
from aiconfigurator_core.sdk import EngineHandle, common
from aiconfigurator_core.sdk import operations as ops
from aiconfigurator_core.sdk.engine import build_ops_json
from aiconfigurator_core.sdk.perf_database import get_database

from specctl.roofline.grid import PROMPTS, batches_with_edges

ROWS = (*range(1, 10), 16, 32)
CONTEXTS = (1024, 4096, 8192, 32768)
VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
HUB = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.x-70b": "meta-llama/Meta-Llama-3.1-70B",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
}
"""What the database has a config of. Others are given by their sizes in models.json."""

BF16, FP8 = "bfloat16", "fp8"
HEAD_VOCAB, TAPS = 32000, 3
ENGINE = ("system", "backend", "backend_version")
PARTS = ("t_step_ms", "gemm_ms", "attn_kvonce_ms", "moe_ms", "comm_ms", "other_ms")
PLACE = ("model", "tp", "moe_tp", "moe_ep", "gemm_dtype", "kv_dtype", "batch", "q_tokens_per_seq", "ctx")
COLUMNS = (*ENGINE, *PLACE, *PARTS)
PREFILL = (*ENGINE, "model", "tp", "gemm_dtype", "batch", "isl", "prefill_ms")
HEADS = (*ENGINE, "head", "tp", "batch", "ctx", "t_draft_step_ms", "gemm_ms", "attn_ms", "comm_ms", "fc_ms_per_verify")


@dataclass(frozen=True)
class Query:
    """One engine with one model in one place."""

    system: str
    engine: str
    model: str
    tp: int = 1
    ep: int = 1
    gemm: str = BF16
    cache: str = BF16

    @property
    def sparse(self) -> bool:
        return "n_routed_experts" in extracts.MODELS[self.model]

    @cached_property
    def handle(self) -> Any:
        name = HUB.get(self.model)
        with tempfile.TemporaryDirectory() as directory:
            if name is None:
                name = directory
                config = {"architectures": ["LlamaForCausalLM"], **extracts.MODELS[self.model]}
                (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            experts = {"moe_tp_size": self.tp // self.ep, "moe_ep_size": self.ep} if self.sparse else {}
            gemm = {} if self.sparse else {"gemm_quant_mode": self.gemm}
            return EngineHandle.compile(
                name,
                self.system,
                self.engine,
                tp_size=self.tp,
                kvcache_quant_mode=self.cache,
                fmha_quant_mode=BF16,
                attention_dp_size=1,
                nextn=0,
                **experts,
                **gemm,
            )

    @cached_property
    def names(self) -> list[str]:
        found: list[str] = []
        while True:
            try:
                ((name, *_),) = self.handle.evaluate_generation_ops([len(found)], batch_size=1, s=1)
            except ValueError:  # the last one is behind us
                return found
            found.append(name)

    def part(self, name: str, batch: int, context: int) -> float:
        """Milliseconds of all operations of a kind."""
        chosen = [index for index, each in enumerate(self.names) if kind_of(each) == name]
        return sum(each[1] for each in self.handle.evaluate_generation_ops(chosen, batch_size=batch, s=context))

    def steps(self, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        identity = {
            "system": self.system,
            "backend": self.engine,
            "backend_version": VERSIONS[self.engine],
            "model": self.model,
            "tp": self.tp,
            "moe_tp": self.tp // self.ep if self.sparse else "",
            "moe_ep": self.ep if self.sparse else "",
            "gemm_dtype": "fp8_block" if self.sparse else self.gemm,
            "kv_dtype": self.cache,
        }
        attention = {(b, c): self.part("attention", b, c) for b in batches for c in (1, *CONTEXTS)}
        for tokens, pairs in by_tokens(batches).items():
            rest = {kind: self.part(kind, tokens, 1) for kind in ("gemm", "moe", "comm", "other")}
            alone = attention.get((tokens, 1)) or self.part("attention", tokens, 1)
            for batch, q in pairs:
                for context in CONTEXTS:
                    once = alone + attention[batch, context] - attention[batch, 1]
                    yield identity | {
                        "batch": batch,
                        "q_tokens_per_seq": q,
                        "ctx": context,
                        "t_step_ms": once + sum(rest.values()),
                        "attn_kvonce_ms": once,
                        **{f"{kind}_ms": ms for kind, ms in rest.items()},
                    }

    def prefill(self) -> Iterator[dict[str, Any]]:
        """With a cache of 16 bits, which all three engines have a table of."""
        other = Query(self.system, self.engine, self.model, self.tp, self.ep, self.gemm, BF16)
        for tokens in PROMPTS:
            yield {
                "system": self.system,
                "backend": self.engine,
                "backend_version": VERSIONS[self.engine],
                "model": self.model,
                "tp": self.tp,
                "gemm_dtype": self.gemm,
                "batch": 1,
                "isl": tokens,
                "prefill_ms": other.handle.predict_prefill_latency(1, tokens, prefix=0),
            }


@dataclass(frozen=True)
class HeadQuery:
    """One step of an EAGLE-3 head for a target: a layer of its sizes that reads two hidden states, a vocabulary of
    32,000 whose logits are gathered, and the projection of three hidden states, which every device has whole."""

    engine: str
    target: str
    tp: int

    def steps(self, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        database = get_database("h100_sxm", self.engine, VERSIONS[self.engine])
        handle = EngineHandle.for_database(database)
        kinds = {kind: build_ops_json(found) for kind, found in self._operations().items()}

        def part(kind: str, batch: int, context: int) -> float:
            found = handle.evaluate_ops_json(kinds[kind], is_context=False, batch_size=batch, s=context, x=batch)
            return float(sum(each[1] for each in found))

        for batch in batches:
            same = {kind: part(kind, batch, 1) for kind in ("gemm", "comm", "other", "fc")}
            for context in CONTEXTS:
                attention = part("attention", batch, context)
                yield {
                    "system": "h100_sxm",
                    "backend": self.engine,
                    "backend_version": VERSIONS[self.engine],
                    "head": extracts.HEADS[self.target],
                    "tp": self.tp,
                    "batch": batch,
                    "ctx": context,
                    "t_draft_step_ms": same["gemm"] + same["comm"] + same["other"] + attention,
                    "gemm_ms": same["gemm"],
                    "attn_ms": attention,
                    "comm_ms": same["comm"],
                    "fc_ms_per_verify": same["fc"],
                }

    def _operations(self) -> dict[str, list[Any]]:
        config, tp, mode = extracts.MODELS[self.target], self.tp, common.GEMMQuantMode.bfloat16
        h, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        width, kv_heads = h // heads, max(1, config["num_key_value_heads"] // tp)
        return {
            "gemm": [
                ops.GEMM("qkv", 1, heads * width // tp + 2 * kv_heads * width, 2 * h, mode),
                ops.GEMM("proj", 1, h, heads * width // tp, mode),
                ops.GEMM("ffn1", 1, 2 * inner // tp, h, mode),
                ops.GEMM("ffn2", 1, h, inner // tp, mode),
                ops.GEMM("logits", 1, HEAD_VOCAB // tp, h, mode),
            ],
            "attention": [
                ops.GenerationAttention(
                    "attention", 1, heads // tp, kv_heads, common.KVCacheQuantMode.bfloat16, head_size=width
                )
            ],
            "comm": [ops.CustomAllReduce(f"ar_{n}", 1, h, tp) for n in range(3)] if tp > 1 else [],
            "other": [ops.ElementWise(f"norm_{n}", 1, 2 * h, 2 * h, 0.8) for n in range(5)],
            "fc": [ops.GEMM("fc", 1, h, TAPS * h, mode)],
        }


def kind_of(name: str) -> str:
    if name.endswith("gemm"):
        return "gemm"
    if name.endswith(("attention", "mla_block")):
        return "attention"
    if "moe" in name:
        return "moe"
    return "comm" if name.endswith(("_ar", "ar_1", "ar_2", "allreduce", "p2p")) else "other"


def by_tokens(batches: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Batches and rows by how many tokens they have together, which is all that kernels without a cache know."""
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in batches:
        for q in ROWS:
            found.setdefault(batch * q, []).append((batch, q))
    return found


def dense() -> dict[str, list[Query]]:
    engines = tuple(VERSIONS)
    kinds = ((BF16, BF16), (FP8, FP8))
    eight = [Query("h100_sxm", e, "llama-3.1-8b", 1, 1, *kind) for e in engines for kind in kinds]
    seventy = [Query("h100_sxm", e, "llama-3.x-70b", tp, 1, *k) for e in engines for tp in (4, 8) for k in kinds]
    one = [Query("h100_sxm", e, "llama-3.2-1b") for e in engines]
    return {"aic_llama31_8b": eight, "aic_llama3x_70b": seventy, "aic_llama32_1b_draft": one}


def sparse() -> dict[str, list[Query]]:
    def of(system: str, *devices: int) -> list[Query]:
        return [Query(system, e, "deepseek-r1", tp, ep) for e in VERSIONS for tp in devices for ep in (1, tp)]

    return {"aic_deepseek_r1_h100": of("h100_sxm", 8, 16), "aic_deepseek_r1_h200": of("h200_sxm", 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory of the CSV extracts")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    batches = batches_with_edges()
    for name, queries in (dense() | sparse()).items():
        write(args.output / f"{name}.csv", COLUMNS, (row for each in queries for row in each.steps(batches)))
    prefill = (row for queries in dense().values() for each in queries for row in each.prefill())
    write(args.output / "aic_prefill.csv", PREFILL, prefill)
    heads = [HeadQuery(e, target, tp) for e in VERSIONS for target, tp in TARGETS]
    write(args.output / "aic_eagle3_draft_step.csv", HEADS, (row for each in heads for row in each.steps(batches)))


TARGETS = (("llama-3.1-8b", 1), ("llama-3.x-70b", 4), ("llama-3.x-70b", 8))


def write(path: Path, columns: Sequence[str], found: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("# from aiconfigurator-core 0.12.0 (Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES)\n")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        count = 0
        for row in found:
            writer.writerow({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()})
            count += 1
    sys.stderr.write(f"written: {path.name}, {count} rows\n")


if __name__ == "__main__":
    main()
