"""The HTTP application: OpenAI's routes over an EngineWorker. It decides statuses; tokens and texts are decided below.

A client that goes away takes its request with it, running or queued. Every error is a JSON body in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specctl import __version__
from specctl.errors import CapacityError, NumericalError, RequestError
from specctl.serve import answers, openai
from specctl.serve.fields import read_body
from specctl.serve.job import Job, encode
from specctl.serve.metrics import CONTENT_TYPE
from specctl.serve.transport import EventStream, Refused, read_raw, unless_gone
from specctl.serve.worker import EngineStopped, EngineWorker, QueueFull
from specctl.text.shown import shown
from specctl.text.tokenizer import Tokenizer

Handler = Callable[[HttpRequest], Awaitable[Response]]
Parse = Callable[[Mapping[str, Any], str, openai.Defaults], openai.Request]

# What the engine calls a parameter of a request where the API has another name for it.
_API_NAMES: dict[str | None, str] = {"k": "speculation"}


@dataclass(frozen=True)
class Serving:
    """What is served and how. facts: further keys of the model in /v1/models. api_keys: none means open to everybody.
    report: told what was raised where nothing should be."""

    worker: EngineWorker
    tokenizer: Tokenizer
    model: str
    defaults: openai.Defaults
    facts: dict[str, object] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    report: Callable[[Exception], None] = lambda error: None
    created: int = field(default_factory=lambda: int(time.time()))
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        """Take in nothing more; what is being answered is answered to its end. To be called in the loop."""
        self.worker.drain()
        self.closing.set()


def create_app(serving: Serving) -> Starlette:
    """The application; the engine's thread lives as long as it does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        serving.worker.start(asyncio.get_running_loop())
        yield
        serving.worker.stop()
        await asyncio.to_thread(serving.worker.join)

    routes = _Routes(serving)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.guarded(routes.chat), methods=["POST"]),
            Route("/v1/completions", routes.guarded(routes.completion), methods=["POST"]),
            Route("/v1/models", routes.guarded(routes.models), methods=["GET"]),
            Route("/v1/models/{model:path}", routes.guarded(routes.one_model), methods=["GET"]),
            Route("/health", routes.guarded(routes.health, key=False), methods=["GET"]),
            Route("/metrics", routes.guarded(routes.metrics, key=False), methods=["GET"]),
            Route("/version", routes.guarded(routes.version, key=False), methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a POST that is sent elsewhere loses its body with some clients
    return app


class _Routes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._keys = [_digest(key.encode()) for key in serving.api_keys]

    def guarded(self, handler: Handler, key: bool = True) -> Handler:
        """`handler` behind the API key (with `key`), and errors as OpenAI writes them."""

        async def guarded(http: HttpRequest) -> Response:
            try:
                if key:
                    self._check_key(http)
                return await handler(http)
            except ClientDisconnect:
                return Response(status_code=499)  # which nobody reads
            except Exception as error:  # noqa: BLE001 - our own bugs too are answered, and the server goes on
                status, body, headers = self._explain(error)
                return JSONResponse(body, status, headers)

        return guarded

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, openai.parse_chat)

    async def completion(self, http: HttpRequest) -> Response:
        return await self._answer(http, openai.parse_completion)

    async def models(self, http: HttpRequest) -> Response:
        serving = self._serving
        return JSONResponse(answers.model_list(serving.model, serving.created, **serving.facts))

    async def one_model(self, http: HttpRequest) -> Response:
        serving, asked = self._serving, http.path_params["model"]
        if asked != serving.model:
            raise openai.ModelNotFound(f"model {shown(asked)} is not served here, {serving.model!r} is", "model")
        return JSONResponse(answers.model_list(serving.model, serving.created, **serving.facts)["data"][0])

    async def health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self._serving.worker.refusal is None else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(self._serving.worker.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    def _check_key(self, http: HttpRequest) -> None:
        if not self._keys:
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))  # as the bytes came
        known = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise Refused(401, message, "invalid_api_key", {"www-authenticate": "Bearer"})

    async def _answer(self, http: HttpRequest, parse: Parse) -> Response:
        serving = self._serving
        raw = await read_raw(http, serving.closing)

        def read() -> tuple[openai.Request, list[list[int]]]:
            request = parse(read_body(raw), serving.model, serving.defaults)
            return request, encode(request, serving.tokenizer, serving.worker.engine.options.max_length)

        # In another thread: a long prompt takes long to encode, and all streams wait for the loop.
        request, prompts = await asyncio.to_thread(read)
        job = Job(serving.worker, serving.tokenizer, request, prompts)
        try:
            # The first output is awaited even for a stream: what the engine refuses is then still an HTTP error.
            await unless_gone(http, job.start())
            if request.stream:
                return EventStream(job.stream(lambda error: self._explain(error)[1]), job.cancel)
            return JSONResponse(await unless_gone(http, job.whole()))
        except BaseException:
            job.cancel()
            raise

    def _explain(self, error: Exception) -> tuple[int, dict[str, Any], dict[str, str] | None]:
        """Status, body and headers for whatever went wrong."""
        if isinstance(error, RequestError):
            error.param = _API_NAMES.get(error.param, error.param)
            return *answers.refusal(error), None
        if isinstance(error, CapacityError):
            return 400, answers.failure(400, str(error), "max_tokens"), None
        if isinstance(error, Refused):
            return error.status, answers.failure(error.status, str(error), code=error.code), error.headers
        if isinstance(error, QueueFull | EngineStopped):
            return 503, answers.failure(503, str(error)), None
        if isinstance(error, NumericalError):
            return 500, answers.failure(500, str(error)), None
        self._serving.report(error)
        return 500, answers.failure(500, "internal error"), None


def read_api_keys(text: str) -> tuple[str, ...]:
    """Keys of a file, one a line; blank lines and lines starting with # are no keys."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _digest(key: bytes) -> bytes:
    """As long for every key, so that comparing two takes as long for every key."""
    return hashlib.sha256(key).digest()


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Of the router's own: nothing at this path, or nothing for this method."""
    assert isinstance(error, HTTPException)
    path = shown(http.scope["path"])
    what = {404: f"there is nothing at {path}", 405: f"{http.method} is not what {path} takes"}
    message = what.get(error.status_code, str(error.detail))
    return JSONResponse(answers.failure(error.status_code, message), error.status_code, error.headers)
