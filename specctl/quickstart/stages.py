"""The stages of a quickstart: what each may take, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """budget: seconds it was expected to take, None where nobody could know."""

    name: str
    budget: float | None
    seconds: float


@dataclass
class Stages:
    """Announces every stage with its budget. total: how many there are; seconds: for all of them together."""

    total: int
    seconds: float
    say: Callable[[str], None]
    done: list[Stage] = field(default_factory=list)
    _start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def stage(self, name: str, budget: float | None = None) -> Iterator[None]:
        about = "" if budget is None else f", about {span(budget)}"
        self.say(f"[{len(self.done) + 1}/{self.total}] {name}{about}")
        start = time.perf_counter()
        yield
        self.done.append(Stage(name, budget, time.perf_counter() - start))

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.spent)


def span(seconds: float) -> str:
    """5 seconds, 2 minutes."""
    if seconds < 90:
        number = max(1, round(seconds))
        return f"{number} second{'s' if number > 1 else ''}"
    return f"{round(seconds / 60)} minutes"
