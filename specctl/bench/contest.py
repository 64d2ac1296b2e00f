"""The contest: every runner does every group of requests, in an order that turns, as often as there are repeats.

What changes on the machine in the meantime (clocks, neighbours, heat) then falls on all runners alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specctl.bench.clock import now
from specctl.bench.runners import Answer, Runner
from specctl.bench.work import Request

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Turn:
    """One group in one repeat; order: the runners by index, each once."""

    repeat: int
    group: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Tally:
    """What one runner did. seconds, tokens: [repeats, groups], wall time of a group and tokens it brought.
    answers[repeat]: of all requests in order."""

    seconds: np.ndarray
    tokens: np.ndarray
    answers: list[list[Answer]]


def turns(num_repeats: int, num_groups: int, num_runners: int) -> Iterator[Turn]:
    """Neighbouring turns begin with different runners, and every runner begins about equally often."""
    for repeat in range(num_repeats):
        for group in range(num_groups):
            first = (repeat * num_groups + group) % num_runners
            order = tuple((first + i) % num_runners for i in range(num_runners))
            yield Turn(repeat, group, order)


def hold(
    runners: Sequence[Runner],
    groups: list[list[Request]],
    repeats: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> list[Tally]:
    """A Tally for each runner, in their order. Before the clock starts each answers the first group in short."""
    for runner in runners:
        progress(f"warming up: {runner.name}")
        runner.warm_up([replace(r, max_tokens=min(r.max_tokens, WARM_UP_TOKENS)) for r in groups[0]])
    shape = (repeats, len(groups))
    tallies = [Tally(np.zeros(shape), np.zeros(shape, dtype=np.int64), [[] for _ in range(repeats)]) for _ in runners]
    begin = now(device)
    for number, turn in enumerate(turns(repeats, len(groups), len(runners)), start=1):
        for index in turn.order:
            start = now(device)
            answers = runners[index].answer(groups[turn.group])
            tally = tallies[index]
            tally.seconds[turn.repeat, turn.group] = now(device) - start
            tally.tokens[turn.repeat, turn.group] = sum(len(answer.token_ids) for answer in answers)
            tally.answers[turn.repeat].extend(answers)
        _tell(progress, number, repeats * len(groups), now(device) - begin)
    return tallies


def _tell(progress: Callable[[str], None], done: int, total: int, seconds: float) -> None:
    """Every tenth of the way."""
    if done * 10 // total > (done - 1) * 10 // total:
        left = seconds / done * (total - done)
        progress(f"{done * 100 // total} % measured after {seconds:.0f} s, about {left:.0f} s to go")
