"""What drafting brings: tokens a step and how long blocks get, for any draft length and confidence stop.

Legend: R requests, S draws of how much each request counts (the first counts all once), K draft lengths from 1.

Survival at k is the share of drafts whose first k tokens were all accepted, among those that could reach k. A draft of
length K brings 1 + the survivals up to K. When the length changes a text keeps its tokens, not its steps: what was
drafted takes its tokens / (1 + survivals) steps, and each token that came without a proposal still takes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from specctl.tune.rates import Survival

TINY = 1e-300


@dataclass(frozen=True)
class Blocks:
    """What became of the drafts under one confidence stop (None: without). reached_RK[r, k - 1]: drafts of request r
    with a k-th token; accepted_RK: those whose first k were all accepted."""

    confidence: float | None
    reached_RK: np.ndarray
    accepted_RK: np.ndarray


@dataclass(frozen=True)
class Outlook:
    """For one draft length and stop, per sequence and step. tokens_S: how many a step brings. reach_SK: the chance that
    its block has k tokens."""

    confidence: float | None
    tokens_S: np.ndarray
    reach_SK: np.ndarray

    @property
    def k(self) -> int:
        return int(self.reach_SK.shape[1])

    def first(self) -> Outlook:
        """Without the draws."""
        return Outlook(self.confidence, self.tokens_S[:1], self.reach_SK[:1])


@dataclass(frozen=True)
class Acceptance:
    """drafts_R: drafts of each request; tokens_R: tokens they brought, definite ones counted; idle_R: its steps without
    a proposal. stops: without a stop first, where that is known; further stops rise. source: in words.

    Where requests are not known, R are the drafts by how many of their tokens were accepted, and reached_K says how
    many had a token in each position: draws are binomial then. Empty: counts are not known either, nothing is drawn.
    observed_k: the longest length that was seen; beyond it survival is extrapolated.
    """

    source: str
    temperature: float | None
    iid: bool
    drafts_R: np.ndarray
    tokens_R: np.ndarray
    idle_R: np.ndarray
    stops: tuple[Blocks, ...]
    reached_K: np.ndarray | None = None
    observed_k: int | None = None

    @property
    def max_k(self) -> int:
        return int(self.stops[0].reached_RK.shape[1])

    @property
    def num_requests(self) -> int:
        return len(self.drafts_R)

    @property
    def uncertain(self) -> bool:
        """Whether it is known how far it may be off."""
        return self.num_requests > 1 if self.reached_K is None else bool(len(self.reached_K))

    @property
    def by_requests(self) -> bool:
        return self.reached_K is None and self.num_requests > 1

    def extrapolated(self, k: int) -> bool:
        return self.observed_k is not None and k > self.observed_k

    def survival(self) -> np.ndarray:
        """[K]: of all drafts together, under the least stop there is."""
        survival: np.ndarray = self.stops[0].accepted_RK.sum(0) / max(TINY, float(self.drafts_R.sum()))
        return survival

    def interval(self, samples: int) -> tuple[np.ndarray, np.ndarray] | None:
        """[K]: 95 % of survival; None where it is not known."""
        if not self.uncertain:
            return None
        weight_SR = self.weights(samples)[1:]
        drafts_S = np.maximum(weight_SR @ self.drafts_R, TINY)
        survival_SK = weight_SR @ self.stops[0].accepted_RK / drafts_S[:, None]
        low_K, high_K = np.quantile(survival_SK, [0.025, 0.975], axis=0)
        survival_K = self.survival()
        return np.minimum(low_K, survival_K), np.maximum(high_K, survival_K)

    def outlook(self, blocks: Blocks, k: int, weight_SR: np.ndarray) -> Outlook:
        drafts_S = np.maximum(weight_SR @ self.drafts_R, TINY)  # without drafts there are no tokens from them either
        survival_SK = weight_SR @ blocks.accepted_RK[:, :k] / drafts_S[:, None]
        steps_S = weight_SR @ self.tokens_R / (1 + survival_SK.sum(1))
        idle_S = weight_SR @ self.idle_R
        total_S = np.maximum(steps_S + idle_S, TINY)
        tokens_S = np.maximum(weight_SR @ (self.tokens_R + self.idle_R) / total_S, 1.0)
        reach_SK = (steps_S / total_S)[:, None] * (weight_SR @ blocks.reached_RK[:, :k]) / drafts_S[:, None]
        return Outlook(blocks.confidence, tokens_S, reach_SK)

    def weights(self, samples: int) -> np.ndarray:
        """[1 + samples, R]: all requests once, then drawn with replacement. Requests are what varies independently;
        where they are not known, drafts are taken to."""
        ones = np.ones((1, self.num_requests))
        if not self.uncertain:
            return np.repeat(ones, samples + 1, axis=0)
        random = np.random.default_rng(1)
        if self.reached_K is not None:
            return np.concatenate([ones, self._binomial(random, samples)])
        return np.concatenate([ones, random.multinomial(self.num_requests, ones[0] / self.num_requests, samples)])

    def _binomial(self, random: np.random.Generator, samples: int) -> np.ndarray:
        """Every conditional rate drawn by itself, as weights of the drafts by accepted tokens."""
        assert self.reached_K is not None
        survival = Survival(tuple(self.survival().tolist()))
        before_K = np.array([1.0, *survival.values[:-1]])
        trials_K = np.maximum(np.rint(self.reached_K * before_K).astype(int), 1)
        rate_K = np.clip(survival.conditional().values, 0, 1)
        drawn_SK = random.binomial(trials_K, rate_K, (samples, len(trials_K))) / trials_K
        edges_SJ = np.pad(np.pad(drawn_SK.cumprod(1), ((0, 0), (1, 0)), constant_values=1.0), ((0, 0), (0, 1)))
        share_R = self.drafts_R / max(TINY, float(self.drafts_R.sum()))
        ended_SR: np.ndarray = (edges_SJ[:, :-1] - edges_SJ[:, 1:]) / np.maximum(share_R, TINY)
        return np.where(share_R > 0, ended_SR, 0.0)

    def scaled(self, change: float) -> Acceptance:
        """As if every token were accepted this share more or less often, given those before it."""
        old = Survival(tuple(self.survival().tolist()))
        new = old.conditional().scaled(change).survival()
        words = f"{self.source}, each token's chance changed by {change:+.0%}"
        if self.reached_K is not None:
            return replace(self._counted(new, self.reached_K), source=words)
        ratio_K = np.array([b / a if a > 0 else 1.0 for a, b in zip(old.values, new.values, strict=True)])
        stops = tuple(_scaled(blocks, ratio_K) for blocks in self.stops)
        gained_R = stops[0].accepted_RK.sum(1) - self.stops[0].accepted_RK.sum(1)
        return replace(self, source=words, tokens_R=self.tokens_R + gained_R, stops=stops)

    def extended(self, k_max: int) -> Acceptance:
        """On to k_max, as if further tokens were accepted as often as the last that was seen."""
        if k_max <= self.max_k:
            return self
        known = self.max_k if self.observed_k is None else self.observed_k
        survival = Survival(tuple(self.survival().tolist()))
        if self.reached_K is not None:
            reached_K = self.reached_K
            if len(reached_K):
                reached_K = np.pad(reached_K, (0, k_max - len(reached_K)), mode="edge")
            return replace(self._counted(survival.extended(k_max), reached_K), observed_k=known)
        last = survival.conditional().values[-1]
        return replace(self, stops=tuple(_extended(blocks, k_max, last) for blocks in self.stops), observed_k=known)

    def _counted(self, survival: Survival, reached_K: np.ndarray) -> Acceptance:
        """The same counts of drafts with another survival."""
        reached = tuple(reached_K.tolist()) or None
        found = of_survival(survival, reached, self.source, self.temperature, float(self.idle_R.sum()))
        return replace(found, observed_k=self.observed_k)


def _scaled(blocks: Blocks, ratio_K: np.ndarray) -> Blocks:
    """No more than there were drafts to accept, over all requests."""
    most_K = blocks.reached_RK.sum(0) / np.maximum(blocks.accepted_RK.sum(0), TINY)
    return replace(blocks, accepted_RK=blocks.accepted_RK * np.minimum(ratio_K, most_K))


def _extended(blocks: Blocks, k_max: int, last: float) -> Blocks:
    """Those that reached the end go on; what is accepted falls by the same share at every further position."""
    more = k_max - blocks.reached_RK.shape[1]
    fall_K = last ** np.arange(1, more + 1)
    return replace(
        blocks,
        reached_RK=np.pad(blocks.reached_RK, ((0, 0), (0, more)), mode="edge"),
        accepted_RK=np.concatenate([blocks.accepted_RK, blocks.accepted_RK[:, -1:] * fall_K], axis=1),
    )


def constant(probability: float, k_max: int, source: str | None = None) -> Acceptance:
    """Every token is accepted with the same probability, whatever came before: survival at k is its k-th power."""
    survival_RK = probability ** np.arange(1, k_max + 1)[None]
    return Acceptance(
        source=source or f"{probability:g} a token, taken to be the same at every position and independent",
        temperature=None,
        iid=True,
        drafts_R=np.ones(1),
        tokens_R=1 + survival_RK.sum(1),
        idle_R=np.zeros(1),
        stops=(Blocks(None, np.ones((1, k_max)), survival_RK),),
    )


def of_survival(
    survival: Survival,
    reached: tuple[float, ...] | None,
    source: str,
    temperature: float | None = None,
    idle: float = 0.0,
) -> Acceptance:
    """reached: drafts with a k-th token, by position; None where nothing was counted. idle: steps without a draft."""
    num_drafts = 1.0 if reached is None else float(reached[0])
    values = np.array(survival.values)
    ended_R = num_drafts * -np.diff(np.concatenate([[1.0], values, [0.0]]))
    count_R = np.arange(len(ended_R))
    k = len(values)
    return Acceptance(
        source=source,
        temperature=temperature,
        iid=False,
        drafts_R=ended_R,
        tokens_R=ended_R * (count_R + 1),
        idle_R=idle * ended_R / num_drafts,  # in this share no draw of the drafts changes their sum
        stops=(Blocks(None, np.repeat(ended_R[:, None], k, axis=1), ended_R[:, None] * _at_least(count_R, k)),),
        reached_K=np.empty(0) if reached is None else np.array(reached, dtype=float),
    )


def _at_least(count_R: np.ndarray, k: int) -> np.ndarray:
    reaches: np.ndarray = (count_R[:, None] >= np.arange(1, k + 1)).astype(float)
    return reaches


@dataclass(frozen=True)
class ByContext:
    """Acceptance at rising contexts, or at one that stands for all (0)."""

    entries: tuple[tuple[float, Acceptance], ...]

    def index(self, context: float) -> int:
        """Of the entry that is nearest, in proportion."""
        return min(range(len(self.entries)), key=lambda i: abs(math.log(max(self.entries[i][0], 1) / max(context, 1))))

    def at(self, context: float) -> Acceptance:
        return self.entries[self.index(context)][1]

    @property
    def max_k(self) -> int:
        return min(acceptance.max_k for _, acceptance in self.entries)
