"""The gate `distribution`: whether tokens sampled with speculation follow the target's own distribution.

Each sampled token is scored by a plain pass of the target over the finished text, outside the engine, in two ways.
Its place in that distribution, drawn uniformly within its own mass, is uniform on [0, 1) when sampling is right; a
chi-square test over equal bins says how well. And a bounded function of q / p, the draft's probability over the
target's, has a known mean: that is the direction in which mistakes of speculation err, so that the sum of deviations
tells a small one from chance (Freedman's bound for martingales, 1975, which holds for any number of tokens).

Legend: T tokens of an answer, V token ids, K draft slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specctl.bench.passes import BareModel, cache_shape
from specctl.bench.work import Request
from specctl.drafts import Dense, Draft
from specctl.engine.engine import MAX_K, Engine
from specctl.engine.scheduler import Policy
from specctl.engine.sequence import Sequence as Text
from specctl.engine.verify import Verdict
from specctl.kv.batch import Batch, Span
from specctl.kv.pages import PAGE_SIZE
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target, build_engine, constant
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.noise import make_key
from specctl.sampling.params import Accept, SamplingParams
from specctl.schemas import gates
from specctl.schemas.validation import Check, GateResult
from specctl.validate.intervals import Interval
from specctl.validate.verdicts import absent, held, result

LENGTH = 32
"""Tokens of an answer: few enough that a wrong one early on does not spoil many."""
AT_ONCE = 16
BINS, LEAST_IN_BIN = 10, 10
RESAMPLES, SEED = 500, 20_240_607
LEAST_DRAFTED = 100
EDGE = 1e-3
"""In fewer than 64 bits a token at the edge of top-k or top-p may be in for one pass and out for another: so many."""


@dataclass(frozen=True)
class Place:
    """Where a token was decided: the slot of its block, whether the block had proposals, and q over the target's ids at
    this slot, None where none is known."""

    slot: int
    drafted: bool
    q_V: Tensor | None


@dataclass
class Sample:
    """u: the places of tokens in the target's distribution; slot: of their block. drifts: for each function of q / p,
    the sum of its deviations from the mean, and of its variances. ruled_out: tokens that the target cannot say."""

    u: list[float] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    drifts: np.ndarray = field(default_factory=lambda: np.zeros((2, 2)))
    drafted: int = 0
    ruled_out: int = 0


@dataclass(frozen=True)
class Fit:
    """p: the probability of a deviation as large as the largest of all that were looked at, corrected for their number.
    distance: total variation over the bins, with its interval."""

    p: float
    distance: float
    interval: Interval


@dataclass(frozen=True)
class Sampler:
    """The pair and how it is sampled."""

    target: Target
    draft: OpenedDraft
    requests: list[Request]
    decoding: DecodingOptions
    policy: Policy
    progress: Callable[[str], None]

    def judge(self, gate: gates.Distribution, accept: Accept | None) -> GateResult:
        """accept: as `open_policy` says; None means exact, but coupled for requests with a seed, and so both."""
        methods = [accept] if accept is not None else [Accept("exact"), Accept("coupled")]
        checks = []
        for method in methods:
            self.progress(f"sampling {gate.samples} tokens with {method} acceptance")
            checks.append(self._check(method, gate.samples, gate.alpha / len(methods)))
        return result("distribution", checks)

    def _check(self, accept: Accept, samples: int, alpha: float) -> Check:
        found = self.sample(accept, samples, self.policy)
        if found.drafted < min(LEAST_DRAFTED, samples // 4):
            why = f"of {len(found.u)} tokens sampled with {accept} acceptance only {found.drafted} were drafted"
            return absent(str(accept), f"{why}, too few to judge by")
        if problem := self._impossible(found):
            return held(str(accept), None, False, problem)
        fit = judge_fit(found)
        says = f"{len(found.u)} tokens at temperature {self._params(accept, 0).temperature:g}: {_told(fit)}, "
        says += f"expected p of {alpha:.1g} or above"
        if accept.lossy:  # too few tokens to see it would not make it right
            says += f"; {accept} acceptance is lossy and does not keep the distribution"
        elif fit.p < alpha:
            says += f"; {self._control(accept, samples, alpha)}"
        right = fit.p >= alpha and not accept.lossy
        return held(str(accept), None, right, says, measured=fit.p, limit=alpha)

    def _impossible(self, found: Sample) -> str | None:
        allowed = 0 if self.target.dtype == torch.float64 else EDGE * len(found.u)
        if found.ruled_out > allowed:
            return f"{found.ruled_out} tokens were sampled that the target's distribution rules out"
        if not np.isfinite(found.u).all():
            return "the target's scores are not numbers"
        return None

    def _control(self, accept: Accept, samples: int, alpha: float) -> str:
        """The same without speculation tells whose fault it is."""
        self.progress("sampling as many without speculation, to see whose fault it is")
        plain = judge_fit(self.sample(accept, samples, constant(0)))
        if plain.p < alpha:
            return f"plain sampling deviates too ({_told(plain)}), so the fault is in sampling, not in acceptance"
        return f"plain sampling does not ({_told(plain)}), so the fault is in speculation"

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(self, accept: Accept, samples: int, policy: Policy) -> Sample:
        """At least `samples` tokens, over all prompts in turn."""
        at_once = max(AT_ONCE, self.decoding.batch)
        longest = max(len(request.token_ids) for request in self.requests) + LENGTH
        target = replace(self.target, max_length=min(self.target.max_length, longest + MAX_K + 2))
        engine = build_engine(target, self.draft, policy, max_sequences=at_once, ignore_tokenizer=True)
        bare = BareModel.of_target(target, longest)
        random = np.random.default_rng([SEED, self.decoding.seed or 0])
        found = Sample()
        texts = self._texts(engine, accept)
        while (missing := samples - len(found.u) - found.ruled_out) > 0:
            places: dict[tuple[int, int], Place] = {}
            engine.observer = _observer(places, accept)
            group = [next(texts) for _ in range(min(at_once, -(-missing // LENGTH)))]
            while engine.has_work:
                engine.step()
            for text in group:
                self._add(found, text, places, bare, random)
        return found

    def _texts(self, engine: Engine, accept: Accept) -> Iterator[Text]:
        """Each is queued when it is asked for."""
        number = 0
        while True:
            for request in self.requests:
                request_id = engine.add(request.token_ids, self._params(accept, number))
                yield engine.choices(request_id)[0]
                number += 1

    def _params(self, accept: Accept, number: int) -> SamplingParams:
        decoding = replace(self.decoding, temperature=self.decoding.temperature or 1.0, ignore_eos=True)
        return replace(decoding.params(LENGTH, seed=make_key(self.decoding.seed or 0, number)), accept=accept)

    def _add(
        self,
        found: Sample,
        text: Text,
        places: dict[tuple[int, int], Place],
        bare: BareModel,
        random: np.random.Generator,
    ) -> None:
        p_TV = _distribution(bare, text)
        for position, token in enumerate(text.output):
            place = places[text.request_id, position]
            p_V = p_TV[position]
            if float(p_V[token]) == 0:
                found.ruled_out += 1
                continue
            found.u.append(_rank(p_V, place.q_V, token, random.random()))
            found.slot.append(place.slot)
            found.drafted += place.drafted
            if place.q_V is not None:
                found.drifts += _drifts(p_V, place.q_V.double(), token)


def _observer(
    places: dict[tuple[int, int], Place], accept: Accept
) -> Callable[[list[Text], Draft, Tensor, Verdict], None]:
    """Notes where each token is decided."""

    def observe(texts: list[Text], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        vocab = scores_BMV.shape[2]
        for b, (text, accepted) in enumerate(zip(texts, verdict.num_accepted_B.tolist(), strict=True)):
            for slot in range(accepted + 1):
                # Under coupled acceptance the proposal is drawn by the noise that decides, so it is no q.
                known = slot < draft.length[b] and accept.method != "coupled"
                q_V = _proposal(draft, b, slot, vocab) if known else None
                places[text.request_id, len(text.output) + slot] = Place(slot, draft.length[b] > 0, q_V)

    return observe


def _proposal(draft: Draft, b: int, slot: int, vocab: int) -> Tensor:
    q_V = torch.zeros(vocab)
    if not isinstance(draft.q, Dense):
        q_V[draft.token_BK[b, slot]] = 1.0
        return q_V
    prob_D = draft.q.prob_BKD[b, slot].float().cpu()
    if draft.q.ids_D is None:
        q_V[: len(prob_D)] = prob_D
    else:
        q_V[draft.q.ids_D.cpu()] = prob_D
    return q_V


def _distribution(bare: BareModel, text: Text) -> Tensor:
    """[T, V], float64: the target's processed distribution of each token of the answer, from one plain pass."""
    tokens = text.tokens(0, len(text) - 1)
    pages = list(range(1, cache_shape(len(tokens), 1)[0]))
    batch = Batch.pack([Span(tokens, 0, pages, 0)], PAGE_SIZE, bare.device)
    rows = torch.arange(len(text.prompt) - 1, len(tokens), device=bare.device)
    state = SequenceState(text.params, text.key, text.prompt, (), text.accept)
    scores_MV = SamplingBatch([state], bare.device).scores(bare.run(batch, rows)[None])[0]
    return scores_MV.double().softmax(-1).cpu()


