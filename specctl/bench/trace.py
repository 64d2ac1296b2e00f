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
from specctl.schemas.policy import Bound, BoundDraft
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
    """Notes the drafts of every request, by the engine's id, and how many steps it had that could have drafted. stats:
    the engine's, which tell a step that only decodes from one that takes prompts in. asking: the policy."""

    stats: EngineStats
    asking: _Asking
    blocks: dict[int, list[_Block]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    _seen: int = 0

    def __call__(self, sequences: list[Sequence], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        decode_steps = sum(self.stats.steps_by_k.values())
        if decode_steps > self._seen:
            self._seen = decode_steps
            for sequence in sequences if self.asking.last_k else []:
                self.steps[sequence.request_id] = self.steps.get(sequence.request_id, 0) + 1
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
    runner: EngineRunner,
    groups: list[list[Request]],
    provenance: Provenance,
    progress: Callable[[str], None],
    pair: tuple[Bound, BoundDraft] | None = None,
) -> Trace:
    """Run the groups once more under observation. A draft with probabilities is asked for its confidence; the bound it
    must reach stays the policy's, none when there is no policy. pair: target and draft as the trace is to name them."""
    progress(f"tracing {runner.name}")
    asking = _Asking(runner.policy)
    runner = replace(runner, policy=asking, stats=EngineStats())
    engine, observer = runner.engine, Observer(runner.stats, asking)
    runner.dial.policy, engine.stats = runner.policy, runner.stats
    by_class: dict[str, list[_Traced]] = {}
    engine.observer = observer
    try:
        for group in groups:
            ids = {engine.add(request.token_ids, runner.params(request)): request for request in group}
            while engine.has_work:
                engine.step()
            for request_id, request in ids.items():
                traced = _Traced(observer.blocks.pop(request_id, []), observer.steps.pop(request_id, 0))
                by_class.setdefault(request.class_, []).append(traced)
    finally:
        engine.observer = None
    target, draft = (None, None) if pair is None else pair
    return Trace(
        schema=SCHEMA,
        provenance=provenance,
        target=target,
        draft=draft,
        accept=str(runner.accept),
        min_confidence=asking.highest,
        k=runner.max_k,
        temperature=runner.decoding.temperature,
        classes=[_summarise(name, requests, runner.max_k) for name, requests in by_class.items()],
    )


@dataclass(frozen=True)
class _Traced:
    """What was seen of one request."""

    blocks: list[_Block]
    steps: int


class _Asking:
    """A policy that asks for the confidence of every token. highest: the highest bound it has passed on, 0 for none.
    last_k: the length it said last."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.highest = 0.0
        self.last_k = 0

    def __call__(self, batch: int, context: float) -> DraftLength:
        said = self.policy(batch, context)
        bound = said.min_confidence or 0.0
        self.highest = max(self.highest, bound)
        self.last_k = said.k
        return DraftLength(said.k, bound)


def _summarise(name: str, requests: list[_Traced], k: int) -> TraceClass:
    counters = SpeculationCounters()
    blocks = list(chain.from_iterable(request.blocks for request in requests))
    for block in blocks:
        counters.add_block(block.drafted, block.accepted)
    known = all(block.confidence for block in blocks)
    return TraceClass(
        **{"class": name},
        context=round(sum(block.context for block in blocks) / len(blocks), 1) if blocks else 0.0,
        num_drafts=counters.num_drafts,
        drafted_per_position=counters.drafted_per_position,
        accepted_per_position=counters.accepted_per_position,
        requests=[RequestTrace(histogram=_histogram(each.blocks, k), steps=each.steps) for each in requests],
        confidence=[block.confidence for block in blocks] if known else [],
        rank=[block.rank for block in blocks],
        accepted=[block.accepted for block in blocks],
    )


def _histogram(blocks: list[_Block], k: int) -> list[int]:
    counts = [0] * (k + 1)
    for block in blocks:
        counts[block.accepted] += 1
    return counts
