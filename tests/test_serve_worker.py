"""EngineWorker: the engine's thread and the loop. Nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import tiny
import torch
from fixtures import Make
from serving import PATIENCE, Gate, local, scrape

from specctl.engine.output import Output
from specctl.errors import NumericalError, RequestError
from specctl.sampling.params import SamplingParams
from specctl.serve.app import Serving
from specctl.serve.worker import FAILED, STOPPING, EngineStopped, EngineWorker, QueueFull, Ticket

HELLO, OTHER = [256, *b"hello"], [256, *b"other words"]


@pytest.fixture
def serving(make: Make) -> Serving:
    target = make(tiny.llama, seed=1)
    return local(target, make(tiny.near, of=target), batch=2, max_queue=2)


@asynccontextmanager
async def working(worker: EngineWorker) -> AsyncIterator[EngineWorker]:
    worker.start(asyncio.get_running_loop())
    try:
        yield worker
    finally:
        worker.stop()
        await asyncio.to_thread(worker.join)


def asks(*prompts: list[int], **params: Any) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | params)) for prompt in prompts]


async def answers(ticket: Ticket) -> list[list[int]]:
    """Token ids of each choice, read to the end."""
    found: list[list[int]] = [[] for _ in range(ticket.num_choices)]
    left = ticket.num_choices
    while left:
        index, output = await asyncio.wait_for(ticket.next(), PATIENCE)
        found[index] += output.token_ids
        left -= output.finish_reason is not None
    return found


async def refused(ticket: Ticket) -> Exception:
    while True:
        try:
            await asyncio.wait_for(ticket.next(), PATIENCE)
        except (EngineStopped, RequestError) as error:
            return error


async def settled(worker: EngineWorker) -> None:
    """Once whatever was sent to the engine has been done, with nothing left of it."""
    async with asyncio.timeout(PATIENCE):
        while worker.engine.has_work or worker.num_open or worker._inbox:
            await asyncio.sleep(0.005)
    assert (worker.engine.num_running, worker.engine.num_waiting, worker.engine.cache_usage) == (0, 0, 0)
    assert not worker._open
    assert not worker._requests


def aborted(worker: EngineWorker) -> float:
    return scrape(worker.metrics.render().decode())["specctl:request_success_total{finished_reason=abort}"]


def test_choices_come_under_their_indices_and_are_the_engines_own(serving: Serving) -> None:
    async def scenario() -> list[list[int]]:
        async with working(serving.worker) as worker:
            prompts = asks(HELLO, OTHER, n=2, temperature=1.0, seed=3)
            found = await answers(worker.submit(prompts))
            await settled(worker)
            return found

    found = asyncio.run(scenario())
    expected = serving.worker.engine.run(asks(HELLO, OTHER, n=2, temperature=1.0, seed=3))
    assert found == [choice.output for choices in expected for choice in choices]
    assert len({tuple(choice) for choice in found}) == 4


def test_withdrawn_in_every_state(serving: Serving) -> None:
    """The first ticket runs, the second waits in the engine, the third has not been seen by it."""

    async def scenario() -> None:
        async with working(serving.worker) as worker:
            gate = Gate(worker.engine)
            running, waiting = worker.submit(asks(HELLO, OTHER)), worker.submit(asks(HELLO))
            await gate.reached()
            unseen = worker.submit(asks(HELLO))
            for ticket in (unseen, waiting, running, running):
                worker.cancel(ticket)
            gate.open()
            await settled(worker)
            assert aborted(worker) == 4
            assert worker.engine.stats.aborts == {"decoding": 2, "waiting": 1}

    asyncio.run(scenario())


def test_withdrawing_what_has_ended_does_nothing(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            ticket = worker.submit(asks(HELLO))
            await answers(ticket)
            worker.cancel(ticket)
            await settled(worker)
            assert not ticket.withdrawn
            assert aborted(worker) == 0

    asyncio.run(scenario())


def test_one_choice_of_several_may_have_ended_when_the_rest_is_withdrawn(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            ticket = worker.submit([*asks(HELLO, max_tokens=1), *asks(OTHER, max_tokens=200)])
            ended: Output | None = None
            while ended is None or ended.finish_reason is None:
                _, ended = await asyncio.wait_for(ticket.next(), PATIENCE)
            worker.cancel(ticket)
            await settled(worker)
            assert aborted(worker) == 1

    asyncio.run(scenario())


def test_the_queue_is_as_long_as_it_says(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            gate = Gate(worker.engine)
            tickets = [worker.submit(asks(HELLO)) for _ in range(4)]  # two run, two wait
            with pytest.raises(QueueFull, match="2 requests are waiting"):
                worker.submit(asks(HELLO))
            await gate.reached()
            with pytest.raises(QueueFull):
                worker.submit(asks(HELLO))
            worker.cancel(tickets.pop())
            gate.open()
            for ticket in tickets:
                await answers(ticket)
            # With room for one, many are taken in together: they would never find room for all.
            assert len(await answers(worker.submit(asks(HELLO, n=9)))) == 9
            await settled(worker)

    asyncio.run(scenario())


def test_prompts_are_taken_in_all_or_none(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            error = await refused(worker.submit(asks(HELLO, [256] * 256)))
            assert "256" in str(error)
            await settled(worker)
            assert worker.engine.stats.speculation.emitted_tokens == 0
            assert aborted(worker) == 0  # it was never served
            await answers(worker.submit(asks(HELLO)))

    asyncio.run(scenario())


def test_when_the_engine_fails_everybody_is_told(serving: Serving, make: Make) -> None:
    """Running, waiting and not yet seen. A token that is no number is our bug, and makes the engine raise."""
    failures: list[Exception] = []
    worker = EngineWorker(serving.worker.engine, serving.worker.metrics, 9, failures.append)

    async def scenario() -> None:
        async with working(worker):
            gate = Gate(worker.engine)
            tickets = [worker.submit(asks(HELLO)) for _ in range(3)]
            await gate.reached()
            tickets += [worker.submit(asks(HELLO)), worker.submit(asks(["no number"])), worker.submit(asks(OTHER))]  # type: ignore[list-item]
            gate.open()
            assert [str(await refused(ticket)) for ticket in tickets] == [FAILED] * 6
            with pytest.raises(EngineStopped):
                worker.submit(asks(HELLO))
            assert worker.refusal == FAILED
            for ticket in tickets:
                worker.cancel(ticket)
            assert worker.num_open == 0

    asyncio.run(scenario())
    assert [type(failure) for failure in failures] == [TypeError]


def test_stopping_tells_whoever_waits(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            gate = Gate(worker.engine)
            tickets = [worker.submit(asks(HELLO, max_tokens=200)) for _ in range(3)]
            await gate.reached()
            tickets.append(worker.submit(asks(HELLO)))
            worker.stop()
            gate.open()
            assert {str(await refused(ticket)) for ticket in tickets} == {STOPPING}

    asyncio.run(scenario())


def test_draining_serves_to_the_end(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            gate = Gate(worker.engine)
            tickets = [worker.submit(asks(HELLO)) for _ in range(3)]
            await gate.reached()
            worker.drain()
            with pytest.raises(EngineStopped, match=STOPPING):
                worker.submit(asks(HELLO))
            gate.open()
            assert [len(choice) for ticket in tickets for choice in await answers(ticket)] == [20] * 3
            await settled(worker)

    asyncio.run(scenario())


def test_a_loop_that_has_ended_does_not_hurt_the_thread(serving: Serving) -> None:
    """pytest makes an error of an exception that ends a thread."""
    worker, gate = serving.worker, Gate(serving.worker.engine)

    async def scenario() -> None:
        worker.start(asyncio.get_running_loop())
        worker.submit(asks(HELLO))
        await gate.reached()

    asyncio.run(scenario())
    gate.open()
    worker.stop()
    worker.join()
    assert worker.refusal == STOPPING


def test_nothing_grows_with_the_number_of_tickets(serving: Serving) -> None:
    async def scenario() -> None:
        async with working(serving.worker) as worker:
            for round_ in range(50):
                tickets = [worker.submit(asks(HELLO, max_tokens=4, n=1 + round_ % 3))]
                if round_ % 2:
                    tickets.append(worker.submit(asks(OTHER, max_tokens=100)))
                    worker.cancel(tickets.pop())
                for ticket in tickets:
                    await answers(ticket)
            await settled(worker)
            assert not worker.engine._requests

    before = threading.active_count()
    asyncio.run(scenario())
    assert threading.active_count() <= before + 1  # the loop's own helper for waiting may stay


def test_logits_that_are_no_numbers_fail_their_request_alone(serving: Serving) -> None:
    worker = serving.worker
    worker.engine.target.model.embed_tokens.weight.data[7] = torch.nan

    async def scenario() -> None:
        async with working(worker):
            poisoned, healthy = worker.submit(asks([256, 7], HELLO)), worker.submit(asks(HELLO))
            with pytest.raises(NumericalError, match="NaN or infinite"):
                await answers(poisoned)
            [text] = await answers(healthy)
            assert len(text) == 20
            await settled(worker)
            assert worker.refusal is None

    asyncio.run(scenario())
