"""What a tuning means for what is really served: the load it meets, the ways it is held against, up to which batch a
limit is kept, what each kind of prompt would want, and how much depends on acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.errors import GateFailed, UsageError
from specctl.schemas.profile import Profile
from specctl.tune.acceptance import Acceptance, ByContext
from specctl.tune.choice import Chooser, Decision
from specctl.tune.compare import Served, Way, by_tokens, evenly, ways
from specctl.tune.costs import StepCosts
from specctl.tune.limits import Kept, up_to
from specctl.tune.load import Played, Steady, Tempo, play, steady
from specctl.tune.memory import largest
from specctl.tune.mix import Histogram, Log
from specctl.tune.places import column, known, nearest
from specctl.tune.prefill import read_prefill
from specctl.tune.ranges import tried_batches
from specctl.tune.run import Tuning

CHANGES = (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Workload:
    """mix: a histogram or a log; rate: of arrival, requests a second. Neither: nothing is known. alone: the profile
    without a draft, where that fits more."""

    mix: Histogram | Log | None = None
    rate: float | None = None
    alone: Profile | None = None


@dataclass(frozen=True)
class Load:
    """plain, policy: what the same load comes to without a draft and under the policy."""

    words: str
    context: int
    plain: Steady | Played
    policy: Steady | Played


@dataclass(frozen=True)
class Sensitivity:
    """Were each token accepted this much more or less often: the best K and its speed-up, by batch."""

    change: float
    ks: list[int]
    speedups: list[float]


@dataclass(frozen=True)
class KindChoice:
    """One class of prompts by itself. survival, interval: by position. ks: what it would want at each batch."""

    name: str
    context: float | None
    survival: list[float]
    interval: tuple[list[float], list[float]] | None
    ks: list[int]
    speedups: list[float]


@dataclass(frozen=True)
class Study:
    """context, batches: where sensitivity and kinds are looked at."""

    served: Served
    ways: list[Way]
    load: Load | None
    kept: list[Kept]
    context: int
    batches: list[int]
    sensitivity: list[Sensitivity]
    kinds: list[KindChoice]
    notices: list[str]


def study(tuning: Tuning, workload: Workload) -> Study:
    """Raises GateFailed where nothing keeps to a limit, UsageError where a load cannot be worked out."""
    notices: list[str] = []
    context = _context(tuning)
    load, served = _served(tuning, workload, context, notices)
    kept = list(_kept(tuning, notices))
    fits = known(tuning)[nearest(tuning, context)]
    batches = sorted({cell.batch for cell in tuning.of.steps if cell.batch <= fits})
    found = tuning.chooser.by_context
    return Study(
        served=served,
        ways=ways(served, tuning.chooser, tuning.policy),
        load=load,
        kept=kept,
        context=context,
        batches=batches,
        sensitivity=[_sensitivity(tuning, found, change, batches, context) for change in CHANGES],
        kinds=[
            _kind(tuning, kind.name, kind.context, kind.acceptance, batches, context) for kind in tuning.evidence.kinds
        ],
        notices=notices,
    )


def gain_of(tuning: Tuning, workload: Workload) -> float:
    """Of what the policy's choices come to over what is served."""
    _, served = _served(tuning, workload, _context(tuning), [])
    return served.gain(lambda decision: decision.chosen.speedup)


def best_ks(tuning: Tuning, acceptance: Acceptance | ByContext, batches: Sequence[int], context: int) -> np.ndarray:
    """[K + 1, N]: the predicted speed-up of every length, K = 0 first, under the least stop there is."""
    by_context = ByContext(((1.0, acceptance),)) if isinstance(acceptance, Acceptance) else acceptance
    longest = min(tuning.k_max, by_context.max_k)
    chooser = Chooser(tuning.chooser.costs, by_context, longest)
    least = by_context.at(context).stops[0].confidence
    keys = [(0, None), *((k, least) for k in range(1, longest + 1))]
    speeds = chooser.speeds(batches, context, keys, 0)
    return np.stack([speeds[key][:, 0] for key in keys])


def _sensitivity(tuning: Tuning, found: ByContext, change: float, batches: Sequence[int], context: int) -> Sensitivity:
    scaled = ByContext(tuple((at, acceptance.scaled(change)) for at, acceptance in found.entries))
    speed_KN = best_ks(tuning, scaled, batches, context)
    return Sensitivity(change, speed_KN.argmax(0).tolist(), speed_KN.max(0).tolist())


def _kind(
    tuning: Tuning, name: str, at: float | None, acceptance: Acceptance, batches: Sequence[int], context: int
) -> KindChoice:
    interval = acceptance.interval(400)
    speed_KN = best_ks(tuning, acceptance, batches, context)
    return KindChoice(
        name=name,
        context=at,
        survival=acceptance.survival().tolist(),
        interval=None if interval is None else (interval[0].tolist(), interval[1].tolist()),
        ks=speed_KN.argmax(0).tolist(),
        speedups=speed_KN.max(0).tolist(),
    )


