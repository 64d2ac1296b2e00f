"""A bar on the terminal: how much is done, at how many tokens a second, and when it will be over."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

QUIET_SECONDS = 30.0  # between two lines where nobody watches


class Bar:
    """Used as a context. done: how much of `total` was there before. quiet: shows nothing."""

    def __init__(self, name: str, total: int, unit: str, done: int = 0, quiet: bool = False) -> None:
        interval = 0.2 if sys.stderr.isatty() else QUIET_SECONDS
        self._bar: Any = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit=f" {unit}",
            mininterval=interval,
            file=sys.stderr,
            disable=quiet,
        )
        self._quiet = quiet
        self._tokens = 0
        self._start = time.perf_counter()

    def add(self, count: int, tokens: int = 0, note: str = "") -> None:
        self._tokens += tokens
        speed = self._tokens / max(1e-9, time.perf_counter() - self._start)
        self._bar.set_postfix_str(f"{speed:.0f} tok/s{', ' if note else ''}{note}", refresh=False)
        self._bar.update(count)

    def note(self, sentence: str) -> None:
        """Say something that stays."""
        if not self._quiet:
            self._bar.write(sentence, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
