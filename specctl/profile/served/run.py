"""Rounds over a grid on a running engine: every place in its turn, so that what changes meanwhile falls on all alike.
It prints and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.errors import UsageError
from specctl.profile.places import choose_contexts
from specctl.profile.served.engine import Served
from specctl.profile.served.meter import Meter, Spot
from specctl.profile.served.steps import Round
from specctl.profile.timing import Timing, rounds, time_left, timing_of

CONTEXTS = (512, 2048)
PROMPTS = (32, 128, 512, 2048)
FORCED = 0.05
"""How far the mean length may be from the one that the engine was told to accept."""


@dataclass(frozen=True)
class Plan:
    """prompts: sizes whose time to the first token is measured. steps: of each stream and round. forced: the mean
    acceptance length that the engine was started with, None for none."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int
    steps: int
    forced: float | None = None

    @property
    def spots(self) -> list[Spot]:
        return [Spot(batch, context) for batch in self.batches for context in self.contexts]


@dataclass(frozen=True)
class Reading:
    """k: tokens drafted in every step. per_step: tokens that a step brought, on average."""

    k: int
    timing: Timing
    per_step: float


@dataclass(frozen=True)
class Readings:
    """steps: of every spot that showed steps of one kind; the others are in notices. first_token: by tokens of a
    prompt."""

    steps: dict[Spot, Reading]
    first_token: dict[int, Timing]
    notices: list[str]


def make_plan(
    served: Served,
    batches: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    repeats: int,
    steps: int,
    forced: float | None = None,
    usual: Sequence[int] = CONTEXTS,
) -> Plan:
    """contexts None: those of `usual` that the engine can hold, half of what it holds if none.

    Raises UsageError for what is named twice or longer than the model's context.
    """
    if forced is not None and served.speculation is None:
        raise UsageError(f"--acceptance-length {forced:g}: {served.wire.url} does not speculate; leave it out")
    longest = 0 if served.speculation is None else served.speculation.longest or 0
    holds = served.max_length - -(-steps * (longest + 1) // 2) - 1
    if holds < 1:
        raise UsageError(
            f"--steps {steps}: {served.wire.url} holds texts of {served.max_length} tokens; ask for fewer steps"
        )
    why = (
        f"{served.wire.url} holds texts of {served.max_length} tokens, so with {steps} steps around it the longest "
        "context"
    )
    contexts = choose_contexts(batches, contexts, usual, holds, why)
    sizes = {n for n in (*PROMPTS, *contexts) if n < served.max_length}
    return Plan(tuple(sorted(batches)), contexts, tuple(sorted(sizes)), repeats, steps, forced)


def measure_engine(served: Served, plan: Plan, progress: Callable[[str], None] = lambda sentence: None) -> Readings:
    """Raises UsageError where no spot shows steps of one kind, or the engine does not accept as it is said to."""
    meter = Meter(served, plan.steps)
    found: dict[Spot, list[Round | None]] = {spot: [] for spot in plan.spots}
    first: dict[int, list[float]] = {tokens: [] for tokens in plan.prompts}
    progress(f"finding the sizes of requests for {len(found)} places")
    for spot in plan.spots:
        meter.settle(spot)
    for tokens in plan.prompts:
        meter.first_token_ms(tokens)
    begin = time.perf_counter()
    turns: list[Spot | int] = [*plan.spots, *plan.prompts]
    for number, order in enumerate(rounds(turns, plan.repeats)):
        for key in order:
            if isinstance(key, Spot):
                found[key].append(meter.measure(key))
            else:
                first[key].append(meter.first_token_ms(key))
        progress(time_left(number, plan.repeats, time.perf_counter() - begin))
    notices: list[str] = []
    steps = {spot: reading for spot, each in found.items() if (reading := _reading(spot, each, notices)) is not None}
    if not steps:
        raise UsageError(f"{served.wire.url}: no place can be told: {'; '.join(notices)}")
    _check_forced(served, plan, steps)
    return Readings(steps, {tokens: timing_of(each) for tokens, each in first.items()}, notices)


def _reading(spot: Spot, rounds_: Sequence[Round | None], notices: list[str]) -> Reading | None:
    """Of the rounds that can be told, if they are more than the others: one may meet a prompt that nothing is found
    in."""
    known = [each for each in rounds_ if each is not None and each.k is not None]
    if 2 * len(known) <= len(rounds_):
        why = next((each.why for each in rounds_ if each is not None and each.why), "its requests did not all decode")
        notices.append(f"{spot}: {why}, so it has no cell")
        return None
    lengths = sorted({each.k for each in known if each.k is not None})
    if len(lengths) > 1:
        notices.append(f"{spot}: drafted {' and '.join(map(str, lengths))} tokens in turn, so it has no cell")
        return None
    return Reading(lengths[0], timing_of([each.ms for each in known]), float(np.mean([e.per_step for e in known])))


def _check_forced(served: Served, plan: Plan, steps: dict[Spot, Reading]) -> None:
    if plan.forced is None:
        return
    mean = float(np.mean([each.per_step for each in steps.values()]))
    if abs(mean / plan.forced - 1) > FORCED:
        raise UsageError(
            f"--acceptance-length {plan.forced:g}: {served.wire.url} gave {mean:.2f} tokens a step, so it does not "
            "accept as it was told to; look at the command that started it"
        )
