"""What the files of constants have that is not fitted: peaks, what engines do by default, what their hosts add, and
where each number comes from. profiles/fit.py puts the fitted kernels in."""

from __future__ import annotations

from typing import Any

from specctl.schemas.base import Provenance
from specctl.schemas.profile import CONSTANTS_SCHEMA
from specctl.schemas.roofline import (
    AllReduce,
    Attention,
    Doubt,
    Elementwise,
    Graphs,
    Lane,
    Overheads,
    Peaks,
    Product,
    Roofline,
    Unit,
)

DIGITS = 4
PEAKS = {
    "h100-sxm": Peaks(memory_gb=80, memory_gbps=3350, bf16_tflops=989.5, fp8_tflops=1979, link_gbps=450),
    "h200-sxm": Peaks(memory_gb=141, memory_gbps=4800, bf16_tflops=989.5, fp8_tflops=1979, link_gbps=450),
    "a100-sxm": Peaks(memory_gb=80, memory_gbps=2039, bf16_tflops=312, link_gbps=300),
}
HARDWARE = {
    "h100-sxm": ("NVIDIA H100 80GB HBM3 (SXM5)", "NVLink 4, 450 GB/s each way"),
    "h200-sxm": ("NVIDIA H200 141GB HBM3e (SXM5)", "NVLink 4, 450 GB/s each way"),
    "a100-sxm": ("NVIDIA A100 80GB (SXM4)", "NVLink 3, 300 GB/s each way"),
}

VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
"""Whose kernels the database has timed."""

SCHEDULING = {"vllm": "mixed", "sglang": "prefill-first", "trtllm": "mixed"}
CHUNK = 8192
GRAPHS: dict[str, tuple[Unit, list[int]] | None] = {
    "vllm": ("tokens", [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]),
    "sglang": ("sequences", [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]),
    "trtllm": None,
}

MISSING = {
    "vllm": "products in FP8 blocks are slower in the database than anybody has measured, so they are taken to be as "
    "fast as SGLang's; no step that drafts is published for it, so what those cost is SGLang's",
    "trtllm": "no step that drafts is published for it but of DeepSeek-R1, so what those cost is SGLang's",
}
# One standard deviation of a step, and the part of it that all steps share. benchmarks/tune_h100.py prints what they
# are of: root mean squares of relative errors against measured steps, less (in squares) half of that of t(q) / t(1),
# whose two steps are each off by themselves. With experts that is of twelve points, so a half more; likewise for an
# A100, of which nothing was compared.
DOUBT = {
    "h100-sxm": {"dense": {"step": 0.12, "shared": 0.113}, "experts": {"step": 0.2, "shared": 0.18}},
    "h200-sxm": {"dense": {"step": 0.12, "shared": 0.113}, "experts": {"step": 0.2, "shared": 0.18}},
    "a100-sxm": {"dense": {"step": 0.18, "shared": 0.17}, "experts": {"step": 0.3, "shared": 0.27}},
}
MEMORY_SHARE, RESERVE_GB = 0.9, 2.5


def lane(engine: str) -> Lane:
    """Where fitting starts."""
    product = Product(bandwidth=0.85, flops=0.75, start_us=4.0, tile=64, norm=2.5)
    eight_bits = Product(bandwidth=0.9, flops=0.5, start_us=6.5, tile=128, norm=2.0)
    attention = Attention(bandwidth=0.85, flops=0.6, start_us=11.0)
    reduce = [
        AllReduce(devices=2, start_us=3.5, small_gbps=60, switch_us=6.0, gbps=200),
        AllReduce(devices=4, start_us=4.5, small_gbps=50, switch_us=7.0, gbps=215),
        AllReduce(devices=8, start_us=5.3, small_gbps=44, switch_us=8.0, gbps=230),
    ]
    graphs = GRAPHS[engine]
    return Lane(
        version=VERSIONS[engine],
        scheduling=SCHEDULING[engine],  # type: ignore[arg-type]
        chunk=CHUNK,
        products={"bf16": product, "fp8": eight_bits, "fp8-block": eight_bits},
        attention={"bf16": attention, "fp8": attention},
        latent=attention,
        experts=Product(bandwidth=0.5, flops=0.3, start_us=40.0, tile=64, norm=1.5),
        all_reduce=reduce,
        across_us=0.0,
        elementwise=Elementwise(calls=3, start_us=3.0, bandwidth=0.8),
        overheads_ms=Overheads(base=0.0, spec=0.0, per_draft_step=0.0),
        graphs=None if graphs is None else Graphs(unit=graphs[0], sizes=graphs[1]),
        missing=MISSING.get(engine),
    )


