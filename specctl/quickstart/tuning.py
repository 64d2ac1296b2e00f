"""From a draft to a draft length, and to a verdict of the gates: `profile`, `tune` and `validate` on a small scale.

Acceptance is measured on the prompts of validation, so that nothing is chosen by what is measured in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from specctl.options import DecodingOptions
from specctl.output import to_json
from specctl.pair import OpenedDraft, Target
from specctl.profile.grid import choose_grid
from specctl.profile.render import as_yaml
from specctl.profile.run import measure
from specctl.prompts import Prompt
from specctl.schemas.gates import GatesFile
from specctl.schemas.trace import Trace
from specctl.schemas.validation import Validation
from specctl.tune.here import trace_here
from specctl.tune.render import policy_yaml
from specctl.tune.run import Tuning, run_tune
from specctl.validate.render import markdown
from specctl.validate.run import Asked, validate_pair

PROFILE, TRACE, POLICY, GATES, VALIDATION = "PROFILE.yaml", "TRACE.json", "POLICY.yaml", "GATES.yaml", "VALIDATION.md"

BATCHES, CONTEXT, PROMPT, REPEATS = (1, 4), 96, 64, 7
LONGEST_K = 5
TRACED, TRACED_AT_ONCE = 16, 8
CHECKED_AT_ONCE, SAMPLED = 4, 400
KEPT = 0.9


@dataclass(frozen=True)
class Tuned:
    """k: what the policy says for one text at a time, of the trace's context. predicted: its speed-up."""

    tuning: Tuning
    trace: Trace
    k: int
    predicted: float


def tune(
    target: Target,
    draft: OpenedDraft,
    prompts: list[Prompt],
    max_tokens: int,
    directory: Path,
    say: Callable[[str], None],
) -> Tuned | None:
    """Profile this machine, trace the draft, choose; PROFILE.yaml, TRACE.json and POLICY.yaml are left behind.

    None, and no policy, when nothing was ever drafted, as may be with prompt lookup.
    """
    context = min(CONTEXT, target.max_length // 2)
    grid = choose_grid(target, draft, BATCHES, (context,))
    grid = replace(
        grid, rows=tuple(q for q in grid.rows if q <= LONGEST_K + 1), prompts=(min(PROMPT, *grid.prompts[-1:]),)
    )
    profile = measure(target, draft, grid, REPEATS)
    (directory / PROFILE).write_text(as_yaml(profile), encoding="utf-8")
    prompts = prompts[:TRACED]
    say(f"tracing {len(prompts)} prompts")
    batch = min(TRACED_AT_ONCE, len(prompts))
    decoding = DecodingOptions(drafts=(draft.name,), k=LONGEST_K, batch=batch, max_tokens=max_tokens)
    trace = trace_here(target, draft, prompts, decoding, lambda sentence: None)
    (directory / TRACE).write_text(to_json(trace.model_dump(mode="json", by_alias=True)) + "\n", encoding="utf-8")
    if not any(each.num_drafts for each in trace.classes):
        return None
    tuning = run_tune(profile, PROFILE, trace, TRACE)
    (directory / POLICY).write_text(policy_yaml(tuning), encoding="utf-8")
    decision = next(decision for decision in tuning.decisions if decision.batch == 1)
    return Tuned(tuning, trace, decision.chosen.k, decision.chosen.speedup)


def check(
    target: Target,
    draft: OpenedDraft,
    length: float,
    k: int,
    prompts: list[Prompt],
    max_tokens: int,
    directory: Path,
) -> Validation:
    """The gates over the pair; GATES.yaml and VALIDATION.md are left behind. length: the mean acceptance length that
    training measured at k on these prompts. Decoded here it is nearly the same, or the two do not run the same
    draft."""
    asked = {
        "schema": "specctl.gates/1",
        "compatible": {},
        "greedy_exact": {},
        "distribution": {"samples": SAMPLED},
        "draft_cache": {},
        "acceptance_length": {"min": round(1 + KEPT * (length - 1), 3), "k": k},
    }
    (directory / GATES).write_text(yaml.safe_dump(asked, sort_keys=False), encoding="utf-8")
    gates = GatesFile.model_validate(asked)
    decoding = DecodingOptions(
        drafts=(draft.name,), k=k, max_tokens=max_tokens, batch=min(CHECKED_AT_ONCE, len(prompts))
    )
    validation = validate_pair(Asked(gates, None), target, draft.name, prompts, decoding)
    (directory / VALIDATION).write_text(markdown(validation), encoding="utf-8")
    return validation
