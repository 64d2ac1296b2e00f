"""`tune` as a command: profile and acceptance read or measured, POLICY.yaml written, the table that tells why shown."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.bench.command import say
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import new_file, to_json
from specctl.pair import identify, open_draft, open_target
from specctl.prompts import Prompt
from specctl.schemas.profile import Profile, read_profile
from specctl.schemas.trace import Trace
from specctl.tune import render
from specctl.tune.costs import StepCosts
from specctl.tune.run import run_tune, settle_k
from specctl.tune.source import check_pair, find_profile, read_acceptance, trace_here

TRACED_AT_ONCE = 8
"""Sequences: what is accepted does not depend on it, and together they are faster."""


@dataclass(frozen=True)
class Wishes:
    """profile: a file or a shipped name. acceptance: a TRACE.json or a number, None when it is measured."""

    profile: str
    output: Path
    acceptance: str | None = None
    k_max: int | None = None
    force: bool = False


@dataclass(frozen=True)
class Measuring:
    """How to measure acceptance. decoding: its draft, temperature, longest answer and seed."""

    target: str
    prompts: list[Prompt]
    model: ModelOptions
    decoding: DecodingOptions


def tune(wishes: Wishes, measuring: Measuring | None, *, as_json: bool) -> None:
    """Choose and write. The table (or with as_json its numbers and the policy) goes to stdout, all else to stderr."""
    assert (wishes.acceptance is None) == (measuring is not None)
    if wishes.output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {wishes.output}: expected a name that ends in .yaml")
    with new_file(wishes.output, force=wishes.force) as file:
        path = find_profile(wishes.profile)
        profile = read_profile(path)
        evidence = read_acceptance(wishes.acceptance) if wishes.acceptance is not None else None
        if measuring is not None:
            evidence = _measure(measuring, profile, str(path), wishes.k_max)
        assert evidence is not None
        tuning = run_tune(profile, str(path), evidence, wishes.acceptance or "measured here", wishes.k_max)
        for notice in tuning.notices:
            say(f"note: {notice}")
        file.write_text(render.policy_yaml(tuning), encoding="utf-8")
    sys.stdout.write(to_json(render.as_json(tuning)) + "\n" if as_json else render.terminal(tuning))
    say(f"written: {wishes.output}")


def _measure(measuring: Measuring, profile: Profile, where: str, k_max: int | None) -> Trace:
    """Drafts as long as the profile knows about: what happens at shorter lengths is part of it."""
    target = open_target(measuring.target, measuring.model)
    assert measuring.decoding.draft is not None
    draft = open_draft(measuring.decoding.draft, target)
    pair = check_pair(profile, where, *identify(target, draft))  # before the work, not after it
    longest = settle_k(StepCosts(profile, where), where, pair, k_max)
    batch = min(TRACED_AT_ONCE, len(measuring.prompts))
    return trace_here(target, draft, measuring.prompts, replace(measuring.decoding, k=longest, batch=batch), say)
