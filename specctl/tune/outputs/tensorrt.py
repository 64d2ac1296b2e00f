"""TensorRT-LLM: speculative_config of its options file, one max_draft_len, off above a number of requests."""

from __future__ import annotations

from typing import Any

import yaml

from specctl.tune.outputs.schedule import IN_TARGET, Engine, Schedule

TYPES = {"llama": "Draft_Target", "mtp": "MTP", "eagle3": "Eagle3", "ngram": "NGram", "medusa": "Medusa"}
FILE = "tensorrt-llm.yaml"


def tensorrt(schedule: Schedule) -> Engine:
    if not schedule.speculates or schedule.static == 0:
        why = "speculation does not pay" + ("" if not schedule.speculates else " with one K for all batches")
        return Engine("TensorRT-LLM", {}, (f"{why}: leave out speculative_config",))
    value: dict[str, Any] = {}
    notes = list(schedule.not_said)
    if schedule.kind in TYPES:
        value["decoding_type"] = TYPES[schedule.kind]
    else:
        notes.append("decoding_type: add it, it is not known here or it has none for this kind")
    value["max_draft_len"] = schedule.static
    if schedule.kind == "mtp":
        value["num_nextn_predict_layers"] = schedule.static
    if schedule.kind not in IN_TARGET:
        if schedule.draft is None:
            notes.append("speculative_model: add where the draft is")
        else:
            value["speculative_model"] = schedule.draft
    if schedule.off_above is not None:
        value["max_concurrency"] = schedule.off_above
    if len(schedule.tiers) > 1:
        notes.append(
            f"{schedule.static_words}; its draft_len_schedule has changed its meaning between versions (thresholds "
            "from below, then from above) and is not written"
        )
    return Engine("TensorRT-LLM", {FILE: yaml.safe_dump({"speculative_config": value}, sort_keys=False)}, tuple(notes))
