"""The HTTP application in this process: routes, keys, bodies, errors, and clients that leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import tiny
from fixtures import Make
from serving import PATIENCE, Call, Gate, local, scrape
from starlette.applications import Starlette

from specctl.serve import transport
from specctl.serve.app import Serving, create_app, read_api_keys
from specctl.serve.worker import FAILED, STOPPING

KEY = "sk-ключ"
POST = ("POST", "/v1/completions")
Scenario = Callable[[Starlette], Awaitable[None]]


@pytest.fixture
def serving(make: Make) -> Serving:
    target = make(tiny.llama, seed=1)
    return local(target, make(tiny.near, of=target), batch=2, max_queue=2, k=4, ignore_eos=True)


def play(serving: Serving, scenario: Scenario) -> None:
    """Run a scenario, at whose end nothing may be left: no request, no page, no task."""

    async def run() -> None:
        app = create_app(serving)
        async with app.router.lifespan_context(app):
            await scenario(app)
            await left_alone(serving)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            assert not tasks

    asyncio.run(run())


async def left_alone(serving: Serving) -> None:
    worker = serving.worker
    serves = worker.refusal is None  # else the engine is not used any more
    async with asyncio.timeout(PATIENCE):
        while worker.num_open or (serves and worker.engine.has_work):
            await asyncio.sleep(0.005)
    if serves:
        assert (worker.engine.num_running, worker.engine.num_waiting, worker.engine.cache_usage) == (0, 0, 0)


def body(prompt: Any = "hello", **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 8, **fields}).encode()


def events(text: str) -> list[Any]:
    """The events of a stream without its end mark, which has to be there."""
    *found, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def is_error(answer: tuple[int | None, Any], status: int) -> str:
    """The message of an error in OpenAI's form."""
    assert answer[0] == status, answer
    assert set(answer[1]["error"]) == {"message", "type", "param", "code"}
    return str(answer[1]["error"]["message"])


# -- routes and keys --------------------------------------------------------------------------------------------------


