"""How wrong predictions are, in the three figures that every table has; and a goal that is reached or missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Relative errors, predicted over measured less one. mape: mean of them without sign. bias: mean. p90: of those
    without sign. rms: root of their mean square."""

    n: int
    mape: float
    bias: float
    p90: float
    rms: float

    @classmethod
    def of(cls, predicted: Iterable[float], measured: Iterable[float]) -> Errors:
        error = np.array(list(predicted)) / np.array(list(measured)) - 1
        absolute = np.abs(error)
        return cls(
            len(error), float(absolute.mean()), float(error.mean()), float(np.quantile(absolute, 0.9)), rms(error)
        )

    def __str__(self) -> str:
        return f"n {self.n:4}  MAPE {self.mape:6.1%}  bias {self.bias:+7.1%}  p90 {self.p90:6.1%}  rms {self.rms:6.1%}"


def rms(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(error**2)))


@dataclass(frozen=True)
class Goal:
    """what: in words. limit: at most. cause: why it is missed, as far as known."""

    what: str
    value: float
    limit: float
    cause: str = ""

    @property
    def reached(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "reached" if self.reached else f"MISSED ({self.cause or 'cause not known'})"
        return f"{self.what}: {self.value:.1%}, at most {self.limit:.0%}: {verdict}"

    def as_json(self) -> dict[str, Any]:
        cause = {} if self.reached else {"cause": self.cause}
        return {"what": self.what, "value": self.value, "limit": self.limit, "reached": self.reached, **cause}


def table(title: str, rows: Sequence[tuple[str, Errors]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:{width}}  {errors}" for name, errors in rows), ""])