def _rank(p_V: Tensor, q_V: Tensor | None, token: int, u: float) -> float:
    """The place of a token in p, tokens in the order of q / p (or of p), those of one value taken for one."""
    order_V = p_V if q_V is None else q_V.double() / p_V.clamp(min=1e-300)
    before = float(p_V[order_V < order_V[token]].sum())
    return before + u * float(p_V[order_V == order_V[token]].sum())


def _drifts(p_V: Tensor, q_V: Tensor, token: int) -> np.ndarray:
    """[2, 2]: (deviation of the token's value from the mean, variance) of min(1, q / p), in which a rejection that is
    followed by the wrong distribution shows, and of q / (p + q), in which a wrong acceptance does."""
    least = 1e-300
    value_2V = torch.stack(((q_V / p_V.clamp(min=least)).clamp(max=1), q_V / (p_V + q_V).clamp(min=least)))
    mean_2 = value_2V @ p_V
    variance_2 = (value_2V - mean_2[:, None]).square() @ p_V
    return torch.stack((value_2V[:, token] - mean_2, variance_2), dim=1).numpy()


# -- statistics -------------------------------------------------------------------------------------------------------


def judge_fit(sample: Sample) -> Fit:
    """Places over all tokens, and over those of each slot of a block that has enough of them; then the drifts."""
    u_N, slot_N = np.array(sample.u), np.array(sample.slot)
    looks = [u_N] + [u_N[slot_N == slot] for slot in sorted(set(sample.slot)) if len(set(sample.slot)) > 1]
    looks = [look for look in looks if len(look) >= BINS * LEAST_IN_BIN]
    p = [chi_square(_counts(look)) for look in looks] + [_freedman(*drift) for drift in sample.drifts if drift[1] > 0]
    distance, interval = _distance(u_N)
    return Fit(min(1.0, min(p) * len(p)), distance, interval)


