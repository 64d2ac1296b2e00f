"""Where a tuning is looked at: the context that stands for others, and the batches that are known there. Where caches
do not fit a computed profile has no steps, and nothing should be said."""

from __future__ import annotations

import math

import numpy as np

from specctl.tune.choice import SAMPLES, Decision
from specctl.tune.goodput import Candidate
from specctl.tune.run import Tuning


def known(tuning: Tuning) -> dict[int, int]:
    """The largest batch that the profile has at each context."""
    return tuning.grid.tops


def column(tuning: Tuning, context: int) -> list[Decision]:
    """By batch, up to the largest that is known there."""
    at, top = tuning.grid.contexts.index(context), known(tuning)[context]
    return [row[at] for row in tuning.grid.rows if row[at].batch <= top]


def nearest(tuning: Tuning, context: int) -> int:
    """Of the profile's contexts."""
    return min(tuning.grid.contexts, key=lambda each: abs(math.log(each / max(1, context))))


def ruled(tuning: Tuning, decision: Decision) -> Candidate:
    """What the policy says there, which may be a neighbour's length that is as good but for a hundredth."""
    cell = tuning.policy.lookup(decision.batch, decision.context)
    return tuning.chooser.candidate(decision, (cell.k, cell.confidence))


def bands(tuning: Tuning, context: int) -> tuple[list[int], np.ndarray]:
    """Batches, and for each of them 2.5 %, the prediction and 97.5 % of the policy's speed-up."""
    batches = [decision.batch for decision in column(tuning, context)]
    cells = [tuning.policy.lookup(batch, context) for batch in batches]
    keys = [(cell.k, cell.confidence) for cell in cells]
    speeds = tuning.chooser.speeds(batches, context, set(keys), SAMPLES)
    speed_NS = np.stack([speeds[key][n] for n, key in enumerate(keys)])
    middle = speed_NS[:, 0]
    low, high = np.quantile(speed_NS[:, 1:], [0.025, 0.975], axis=1)
    return batches, np.stack([np.minimum(low, middle), middle, np.maximum(high, middle)], axis=1)
