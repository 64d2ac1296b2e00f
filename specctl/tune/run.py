"""Tuning from a profile and acceptance to a policy with its reasons. It reads, prints and writes no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specctl.engine.engine import MAX_K
from specctl.errors import UsageError
from specctl.schemas.base import Provenance
from specctl.schemas.policy import SCHEMA, AcceptRule, PolicyFile
from specctl.schemas.profile import Profile
from specctl.schemas.trace import Trace
from specctl.tune.acceptance import Acceptance, constant
from specctl.tune.choice import Chooser, Decision
from specctl.tune.costs import StepCosts
from specctl.tune.evidence import Evidence, from_trace
from specctl.tune.ranges import cells
from specctl.tune.source import Pair, check_pair

AtK0 = Literal["follow", "detach"]


@dataclass(frozen=True)
class Tuning:
    """decisions: at every place of the profile, by batch and context. profile: its name. k_max: the longest length that
    was looked at."""

    profile: str
    acceptance: Acceptance
    k_max: int
    decisions: list[Decision]
    policy: PolicyFile
    notices: list[str]


def run_tune(
    profile: Profile, profile_name: str, evidence: float | Trace, evidence_name: str, k_max: int | None = None
) -> Tuning:
    """evidence: the same acceptance of every token, or a trace. k_max None: as long as all of them know about.

    Raises UsageError where profile and trace do not fit each other or know nothing about k_max.
    """
    trace = evidence if isinstance(evidence, Trace) else None
    whose = (None, None) if trace is None else (trace.target, trace.draft)
    pair = check_pair(profile, profile_name, *whose)
    costs = StepCosts(profile, profile_name)
    longest = settle_k(costs, profile_name, pair, k_max)
    if isinstance(evidence, Trace):
        found = from_trace(evidence, evidence_name)
        longest = _settle({evidence_name: found.acceptance.max_k, "the rest": longest}, k_max)
    else:
        found = Evidence(constant(evidence, longest), [])
    chooser, at_k0 = _chooser(profile, profile_name, found.acceptance, longest)
    places = sorted({(cell.batch, cell.context) for cell in profile.steps})
    return Tuning(
        profile=profile_name,
        acceptance=found.acceptance,
        k_max=longest,
        decisions=[chooser.decide(batch, context) for batch, context in places],
        policy=PolicyFile(
            schema=SCHEMA,
            provenance=Provenance.here(),
            target=pair.target,
            draft=pair.draft,
            accept=AcceptRule(method="coupled" if trace is not None and trace.accept == "coupled" else "exact"),
            at_k0=at_k0,
            k=cells(chooser),
        ),
        notices=[*_notices(profile, profile_name, costs, pair), *_at_k0_notices(chooser), *found.notices],
    )


def _chooser(profile: Profile, name: str, acceptance: Acceptance, k_max: int) -> tuple[Chooser, AtK0]:
    """Following costs something at K = 0, and giving up costs every later block. Where blocks never pay, there is
    nothing to give up."""
    if StepCosts(profile, name).follow_plain:
        chooser = Chooser(StepCosts(profile, name, detaches=True), acceptance, k_max)
        if all(cell.k == 0 for cell in cells(chooser)):
            return chooser, "detach"
    return Chooser(StepCosts(profile, name), acceptance, k_max), "follow"


def _at_k0_notices(chooser: Chooser) -> list[str]:
    """What K = 0 costs with a draft that has to follow every step, where the policy may come to it."""
    costs = chooser.costs
    if not costs.follow_plain:
        return []
    if costs.detaches:
        return [
            "no block pays anywhere, so the draft is given up for every text (at_k0: detach), which then costs nothing"
        ]
    chosen = cells(chooser)
    if all(cell.k for cell in chosen):
        return []
    batch = next(cell.batch[0] or 1 for cell in chosen if cell.k == 0)
    times = costs.at(batch, max(costs.steps.contexts), 1, 0)
    share = float(times.without_S[0] / times.plain_S[0]) - 1
    return [
        f"at K = 0 the draft follows every step, which is {share:.0%} of a plain step at batch {batch}; at_k0: detach "
        "in the policy saves it, and gives the draft up for every text that meets K = 0, to its end"
    ]


def settle_k(costs: StepCosts, profile_name: str, pair: Pair, wanted: int | None) -> int:
    """The longest length to look at: `wanted`, or all that profile, engine and draft allow. Raises UsageError naming
    who allows less."""
    known = {profile_name: costs.max_k, "the engine": MAX_K}
    if pair.draft.max_k is not None:
        known["the draft"] = pair.draft.max_k
    return _settle(known, wanted)


def _settle(known: dict[str, int], wanted: int | None) -> int:
    if wanted is None:
        return min(known.values())
    for who, most in known.items():
        if wanted > most:
            raise UsageError(f"--k-max {wanted}: {who} knows nothing beyond K = {most}")
    return wanted


def _notices(profile: Profile, profile_name: str, costs: StepCosts, pair: Pair) -> list[str]:
    notices = []
    if not costs.runs_draft and pair.draft.kind != "ngram":
        notices.append(f"{profile_name}: has no draft steps: drafting is taken to cost nothing, as looking up does")
    if profile.provenance is None:
        notices.append(f"{profile_name}: does not say where its numbers come from")
    if pair.draft.kind is None or (pair.draft.digest is None and pair.draft.kind != "ngram"):
        notices.append("the draft is not known by its digest; the policy is bound to none")
    if pair.target.digest is None:
        notices.append("the target is not known by its digest; the policy is bound to none")
    top = max(costs.steps.batches)
    notices.append(f"batches above {top} get what is best at {top}, the largest that was profiled")
    return notices
