"""A benchmark from loaded models to a report. It prints and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specctl.bench.anatomy import Anatomy, dissect
from specctl.bench.contest import Tally, hold
from specctl.bench.entrants import enter, label_drafts
from specctl.bench.options import BenchOptions
from specctl.bench.passes import measure_passes
from specctl.bench.report import compare_runs, make_run
from specctl.bench.runners import EngineRunner, Runner
from specctl.bench.trace import trace_run
from specctl.bench.work import in_groups, read_work, work_sha
from specctl.errors import UsageError
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target, identify
from specctl.prompts import Prompt
from specctl.schemas import report as schema
from specctl.schemas.base import Provenance
from specctl.schemas.report import Report, Work
from specctl.schemas.trace import Trace


@dataclass(frozen=True)
class Measured:
    """anatomy, trace: None unless asked for."""

    report: Report
    anatomy: Anatomy | None
    trace: Trace | None


def run_bench(
    target: Target,
    drafts: list[OpenedDraft],
    prompts: list[Prompt],
    options: BenchOptions,
    decoding: DecodingOptions,
    progress: Callable[[str], None] = lambda sentence: None,
) -> Report:
    """Measure plain decoding, every draft at every length, and transformers if asked, on the same prompts.

    Answers that differ where they may not are in the report (`identical` is false) and raise nothing. Raises UsageError
    for options that contradict each other and for prompts that do not fit, before anything is run.
    """
    return measure(target, drafts, prompts, options, decoding, progress).report


def measure(
    target: Target,
    drafts: list[OpenedDraft],
    prompts: list[Prompt],
    options: BenchOptions,
    decoding: DecodingOptions,
    progress: Callable[[str], None] = lambda sentence: None,
) -> Measured:
    """`run_bench`, and what else the options ask for."""
    labelled = label_drafts(drafts)
    requests = read_work(target, prompts, decoding)
    runners = enter(target, labelled, requests, options, decoding, progress)
    traced = _to_trace(runners) if options.trace else None
    groups = in_groups(requests, decoding.batch)
    tallies = hold(runners, groups, options.repeats, target.device, progress)

    context = _mean_context(tallies[0], [len(request.token_ids) for request in requests])
    ks = sorted({runner.k for runner in runners if isinstance(runner, EngineRunner) and runner.k})
    passes = None
    if options.passes:
        progress("timing bare passes")
        passes = measure_passes(target, labelled, ks, decoding.batch, context)
    provenance = Provenance.here(str(target.device), target.num_threads)
    report = Report(
        schema=schema.SCHEMA,
        provenance=provenance,
        work=Work(
            prompts_sha=work_sha(requests),
            n=len(requests),
            max_tokens=decoding.max_tokens,
            temperature=decoding.temperature,
            seed=decoding.seed,
        ),
        runs=[make_run(runner, tally) for runner, tally in zip(runners, tallies, strict=True)],
        comparisons=compare_runs(requests, runners, tallies, passes, decoding.temperature, target.dtype, progress),
    )
    anatomy = None
    if options.anatomy:
        progress("timing the parts of a pass")
        anatomy = dissect(target, *_ours(runners, tallies), ks, decoding.batch, context)
    trace = None
    if traced is not None:
        trace = trace_run(traced, groups, provenance, progress, identify(target, labelled[traced.draft or ""]))
    return Measured(report, anatomy, trace)


def _to_trace(runners: list[Runner]) -> EngineRunner:
    """The run with the longest draft: what happens at shorter ones is part of it."""
    drafting = [runner for runner in runners if isinstance(runner, EngineRunner) and runner.max_k]
    if len({runner.draft for runner in drafting}) != 1:
        found = ", ".join(sorted({runner.draft or "" for runner in drafting})) or "none that drafts a token"
        raise UsageError(f"--trace needs one draft to trace, there is {found}; give one --draft and a --k above 0")
    return max(drafting, key=lambda runner: runner.max_k)


def _mean_context(plain: Tally, prompt_lengths: list[int]) -> int:
    """The mean number of tokens before a step: the prompt and half of the answer."""
    contexts = [
        length + len(answer.token_ids) / 2 for length, answer in zip(prompt_lengths, plain.answers[0], strict=True)
    ]
    return max(1, round(sum(contexts) / len(contexts)))


def _ours(runners: list[Runner], tallies: list[Tally]) -> tuple[list[EngineRunner], list[Tally]]:
    pairs = [(r, t) for r, t in zip(runners, tallies, strict=True) if isinstance(r, EngineRunner)]
    return [runner for runner, _ in pairs], [tally for _, tally in pairs]
