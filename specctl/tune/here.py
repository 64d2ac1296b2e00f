"""Acceptance by this machine's own run. It alone of all files of `tune` needs models."""

from __future__ import annotations

from collections.abc import Callable

from specctl.bench.entrants import enter, label_drafts
from specctl.bench.options import BenchOptions
from specctl.bench.runners import EngineRunner
from specctl.bench.trace import trace_run
from specctl.bench.work import in_groups, read_work
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target, identify
from specctl.prompts import Prompt
from specctl.schemas.base import Provenance
from specctl.schemas.divergence import Divergence
from specctl.schemas.trace import Trace
from specctl.tune.watching import divergence_run


def trace_here(
    target: Target,
    draft: OpenedDraft,
    prompts: list[Prompt],
    decoding: DecodingOptions,
    progress: Callable[[str], None],
) -> Trace:
    """What becomes of this draft on these prompts. decoding.k: the longest length to learn about."""
    requests = read_work(target, prompts, decoding)
    runners = enter(target, label_drafts([draft]), requests, BenchOptions(), decoding, progress)
    (runner,) = (each for each in runners if isinstance(each, EngineRunner) and each.draft is not None)
    provenance = Provenance.here(str(target.device), target.num_threads)
    return trace_run(runner, in_groups(requests, decoding.batch), provenance, progress, identify(target, draft))


def divergence_here(
    target: Target,
    draft: OpenedDraft,
    prompts: list[Prompt],
    decoding: DecodingOptions,
    progress: Callable[[str], None],
) -> Divergence:
    """How far lossy rules move what the target says on these prompts, and what they accept."""
    requests = read_work(target, prompts, decoding)
    runners = enter(target, label_drafts([draft]), requests, BenchOptions(), decoding, progress)
    (runner,) = (each for each in runners if isinstance(each, EngineRunner) and each.draft is not None)
    provenance = Provenance.here(str(target.device), target.num_threads)
    groups = in_groups(requests, decoding.batch)
    return divergence_run(runner, groups, provenance, progress, identify(target, draft))
