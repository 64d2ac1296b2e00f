"""Acceptance that changes what is said, and how much of that may be bought: rules whose measured divergence stays
within a budget, and so does what it costs at a task, where somebody has scored one.

Nothing is lossy unless a budget is given, and nothing is guessed: a rule that nobody measured is not looked at. Legend:
R requests, S draws of how much each counts, K draft lengths from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.sampling.params import Accept
from specctl.schemas.base import read_mapping
from specctl.schemas.divergence import Divergence, RuleDivergence
from specctl.schemas.policy import AcceptRule
from specctl.tune.acceptance import Acceptance, Blocks
from specctl.tune.evidence import Evidence

SAMPLES = 400
EXACT = "exact"


@dataclass(frozen=True)
class Budget:
    """kl: nats a token. score: of a task, how much less than with exact acceptance."""

    kl: float | None = None
    score: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A number of nats a token, or kl=X, score=X or both."""
        given: dict[str, float] = {}
        for part in text.split(","):
            key, found, value = part.strip().rpartition("=")
            name = key if found else "kl"
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if name not in ("kl", "score") or name in given or not (math.isfinite(number) and number >= 0):
                raise UsageError(
                    f"--quality-budget {text}: expected nats a token like 0.01, or kl=0.01,score=0.005, from 0 up"
                )
            given[name] = number
        return cls(**given)

    def words(self) -> str:
        parts = [f"{name} {value:g}" for name, value in (("KL", self.kl), ("score", self.score)) if value is not None]
        return " and ".join(parts)


@dataclass(frozen=True)
class Rule:
    """A rule within the budget. k: the longest length that is. kl: nats a token at that length, with its interval.
    drop: of the task's score, with its interval; None where none was given."""

    name: str
    k: int
    kl: tuple[float, float, float]
    drop: tuple[float, float, float] | None
    evidence: Evidence

    @property
    def accept(self) -> AcceptRule:
        rule = Accept.parse(self.name)
        return AcceptRule(
            method="threshold" if rule.method == "threshold" else "typical",
            threshold=rule.threshold if rule.method == "threshold" else None,
            epsilon=rule.epsilon if rule.method == "typical" else None,
            delta=rule.delta if rule.method == "typical" else None,
            divergence_kl=self.kl[1],
            interval=[self.kl[0], self.kl[2]],
        )


def rules_within(
    divergence: Divergence, where: str, budget: Budget, scores: dict[str, list[float]] | None
) -> tuple[list[Rule], list[str]]:
    """The rules whose interval lies within the budget, and a sentence about each that does not."""
    if budget.score is not None and scores is None:
        raise UsageError("--quality-budget has a score, and no --scores FILE says what the task's scores are")
    found, refused = [], []
    for rule in divergence.rules:
        drop = None
        if scores is not None and budget.score is not None:
            if rule.accept not in scores:
                refused.append(f"{rule.accept}: nobody has scored it")
                continue
            drop = score_drop(scores[EXACT], scores[rule.accept])
            if drop[2] > budget.score:
                refused.append(f"{rule.accept}: may lose {drop[2]:.4g} of the score")
                continue
        within = [kl_per_token(rule, k) for k in range(1, divergence.k + 1)]
        k = next(
            (i for i, (_, _, high) in enumerate(within) if budget.kl is not None and high > budget.kl), len(within)
        )
        if k == 0:
            refused.append(f"{rule.accept}: moves {within[0][1]:.4g} nats a token, {within[0][2]:.4g} at most")
            continue
        evidence = Evidence(_acceptance(rule, divergence, where), [], divergence.target, divergence.draft, rule.accept)
        found.append(Rule(rule.accept, k, within[k - 1], drop, evidence))
    return found, refused


def kl_per_token(rule: RuleDivergence, k: int) -> tuple[float, float, float]:
    """2.5 %, what was measured, 97.5 %, of drafts of k tokens; requests drawn with replacement. With one request
    nothing is known of the rest, so no bound is: infinite."""
    histogram_RJ, kl_RK = _arrays(rule)
    kl_R = kl_RK[:, :k].sum(1)
    tokens_R = (histogram_RJ * (np.minimum(np.arange(histogram_RJ.shape[1]), k) + 1)).sum(1)
    total = float(tokens_R.sum())
    if not total:
        return 0.0, 0.0, math.inf
    value = float(kl_R.sum()) / total
    if len(kl_R) < 2:
        return 0.0, value, math.inf
    weight_SR = np.random.default_rng(2).multinomial(len(kl_R), np.full(len(kl_R), 1 / len(kl_R)), SAMPLES)
    drawn_S = weight_SR @ kl_R / np.maximum(weight_SR @ tokens_R, 1)
    low, high = np.quantile(drawn_S, [0.025, 0.975])
    return min(float(low), value), value, max(float(high), value)


def score_drop(exact: Sequence[float], rule: Sequence[float]) -> tuple[float, float, float]:
    """Mean of what an item loses, items drawn with replacement."""
    loss_R = np.array(exact) - np.array(rule)
    weight_SR = np.random.default_rng(3).multinomial(len(loss_R), np.full(len(loss_R), 1 / len(loss_R)), SAMPLES)
    low, high = np.quantile(weight_SR @ loss_R / len(loss_R), [0.025, 0.975])
    return float(low), float(loss_R.mean()), float(high)


def read_scores(path: Path) -> dict[str, list[float]]:
    """{"exact": [...], "typical": [...], ...}: a number for every item of a task, in the same order."""
    value: dict[str, Any] = read_mapping(path)
    for name, scores in value.items():
        numbers = isinstance(scores, list) and all(
            isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in scores
        )
        if not numbers or not scores:
            raise UsageError(f"{path}: key {name} is {str(scores)[:60]}, expected a number for every item of the task")
    if EXACT not in value:
        raise UsageError(f"{path}: key exact is missing: scores with exact acceptance, to compare with")
    for name, scores in value.items():
        if len(scores) != len(value[EXACT]):
            raise UsageError(
                f"{path}: key {name} has {len(scores)} items and exact has {len(value[EXACT])}; they are pairs"
            )
    return {name: [float(n) for n in scores] for name, scores in value.items()}


def _arrays(rule: RuleDivergence) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([request.histogram for request in rule.requests], dtype=float),
        np.array([request.kl for request in rule.requests], dtype=float),
    )


def _acceptance(rule: RuleDivergence, divergence: Divergence, where: str) -> Acceptance:
    """What the rule accepts. Requests without a draft tell nothing."""
    histogram_RJ, _ = _arrays(rule)
    histogram_RJ = histogram_RJ[histogram_RJ.sum(1) > 0]
    if not len(histogram_RJ):
        raise UsageError(f"{where}: rule {rule.accept} has no draft in it, so it tells nothing about acceptance")
    drafts_R = histogram_RJ.sum(1)
    return Acceptance(
        source=f"{where}, --accept {rule.accept}: {drafts_R.sum():.0f} drafts in {len(drafts_R)} requests",
        temperature=divergence.temperature,
        iid=False,
        drafts_R=drafts_R,
        tokens_R=(histogram_RJ * np.arange(1, divergence.k + 2)).sum(1),
        idle_R=np.zeros(len(drafts_R)),
        stops=(
            Blocks(
                None,
                np.repeat(drafts_R[:, None], divergence.k, axis=1),
                histogram_RJ[:, ::-1].cumsum(1)[:, ::-1][:, 1:],
            ),
        ),
    )
