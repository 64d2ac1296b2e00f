"""What a speculative step costs and brings, worked out from a report: the speed-up is the ratio of the two.

`implied` takes every step for one that drafts. A draft may have nothing to propose, as ngram often has; here such steps
are counted as the plain passes they are, so that what is left over is really the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.schemas.report import Comparison, Report


@dataclass(frozen=True)
class StepCost:
    """Of one sequence's mean decode step. tokens: what it brings. drafting: the share of steps that drafted. verify,
    draft, catch_up and rest: what it costs, in plain steps; the rest is whatever is no bare pass, and what speculation
    adds to prefill."""

    run: str
    tokens: float
    drafting: float
    verify: float
    draft: float
    catch_up: float
    rest: float

    @property
    def passes(self) -> float:
        return self.verify + self.draft + self.catch_up

    @property
    def in_passes(self) -> float:
        """The share of a step's time that its bare passes account for; noise can bring it above 1."""
        return self.passes / (self.passes + self.rest)


def step_costs(report: Report) -> list[StepCost]:
    """Of every run of ours with a fixed draft length."""
    return [_cost(report, comparison) for comparison in report.comparisons if comparison.v is not None]


def _cost(report: Report, comparison: Comparison) -> StepCost:
    run = report.run(comparison.run)
    counters = run.speculation
    assert counters is not None
    assert run.k
    decoded = max(1, run.tokens - report.work.n)  # the first token of each answer is prefill's
    steps = max(1, decoded - counters.num_accepted_tokens)  # a step decides one token besides those it accepts
    drafting = min(1.0, counters.num_drafts / steps)
    tokens = decoded / steps
    verify = drafting * (comparison.v or 0.0) + 1 - drafting
    draft = drafting * (run.k - 1) * (comparison.c or 0.0)
    catch_up = drafting * (comparison.u or 0.0)
    rest = tokens / comparison.speedup - verify - draft - catch_up
    return StepCost(run.name, tokens, drafting, verify, draft, catch_up, rest)
