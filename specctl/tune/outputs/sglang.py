"""SGLang: flags, and for EAGLE kinds the JSON of --speculative-adaptive-config with one tier for every range of
batches.

A chain of K tokens is verified with the definite one before it, so its flags want K + 1 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from specctl.tune.outputs.schedule import IN_TARGET, Engine, Schedule

ALGORITHMS = {"llama": "STANDALONE", "mtp": "EAGLE", "eagle": "EAGLE", "eagle3": "EAGLE3", "ngram": "NGRAM"}
ADAPTIVE = ("EAGLE", "EAGLE3")
FLAGS, CONFIG = "sglang-flags.txt", "sglang-adaptive.json"


def sglang(schedule: Schedule) -> Engine:
    algorithm = ALGORITHMS.get(schedule.kind or "")
    if schedule.kind == "medusa":
        return Engine("SGLang", {}, ("it has no Medusa heads",))
    adaptive = algorithm in ADAPTIVE and schedule.data_parallel == 1 and len(schedule.tiers) > 1
    if not schedule.speculates or (not adaptive and schedule.static == 0):
        return Engine("SGLang", {}, ("speculation does not pay: leave out --speculative-algorithm",))
    notes = [*schedule.not_said, *_notes(schedule, algorithm, adaptive)]
    steps = (schedule.tiers[0].k or schedule.longest) if adaptive else schedule.static
    flags = [] if algorithm is None else [f"--speculative-algorithm {algorithm}"]
    if schedule.kind not in IN_TARGET and schedule.draft is not None:
        flags.append(f"--speculative-draft-model-path {schedule.draft}")
    if algorithm != "NGRAM":
        flags += [f"--speculative-num-steps {steps}", "--speculative-eagle-topk 1"]
    flags.append(f"--speculative-num-draft-tokens {steps + 1}")
    files = {}
    if adaptive:
        flags += ["--speculative-adaptive", f"--speculative-adaptive-config {CONFIG}"]
        files[CONFIG] = json.dumps(_slots(schedule), indent=2) + "\n"
    files[FLAGS] = " ".join(flags) + "\n"
    return Engine("SGLang", files, tuple(notes))


def _notes(schedule: Schedule, algorithm: str | None, adaptive: bool) -> Iterator[str]:
    if algorithm is None:
        yield "--speculative-algorithm: add it, the kind of the draft is not known here"
    if schedule.kind not in IN_TARGET and schedule.draft is None:
        yield "--speculative-draft-model-path: add where the draft is"
    if adaptive:
        yield "every slot has one tier, so that K follows the batch alone and not the engine's own average"
        if schedule.lost > 0.005:
            yield f"no contexts in its slots: one K for all of them loses {schedule.lost:.1%} at most"
    elif len(schedule.tiers) > 1:
        why = "with attention data parallelism" if schedule.data_parallel > 1 else f"of {algorithm or 'this kind'}"
        yield f"K does not follow the batch {why}; {schedule.static_words}"
    if algorithm == "STANDALONE":
        yield "a draft model of its own is verified against one-hot proposals, so at T > 0 it accepts less"


def _slots(schedule: Schedule) -> dict[str, dict[str, list[int]]]:
    """By the smallest batch of each."""
    return {str(tier.low): {"candidate_steps": [tier.k]} for tier in schedule.tiers}
