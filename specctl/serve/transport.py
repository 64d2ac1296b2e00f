"""What one HTTP connection does: a body comes in, bounded in bytes and time, events go out, and clients leave.

It knows nothing about what is in them. Whoever waits here for anything waits for the client's leaving too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MAX_BODY = 8 * 2**20
BODY_SECONDS = 30.0

Result = TypeVar("Result")


class Refused(Exception):
    """Raised for a request that gets `status` and a sentence as its answer."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers


class Overtaken(Exception):
    """Raised when something else came first."""


async def unless(rival: Awaitable[object], work: Awaitable[Result], seconds: float | None = None) -> Result:
    """The result of `work`. Raises Overtaken when `rival` ends before it, TimeoutError after `seconds`; neither of the
    two goes on afterwards."""
    tasks = job, other = asyncio.ensure_future(work), asyncio.ensure_future(rival)
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise Overtaken if other.done() else TimeoutError
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, or ClientDisconnect as soon as the client has gone. The body has been read before."""
    try:
        return await unless(gone(http.receive), work)
    except Overtaken:
        raise ClientDisconnect from None


async def gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_raw(http: Request, closing: asyncio.Event) -> bytes:
    """The body. Raises Refused for one too large, too slow, or not complete when the server is told to end."""
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY:
        raise Refused(413, f"the body has {length[:20]} bytes, at most {MAX_BODY} are taken")
    close = {"connection": "close"}  # what is still to come of the body is waited for no longer
    try:
        return await unless(closing.wait(), _whole_body(http), BODY_SECONDS)
    except TimeoutError:
        what = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        raise Refused(408, what, headers=close) from None
    except Overtaken:
        raise Refused(503, "the server is shutting down", headers=close) from None


async def _whole_body(http: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY:
            raise Refused(413, f"the body has more than {MAX_BODY} bytes, which is the most that is taken")
        parts.append(part)
    return b"".join(parts)


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, or if it never begins, `ended` is called."""

    def __init__(self, events: AsyncGenerator[bytes, None], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette watches for the client itself only on some versions of ASGI; on others sending fails, with OSError.
        try:
            await unless(gone(receive), self.stream_response(send))
        except (Overtaken, OSError):
            pass
        finally:
            self._ended()
            await self._events.aclose()
