"""Golden curves: measured mean acceptance lengths by K, against the formula that takes all tokens to be accepted alike.

What a wrong K costs is a statement of the profile's times, not a measurement: no step of these runs was timed on H100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import extracts
import numpy as np

from specctl.roofline.reading import as_read
from specctl.schemas.profile import read_profile
from specctl.tune.costs import StepCosts

KS = range(1, 9)
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Curve:
    """survival: of the first k drafts together, k = 1..8, made monotone. moved: the most that took, in tokens."""

    name: str
    method: str
    lengths: tuple[float, ...]
    survival: tuple[float, ...]
    moved: float

    @property
    def projected(self) -> list[float]:
        """Mean acceptance length by K, 0 included."""
        return [1.0, *(1 + np.cumsum(self.survival)).tolist()]


def read(data: Path) -> list[Curve]:
    found = []
    for row in extracts.rows(data / "golden_al_curves.csv"):
        lengths = [float(row[f"K{k}"]) for k in KS]
        raw = np.diff([1.0, *lengths])
        survival = falling(raw)
        moved = float(np.abs(np.cumsum(survival) - np.cumsum(raw)).max())
        name = f"{row['model']} {row['method']}, thinking {row['thinking']}"
        found.append(Curve(name, row["method"], tuple(lengths), tuple(survival), moved))
    return found


def falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence, by squares, that never rises and stays from 0 to 1: lengths of separate runs may make a
    later token look more likely than the one it needs."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] < mean:
            last, n = blocks.pop()
            mean, count = (mean * count + last * n) / (count + n), count + n
        blocks.append((mean, count))
    return [min(1.0, max(0.0, mean)) for mean, count in blocks for _ in range(count)]


@dataclass(frozen=True)
class Choice:
    """At one place: K by the formula and by the curve, what the first loses, and what it promised too much."""

    curve: str
    profile: str
    batch: int
    context: int
    by_formula: int
    best: int
    cost: float
    promised: float


def choices(curves: Sequence[Curve], profiles: dict[str, Path]) -> Iterator[Choice]:
    """profiles: by the drafts they are for, eagle3 or mtp; every curve goes with one of them."""
    for kind, path in profiles.items():
        costs = StepCosts(as_read(read_profile(path)), path.stem)
        for curve in curves:
            if ("mtp" if curve.method == "mtp" else "eagle3") == kind:
                for context in costs.steps.contexts:
                    for batch in BATCHES:
                        yield _choice(curve, costs, path.stem, batch, context)


def _choice(curve: Curve, costs: StepCosts, profile: str, batch: int, context: int) -> Choice:
    times = costs.at(batch, context, max(KS), 0)
    ms = [float(times.plain_S[0]), *(float(times.drafting_S(k, k)[0]) for k in KS)]
    formula = [1.0, *(1 + np.cumsum(curve.survival[0] ** np.arange(1, 9))).tolist()]
    true = [length / each for length, each in zip(curve.projected, ms, strict=True)]
    believed = [length / each for length, each in zip(formula, ms, strict=True)]
    chosen, best = int(np.argmax(believed)), int(np.argmax(true))
    return Choice(
        curve.name,
        profile,
        batch,
        context,
        chosen,
        best,
        1 - true[chosen] / true[best],
        believed[chosen] / true[chosen] - 1,
    )
