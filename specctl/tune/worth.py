"""What a further slot has to bring: the confidence below which one more token is not worth drafting."""

from __future__ import annotations

from specctl.tune.choice import Decision


def needed(decision: Decision, k: int) -> float | None:
    """The chance that the first k + 1 tokens are all accepted, from which on drafting k + 1 of them instead of k pays:
    goodput at k times what the slot costs. Above 1: it never pays. None where its cost is not known."""
    if k + 1 >= len(decision.candidates):
        return None
    times, here = decision.times, decision.candidates[k]
    before = times.drafting_S(k, k) if k else times.without_S
    more = float(times.drafting_S(k + 1, k + 1)[0] - before[0])
    return max(0.0, float(here.tokens_S[0] / here.step_S[0]) * more)


def crossover(decisions: list[Decision], k: int) -> int | None:
    """Of one context, by batch: the first at which a step of length k costs as much as it brings, and from which on it
    stays so. None: it pays up to the last."""
    pays = [decision.candidates[k].speedup > 1 for decision in decisions]
    if pays[-1]:
        return None
    last = max((i for i, each in enumerate(pays) if each), default=-1)
    return decisions[last + 1].batch
