"""vLLM: the value of --speculative-config, with a K for every range of batches."""

from __future__ import annotations

import json
from typing import Any

from specctl.tune.outputs.schedule import IN_TARGET, Engine, Schedule

METHODS = {
    "llama": "draft_model",
    "mtp": "mtp",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "ngram": "ngram",
}
FILE = "vllm-speculative-config.json"


def vllm(schedule: Schedule) -> Engine:
    if not schedule.speculates or (schedule.data_parallel > 1 and schedule.static == 0):
        return Engine("vLLM", {}, ("speculation does not pay: leave out --speculative-config",))
    value: dict[str, Any] = {}
    notes = list(schedule.not_said)
    if schedule.kind in METHODS:
        value["method"] = METHODS[schedule.kind]
    else:
        notes.append("method: add it, the kind of the draft is not known here")
    if schedule.kind not in IN_TARGET:
        if schedule.draft is None:
            notes.append("model: add where the draft is")
        else:
            value["model"] = schedule.draft
    if schedule.data_parallel > 1:
        value["num_speculative_tokens"] = schedule.static
        notes.append(
            f"data parallel over {schedule.data_parallel}: vLLM drops a table of K there, since its ranks could choose "
            f"differently; {schedule.static_words}"
        )
    else:
        value["num_speculative_tokens"] = schedule.longest
        if len(schedule.tiers) > 1:
            value["num_speculative_tokens_per_batch_size"] = _table(schedule)
            notes.append(
                "a table of K runs with full CUDA graphs in model runner V2 only (VLLM_USE_V2_MODEL_RUNNER=1); V1 "
                "falls back to piecewise ones, which costs more than it gains at small batches"
            )
        if schedule.lost > 0.005:
            notes.append(f"no contexts in its table: one K for all of them loses {schedule.lost:.1%} at most")
    if any(tier.k == 0 for tier in schedule.tiers) and schedule.data_parallel == 1:
        notes.append("at K = 0 it still keeps the draft's cache in step, which is not free")
    return Engine("vLLM", {FILE: json.dumps(value, indent=2) + "\n"}, tuple(notes))


def _table(schedule: Schedule) -> list[list[int]]:
    """Inclusive ranges from 1; beyond the last one its K goes on."""
    return [
        [tier.low, max(tier.low, schedule.largest) if tier.high is None else tier.high, tier.k]
        for tier in schedule.tiers
    ]
