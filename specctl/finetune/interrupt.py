"""Interrupts: an interrupted run ends where it can be gone on with, not in the middle of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from specctl.dist import ALONE, World


class Interrupted(KeyboardInterrupt):
    """Raised where the run can be saved."""


class Interrupts:
    """check() raises Interrupted after a SIGINT or SIGTERM; a second one ends the process as usual. Of several
    processes all are interrupted when one is, for they can only stop together."""

    def __init__(self, world: World = ALONE) -> None:
        self.asked = False
        self._world = world

    def check(self) -> None:
        if self._world.any(self.asked):
            raise Interrupted

    def check_alone(self) -> None:
        """Where the others are waiting; with others there is nothing to be done but to go on."""
        if self._world.size == 1:
            self.check()

    @contextmanager
    def caught(self, say: Callable[[str], None]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only there can signals be caught
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def ask(number: int, _frame: FrameType | None) -> None:
            self.asked = True
            for each, handler in before.items():
                signal.signal(each, handler)
            say("interrupted: the state is saved after this step; once more to stop without that")

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
