"""Several completions at a time, and how many tokens each of their events brought. It knows nothing about steps.

They go out together, as the prompts of one request, so that an engine takes them in at the same time; of several
requests only where there are very many. Prompts are token ids, a short random block said over and over: no two share a
beginning, so no prefix cache helps, and a draft that looks things up finds something.
"""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from specctl.errors import UsageError
from specctl.profile.served.wire import Raw, Wire, reason

PATH = "/v1/completions"
BLOCK = 32
IDS = range(3, 256)
"""Every vocabulary has them."""

GROUP = 64
"""Prompts of a request."""


@dataclass(frozen=True)
class Stream:
    """One answer. sent: when its request was; moments, tokens: of every event that brought some, when it came and how
    many there were by then. Seconds."""

    sent: float
    moments: tuple[float, ...]
    tokens: tuple[int, ...]

    def but_last(self) -> Stream:
        """Without the last event, in which the longest answer may have cut a block."""
        return self if len(self.moments) < 3 else Stream(self.sent, self.moments[:-1], self.tokens[:-1])


def prompt(length: int, random: random.Random) -> list[int]:
    block = [random.choice(IDS) for _ in range(min(length, BLOCK))]
    return (block * -(-length // len(block)))[:length]


def answer_all(wire: Wire, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    """All at once. Raises EngineUnreachable, Refusal, and UsageError for a stream that does not count its tokens."""
    groups = [prompts[first : first + GROUP] for first in range(0, len(prompts), GROUP)]
    start = threading.Barrier(len(groups))

    def one(group: Sequence[Sequence[int]]) -> tuple[float, Raw]:
        try:
            return wire.stream(PATH, _body(model, group, max_tokens), start.wait)
        except BaseException:
            start.abort()  # those that wait for this one
            raise

    collects = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(len(groups)) as pool:
            futures = [pool.submit(one, group) for group in groups]
    finally:
        if collects:
            gc.enable()
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    answered = zip(groups, futures, strict=True)
    return [stream for group, future in answered for stream in _read(wire.url, len(group), *future.result())]


def _body(model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    ids = [list(each) for each in prompts]
    return {
        "model": model,
        "prompt": ids[0] if len(ids) == 1 else ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def _read(url: str, count: int, sent: float, raw: Raw) -> Iterator[Stream]:
    moments: list[list[float]] = [[] for _ in range(count)]
    tokens: list[list[int]] = [[] for _ in range(count)]
    for moment, index, total in _counted(url, raw):
        if not 0 <= index < count:
            raise UsageError(f"{url}{PATH}: answers choice {index}, and {count} were asked for")
        if total > (tokens[index][-1] if tokens[index] else 0):
            moments[index].append(moment)
            tokens[index].append(total)
    if not all(tokens):
        raise UsageError(f"{url}{PATH}: ended an answer before its first token; look at the engine's log")
    for each, totals in zip(moments, tokens, strict=True):
        yield Stream(sent, tuple(each), tuple(totals))


def _counted(url: str, raw: Raw) -> Iterator[tuple[float, int, int]]:
    """(moment, choice, its tokens so far) of every event."""
    for moment, event in raw:
        data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data or data == b"[DONE]":
            continue
        value = _object(url, data)
        if "error" in value or value.get("object") == "error":
            raise UsageError(f"{url}{PATH}: broke off an answer: {reason(data.decode('utf-8', 'replace'))}")
        if choices := value.get("choices"):
            yield moment, choices[0].get("index", 0), _total(url, value.get("usage"))


def _object(url: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{url}{PATH}: an event of its stream is {data[:60]!r}, expected a JSON object")
    return value


def _total(url: str, usage: Any) -> int:
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(total, int):
        raise UsageError(
            f"{url}{PATH}: its stream does not tell how many tokens an event has (stream_options."
            "continuous_usage_stats), so steps cannot be told from it; update the engine, or ask it directly if "
            "something stands in between"
        )
    return total
