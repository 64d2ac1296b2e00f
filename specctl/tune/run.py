"""Tuning from a profile and acceptance to a policy with its reasons. It reads, prints and writes no file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specctl.errors import UsageError
from specctl.sampling.params import MAX_K
from specctl.schemas.base import Provenance
from specctl.schemas.policy import SCHEMA, AcceptRule, Cell, PolicyFile
from specctl.schemas.profile import Profile
from specctl.schemas.trace import Trace
from specctl.tune.acceptance import Acceptance, ByContext, constant
from specctl.tune.choice import Chooser, Decision
from specctl.tune.costs import StepCosts
from specctl.tune.evidence import Evidence, from_trace
from specctl.tune.limits import Limits, check_first_token
from specctl.tune.prefill import Prefill, read_prefill
from specctl.tune.ranges import Grid, cells, tried_batches
from specctl.tune.source import Pair, check_pair

AtK0 = Literal["follow", "detach"]


@dataclass(frozen=True)
class Asked:
    """k_max: the longest length to look at; None: as long as profile, draft and acceptance know about. extrapolate:
    beyond what acceptance was seen at. Lengths of prompts and answers, where they are known. rule: how tokens are
    accepted, where that is not lossless."""

    k_max: int | None = None
    extrapolate: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_tpot_ms: float | None = None
    max_ttft_ms: float | None = None
    rule: AcceptRule | None = None


@dataclass(frozen=True)
class Tuning:
    """decisions: at every place of the profile, by batch and context. grid: at every batch. profile: its name, of: the
    profile itself. k_max: the longest length that was looked at. prefill: of one request, where lengths are known."""

    profile: str
    of: Profile
    evidence: Evidence
    k_max: int
    chooser: Chooser
    grid: Grid
    decisions: list[Decision]
    policy: PolicyFile
    prefill: Prefill | None
    asked: Asked
    notices: list[str]

    @property
    def acceptance(self) -> Acceptance:
        return self.chooser.acceptance


def run_tune(
    profile: Profile,
    profile_name: str,
    evidence: float | Trace | Evidence,
    evidence_name: str,
    k_max: int | None = None,
    asked: Asked | None = None,
) -> Tuning:
    """evidence: the same acceptance of every token, a trace, or what was read elsewhere.

    Raises UsageError where profile and acceptance do not fit each other or know nothing about k_max, and GateFailed
    where nothing keeps to a limit.
    """
    asked = replace(asked or Asked(), k_max=k_max) if k_max is not None else asked or Asked()
    found = from_trace(evidence, evidence_name) if isinstance(evidence, Trace) else evidence
    pair = check_pair(
        profile, profile_name, *((None, None) if isinstance(found, float) else (found.target, found.draft))
    )
    costs = StepCosts(profile, profile_name)
    known = {profile_name: costs.max_k, "the engine": MAX_K}
    if pair.draft.max_k is not None:
        known["the draft"] = pair.draft.max_k
    found, longest = _lengths(found, evidence_name, known, asked)
    prefill = _prefill(profile, profile_name, asked)
    by_context = ByContext(found.by_context or ((1.0, found.acceptance),))
    chooser, grid, chosen, at_k0 = _choose(costs, by_context, longest, _limits(asked, prefill))
    places = sorted({(cell.batch, cell.context) for cell in profile.steps})
    tuning = Tuning(
        profile=profile_name,
        of=profile,
        evidence=found,
        k_max=longest,
        chooser=chooser,
        grid=grid,
        decisions=[grid.at(batch, context) for batch, context in places],
        policy=PolicyFile(
            schema=SCHEMA,
            provenance=Provenance.here(),
            target=pair.target,
            draft=pair.draft,
            accept=asked.rule or AcceptRule(method="coupled" if found.accept == "coupled" else "exact"),
            at_k0=at_k0,
            k=chosen,
        ),
        prefill=prefill,
        asked=asked,
        notices=[],
    )
    tuning.notices.extend([*_notices(profile, profile_name, costs, pair), *_at_k0_notices(tuning)])
    tuning.notices.extend([*found.notices, *_seen_notices(tuning, by_context), *_limit_notices(tuning)])
    return tuning


def _lengths(found: float | Evidence, name: str, known: dict[str, int], asked: Asked) -> tuple[Evidence, int]:
    """The evidence up to the longest length that is looked at."""
    if isinstance(found, float):
        longest = settle(known, asked.k_max)
        return Evidence(constant(found, longest), []), longest
    entries = ByContext(found.by_context or ((1.0, found.acceptance),))
    seen = entries.max_k
    if not asked.extrapolate:
        if asked.k_max is not None and asked.k_max > seen and asked.k_max <= min(known.values()):
            raise UsageError(
                f"--k-max {asked.k_max}: {name} knows nothing beyond K = {seen}; --extrapolate goes on as if further "
                "tokens were accepted as often as the last one seen"
            )
        return found, settle({name: seen, **known}, asked.k_max)
    longest = settle(known, asked.k_max)
    by_context = tuple((context, each.extended(longest)) for context, each in found.by_context)
    return replace(found, acceptance=found.acceptance.extended(longest), by_context=by_context), longest


def settle(known: dict[str, int], wanted: int | None) -> int:
    """The longest length to look at: `wanted`, or all that everybody allows. Raises UsageError naming who allows
    less."""
    if wanted is None:
        return min(known.values())
    for who, most in known.items():
        if wanted > most:
            raise UsageError(f"--k-max {wanted}: {who} knows nothing beyond K = {most}")
    return wanted


def settle_k(costs: StepCosts, profile_name: str, pair: Pair, wanted: int | None) -> int:
    """The longest length that profile, engine and draft allow, before anything is known of acceptance."""
    known = {profile_name: costs.max_k, "the engine": MAX_K}
    if pair.draft.max_k is not None:
        known["the draft"] = pair.draft.max_k
    return settle(known, wanted)


def _prefill(profile: Profile, name: str, asked: Asked) -> Prefill | None:
    if asked.input_tokens is None or asked.output_tokens is None:
        return None
    return read_prefill(profile, name, asked.input_tokens, asked.output_tokens)


def _limits(asked: Asked, prefill: Prefill | None) -> Limits:
    with_draft = asked.max_ttft_ms is None or check_first_token(prefill, asked.max_ttft_ms)
    return Limits(asked.max_tpot_ms, prefill, with_draft)


def _choose(
    costs: StepCosts, acceptance: ByContext, k_max: int, limits: Limits
) -> tuple[Chooser, Grid, list[Cell], AtK0]:
    """Following costs something at K = 0, and giving up costs every later block. Where blocks never pay, there is
    nothing to give up."""
    if costs.follow_plain:
        chooser = Chooser(costs.giving_up(), acceptance, k_max, limits)
        if _never_pays(chooser):
            grid = Grid.of(chooser)
            return chooser, grid, cells(chooser, grid), "detach"
    chooser = Chooser(costs, acceptance, k_max, limits)
    grid = Grid.of(chooser)
    return chooser, grid, cells(chooser, grid), "follow"


def _never_pays(chooser: Chooser) -> bool:
    batches = tried_batches(chooser.costs.steps.batches)
    columns = (chooser.decide_all(batches, context) for context in chooser.costs.steps.contexts)
    return all(decision.chosen.k == 0 for column in columns for decision in column)


def _at_k0_notices(tuning: Tuning) -> list[str]:
    """What K = 0 costs with a draft that has to follow every step, where the policy may come to it."""
    costs = tuning.chooser.costs
    if not costs.follow_plain:
        return []
    if costs.detaches:
        return [
            "no block pays anywhere, so the draft is given up for every text (at_k0: detach), which then costs nothing"
        ]
    if all(cell.k for cell in tuning.policy.k):
        return []
    batch = next(cell.batch[0] or 1 for cell in tuning.policy.k if cell.k == 0)
    times = costs.at(batch, max(costs.steps.contexts), 1, 0)
    share = float(times.without_S[0] / times.plain_S[0]) - 1
    return [
        f"at K = 0 the draft follows every step, which is {share:.0%} of a plain step at batch {batch}; at_k0: detach "
        "in the policy saves it, and gives the draft up for every text that meets K = 0, to its end"
    ]


def _notices(profile: Profile, profile_name: str, costs: StepCosts, pair: Pair) -> list[str]:
    notices = []
    if not costs.runs_draft and pair.draft.kind != "ngram" and not profile.whole_steps:
        notices.append(f"{profile_name}: has no draft steps: drafting is taken to cost nothing, as looking up does")
    least = max(rows[1] - 1 for _, _, rows in costs.steps.rows())
    if profile.whole_steps and least > 1:
        notices.append(
            f"{profile_name}: K below {least} was not timed everywhere; where it was not, such a step is taken to cost "
            "as much as the least that was, the most it can, so shorter drafts may pay more than is said; profile the "
            "engine at K = 1 too"
        )
    if profile.provenance is None and not profile.sources:
        notices.append(f"{profile_name}: does not say where its numbers come from")
    if pair.draft.kind is None or (pair.draft.digest is None and pair.draft.kind != "ngram"):
        notices.append("the draft is not known by its digest; the policy is bound to none")
    if pair.target.digest is None:
        notices.append("the target is not known by its digest; the policy is bound to none")
    top = max(costs.steps.batches)
    notices.append(f"batches above {top} get what is best at {top}, the largest that was profiled")
    return notices


def _seen_notices(tuning: Tuning, by_context: ByContext) -> list[str]:
    """What was chosen on the word of survival that nobody has seen."""
    notices = []
    seen = [each.observed_k for _, each in by_context.entries if each.observed_k is not None]
    longest = max((cell.k for cell in tuning.policy.k), default=0)
    if seen and longest > min(seen):
        notices.append(
            f"lengths above {min(seen)} rest on extrapolated survival (*): nobody has seen what is accepted there"
        )
    if by_context.entries[0][1].iid:
        notices.append("acceptance is taken to be i.i.d.: real drafts fade with the position, which makes K too large")
    return notices


def _limit_notices(tuning: Tuning) -> list[str]:
    notices = []
    limits, asked = tuning.chooser.limits, tuning.asked
    if asked.max_ttft_ms is not None and not limits.with_draft:
        assert tuning.prefill is not None
        notices.append(
            f"--max-ttft-ms {asked.max_ttft_ms:g}: kept without a draft only, whose own pass over the prompt makes it "
            f"{tuning.prefill.ms(drafts=True):.1f} ms; K = 0 everywhere, and better no draft at all"
        )
    return notices
