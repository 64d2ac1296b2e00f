"""EngineWorker: the engine in a thread of its own, asked and heard from an asyncio loop. It knows nothing about HTTP.

The thread alone touches the engine. What is asked of it waits in an inbox that it empties between two steps; outputs
travel back through the loop. When the engine fails, everybody who waits is told and nobody is taken in any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from specctl.engine.engine import Engine
from specctl.engine.output import Output
from specctl.errors import NumericalError, SpecctlError
from specctl.sampling.params import SamplingParams
from specctl.serve.metrics import Metrics

STOPPING = "the server is shutting down"
FAILED = "the engine has failed and takes nothing more until the server is started again"


class QueueFull(SpecctlError):
    """Raised when as many choices wait as the server lets wait (HTTP 503)."""


class EngineStopped(SpecctlError):
    """Raised when the engine has failed or is shutting down (HTTP 503)."""


Event = tuple[int, Output] | SpecctlError
"""What a ticket hears: the index of a choice and what is new of it, or why there will be nothing more."""


@dataclass(eq=False)
class Ticket:
    """Prompts that came together, taken in all or none. Choice j of prompt i has index i * n + j.

    withdrawn: nobody listens any more. request_ids, first, num_tokens belong to the engine's thread: what the engine
    calls the prompts it has taken in; of each choice, when its first token came and how many have come.
    """

    prompts: Sequence[tuple[list[int], SamplingParams]]
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    arrived: float = field(default_factory=time.perf_counter)
    withdrawn: bool = False
    request_ids: list[int] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return sum(params.n for _, params in self.prompts)

    async def next(self) -> tuple[int, Output]:
        """What comes next of any choice. The caller asks until every choice has had an output with a finish_reason.

        Raises RequestError and CapacityError when the engine refuses a prompt, EngineStopped.
        """
        event = await self.events.get()
        if isinstance(event, SpecctlError):
            raise event
        return event


class EngineWorker:
    """max_queue: how many choices may wait for a place among those that run. on_failure: shown what the engine raised,
    in the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        max_queue: int,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self._max_queue = max_queue
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Both threads' own, under the lock of _wake.
        self._wake = threading.Condition()
        self._inbox: list[tuple[Callable[[Ticket], None], Ticket]] = []
        self._open: dict[Ticket, int] = {}  # of each ticket, how many choices have not ended
        self._refusal: str | None = None  # why nobody is taken in any more
        self._stopping = False
        # The engine's thread's own: ticket of each request of the engine, and the index of its first choice.
        self._requests: dict[int, tuple[Ticket, int]] = {}

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    @property
    def refusal(self) -> str | None:
        """Why nobody is taken in any more; None while all is well."""
        return self._refusal

    @property
    def num_open(self) -> int:
        """Choices taken in, here or by the engine, that have not ended."""
        with self._wake:
            return sum(self._open.values())

    def submit(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> Ticket:
        """Queue prompts. Raises QueueFull and EngineStopped; what is wrong with a prompt is heard from the ticket."""
        ticket = Ticket(prompts)
        with self._wake:
            if self._refusal is not None:
                raise EngineStopped(self._refusal)
            # Whoever comes while there is room is taken in whole: many choices must not be refused for ever.
            if sum(self._open.values()) >= self.engine.options.max_sequences + self._max_queue:
                raise QueueFull(f"{self._max_queue} requests are waiting already; try again later")
            self._open[ticket] = ticket.num_choices
            self._send(self._take_in, ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody listens any more: drop what has not ended, queued or running. Harmless when all has."""
        with self._wake:
            if ticket in self._open and not ticket.withdrawn:
                ticket.withdrawn = True
                self._send(self._withdraw, ticket)

    def drain(self) -> None:
        """Take nobody in any more; whoever is in is served to the end."""
        with self._wake:
            self._refusal = self._refusal or STOPPING

    def stop(self) -> None:
        """Let the thread end after its present step; whoever still waits is told then."""
        with self._wake:
            self._refusal = self._refusal or STOPPING
            self._stopping = True
            self._wake.notify()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _send(self, command: Callable[[Ticket], None], ticket: Ticket) -> None:
        self._inbox.append((command, ticket))
        self._wake.notify()

    # -- in the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = STOPPING
        try:
            while (commands := self._commands()) is not None:
                for command, ticket in commands:
                    command(ticket)
                if self.engine.has_work:
                    try:
                        self._deliver(self.engine.step())
                    except NumericalError as error:
                        self._give_up(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, clients must not wait for ever
            reason = FAILED
            self._on_failure(error)
        with self._wake:
            self._refusal = reason
            left = list(self._open)
            self._open.clear()
            self._inbox.clear()
        self._post([(ticket, EngineStopped(reason)) for ticket in left])

    def _commands(self) -> list[tuple[Callable[[Ticket], None], Ticket]] | None:
        """What came in since the last step; waits while there is nothing to do. None: it is time to end."""
        with self._wake:
            while not self._inbox and not self.engine.has_work and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return None
            commands, self._inbox = self._inbox, []
            return commands

    def _take_in(self, ticket: Ticket) -> None:
        if ticket.withdrawn:
            return
        index = 0
        try:
            for token_ids, params in ticket.prompts:
                request_id = self.engine.add(token_ids, params)
                ticket.request_ids.append(request_id)
                self._requests[request_id] = (ticket, index)
                index += params.n
        except SpecctlError as error:
            self._drop(ticket)
            self._post([(ticket, error)])

    def _withdraw(self, ticket: Ticket) -> None:
        self.metrics.aborted(self._drop(ticket))

    def _drop(self, ticket: Ticket) -> int:
        """How many of its choices had not ended."""
        for request_id in ticket.request_ids:
            if self._requests.pop(request_id, None) is not None:
                self.engine.abort(request_id)
        with self._wake:
            return self._open.pop(ticket, 0)

    def _give_up(self, error: NumericalError) -> None:
        """The engine has ended these requests; whoever waits for them, or for others of the same ticket, is told."""
        for ticket in {self._requests[i][0] for i in error.request_ids if i in self._requests}:
            self.metrics.aborted(self._drop(ticket))
            self._post([(ticket, error)])

    def _deliver(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        events: list[tuple[Ticket, Event]] = []
        for output in outputs:
            ticket, first_index = self._requests[output.request_id]
            index = first_index + output.choice
            self._time(ticket, index, output, now)
            if output.finish_reason is not None:
                self._end(ticket)
            events.append((ticket, (index, output)))
        self._post(events)

    def _time(self, ticket: Ticket, index: int, output: Output, now: float) -> None:
        if index not in ticket.first:
            ticket.first[index] = now
            self.metrics.first_token(now - ticket.arrived)
        ticket.num_tokens[index] = ticket.num_tokens.get(index, 0) + len(output.token_ids)
        if output.finish_reason is None:
            return
        self.metrics.finished(output.finish_reason, now - ticket.arrived)
        if ticket.num_tokens[index] > 1:
            # By tokens, not by outputs: under speculation one output holds several.
            self.metrics.per_token((now - ticket.first[index]) / (ticket.num_tokens[index] - 1))

    def _end(self, ticket: Ticket) -> None:
        """One choice more has ended."""
        with self._wake:
            self._open[ticket] -= 1
            if not self._open[ticket]:
                del self._open[ticket]
                for ended in ticket.request_ids:
                    del self._requests[ended]

    def _post(self, events: list[tuple[Ticket, Event]]) -> None:
        """To the loop, all at once: waking it costs more than what it has to do."""
        assert self._loop is not None
        if events:
            with suppress(RuntimeError):  # the loop is closed, so nobody listens
                self._loop.call_soon_threadsafe(_hand_out, events)


def _hand_out(events: list[tuple[Ticket, Event]]) -> None:
    for ticket, event in events:
        ticket.events.put_nowait(event)
