"""What drafting brings: tokens a step and how long blocks get, for any draft length and confidence stop.

Legend: R requests, S draws of how much each request counts (the first counts all once), K draft lengths from 1.

Survival at k is the share of drafts whose first k tokens were all accepted, among those that could reach k. A draft of
length K brings 1 + the survivals up to K. When the length changes a text keeps its tokens, not its steps: what was
drafted takes its tokens / (1 + survivals) steps, and each token that came without a proposal still takes one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class Acceptance:
    """drafts_R: drafts of each request; tokens_R: tokens they brought, definite ones counted; idle_R: its steps without
    a proposal. stops: without a stop first, where that is known; further stops rise. source: in words.
    """

    source: str
    temperature: float | None
    iid: bool
    drafts_R: np.ndarray
    tokens_R: np.ndarray
    idle_R: np.ndarray
    stops: tuple[Blocks, ...]

    @property
    def max_k(self) -> int:
        return int(self.stops[0].reached_RK.shape[1])

    @property
    def num_requests(self) -> int:
        return len(self.drafts_R)

    def survival(self) -> np.ndarray:
        """[K]: of all drafts together, under the least stop there is."""
        survival: np.ndarray = self.stops[0].accepted_RK.sum(0) / max(1.0, float(self.drafts_R.sum()))
        return survival

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
        """[1 + samples, R]: all requests once, then drawn with replacement. Requests are what varies independently."""
        ones = np.ones((1, self.num_requests))
        if self.num_requests < 2:
            return np.repeat(ones, samples + 1, axis=0)
        random = np.random.default_rng(1)
        return np.concatenate([ones, random.multinomial(self.num_requests, ones[0] / self.num_requests, samples)])


def constant(probability: float, k_max: int) -> Acceptance:
    """Every token is accepted with the same probability, whatever came before: survival at k is its k-th power."""
    survival_RK = probability ** np.arange(1, k_max + 1)[None]
    return Acceptance(
        source=f"{probability:g} a token, taken to be the same at every position and independent",
        temperature=None,
        iid=True,
        drafts_R=np.ones(1),
        tokens_R=1 + survival_RK.sum(1),
        idle_R=np.zeros(1),
        stops=(Blocks(None, np.ones((1, k_max)), survival_RK),),
    )