def chi_square(counts: np.ndarray) -> float:
    """The probability of counts at least this uneven when all are equally likely."""
    mean = counts.sum() / len(counts)
    half_statistic, half_df = ((counts - mean) ** 2).sum() / mean / 2, (len(counts) - 1) / 2
    return float(torch.special.gammaincc(torch.tensor(half_df).double(), torch.tensor(half_statistic).double()))


def _freedman(total: float, variance: float) -> float:
    """A bound on the probability of a sum this far from 0, of deviations of at most 1 with this sum of variances."""
    return min(1.0, 2 * math.exp(-(total**2) / (2 * (variance + abs(total) / 3))))


def _counts(u_N: np.ndarray) -> np.ndarray:
    return np.bincount(np.minimum((u_N * BINS).astype(int), BINS - 1), minlength=BINS)


def _distance(u_N: np.ndarray) -> tuple[float, Interval]:
    """Total variation from the uniform distribution over the bins, and the basic bootstrap's interval: what chance adds
    to the resamples is taken off."""
    counts, total = _counts(u_N), len(u_N)
    drawn = np.random.default_rng(SEED).multinomial(total, counts / total, size=RESAMPLES)
    found = float(np.abs(counts / total - 1 / BINS).sum() / 2)
    low, high = np.quantile(np.abs(drawn / total - 1 / BINS).sum(1) / 2, [0.025, 0.975])
    return found, (max(0.0, 2 * found - float(high)), max(0.0, 2 * found - float(low)))


def _told(fit: Fit) -> str:
    low, high = fit.interval
    return f"total variation {fit.distance:.3f} (95 % {low:.3f} - {high:.3f}) from the target's, p = {fit.p:.2g}"
