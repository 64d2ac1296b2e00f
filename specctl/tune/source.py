"""Where a profile and acceptance come from: a shipped name or a file; a TRACE, a number, or this machine's own run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specctl.bench.entrants import enter, label_drafts
from specctl.bench.options import BenchOptions
from specctl.bench.runners import EngineRunner
from specctl.bench.trace import trace_run
from specctl.bench.work import in_groups, read_work
from specctl.errors import UsageError
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target, identify
from specctl.prompts import Prompt
from specctl.schemas.base import Provenance
from specctl.schemas.policy import Bound, BoundDraft
from specctl.schemas.profile import Profile
from specctl.schemas.trace import Trace, read_trace
from specctl.shipped import shipped


@dataclass(frozen=True)
class Pair:
    """Target and draft as far as they are known."""

    target: Bound
    draft: BoundDraft


def find_profile(name: str) -> Path:
    """A file, or the name of a shipped one. Raises UsageError with the names there are."""
    path = Path(name)
    if path.is_file():
        return path
    shipped_path = shipped("profiles") / f"{name}.yaml"
    if shipped_path.is_file():
        return shipped_path
    names = sorted(path.stem for path in shipped("profiles").glob("*.yaml"))
    raise UsageError(f"--profile {name}: is no file and no shipped profile (shipped: {', '.join(names) or 'none yet'})")


def read_acceptance(given: str) -> float | Trace:
    """A probability from 0 to 1, or what is in a TRACE.json."""
    try:
        probability = float(given)
    except ValueError:
        return read_trace(Path(given))
    if math.isfinite(probability) and 0 <= probability <= 1:
        return probability
    raise UsageError(f"--acceptance {given}: expected a probability from 0 to 1, or a TRACE.json")


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


def check_pair(profile: Profile, where: str, target: Bound | None, draft: BoundDraft | None) -> Pair:
    """Whose numbers these are. target, draft: whose acceptance it is, as far as that is known.

    Raises UsageError where the profile is of other models, or lacks the steps of a draft that has some.
    """
    profiled = Bound(name=profile.model.name, digest=profile.model.digest)
    drafter = profile.drafter or BoundDraft(kind=None)
    if target is not None:
        _check_same(where, "target", profiled.digest, target.digest)
        profiled = target if profiled.digest is None else profiled
    if draft is not None:
        if None not in (drafter.kind, draft.kind) and drafter.kind != draft.kind:
            raise UsageError(
                f"{where}: is the profile of a draft of kind {drafter.kind}, acceptance is of kind {draft.kind}"
            )
        if draft.kind not in (None, "ngram") and not profile.draft:
            raise UsageError(
                f"{where}: has no draft steps, and a draft of kind {draft.kind} takes some; profile with --draft"
            )
        _check_same(where, "draft", drafter.digest, draft.digest)
        drafter = draft if drafter.digest is None else drafter
    return Pair(profiled, drafter)


def _check_same(where: str, what: str, profiled: str | None, traced: str | None) -> None:
    if profiled is not None and traced is not None and profiled != traced:
        raise UsageError(
            f"{where}: is the profile of a {what} with tensors_sha {profiled[:12]}, acceptance is of one with "
            f"{traced[:12]}; profile the pair that is to be tuned"
        )
