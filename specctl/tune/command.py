"""`tune` as a command: profile and acceptance read or measured, POLICY.yaml and what goes with it written, the table
that tells why shown. Models are opened only to measure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import new_directory, new_file, say, to_json
from specctl.prompts import Prompt
from specctl.schemas.profile import Profile
from specctl.tune import render
from specctl.tune.as_json import as_json as all_of
from specctl.tune.budget import Lossy, within_budget
from specctl.tune.costs import StepCosts
from specctl.tune.evidence import Evidence
from specctl.tune.memory import memory_notice, without_draft
from specctl.tune.mix import Log, read_mix
from specctl.tune.only import Only
from specctl.tune.outputs import files as engine_files
from specctl.tune.outputs.schedule import Engine, schedule
from specctl.tune.profiles import load_profile
from specctl.tune.reading import read_acceptance
from specctl.tune.report import check_name, text_of
from specctl.tune.run import Asked, Tuning, run_tune, settle_k
from specctl.tune.source import check_pair
from specctl.tune.study import Study, Workload, study
from specctl.tune.what_if import Answer, WhatIf, answer
from specctl.tune.wishes import Wishes

if TYPE_CHECKING:
    from specctl.schemas.divergence import Divergence
    from specctl.schemas.trace import Trace

TRACED_AT_ONCE = 8
"""Sequences: what is accepted does not depend on it, and together they are faster."""

MEASURED = "measured here"
IN_TARGET = ("mtp", "eagle3", "ngram")


@dataclass(frozen=True)
class Measuring:
    """How to measure acceptance. decoding: its draft, temperature, longest answer and seed."""

    target: str
    prompts: list[Prompt]
    model: ModelOptions
    decoding: DecodingOptions


@dataclass
class _Files:
    """Temporary places of what is to be written; taken before the work, so that nothing is refused after it."""

    policy: Path | None
    reports: list[tuple[Path, Path]]
    engines: Path | None
    divergence: Path | None


def tune(wishes: Wishes, measuring: Measuring | None, *, as_json: bool) -> None:
    """Choose and write. The table (or with as_json its numbers and the policy) goes to stdout, all else to stderr."""
    assert (wishes.acceptance is None) == (measuring is not None)
    wishes.check()
    for path in wishes.reports:
        check_name(path)
    what_if = None if wishes.what_if is None else WhatIf.parse(wishes.what_if)
    with ExitStack() as stack:
        files = _open(wishes, stack)
        profile, name = load_profile(wishes.profile, wishes.offer)
        alone = without_draft(wishes.profile, wishes.offer)
        workload, asked = _asked(wishes, alone)
        evidence, lossy = _known(wishes, measuring, profile, name, files)
        tuning = run_tune(profile, name, evidence, wishes.acceptance or MEASURED, None, asked)
        if lossy is not None:
            tuning = within_budget(tuning, workload, lossy)
        if alone is not None:
            tuning.notices.append(memory_notice(profile, alone))
        found = study(tuning, workload)
        engines = _engines(tuning, found, wishes, measuring, files)
        told = None if what_if is None else _answer(tuning, what_if, wishes, profile, name)
        _write(tuning, found, engines, files)
    for notice in [*profile.notes, *tuning.notices, *found.notices]:
        say(f"note: {notice}")
    value = all_of(tuning, found, engines, told) if as_json else None
    sys.stdout.write(render.terminal(tuning, found, told) if value is None else to_json(value) + "\n")
    written = [path for path in (wishes.output, *wishes.reports, wishes.engine_config, wishes.save_divergence) if path]
    if written:
        say(f"written: {', '.join(map(str, written))}")


def _known(
    wishes: Wishes, measuring: Measuring | None, profile: Profile, name: str, files: _Files
) -> tuple[float | Evidence | Trace, Lossy | None]:
    """Acceptance, read or measured, and what lossy rules would change, if that is asked for."""
    lossy = None if wishes.quality_budget is None else Lossy.read(wishes, measures=measuring is not None)
    if measuring is None:
        assert wishes.acceptance is not None
        evidence = read_acceptance(wishes.acceptance, Only.parse(wishes.only))
        if isinstance(evidence, float) and wishes.extrapolate:
            raise UsageError("--extrapolate: a number holds for every position, so leave it out")
        return evidence, lossy
    measures = lossy is not None and lossy.measures
    if measures and not measuring.decoding.temperature:
        raise UsageError(
            "--quality-budget: at temperature 0 a divergence is no number; measure at a --temperature above 0"
        )
    trace, divergence = _measure(measuring, profile, name, wishes, measures)
    if lossy is not None and divergence is not None:
        lossy = lossy.measured(divergence)
        if files.divergence is not None:
            value = divergence.model_dump(mode="json", by_alias=True)
            files.divergence.write_text(to_json(value) + "\n", encoding="utf-8")
    return trace, lossy


def _open(wishes: Wishes, stack: ExitStack) -> _Files:
    def place(path: Path | None) -> Path | None:
        return None if path is None else stack.enter_context(new_file(path, force=wishes.force))

    engines = None
    if wishes.engine_config is not None:
        engines = stack.enter_context(new_directory(wishes.engine_config, force=wishes.force))
    reports = [(path, stack.enter_context(new_file(path, force=wishes.force))) for path in wishes.reports]
    return _Files(place(wishes.output), reports, engines, place(wishes.save_divergence))


def _asked(wishes: Wishes, alone: Profile | None) -> tuple[Workload, Asked]:
    mix = None if wishes.mix is None else read_mix(wishes.mix)
    lengths = wishes.input_tokens, wishes.output_tokens
    if isinstance(mix, Log) and lengths == (None, None):
        lengths = mix.input_tokens, mix.output_tokens
    asked = Asked(
        k_max=wishes.k_max,
        extrapolate=wishes.extrapolate,
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        max_tpot_ms=wishes.max_tpot_ms,
        max_ttft_ms=wishes.max_ttft_ms,
    )
    return Workload(mix, wishes.arrival_rate, alone), asked


def _measure(
    measuring: Measuring, profile: Profile, where: str, wishes: Wishes, divergence: bool
) -> tuple[Trace, Divergence | None]:
    """Drafts as long as the profile knows about: what happens at shorter lengths is part of it."""
    from specctl.pair import identify, open_draft, open_target
    from specctl.tune.here import divergence_here, trace_here

    target = open_target(measuring.target, measuring.model)
    assert measuring.decoding.draft is not None
    draft = open_draft(measuring.decoding.draft, target)
    pair = check_pair(profile, where, *identify(target, draft))  # before the work, not after it
    longest = settle_k(StepCosts(profile, where), where, pair, wishes.k_max)
    batch = min(TRACED_AT_ONCE, len(measuring.prompts))
    decoding = replace(measuring.decoding, k=longest, batch=batch)
    trace = trace_here(target, draft, measuring.prompts, decoding, say)
    return trace, divergence_here(target, draft, measuring.prompts, decoding, say) if divergence else None


def _engines(tuning: Tuning, found: Study, wishes: Wishes, measuring: Measuring | None, files: _Files) -> list[Engine]:
    if files.engines is None:
        return []
    draft = wishes.draft_model or wishes.offer.draft_config
    if draft is None and measuring is not None:
        draft = measuring.decoding.draft
    gain = next(way.gain for way in found.ways if way.name == "this policy")
    made = schedule(tuning, found.served, gain, None if draft in IN_TARGET else draft, wishes.data_parallel or 1)
    engines = engine_files.engines(made)
    policy = wishes.output.name if wishes.output is not None else "the policy"
    engine_files.write(engines, made, policy, files.engines)
    return engines


def _answer(tuning: Tuning, what_if: WhatIf, wishes: Wishes, profile: Profile, name: str) -> Answer:
    if what_if.tp is None:
        return answer(tuning, what_if, profile, name)
    if wishes.offer.model_config is None:
        raise UsageError(
            f"--what-if tp={what_if.tp}: {name} has steps of its own, taken at tp {profile.model.tp}; another tp is "
            "known only where steps are computed, from a profile of constants with --model-config"
        )
    other, _ = load_profile(wishes.profile, replace(wishes.offer, tp=what_if.tp, nodes=None))
    return answer(tuning, what_if, other, name)


def _write(tuning: Tuning, found: Study, engines: Sequence[Engine], files: _Files) -> None:
    if files.policy is not None:
        files.policy.write_text(render.policy_yaml(tuning), encoding="utf-8")
    for path, place in files.reports:
        place.write_text(text_of(path, tuning, found, engines), encoding="utf-8")