def test_routes_that_are_there(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        assert await Call(app, "GET", "/health").answer() == (200, "")
        assert await Call(app, "HEAD", "/health").answer() == (200, "")
        status, models = await Call(app, "GET", "/v1/models").answer()
        assert (status, [model["id"] for model in models["data"]]) == (200, [serving.model])
        assert models["data"][0]["max_model_len"] == 256
        assert await Call(app, "GET", f"/v1/models/{serving.model}").answer() == (200, models["data"][0])
        assert "not served here" in is_error(await Call(app, "GET", "/v1/models/other").answer(), 404)
        status, version = await Call(app, "GET", "/version").answer()
        assert (status, list(version)) == (200, ["version"])

    play(serving, scenario)


def test_routes_that_are_not_there(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        for path in ("/", "/v1/nope", "/v1/completions/", "/v1/\u0000" + "x" * 5000):
            assert len(is_error(await Call(app, "POST", path).answer(), 404)) < 200
        for method, path, allowed in (
            ("GET", "/v1/completions", "POST"),
            ("OPTIONS", "/v1/chat/completions", "POST"),
            ("DELETE", "/v1/models", "GET"),
        ):
            call = Call(app, method, path)
            assert method in is_error(await call.answer(), 405)
            assert allowed in call.headers["allow"]

    play(serving, scenario)


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer sk-", f"Bearer {KEY}x"])
def test_a_wrong_key_is_refused(make: Make, sent: str) -> None:
    serving = local(make(tiny.llama, seed=1), api_keys=("first", KEY))

    async def scenario(app: Starlette) -> None:
        for method, path in (POST, ("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
            call = Call(app, method, path, b"{}", headers={"authorization": sent} if sent else {})
            assert "Authorization: Bearer" in is_error(await call.answer(), 401)
            assert call.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/metrics"):
            assert (await Call(app, "GET", path).answer())[0] == 200

    play(serving, scenario)


def test_every_key_of_the_file_is_good(make: Make) -> None:
    keys = read_api_keys(f"# two keys\n\n  first\n{KEY}\n")
    serving = local(make(tiny.llama, seed=1), api_keys=keys)
    assert keys == ("first", KEY)

    async def scenario(app: Starlette) -> None:
        for sent in ("Bearer first", "bearer first", "Bearer  first ", f"Bearer {KEY}"):
            call = Call(app, "GET", "/v1/models", headers={"authorization": sent})
            assert (await call.answer())[0] == 200, sent

    play(serving, scenario)


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_a_large_body_is_refused_before_it_is_read(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        call = Call(app, *POST, headers={"content-length": str(transport.MAX_BODY + 1)}, complete=False)
        assert str(transport.MAX_BODY) in is_error(await call.answer(), 413)

    play(serving, scenario)


def test_a_large_body_of_unknown_length_is_refused_as_it_comes(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        half = b" " * (transport.MAX_BODY // 2)
        is_error(await Call(app, *POST, half, half, b" ", complete=False).answer(), 413)
        # One that just fits is read.
        rest = body()
        status, _ = await Call(app, *POST, half, half[len(rest) :], rest).answer()
        assert status == 200

    play(serving, scenario)


def test_a_slow_body_is_not_waited_for(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BODY_SECONDS", 0.05)

    async def scenario(app: Starlette) -> None:
        call = Call(app, *POST, b'{"prompt": ', complete=False)
        assert "0.05 seconds" in is_error(await call.answer(), 408)
        assert call.headers["connection"] == "close"

    play(serving, scenario)


def test_an_unfinished_body_does_not_keep_the_server(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        call = Call(app, *POST, b'{"prompt": ', complete=False)
        await asyncio.sleep(0.01)
        serving.close()
        assert is_error(await call.answer(), 503) == STOPPING
        assert is_error(await Call(app, *POST, body()).answer(), 503) == STOPPING
        assert (await Call(app, "GET", "/health").answer())[0] == 503

    play(serving, scenario)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 3}, "max_token", "max_tokens"),
        ({"speculation": {"k": 17}}, "speculation", "16"),
        ({"prompt": [999]}, "prompt", "999"),
        ({"prompt": ["fits", "x" * 256]}, "prompt", "256"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"repetition_penalty": 1000}, "repetition_penalty", "1000"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_request_is_said(
    serving: Serving, fields: Mapping[str, Any], param: str, words: str, stream: bool
) -> None:
    """By our own checks and by the engine's alike; a stream that has not begun gets a status too."""

    async def scenario(app: Starlette) -> None:
        answer = await Call(app, *POST, body(**{"stream": stream} | fields)).answer()
        assert words in is_error(answer, 400)
        assert answer[1]["error"]["param"] == param

    play(serving, scenario)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        gate = Gate(serving.worker.engine)
        calls = [Call(app, *POST, body()) for _ in range(4)]
        await gate.reached()
        while serving.worker.num_open < 4:
            await asyncio.sleep(0.005)
        assert "2 requests are waiting" in is_error(await Call(app, *POST, body()).answer(), 503)
        gate.open()
        assert [(await call.answer())[0] for call in calls] == [200] * 4

    play(serving, scenario)


def test_a_failed_engine_is_said_and_the_server_lives(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        engine = serving.worker.engine
        stream = Call(app, *POST, body(stream=True, max_tokens=200))
        await asyncio.wait_for(stream.got.wait(), PATIENCE)
        gate = Gate(engine)
        await gate.reached()
        waiting = Call(app, *POST, body())
        while serving.worker.num_open < 2:
            await asyncio.sleep(0.005)

        def fail(*decision: Any) -> None:
            raise ValueError("no such page")

        engine.observer = fail
        gate.open()
        status, text = await stream.answer()
        assert status == 200
        assert events(text)[-1]["error"]["message"] == FAILED
        assert is_error(await waiting.answer(), 503) == FAILED
        assert is_error(await Call(app, *POST, body()).answer(), 503) == FAILED
        assert (await Call(app, "GET", "/health").answer())[0] == 503
        assert (await Call(app, "GET", "/metrics").answer())[0] == 200

    play(serving, scenario)


def test_stopping_ends_streams_with_an_event(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        stream = Call(app, *POST, body(stream=True, max_tokens=200))
        await asyncio.wait_for(stream.got.wait(), PATIENCE)
        gate = Gate(serving.worker.engine)
        await gate.reached()
        serving.worker.stop()
        gate.open()
        assert events((await stream.answer())[1])[-1]["error"]["message"] == STOPPING

    play(serving, scenario)


def test_our_own_bug_is_an_error_and_is_reported(serving: Serving) -> None:
    """A tokenizer that is none: in encoding before there is a request, and in logprobs while there is a stream."""
    bugs: list[Exception] = []
    broken: Any = object()
    serving = replace(serving, tokenizer=broken, report=bugs.append)

    async def scenario(app: Starlette) -> None:
        assert is_error(await Call(app, *POST, body()).answer(), 500) == "internal error"
        ids = [256, *b"hello"]
        status, text = await Call(app, *POST, body(ids, logprobs=1, stream=True)).answer()
        assert (status, events(text)[-1]["error"]["message"]) == (200, "internal error")
        is_error(await Call(app, *POST, body(ids, logprobs=1)).answer(), 500)
        assert (await Call(app, *POST, body(ids)).answer())[0] == 200

    play(serving, scenario)
    assert [type(bug) for bug in bugs] == [AttributeError] * 3


# -- clients that leave -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def busy(serving: Serving, app: Starlette) -> AsyncIterator[None]:
    """While both places are taken, by a step that does not end."""
    gate = Gate(serving.worker.engine)
    calls = [Call(app, *POST, body()) for _ in range(2)]
    await gate.reached()
    yield
    gate.open()
    assert [(await call.answer())[0] for call in calls] == [200] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cancelled", [False, True], ids=["left", "cancelled"])
def test_leaving_while_queued(serving: Serving, stream: bool, cancelled: bool) -> None:
    async def scenario(app: Starlette) -> None:
        async with busy(serving, app):
            call = Call(app, *POST, body(stream=stream))
            while serving.worker.num_open < 3:
                await asyncio.sleep(0.005)
            await leave(call, cancelled)
        await left_alone(serving)
        assert serving.worker.engine.stats.speculation.emitted_tokens == 16  # nothing was made for it

    play(serving, scenario)


@pytest.mark.parametrize("when", ["whole", "before the stream", "in the stream"])
@pytest.mark.parametrize("cancelled", [False, True], ids=["left", "cancelled"])
def test_leaving_while_running(serving: Serving, when: str, cancelled: bool) -> None:
    async def scenario(app: Starlette) -> None:
        if when != "in the stream":
            gate = Gate(serving.worker.engine)
        call = Call(app, *POST, body(stream=when != "whole", max_tokens=200))
        if when == "in the stream":
            await asyncio.wait_for(call.got.wait(), PATIENCE)
            gate = Gate(serving.worker.engine)
        await gate.reached()
        await leave(call, cancelled)
        gate.open()

    play(serving, scenario)
    page = scrape(serving.worker.metrics.render().decode())
    assert page["specctl:request_success_total{finished_reason=abort}"] == 1
    assert serving.worker.engine.stats.speculation.emitted_tokens < 200


def test_leaving_with_half_a_body(serving: Serving) -> None:
    async def scenario(app: Starlette) -> None:
        call = Call(app, *POST, b'{"prompt": ', complete=False)
        await asyncio.sleep(0.01)
        await leave(call, False)

    play(serving, scenario)


@pytest.mark.parametrize("cancelled", [False, True], ids=["left", "cancelled"])
def test_leaving_at_any_moment(serving: Serving, cancelled: bool) -> None:
    """After every number of turns of the loop: before the request is read, between its first token and the stream, in
    the stream, after its end. The answer of somebody else is the same all along."""
    params = {"stream": True, "max_tokens": 12}

    async def scenario(app: Starlette) -> None:
        alone = await Call(app, *POST, body("somebody")).answer()
        for turns in range(40):
            other = Call(app, *POST, body("somebody"))
            call = Call(app, *POST, body(**params, n=2))
            for turn in range(turns):
                await asyncio.sleep(0.001 * (turn % 3))
                if call.task.done():
                    break
            await leave(call, cancelled)
            status, answer = await other.answer()
            assert (status, answer["choices"]) == (alone[0], alone[1]["choices"])
            await left_alone(serving)

    play(serving, scenario)


async def leave(call: Call, cancelled: bool) -> None:
    """As the client does it, or as a server does that ends the request."""
    if cancelled:
        call.task.cancel()
    else:
        call.leave()
    await asyncio.wait([call.task], timeout=PATIENCE)
    assert call.task.done()
    if not call.task.cancelled():
        assert call.task.exception() is None


def test_a_text_far_too_long_is_refused_unread(serving: Serving) -> None:
    question = {"role": "user", "content": "x" * 3_000_000}

    async def scenario(app: Starlette) -> None:
        for path, asked in (
            ("/v1/completions", body("x" * 3_000_000)),
            ("/v1/chat/completions", json.dumps({"messages": [question]}).encode()),
        ):
            message = is_error(await Call(app, "POST", path, asked).answer(), 400)
            assert "3000000 characters" in message
            assert f"context of {serving.worker.engine.options.max_length} tokens" in message

    play(serving, scenario)
