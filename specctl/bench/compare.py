"""One run against another: the speed-up with its interval, and whether they said the same.

Near-tie: two runs may differ where the scores of the two tokens are closer than NEAR_TIE, as float32 rounds them
differently for different numbers of rows. docs/design.md, "Near-tie".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specctl.bench.contest import Tally
from specctl.bench.runners import Runner
from specctl.bench.work import Request

NEAR_TIE = 1e-3
RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True)
class Speedup:
    """interval: 95 %, None when there is only one group in one repeat."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs. gap: None when it is no number (an answer ends, or a token was ruled out)."""

    prompt: str
    position: int
    gap: float | None


def speedup(run: Tally, against: Tally) -> Speedup:
    """Tokens a second over tokens a second; the ratio of times where both did the same tokens. The interval is a paired
    bootstrap: repeats and groups are drawn anew, for both runs alike."""
    value = _ratio(run.tokens.sum(), run.seconds.sum(), against.tokens.sum(), against.seconds.sum())
    repeats, groups = run.seconds.shape
    if repeats * groups < 2:
        return Speedup(float(value), None)
    random = np.random.default_rng(SEED)
    repeat_SR1 = random.integers(repeats, size=(RESAMPLES, repeats))[:, :, None]
    group_S1G = random.integers(groups, size=(RESAMPLES, groups))[:, None, :]
    sums = [
        cells_RG[repeat_SR1, group_S1G].sum((1, 2))
        for cells_RG in (run.tokens, run.seconds, against.tokens, against.seconds)
    ]
    low, high = np.quantile(_ratio(*sums), [0.025, 0.975])
    return Speedup(float(value), (float(low), float(high)))


def must_agree(run: Runner, against: Runner, temperature: float) -> bool:
    """Whether the two have to say the same: both lossless, and greedy or drawing by the same noise."""
    accepts = [runner.accept for runner in (run, against)]
    if any(accept is not None and accept.lossy for accept in accepts):
        return False
    return temperature == 0 or all(accept is not None and accept.method == "coupled" for accept in accepts)


def near_tie(run: Runner, against: Runner, dtype: torch.dtype) -> float:
    """The gap below which a difference is a near-tie. float64 has none, but transformers chooses in float32."""
    ours = run.accept is not None and against.accept is not None
    return 0.0 if dtype == torch.float64 and ours else NEAR_TIE


def differences(requests: list[Request], run: Tally, against: Tally, reference: Runner) -> list[Difference]:
    """Every first difference, once, the widest gap first. reference: who answered in `against`; gaps are its own."""
    found: dict[tuple[int, int], Difference] = {}
    for index, mine, theirs in _pairs(run, against):
        position = first_difference(mine, theirs)
        if position is not None and (index, position) not in found:
            gap = _gap(requests[index], mine, theirs, position, reference)
            found[index, position] = Difference(requests[index].id, position, gap)
    return sorted(found.values(), key=lambda difference: -np.inf if difference.gap is None else -difference.gap)


def first_difference(mine: list[int], theirs: list[int]) -> int | None:
    """The first position where two answers differ; the end of the shorter one when that is all of it."""
    for position, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return position
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def identical(found: list[Difference], limit: float, dtype: torch.dtype) -> bool | None:
    """Whether all differences are near-ties. None: 16-bit numbers are too coarse to tell a tie from a difference."""
    if all(difference.gap is not None and difference.gap < limit for difference in found):
        return True
    return None if dtype.itemsize < 4 else False


def _pairs(run: Tally, against: Tally) -> Iterator[tuple[int, list[int], list[int]]]:
    for answers, others in zip(run.answers, against.answers, strict=True):
        for index, (mine, theirs) in enumerate(zip(answers, others, strict=True)):
            yield index, mine.token_ids, theirs.token_ids


def _gap(request: Request, mine: list[int], theirs: list[int], position: int, reference: Runner) -> float | None:
    """How far the lower of the two tokens is below the best score: at least the gap between the best two."""
    if position >= min(len(mine), len(theirs)):
        return None
    scores_V = reference.scores_after(request, theirs[:position])
    gap = float(scores_V.max() - min(scores_V[mine[position]], scores_V[theirs[position]]))
    return gap if np.isfinite(gap) else None


def _ratio(tokens: Any, seconds: Any, other_tokens: Any, other_seconds: Any) -> Any:
    """Of numbers or of arrays of them."""
    return (tokens / seconds) / (other_tokens / other_seconds)