def _context(tuning: Tuning) -> int:
    """The mean one of a sequence that decodes, where lengths are known; else the middle one of the profile."""
    if tuning.prefill is not None:
        return tuning.prefill.input_tokens + tuning.prefill.output_tokens // 2
    contexts = tuning.grid.contexts
    return contexts[(len(contexts) - 1) // 2]


# -- the load ----------------------------------------------------------------------------------------------------------


def _served(tuning: Tuning, workload: Workload, context: int, notices: list[str]) -> tuple[Load | None, Served]:
    if workload.mix is None and workload.rate is None:
        return None, evenly(tuning.decisions)
    plain, policy = tempos(tuning, workload, context)
    if isinstance(workload.mix, Histogram):
        tokens = workload.mix.tokens(lambda batch: plain.tpot(batch))
        above = [batch for batch in tokens if batch > plain.most]
        if above:
            notices.append(f"--mix: batches above {plain.most}, the largest profiled, are taken to cost what it does")
        return None, _of_batches(tuning, tokens, context, "the batches of --mix, by output tokens")
    if isinstance(workload.mix, Log):
        played = play(plain, workload.mix), play(policy, workload.mix)
        load = Load(f"a log of {len(workload.mix.arrivals)} requests", context, *played)
        _log_notices(load, plain.most, notices)
        return load, _of_batches(tuning, played[1].tokens, context, "the batches that the log leads to")
    assert workload.rate is not None
    if tuning.prefill is None:
        raise UsageError("--arrival-rate needs --input-tokens and --output-tokens: how long a request stays decides")
    lengths = tuning.prefill.input_tokens, tuning.prefill.output_tokens
    both = steady(plain, workload.rate, *lengths), steady(policy, workload.rate, *lengths)
    words = f"{workload.rate:g} requests a second of {lengths[0]} tokens in and {lengths[1]} out"
    _rate_notices(both, words, notices)
    batch = max(1, round(both[1].batch))
    return Load(words, context, *both), _of_batches(
        tuning, {batch: 1.0}, context, f"batch {batch}, where {words} settle"
    )


def _of_batches(tuning: Tuning, tokens: dict[int, float], context: int, words: str) -> Served:
    decisions = tuning.chooser.decide_all(list(tokens), context)
    return by_tokens(decisions, list(tokens.values()), f"{words}, context {context}")


def tempos(tuning: Tuning, workload: Workload, context: int) -> tuple[Tempo, Tempo]:
    """Plain decoding, which has the memory of the draft for itself, and the policy; at every batch that fits."""
    batches = [d.batch for d in column(tuning, nearest(tuning, context))]
    cells = [tuning.policy.lookup(batch, context) for batch in batches]
    speeds = tuning.chooser.speeds(batches, context, {(cell.k, cell.confidence) for cell in cells}, 0)
    speed_N = np.array([speeds[cell.k, cell.confidence][n, 0] for n, cell in enumerate(cells)])
    tpot_N = tuning.chooser.costs.at_all(batches, context, 1, 0).plain_S[:, 0] / speed_N
    alone = workload.alone or tuning.of
    top = largest(alone)[nearest(tuning, context)]
    more = [batch for batch in tried_batches([cell.batch for cell in alone.steps]) if batch <= top]
    plain_N = StepCosts(alone, tuning.profile).at_all(more, context, 1, 0).plain_S[:, 0]
    return (
        Tempo(np.interp(np.arange(1, more[-1] + 1), more, plain_N), Prompt(tuning, False)),
        Tempo(np.interp(np.arange(1, batches[-1] + 1), batches, tpot_N), Prompt(tuning, any(cell.k for cell in cells))),
    )


@dataclass(frozen=True)
class Prompt:
    """Milliseconds of a prompt, with or without the draft's own pass; nothing where the profile has no prefill."""

    tuning: Tuning
    drafts: bool

    def __call__(self, tokens: int) -> float:
        if not self.tuning.of.prefill:
            return 0.0
        return read_prefill(self.tuning.of, self.tuning.profile, tokens, 1).ms(self.drafts)


def _rate_notices(both: tuple[Steady, Steady], words: str, notices: list[str]) -> None:
    for what, found in zip(("without a draft", "under the policy"), both, strict=True):
        if found.saturated:
            notices.append(
                f"{words}: saturated {what}, which serves {found.most:.3g} a second at most; requests pile up, and the "
                "figures are those of the largest batch"
            )


def _log_notices(load: Load, most: int, notices: list[str]) -> None:
    for what, found in (("without a draft", load.plain), ("under the policy", load.policy)):
        assert isinstance(found, Played)
        if found.queued:
            notices.append(f"{load.words}: {what} up to {found.queued} of them waited, {most} at most run at a time")


# -- limits ------------------------------------------------------------------------------------------------------------


def _kept(tuning: Tuning, notices: list[str]) -> list[Kept]:
    """Up to which batch a token takes no longer than asked. Raises GateFailed where not even the first keeps to it."""
    limit = tuning.asked.max_tpot_ms
    if limit is None:
        return []
    kept = []
    for context in tuning.grid.contexts:
        here = column(tuning, context)
        batches = [decision.batch for decision in here]
        plain = up_to(batches, [_tpot(tuning, decision, 0) for decision in here], limit)
        policy = up_to(batches, [_tpot(tuning, decision, None) for decision in here], limit)
        kept.append(Kept(context, plain, policy))
        if policy < batches[-1]:
            notices.append(
                f"--max-tpot-ms {limit:g} at context {context}: kept up to batch {policy}, without a draft up to "
                f"{plain}; a policy cannot bound the batch, the server's --batch does"
            )
    if not any(each.policy for each in kept):
        first = tuning.grid.rows[0][0]
        raise GateFailed(
            f"--max-tpot-ms {limit:g}: nothing meets it, the fastest at batch {first.batch} and context "
            f"{first.context} is K = {first.best.k} with {_tpot(tuning, first, first.best.k):.2f} ms a token"
        )
    return kept


def _tpot(tuning: Tuning, decision: Decision, k: int | None) -> float:
    candidate = decision.chosen if k is None else decision.candidates[k]
    shared = tuning.chooser.limits.shared_ms(decision.batch, drafts=candidate.k > 0)
    return candidate.tpot_ms + float(shared)
