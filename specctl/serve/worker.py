"""EngineWorker: the engine in a thread of its own, asked and heard from an asyncio loop. It knows nothing about HTTP.

The thread alone touches the engine. Requests and aborts wait in an inbox that it empties between two steps; outputs
travel back through the loop. When the engine fails, everybody who waits is told and nobody is taken in any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from specctl.engine.engine import Engine, Output
from specctl.errors import SpecctlError
from specctl.sampling.params import SamplingParams
from specctl.serve.metrics import Metrics


class QueueFull(SpecctlError):
    """Raised when as many requests wait as the server lets wait (HTTP 503)."""


class EngineStopped(SpecctlError):
    """Raised when the engine has failed or is shutting down (HTTP 503)."""


@dataclass
class Ticket:
    """One prompt of a request on its way through the engine.

    first, num_tokens: of each choice, when its first token came and how many have come. ended: choices that got their
    last token; read: those whose last output was read.
    """

    params: SamplingParams
    events: asyncio.Queue[Output | Exception]
    arrived: float = field(default_factory=time.perf_counter)
    request_id: int | None = None
    cancelled: bool = False
    first: dict[int, float] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    ended: int = 0
    read: int = 0

    async def outputs(self) -> AsyncIterator[Output]:
        """Outputs of all choices until each has ended. Raises what the engine raised."""
        while self.read < self.params.n:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            self.read += event.finish_reason is not None
            yield event


class EngineWorker:
    """max_queue: how many prompts may wait for a place among the running ones."""

    def __init__(self, engine: Engine, metrics: Metrics, max_queue: int) -> None:
        self.engine = engine
        self.metrics = metrics
        self.max_queue = max_queue
        self.failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._num_pending = 0  # submitted and not yet seen by the engine
        self._tickets: dict[int, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present step; whoever still waits is told."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._stopping

    def submit(self, token_ids: list[int], params: SamplingParams) -> Ticket:
        """Queue a prompt. Raises QueueFull or EngineStopped; what is wrong with the request comes out of the ticket."""
        if not self.alive:
            raise EngineStopped("the server is shutting down" if self.failure is None else "the engine has failed")
        ticket = Ticket(params, asyncio.Queue())
        with self._wake:
            if self.engine.num_waiting + self._num_pending >= self.max_queue:
                raise QueueFull(f"{self.max_queue} requests are waiting already; try again later")
            self._num_pending += 1
        self._send(lambda: self._add(ticket, token_ids))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody reads the ticket any more: drop its request, queued or running. Harmless when it has ended."""
        if not ticket.cancelled and ticket.read < ticket.params.n:
            ticket.cancelled = True
            self._send(lambda: self._abort(ticket))

    def _send(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # -- in the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._inbox and not self.engine.has_work and not self._stopping:
                        self._wake.wait()
                    if self._stopping:
                        break
                    commands, self._inbox = self._inbox, []
                for command in commands:
                    command()
                if self.engine.has_work:
                    for output in self.engine.step():
                        self._deliver(output)
        except Exception as error:  # noqa: BLE001 - whatever it is, the clients must not wait for ever
            self.failure = error
        reason = EngineStopped("the engine has failed" if self.failure else "the server is shutting down")
        for ticket in list(self._tickets.values()):
            self._tell(ticket, reason)
        with self._wake:
            commands, self._inbox, self._stopping = self._inbox, [], True
        for command in commands:
            command()

    def _add(self, ticket: Ticket, token_ids: list[int]) -> None:
        with self._wake:
            self._num_pending -= 1
        if ticket.cancelled:
            return
        if not self.alive:
            self._tell(ticket, EngineStopped("the server is shutting down"))
            return
        try:
            ticket.request_id = self.engine.add(token_ids, ticket.params)
        except SpecctlError as error:
            self._tell(ticket, error)
            return
        self._tickets[ticket.request_id] = ticket

    def _abort(self, ticket: Ticket) -> None:
        if ticket.request_id is not None and self._tickets.pop(ticket.request_id, None) is not None:
            self.engine.abort(ticket.request_id)
            self.metrics.finished("abort", time.perf_counter() - ticket.arrived)

    def _deliver(self, output: Output) -> None:
        ticket, choice, now = self._tickets[output.request_id], output.choice, time.perf_counter()
        if choice not in ticket.first:
            ticket.first[choice] = now
            self.metrics.first_token(now - ticket.arrived)
        ticket.num_tokens[choice] = ticket.num_tokens.get(choice, 0) + len(output.token_ids)
        if output.finish_reason is not None:
            self.metrics.finished(output.finish_reason, now - ticket.arrived)
            if ticket.num_tokens[choice] > 1:
                # By tokens, not by outputs: under speculation one output holds several.
                self.metrics.per_token((now - ticket.first[choice]) / (ticket.num_tokens[choice] - 1))
            ticket.ended += 1
            if ticket.ended == ticket.params.n:
                del self._tickets[output.request_id]
        self._tell(ticket, output)

    def _tell(self, ticket: Ticket, event: Output | Exception) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(ticket.events.put_nowait, event)
