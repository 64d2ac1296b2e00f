"""What vLLM drafts and accepts, block by block. Run by interop_vllm.py, in vLLM's own environment, without specctl.

    PYTHON_WITH_VLLM benchmarks/vllm_blocks.py JOB.json RESULT.json

Greedy, float32, eager, one prompt after another, end of text ignored. The engine lives in this process, so that the
scheduler can be asked what it had verified; vLLM's own counters stand beside it. unmasked: vLLM's DeepSeek MTP layer
reads zeros in place of the embedding at position 0; here it reads the embedding.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for name, value in (
    ("HF_HUB_OFFLINE", "1"),
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_LOGGING_LEVEL", "ERROR"),
):
    os.environ.setdefault(name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    args.result.write_text(json.dumps(run(json.loads(args.job.read_text()))))


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm

    masks = Unmasked() if job["unmasked"] else None
    llm = vllm.LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=job["speculative_config"],
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    decided = Decided(llm.llm_engine.engine_core.engine_core.scheduler)
    outputs, blocks = [], []
    for ids in job["prompts"]:
        [answer] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        outputs.append(list(answer.outputs[0].token_ids))
        blocks.append(decided.taken())
    if masks is not None and not masks.lifted:
        raise SystemExit("vLLM's MTP layer masked nothing: this is not the layer that unmasked is for")
    return {"vllm": vllm.__version__, "outputs": outputs, "blocks": blocks, "counters": counters(llm)}


class Decided:
    """Notes every verified block, [drafted tokens, how many were accepted], on its way into the scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._blocks: list[tuple[list[int], int]] = []
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self

    def __call__(self, scheduled: Any, output: Any) -> Any:
        for request, index in output.req_id_to_index.items():
            drafted = scheduled.scheduled_spec_decode_tokens.get(request)
            if drafted:
                self._blocks.append((list(drafted), len(output.sampled_token_ids[index]) - 1))
        return self._update(scheduled, output)

    def taken(self) -> list[tuple[list[int], int]]:
        blocks, self._blocks = self._blocks, []
        return blocks


class Unmasked:
    """Stands where that layer's file has `torch`, and has its where() choose the embedding at every position."""

    def __init__(self) -> None:
        from vllm.model_executor.models import deepseek_mtp

        self.lifted = 0
        self._torch = deepseek_mtp.torch
        deepseek_mtp.torch = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def where(self, first: Any, zero: Any, embedding: Any) -> Any:
        self.lifted += int(first.sum())
        return embedding


def counters(llm: Any) -> dict[str, Any]:
    """Of the whole run, as vLLM's metrics have them."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    return found


if __name__ == "__main__":
    main()
