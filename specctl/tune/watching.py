"""How far a lossy rule moves what is said: watched in a run of the engine under that rule.

In each place of a block that was reached, what is really said has a distribution of its own: the draft's tokens that
the rule would accept there, and for the rest the target's. Its divergence from the target's is worked out in full and
not sampled, so that little text tells much. Legend: B sequences, K draft slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specctl.bench.runners import EngineRunner
from specctl.bench.work import Request
from specctl.drafts import Dense, Draft
from specctl.engine.sequence import Sequence
from specctl.engine.stats import EngineStats
from specctl.engine.verify import Verdict
from specctl.sampling.params import Accept
from specctl.schemas.base import Provenance
from specctl.schemas.divergence import SCHEMA, Divergence, RequestDivergence, RuleDivergence
from specctl.schemas.policy import Bound, BoundDraft

RULES = ("typical", "threshold=0.9", "threshold=0.7", "threshold=0.5", "threshold=0.3", "threshold=0.1")
"""What is tried, where nothing else is asked for."""


@dataclass
class Watcher:
    """Notes for every request, by the engine's id, what its drafts came to. k: the longest."""

    accept: Accept
    k: int
    histogram: dict[int, list[int]] = field(default_factory=dict)
    kl: dict[int, list[float]] = field(default_factory=dict)

    def __call__(self, sequences: list[Sequence], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        accepted_B = verdict.num_accepted_B.tolist()
        for b, (sequence, length) in enumerate(zip(sequences, draft.length, strict=True)):
            if not length:
                continue
            histogram = self.histogram.setdefault(sequence.request_id, [0] * (self.k + 1))
            kl = self.kl.setdefault(sequence.request_id, [0.0] * self.k)
            histogram[accepted_B[b]] += 1
            prefix = 1.0
            for k in range(min(length, accepted_B[b] + 1)):
                p_V = scores_BMV[b, k].double().softmax(-1)
                said_V = said(p_V, proposed(draft, b, k, p_V), self.accept, prefix)
                kl[k] += max(0.0, float((torch.special.xlogy(said_V, said_V) - torch.special.xlogy(said_V, p_V)).sum()))
                prefix *= float(p_V[draft.token_BK[b, k]])


def said(p_V: Tensor, q_V: Tensor, accept: Accept, prefix: float) -> Tensor:
    """What is said in a place, where the target has p and the draft q. prefix: the product of the target's
    probabilities of the block's tokens before it."""
    if accept.method == "typical":
        ok_V = p_V >= min(accept.epsilon, accept.delta * float(torch.exp(-torch.special.entr(p_V).sum())))
    else:
        ok_V = prefix * p_V >= accept.threshold
    taken_V = q_V * ok_V
    return taken_V + (1 - taken_V.sum()) * p_V


def proposed(draft: Draft, b: int, k: int, like_V: Tensor) -> Tensor:
    """q over the target's vocabulary."""
    q_V = torch.zeros_like(like_V)
    if not isinstance(draft.q, Dense):
        q_V[draft.token_BK[b, k]] = 1.0
        return q_V
    prob_D = draft.q.prob_BKD[b, k].double()
    if draft.q.ids_D is None:
        q_V[: len(prob_D)] = prob_D
    else:
        q_V[draft.q.ids_D] = prob_D
    return q_V


def divergence_run(
    runner: EngineRunner,
    groups: list[list[Request]],
    provenance: Provenance,
    progress: Callable[[str], None],
    pair: tuple[Bound, BoundDraft],
    rules: tuple[str, ...] = RULES,
) -> Divergence:
    """Answer the groups under every rule, all with the runner's longest draft."""
    found = []
    for rule in rules:
        progress(f"watching --accept {rule}")
        found.append(RuleDivergence(accept=rule, requests=_watch(runner, groups, Accept.parse(rule))))
    return Divergence(
        schema=SCHEMA,
        provenance=provenance,
        target=pair[0],
        draft=pair[1],
        k=runner.max_k,
        temperature=runner.decoding.temperature,
        rules=found,
    )


def _watch(runner: EngineRunner, groups: list[list[Request]], accept: Accept) -> list[RequestDivergence]:
    watcher = Watcher(accept, runner.max_k)
    under = replace(runner, accept=accept, stats=EngineStats())
    found = []
    under.engine.observer = watcher
    try:
        for group in groups:
            under.dial.policy, under.engine.stats = under.policy, under.stats
            ids = [under.engine.add(request.token_ids, under.params(request)) for request in group]
            while under.engine.has_work:
                under.engine.step()
            for request_id in ids:
                histogram = watcher.histogram.pop(request_id, [0] * (runner.max_k + 1))
                found.append(
                    RequestDivergence(histogram=histogram, kl=watcher.kl.pop(request_id, [0.0] * runner.max_k))
                )
    finally:
        under.engine.observer = None
    return found
