"""The entrants: which runs a command line asks for, each as a runner with a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.bench.baseline import transformers_runners
from specctl.bench.options import BASELINES, BenchOptions
from specctl.bench.runners import Dial, EngineRunner, Runner
from specctl.bench.work import Request
from specctl.engine.engine import MAX_K
from specctl.engine.scheduler import Policy
from specctl.engine.stats import EngineStats
from specctl.errors import UsageError
from specctl.options import DecodingOptions
from specctl.pair import DEFAULT_K, OpenedDraft, Target, build_engine, constant, open_policy
from specctl.sampling.params import Accept
from specctl.schemas.policy import read_policy

EXACT = Accept("exact")
RESERVED = ("plain", "transformers")


@dataclass(frozen=True)
class Entry:
    """One way of running a draft: its length (None: the policy's), its longest, how it is accepted."""

    k: int | None
    max_k: int
    policy: Policy
    accept: Accept

    def name(self, label: str) -> str:
        return f"{label} policy" if self.k is None else f"{label} k={self.k}"


def label_drafts(drafts: list[OpenedDraft]) -> dict[str, OpenedDraft]:
    """The drafts by the names their runs get: the last part of a directory or hub id. Raises UsageError for a name that
    would stand for two things."""
    labelled: dict[str, OpenedDraft] = {}
    for draft in drafts:
        label = draft.name if draft.checkpoint is None else Path(draft.name).resolve().name
        if label in RESERVED:
            raise UsageError(f"--draft {draft.name}: a run called {label} is another one here; rename the directory")
        if label in labelled:
            raise UsageError(
                f"--draft {draft.name}: its runs would be called {label} like those of --draft {labelled[label].name}; "
                "name each draft once, or rename a directory"
            )
        labelled[label] = draft
    return labelled


def enter(
    target: Target,
    drafts: dict[str, OpenedDraft],
    requests: list[Request],
    options: BenchOptions,
    decoding: DecodingOptions,
    progress: Callable[[str], None],
) -> list[Runner]:
    """plain first, then every draft at every length, then transformers. Engines are built and models loaded."""
    assert set(options.baselines) <= set(BASELINES), options.baselines
    check_options(drafts, options, decoding)
    if not drafts:
        open_policy(decoding, target, None)  # refuses what has a meaning only with a draft
    entries = {label: plan(target, draft, options, decoding) for label, draft in drafts.items()}
    for draft in drafts.values():
        for notice in draft.notices:
            progress(f"note: {notice}")
    longest = max(len(request.token_ids) + request.max_tokens for request in requests)
    # No larger cache than the work needs; the room behind the longest text keeps K from being cut short there.
    target = replace(target, max_length=min(target.max_length, longest + MAX_K + 2))
    coupled = next((e.accept for each in entries.values() for e in each if e.accept.method == "coupled"), EXACT)
    runners: list[Runner] = [*_engine_runners(target, None, [Entry(0, 0, constant(0), coupled)], decoding, progress)]
    for label, draft in drafts.items():
        runners += _engine_runners(target, (label, draft), entries[label], decoding, progress)
    if "transformers" in options.baselines:
        lengths = {label: (draft, _assisted_k(entries[label])) for label, draft in drafts.items()}
        assisted = {label: (draft, k) for label, (draft, k) in lengths.items() if options.assisted and k > 0}
        runners += transformers_runners(target, assisted, decoding, progress)
    return runners


def check_options(drafts: dict[str, OpenedDraft], options: BenchOptions, decoding: DecodingOptions) -> None:
    """Raises UsageError for options that contradict each other."""
    if not options.sweep_k:
        return
    if not drafts:
        raise UsageError("--sweep-k is given but no --draft; name a draft, or ngram")
    for flag, value in (("--k", decoding.k), ("--policy", decoding.policy)):
        if value is not None:
            raise UsageError(f"--sweep-k and {flag} are both given, and each says how much is drafted; leave one out")
    if len(set(options.sweep_k)) < len(options.sweep_k):
        raise UsageError(f"--sweep-k {','.join(map(str, options.sweep_k))}: names a length twice")


def plan(target: Target, draft: OpenedDraft, options: BenchOptions, decoding: DecodingOptions) -> list[Entry]:
    """How a draft is to be run. Raises UsageError for a length or a policy it cannot have."""
    if options.sweep_k:
        draft.check_k("--sweep-k", max(options.sweep_k))
        return [Entry(k, k, constant(k), decoding.accept or EXACT) for k in options.sweep_k]
    policy, accept = open_policy(decoding, target, draft)
    if decoding.policy is not None and decoding.k is None:
        return [Entry(None, read_policy(decoding.policy).max_k, policy, accept or EXACT)]
    k = draft.default_k if decoding.k is None else decoding.k
    return [Entry(k, k, policy, accept or EXACT)]


def _engine_runners(
    target: Target,
    draft: tuple[str, OpenedDraft] | None,
    entries: list[Entry],
    decoding: DecodingOptions,
    progress: Callable[[str], None],
) -> list[EngineRunner]:
    """All runs of one draft share an engine: its cache is allocated once."""
    label, opened = (None, None) if draft is None else draft
    dial = Dial()
    # Ids only: transformers' generate makes no text either.
    engine = build_engine(target, opened, dial, max_sequences=decoding.batch, ignore_tokenizer=True, announce=progress)
    return [
        EngineRunner(
            name="plain" if label is None else entry.name(label),
            draft=label,
            k=entry.k,
            max_k=entry.max_k,
            batch=decoding.batch,
            accept=entry.accept,
            engine=engine,
            dial=dial,
            policy=entry.policy,
            target=target,
            decoding=decoding,
            stats=EngineStats(),
        )
        for entry in entries
    ]


def _assisted_k(entries: list[Entry]) -> int:
    """The length that transformers assists with: of those measured the one nearest to the default, 0 for none."""
    return min((entry.max_k for entry in entries if entry.max_k), key=lambda k: abs(k - DEFAULT_K), default=0)
