"""From tallies to the report: runs, their counters, and the comparisons that are worth making."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from specctl.bench.baseline import TransformersRunner, assisted_name
from specctl.bench.compare import (
    Difference,
    differences,
    identical,
    must_agree,
    near_tie,
    speedup,
)
from specctl.bench.contest import Tally
from specctl.bench.passes import Costs, PassTimes
from specctl.bench.runners import Answer, EngineRunner, Runner
from specctl.bench.work import Request
from specctl.engine.stats import SpeculationCounters
from specctl.schemas.report import Comparison, NearTie, Percentiles, Run, Speculation


def make_run(runner: Runner, tally: Tally) -> Run:
    answers = [answer for repeat in tally.answers for answer in repeat]
    between = [1000 * (a.last - a.first) / (len(a.token_ids) - 1) for a in answers if len(a.token_ids) > 1]
    return Run(
        name=runner.name,
        k=runner.k,
        batch=runner.batch,
        tokens=int(tally.tokens[0].sum()),
        seconds=tally.seconds.sum(1).tolist(),
        tok_s=float(tally.tokens.sum() / tally.seconds.sum()),
        ttft_ms=_percentiles([1000 * answer.first for answer in answers]),
        tpot_ms=_percentiles(between),
        speculation=_speculation(runner, tally.answers[0]),
    )


def compare_runs(
    requests: list[Request],
    runners: Sequence[Runner],
    tallies: Sequence[Tally],
    passes: PassTimes | None,
    temperature: float,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> list[Comparison]:
    """Every comparison of `pairs`; differences that are no near-ties are told at once. passes: None when not timed."""
    by_name = {runner.name: (runner, tally) for runner, tally in zip(runners, tallies, strict=True)}
    comparisons = []
    for name, other in pairs(runners):
        (runner, mine), (against, theirs) = by_name[name], by_name[other]
        same: bool | None = None
        found: list[Difference] = []
        if must_agree(runner, against, temperature):
            limit = near_tie(runner, against, dtype)
            found = differences(requests, mine, theirs, against)
            same = identical(found, limit, dtype)
            for difference in found:
                progress(f"{name} differs from {other} at {_place(difference)}")
        comparisons.append(_comparison(runner, against, mine, theirs, passes, same, found))
    return comparisons


def pairs(runners: Sequence[Runner]) -> Iterator[tuple[str, str]]:
    """Speculation against plain decoding, ours and transformers'; then ours against theirs, like against like."""
    names = {runner.name for runner in runners}
    ours = [runner for runner in runners if isinstance(runner, EngineRunner) and runner.draft is not None]
    for runner in ours:
        yield runner.name, "plain"
    if "transformers" not in names:
        return
    yield "plain", "transformers"
    for other in runners:
        if isinstance(other, TransformersRunner) and other.k:
            yield other.name, "transformers"
    for runner in ours:
        theirs = assisted_name(runner.draft or "", runner.k or 0)
        if theirs in names:
            yield runner.name, theirs


def _comparison(
    runner: Runner,
    against: Runner,
    mine: Tally,
    theirs: Tally,
    passes: PassTimes | None,
    same: bool | None,
    found: list[Difference],
) -> Comparison:
    measured = speedup(mine, theirs)
    costs: Costs | None = None
    implied: float | None = None
    if (
        passes is not None
        and isinstance(runner, EngineRunner)
        and runner.draft is not None
        and runner.k
        and against.name == "plain"
    ):
        costs = passes.costs(runner.draft, runner.k)
        length = _counters(mine.answers[0]).mean_acceptance_length
        implied = None if length is None else costs.implied(runner.k, length)
    return Comparison(
        run=runner.name,
        against=against.name,
        speedup=measured.value,
        ci95=None if measured.interval is None else list(measured.interval),
        c=None if costs is None else costs.c,
        v=None if costs is None else costs.v,
        u=None if costs is None else costs.u,
        implied=implied,
        efficiency=None if implied is None else measured.value / implied,
        identical=same,
        near_ties=[NearTie(prompt=d.prompt, position=d.position, gap=d.gap) for d in found],
    )


def _speculation(runner: Runner, answers: list[Answer]) -> Speculation | None:
    if not isinstance(runner, EngineRunner) or runner.draft is None:
        return None
    counters = _counters(answers)
    return Speculation(
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        drafted_per_position=counters.drafted_per_position,
        accepted_per_position=counters.accepted_per_position,
        acceptance_rate=counters.acceptance_rate,
        mean_acceptance_length=counters.mean_acceptance_length,
        counts_bonus=True,
        emitted_tokens=counters.emitted_tokens,
        accept=str(runner.accept),
        lossy=runner.accept.lossy,
    )


def _counters(answers: list[Answer]) -> SpeculationCounters:
    """The sum over requests."""
    total = SpeculationCounters()
    for answer in answers:
        counters = answer.counters
        assert counters is not None
        total.num_drafts += counters.num_drafts
        total.num_draft_tokens += counters.num_draft_tokens
        total.num_accepted_tokens += counters.num_accepted_tokens
        total.emitted_tokens += counters.emitted_tokens
        for name in ("drafted_per_position", "accepted_per_position"):
            into, more = getattr(total, name), getattr(counters, name)
            into.extend([0] * (len(more) - len(into)))
            for k, count in enumerate(more):
                into[k] += count
    return total


def _percentiles(values: list[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p95 = np.percentile(values, [50, 95])
    return Percentiles(p50=float(p50), p95=float(p95))


def _place(difference: Difference) -> str:
    where = f"prompt {difference.prompt}, token {difference.position} of the answer"
    return where + ("" if difference.gap is None else f", by {difference.gap:.2g} in the scores")
