"""The trace of a run: an observer of every verification, and TRACE.json made from what it saw.

It goes over the work once more, outside the contest, so that looking costs the contest nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor

from specctl.bench.runners import EngineRunner
from specctl.bench.work import Request
from specctl.drafts import Draft
from specctl.engine.scheduler import DraftLength, Policy
from specctl.engine.sequence import Sequence
from specctl.engine.stats import EngineStats, SpeculationCounters
from specctl.engine.verify import Verdict
from specctl.schemas.base import Provenance
from specctl.schemas.trace import SCHEMA, RequestTrace, Trace, TraceClass


@dataclass(frozen=True)
class _Block:
    """One draft of one sequence. context: tokens before it."""

    context: int
    drafted: int
    accepted: int
    confidence: list[float]
    rank: list[int]


@dataclass
class Observer:
    """Notes the drafts of every request, by the engine's id."""

    blocks: dict[int, list[_Block]] = field(default_factory=dict)

    def __call__(self, sequences: list[Sequence], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        if not any(draft.length):
            return
        drafted_BK1 = scores_BMV[:, :-1].gather(2, draft.token_BK[..., None])
        rank_BK = 1 + (scores_BMV[:, :-1] > drafted_BK1).sum(-1)
        confidences = None if draft.confidence_BK is None else draft.confidence_BK.double().clamp(0, 1).tolist()
        rows = zip(sequences, draft.length, verdict.num_accepted_B.tolist(), rank_BK.tolist(), strict=True)
        for b, (sequence, length, accepted, rank) in enumerate(rows):
            if length:
                confidence = [] if confidences is None else confidences[b][:length]
                block = _Block(len(sequence), length, accepted, confidence, rank[:length])
                self.blocks.setdefault(sequence.request_id, []).append(block)


def trace_run(
    runner: EngineRunner, groups: list[list[Request]], provenance: Provenance, progress: Callable[[str], None]
) -> Trace:
    """Run the groups once more under observation. A draft with probabilities is asked for its confidence; the bound it
    must reach stays the policy's, none when there is no policy."""
    progress(f"tracing {runner.name}")
    runner = replace(runner, policy=_asking_confidence(runner.policy), stats=EngineStats())
    engine, observer = runner.engine, Observer()
    runner.dial.policy, engine.stats = runner.policy, runner.stats
    by_class: dict[str, list[list[_Block]]] = {}
    engine.observer = observer
    try:
        for group in groups:
            ids = {engine.add(request.token_ids, runner.params(request)): request for request in group}
            while engine.has_work:
                engine.step()
            for request_id, request in ids.items():
                by_class.setdefault(request.class_, []).append(observer.blocks.pop(request_id, []))
    finally:
        engine.observer = None
    return Trace(
        schema=SCHEMA,
        provenance=provenance,
        k=runner.max_k,
        temperature=runner.decoding.temperature,
        classes=[_summarise(name, requests, runner.max_k) for name, requests in by_class.items()],
    )


def _asking_confidence(policy: Policy) -> Policy:
    def asking(batch: int, context: float) -> DraftLength:
        said = policy(batch, context)
        return DraftLength(said.k, said.min_confidence or 0.0)

    return asking


def _summarise(name: str, requests: list[list[_Block]], k: int) -> TraceClass:
    counters = SpeculationCounters()
    blocks = list(chain.from_iterable(requests))
    for block in blocks:
        counters.add_block(block.drafted, block.accepted)
    known = all(block.confidence for block in blocks)
    return TraceClass(
        **{"class": name},
        context=round(sum(block.context for block in blocks) / len(blocks), 1) if blocks else 0.0,
        num_drafts=counters.num_drafts,
        drafted_per_position=counters.drafted_per_position,
        accepted_per_position=counters.accepted_per_position,
        requests=[RequestTrace(histogram=_histogram(each, k)) for each in requests],
        confidence=[block.confidence for block in blocks] if known else [],
        rank=[block.rank for block in blocks],
    )


def _histogram(blocks: list[_Block], k: int) -> list[int]:
    counts = [0] * (k + 1)
    for block in blocks:
        counts[block.accepted] += 1
    return counts
