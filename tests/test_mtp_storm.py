"""The storm of test_engine_storm with drafts that read hidden states: pages come back, texts are what they are alone,
and whoever is followed is followed in every step, some to the end and some until they are given up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import test_engine_storm as storms
import tiny
import tiny_eagle3
import tiny_mtp
from decoding import all_back, eagle3_draft, engine, model, mtp_draft, tokenizer
from fixtures import Make

from specctl.engine.scheduler import DraftLength
from specctl.engine.sequence import Status

REQUESTS = 400


@pytest.mark.parametrize(
    ("family", "detach"),
    [("llama", False), ("llama", True), ("deepseek_v3", True), ("eagle3", False), ("eagle3", True)],
)
def test_hundreds_of_requests(make: Make, monkeypatch: pytest.MonkeyPatch, family: str, detach: bool) -> None:
    if family == "eagle3":
        target, head = tiny_eagle3.pair(make, ids=tiny_eagle3.IDS)
        drafter = eagle3_draft(head, target)
    else:
        target = tiny_mtp.with_mtp(make, family)
        drafter = mtp_draft(target)
    monkeypatch.setattr(storms, "REQUESTS", REQUESTS)
    rng = random.Random(2)
    options = {"tokens": tokenizer(target), "eos_ids": frozenset(range(0, 256, 29)) | {tiny.END}}
    alone = {}
    for kind in storms.kinds(rng):
        [choices] = engine(model(target), **options).run([(list(kind.prompt), storms._without_k(kind.params))])
        alone[kind] = [s.output for s in choices]

    def policy(batch: int, context: float) -> DraftLength:
        return DraftLength(storms.policy(batch, context).k, detach=detach)

    e = engine(model(target), drafter, policy, pages=17, chunk=48, max_sequences=20, max_length=96, **options)
    given_up: set[int] = set()
    step = e.step

    def watched() -> Any:
        outputs = step()
        for s in e.scheduler.running:
            if s.detached:
                given_up.add(id(s))
            elif s.cached:
                assert s.draft_cached == s.cached
        return outputs

    monkeypatch.setattr(e, "step", watched)
    storm = storms.Storm(e, alone, rng)
    storm.rage()
    assert all_back(e)
    stats = e.stats
    counts = {
        "preemptions": stats.preemptions,
        **{f"aborts while {s.value}": stats.aborts.get(s.value, 0) for s in Status if s is not Status.FINISHED},
        **{f"steps with K = {k}": stats.steps_by_k.get(k, 0) for k in range(6)},
        "answers compared": storm.compared,
        "accepted": stats.speculation.num_accepted_tokens,
        **{f"ended by {reason}": storm.finished[reason] for reason in ("stop", "length", "abort")},
    }
    assert all(counts.values()), counts
    assert bool(given_up) == detach
    assert storm.compared > REQUESTS / 2
