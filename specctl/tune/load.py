"""The batch that a load brings about: faster decoding ends requests sooner, so fewer run at a time. A rate of arrival
has a fixed point, or the server is saturated; a log is played through.

Tokens flow evenly: every running request gets one each TPOT of the batch there is. A prompt stops everybody while it
is taken in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specctl.tune.mix import Log

STEPS = 2000
DAMPING = 0.5
CLOSE = 1e-6


@dataclass(frozen=True)
class Tempo:
    """How fast a way of decoding is. tpot_B: milliseconds a token of a sequence, at batch b + 1, up to the most that
    run at a time. prompt_ms: of a prompt of so many tokens."""

    tpot_B: np.ndarray
    prompt_ms: Callable[[int], float]

    @property
    def most(self) -> int:
        return len(self.tpot_B)

    def tpot(self, batch: float) -> float:
        return float(np.interp(batch, np.arange(1, self.most + 1), self.tpot_B))


@dataclass(frozen=True)
class Steady:
    """What a rate of arrival settles at. saturated: it never does; batch is the most there is then. most: requests a
    second that can be served at all. Times in milliseconds, prompts of others included."""

    batch: float
    tpot_ms: float
    ttft_ms: float
    saturated: bool
    most: float

    def request_ms(self, output_tokens: int) -> float:
        """Of one request, from its arrival to its last token."""
        return self.ttft_ms + (output_tokens - 1) * self.tpot_ms


def steady(tempo: Tempo, rate: float, input_tokens: int, output_tokens: int) -> Steady:
    """rate: requests a second. batch = rate x (TTFT + output tokens x TPOT at that batch), from below, damped."""
    prompt, per_ms = tempo.prompt_ms(input_tokens), rate / 1000
    capacity = 1000 / float((output_tokens * tempo.tpot_B / np.arange(1, tempo.most + 1)).min() + prompt)
    free = 1 - per_ms * prompt  # the share of time that prompts leave
    if rate >= capacity or free <= 0:
        tpot = float(tempo.tpot_B[-1] / max(free, CLOSE))
        return Steady(float(tempo.most), tpot, prompt / max(free, CLOSE), True, capacity)
    batch = 0.0
    for _ in range(STEPS):
        wanted = per_ms * (prompt + output_tokens * tempo.tpot(max(batch, 1.0))) / free
        if abs(wanted - batch) < CLOSE * max(1.0, batch):
            break
        batch += DAMPING * (wanted - batch)
        if batch > tempo.most:
            return Steady(float(tempo.most), float(tempo.tpot_B[-1] / free), prompt / free, True, capacity)
    return Steady(batch, tempo.tpot(max(batch, 1.0)) / free, prompt / free, False, capacity)


@dataclass(frozen=True)
class Played:
    """What became of a log. tokens: the share of output tokens that came at each batch. seconds: until the last request
    ended. behind: how long after the last arrival that was, beyond what its own answer takes."""

    tokens: dict[int, float]
    tpot_ms: float
    ttft_ms: float
    seconds: float
    queued: int


def play(tempo: Tempo, log: Log) -> Played:
    """Everybody who runs has had as many tokens as everybody else who came at the same time, so one clock of tokens
    does for all: a request ends when the clock has gone on by its output."""
    now = clock = 0.0
    running: list[tuple[float, int]] = []
    waiting: list[int] = []
    tokens: dict[int, float] = {}
    begun: dict[int, float] = {}
    spent = first = 0.0
    queued, coming = 0, 0
    requests = log.arrivals
    while running or waiting or coming < len(requests):
        arrives = requests[coming].at * 1000 if coming < len(requests) else np.inf
        if waiting and len(running) < tempo.most:
            index = waiting.pop(0)
            now += tempo.prompt_ms(requests[index].input_tokens)
            first += now - requests[index].at * 1000
            begun[index] = now
            heapq.heappush(running, (clock + requests[index].output_tokens, index))
            continue
        if not running:
            now = max(now, arrives)
            waiting.append(coming)
            coming += 1
            continue
        tpot = tempo.tpot(len(running))
        ends = now + (running[0][0] - clock) * tpot
        until = min(ends, max(arrives, now))
        gone = (until - now) / tpot
        tokens[len(running)] = tokens.get(len(running), 0.0) + gone * len(running)
        clock, now = clock + gone, until
        if until == ends:
            _, index = heapq.heappop(running)
            spent += (now - begun.pop(index)) / requests[index].output_tokens
        else:
            waiting.append(coming)
            coming += 1
            queued = max(queued, len(waiting) if len(running) >= tempo.most else 0)
    total = sum(tokens.values())
    return Played(
        tokens={batch: amount / total for batch, amount in sorted(tokens.items())},
        tpot_ms=spent / len(requests),
        ttft_ms=first / len(requests),
        seconds=now / 1000,
        queued=queued,
    )
