"""How many experts a step reads: of all, and on the device that has the most to read.

Every token chooses `chosen` of E experts, all sets alike; where choices are limited to some groups, first groups and
then experts inside them. Tokens of one text choose more alike than that, so a step reads at most about this many.
Legend: T tokens, E experts.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from specctl.roofline.shape import Experts

Array = np.ndarray


def distinct(tokens: Array, experts: Experts) -> Array:
    """The expected number of experts that somebody chose, E (1 - (1 - chosen / E) ** T).

    By symmetry every expert is chosen by a token with probability chosen / E, whatever the groups are, and
    expectations add up; so the groups do not show here, but in `fullest`.
    """
    untouched: Array = (1 - experts.chosen / experts.count) ** np.asarray(tokens, dtype=float)
    return experts.count * (1 - untouched)


def fullest(tokens: Array, experts: Experts, ranks: int) -> Array:
    """The expected number on that of `ranks` devices which has most of them, each holding E / ranks in a row.

    Mean and variance of one device's number are exact (pairs of experts are both left out by T tokens with probability
    (1 - 2 chosen / E + both) ** T); the largest of `ranks` is taken as of independent normal ones.
    """
    mean = distinct(tokens, experts) / ranks
    if ranks == 1:
        return mean
    held = experts.count / ranks
    size = experts.count // experts.groups
    single = (1 - experts.chosen / experts.count) ** np.asarray(tokens, dtype=float)
    near, far = _both(experts)
    companions = min(held, size) - 1  # of an expert, in its own group and on its own device
    strangers = held - 1 - companions
    variance = single * (1 - single)
    for others, both in ((companions, near), (strangers, far)):
        neither = np.maximum(0.0, 1 - 2 * experts.chosen / experts.count + both) ** np.asarray(tokens, dtype=float)
        variance = variance + others * (neither - single**2)
    quantile = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    most = np.minimum(held, np.asarray(tokens, dtype=float) * experts.chosen)
    result: Array = np.minimum(mean + quantile * np.sqrt(np.maximum(0.0, held * variance)), most)
    return result


def _both(experts: Experts) -> tuple[float, float]:
    """The probability that one token chooses two given experts: of one group, and of two groups."""
    kept, groups, chosen = experts.kept_groups, experts.groups, experts.chosen
    eligible = kept * (experts.count // groups)
    pair = chosen * (chosen - 1) / (eligible * (eligible - 1)) if eligible > 1 else 0.0
    apart = kept * (kept - 1) / (groups * (groups - 1)) if groups > 1 else 0.0
    return kept / groups * pair, apart * pair