def roofline(name: str, lanes: dict[str, Lane]) -> Roofline:
    if name == "a100-sxm":
        lanes = {engine: _without_fp8(each) for engine, each in lanes.items()}
    dense, experts = (Doubt(**DOUBT[name][kind]) for kind in ("dense", "experts"))
    return Roofline(
        peaks=PEAKS[name],
        memory_share=MEMORY_SHARE,
        reserve_gb=RESERVE_GB,
        dense=dense,
        experts=experts,
        lanes=lanes,
    )


def with_blocks(lanes: dict[str, Lane]) -> dict[str, Lane]:
    """vLLM's products in blocks are taken to be SGLang's."""
    block = lanes["sglang"].products["fp8-block"]
    own = lanes["vllm"].model_copy(update={"products": {**lanes["vllm"].products, "fp8-block": block}})
    return {**lanes, "vllm": own}


def files(lanes: dict[str, Lane], date: str) -> dict[str, dict[str, Any]]:
    """By name, ready to be written."""
    return {name: _file(name, lanes, date) for name in PEAKS}


def _file(name: str, lanes: dict[str, Lane], date: str) -> dict[str, Any]:
    hardware, interconnect = HARDWARE[name]
    return {
        "schema": CONSTANTS_SCHEMA,
        "provenance": {**Provenance.here().model_dump(), "command": "python profiles/fit.py --data DIRECTORY"},
        "hardware": {"name": hardware, "memory_gbps": PEAKS[name].memory_gbps, "interconnect": interconnect},
        "notes": _notes(name),
        "sources": _sources(name, date),
        "roofline": roofline(name, lanes).model_dump(exclude_none=True),
    }


def _without_fp8(each: Lane) -> Lane:
    return each.model_copy(
        update={"products": {"bf16": each.products["bf16"]}, "attention": {"bf16": each.attention["bf16"]}}
    )


def _notes(name: str) -> list[str]:
    if name == "h100-sxm":
        return []
    if name == "h200-sxm":
        return ["what share of the peaks is reached is that of an H100, where it was fitted"]
    return [
        "what share of the peaks is reached is that of an H100, where it was fitted, and no step of an A100 was "
        "compared with this: measure before relying on it"
    ]


def _sources(name: str, date: str) -> list[dict[str, Any]]:
    fitted = "" if name == "h100-sxm" else ", fitted on an H100"
    return [
        {
            "numbers": "roofline.peaks, hardware",
            "what": "the maker's data sheet of the device",
            "date": date,
        },
        {
            "numbers": "lanes: products, attention, latent, experts, all_reduce, elementwise",
            "what": f"kernel times that NVIDIA collected, as operator sums of Llama and DeepSeek-R1 steps{fitted}",
            "package": "aiconfigurator-core",
            "version": "0.12.0",
            "licence": "Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES",
            "tables": [
                "gemm_perf",
                "generation_attention_perf",
                "context_attention_perf",
                "generation_mla_perf",
                "moe_perf",
                "custom_allreduce_perf",
                "nccl_perf",
            ],
            "date": date,
        },
        {
            "numbers": "lanes: overheads_ms",
            "what": "steps of Qwen3-8B on one H100 SXM (vLLM 0.11.0, SGLang 0.5.3.post3), plain and with EAGLE-3, less "
            "the computed passes",
            "package": "gpustack/gpustack",
            "licence": "Apache-2.0",
            "tables": ["docs/performance-lab/qwen3-8b/h100-latency.md"],
            "date": date,
        },
        {
            "numbers": "lanes: per_sequence_us, across_us",
            "what": "what measured milliseconds a token exceed the computed ones by, for each running sequence (H100, "
            "answers of 512 tokens and more) and for each all-reduce of DeepSeek-R1 in two nodes (SGLang 0.5.8, "
            "TensorRT-LLM of dynamo 0.8.1; seven points)",
            "package": "aiconfigurator-core",
            "version": "0.12.0",
            "licence": "Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES",
            "tables": ["silicon_sample.csv"],
            "date": date,
        },
        {
            "numbers": "lanes: graphs, chunk, scheduling",
            "what": "defaults of the engines' published code",
            "tables": ["vllm/config/vllm.py", "sglang/srt/server_args.py"],
            "date": date,
        },
    ]


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value
