"""The HTTP application: OpenAI's routes over an EngineWorker. It reads bodies and writes answers; tokens are decided below.

A client that goes away takes its request with it, running or queued. Every error is a JSON body in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specctl import __version__
from specctl.engine.engine import Output
from specctl.engine.stats import SpeculationCounters
from specctl.errors import CapacityError, RequestError, SpecctlError
from specctl.serve import answers, openai
from specctl.serve.fields import read_body
from specctl.serve.worker import EngineStopped, EngineWorker, QueueFull, Ticket
from specctl.text.tokenizer import Tokenizer

MAX_BODY = 8 * 2**20
BODY_SECONDS = 30


@dataclass(frozen=True)
class Serving:
    """What is served and how. facts: further keys of the model in /v1/models. api_keys: empty means open to everybody."""

    worker: EngineWorker
    tokenizer: Tokenizer
    model: str
    defaults: openai.Defaults
    facts: dict[str, object] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))


class _Refused(Exception):  # noqa: N818 - it is a response on its way, not a fault
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(serving: Serving) -> Starlette:
    """The application; the engine's thread lives as long as it does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        serving.worker.start(asyncio.get_running_loop())
        yield
        serving.worker.stop()

    routes = _Routes(serving)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", routes.guarded(routes.chat), methods=["POST"]),
            Route("/v1/completions", routes.guarded(routes.completion), methods=["POST"]),
            Route("/v1/models", routes.guarded(routes.models), methods=["GET"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )


class _Routes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def guarded(
        self, handler: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """`handler` behind the API key, with errors as OpenAI writes them."""

        async def guarded(http: HttpRequest) -> Response:
            try:
                self._check_key(http)
                return await handler(http)
            except RequestError as error:
                status, body = answers.refusal(error)
                return JSONResponse(body, status)
            except (QueueFull, EngineStopped) as error:
                return JSONResponse(answers.failure(503, str(error)), 503)
            except CapacityError as error:
                return JSONResponse(answers.failure(400, str(error), "max_tokens"), 400)
            except _Refused as refused:
                return JSONResponse(answers.failure(refused.status, str(refused)), refused.status)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    async def chat(self, http: HttpRequest) -> Response:
        body = await _body(http)
        return await self._answer(http, openai.parse_chat(body, self._serving.model, self._serving.defaults))

    async def completion(self, http: HttpRequest) -> Response:
        body = await _body(http)
        return await self._answer(http, openai.parse_completion(body, self._serving.model, self._serving.defaults))

    async def models(self, http: HttpRequest) -> Response:
        serving = self._serving
        return JSONResponse(answers.model_list(serving.model, serving.created, **serving.facts))

    async def health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self._serving.worker.alive else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(self._serving.worker.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    def _check_key(self, http: HttpRequest) -> None:
        keys = self._serving.api_keys
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
        if keys and not (scheme.lower() == "bearer" and any(known)):
            raise _Refused(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")

    async def _answer(self, http: HttpRequest, request: openai.Request) -> Response:
        job = _Job(self._serving, request)
        job.submit()
        try:
            # The first output is awaited even for a stream: what the engine refuses is then still an HTTP error.
            await _unless_gone(http, job.start())
            if request.stream:
                return _EventStream(job)
            return JSONResponse(await _unless_gone(http, job.whole()))
        except BaseException:
            job.cancel()
            raise


class _EventStream(StreamingResponse):
    """A job's events. However the response ends, or if it never begins, the job ends with it."""

    def __init__(self, job: _Job) -> None:
        super().__init__(job.stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class _Job:
    """One request on its way: a ticket for each of its prompts, their outputs merged as they come."""

    def __init__(self, serving: Serving, request: openai.Request) -> None:
        self._serving = serving
        self._request = request
        self._prompts = [self._encode(prompt) for prompt in request.prompts]
        self._tickets: list[Ticket] = []
        self._counters = SpeculationCounters()
        self._completion_tokens = 0
        self._events: asyncio.Queue[tuple[int, Output] | Exception] = asyncio.Queue()
        self._forwarding: list[asyncio.Task[None]] = []
        self._first: tuple[int, Output] | None = None
        self._ended = 0

    def submit(self) -> None:
        """Queue every prompt, or none: what is refused for one is refused for all."""
        limit = self._serving.worker.engine.options.max_length
        try:
            for token_ids in self._prompts:
                params = self._request.sampling(max(1, limit - len(token_ids)))
                self._tickets.append(self._serving.worker.submit(token_ids, params))
        except BaseException:
            self.cancel()
            raise
        n = self._request.params.n
        self._forwarding = [asyncio.create_task(self._forward(i * n, t)) for i, t in enumerate(self._tickets)]

    def cancel(self) -> None:
        for task in self._forwarding:
            task.cancel()
        for ticket in self._tickets:
            self._serving.worker.cancel(ticket)

    async def start(self) -> None:
        """Wait for the first output."""
        self._first = await self._next()

    async def whole(self) -> dict[str, Any]:
        request = self._request
        texts = [""] * request.num_choices
        logprobs: list[list[answers.TokenLogprob]] = [[] for _ in texts]
        reasons: dict[int, answers.FinishReason] = {}
        async for index, output in self._outputs():
            texts[index] += output.text
            logprobs[index].extend(self._logprobs(output))
            if output.finish_reason is not None:
                reasons[index] = _reason(output)
        wanted = request.params.logprobs is not None
        choices = [
            answers.Choice(i, text, reasons[i], logprobs[i] if wanted else None) for i, text in enumerate(texts)
        ]
        return answers.answer(answers.Envelope.new(request.model, chat=request.chat), choices, self._usage())

    async def stream(self) -> AsyncIterator[bytes]:
        request = self._request
        chunks = answers.Chunks(answers.Envelope.new(request.model, chat=request.chat), request.include_usage)
        try:
            async for index, output in self._outputs():
                logprobs = self._logprobs(output) if request.params.logprobs is not None else None
                if output.finish_reason is not None:
                    yield answers.sse(chunks.end(index, _reason(output), output.text, logprobs))
                elif output.text or logprobs:
                    yield answers.sse(chunks.delta(index, output.text, logprobs))
            if (usage := chunks.usage(self._usage())) is not None:
                yield answers.sse(usage)
        except (RequestError, CapacityError, EngineStopped) as error:
            yield answers.sse(answers.failure(503 if isinstance(error, EngineStopped) else 400, str(error)))
        yield answers.DONE

    async def _outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(choice index, output) of all prompts, in the order they come, until every choice has ended."""
        assert self._first is not None
        yield self._first
        while self._ended < self._request.num_choices:
            yield await self._next()

    async def _next(self) -> tuple[int, Output]:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        output = event[1]
        self._completion_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._ended += 1
            self._counters.add(output.counters)
        return event

    async def _forward(self, first_index: int, ticket: Ticket) -> None:
        try:
            async for output in ticket.outputs():
                self._events.put_nowait((first_index + output.choice, output))
        except SpecctlError as error:
            self._events.put_nowait(error)

    def _usage(self) -> answers.Usage:
        speculation = self._counters.as_dict() if self._serving.worker.engine.drafter is not None else None
        return answers.Usage(sum(map(len, self._prompts)), self._completion_tokens, speculation)

    def _logprobs(self, output: Output) -> list[answers.TokenLogprob]:
        scored = zip(output.token_ids, output.logprobs, output.offsets, strict=False)
        return [
            answers.TokenLogprob.of(self._serving.tokenizer, token_id, entry.logprob, entry.top, offset)
            for token_id, entry, offset in scored
        ]

    def _encode(self, prompt: openai.Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._serving.tokenizer.encode(prompt)
        if self._request.chat:
            return self._serving.tokenizer.chat(prompt)
        return [token for token in prompt if isinstance(token, int)]


async def _body(http: HttpRequest) -> dict[str, Any]:
    """The JSON body, bounded in bytes and in time."""
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY:
        raise _Refused(413, f"the body has {length} bytes, at most {MAX_BODY} are taken")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise _Refused(413, f"the body has more than {MAX_BODY} bytes, which is the most that is taken")
                parts.append(part)
    except TimeoutError:
        raise _Refused(408, f"the body did not arrive within {BODY_SECONDS} seconds") from None
    return read_body(b"".join(parts))


async def _unless_gone(http: HttpRequest, work: Awaitable[Any]) -> Any:
    """The result of `work`, or ClientDisconnect as soon as the client has gone."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    job, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((job, watch), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        job.cancel()
        watch.cancel()


def _reason(output: Output) -> answers.FinishReason:
    return "stop" if output.finish_reason == "stop" else "length"


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {http.url.path} here", 405: f"{http.method} is not what {http.url.path} takes"}
    return JSONResponse(
        answers.failure(error.status_code, what.get(error.status_code, str(error.detail))), error.status_code
    )


async def _internal_error(http: HttpRequest, error: Exception) -> Response:
    return JSONResponse(answers.failure(500, "internal error"), 500)


def read_api_keys(text: str) -> tuple[str, ...]:
    """Keys of a file, one a line; blank lines and lines starting with # are no keys."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
