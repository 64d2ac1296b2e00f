"""Listening: an address reserved early, a server on it when all is ready, and signals that end it.

The first SIGTERM or Ctrl-C lets requests under way finish, the second ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from specctl.errors import CapacityError, UsageError
from specctl.serve.app import Serving, create_app

DRAIN_SECONDS = 30.0
INTERRUPTED = 130
_GRACE_SECONDS = 3  # for the answers of those whose requests were ended


def reserve(host: str, port: int) -> socket.socket:
    """A socket bound to the address and not listening: nobody else gets the port, and clients are refused as yet.

    port 0: any free one. Raises UsageError for a host that is none, CapacityError for an address that cannot be had.
    """
    where = f"--host {host} --port {port}"
    try:
        if not host:
            raise UsageError("--host is empty, expected an address of this machine like 127.0.0.1, or 0.0.0.0 for all")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise UsageError(f"--host {host}: is no known host; expected an address of this machine") from None
    # A name may stand for both; clients that are given it try the older one too.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_open(where, error) from None
    return listener


def run(serving: Serving, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM. Raises KeyboardInterrupt for Ctrl-C, CapacityError when the address was taken meanwhile."""
    config = uvicorn.Config(
        create_app(serving),
        http="h11",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="critical",
        timeout_graceful_shutdown=round(DRAIN_SECONDS + _GRACE_SECONDS),
    )
    server = _Server(config, serving, say)
    server.run(sockets=[listener])
    if server.interrupted:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, serving: Serving, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._serving = serving
        self._say = say
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            host, port = sockets[0].getsockname()[:2]
            raise _cannot_open(f"--host {host} --port {port}", error) from None
        if self.started:
            self._say(f"serving {self._serving.model} on {_url(sockets[0])}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving.close()
        worker = self._serving.worker
        if worker.num_open:
            self._say(f"stopping: {worker.num_open} answers under way have {DRAIN_SECONDS:g} s to finish")
        late = asyncio.get_running_loop().call_later(DRAIN_SECONDS, worker.stop)
        await super().shutdown(sockets)
        late.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which raises the signal once more when it has drained: being told to end is no
        failure."""
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Not through the loop, which may be busy or wait for somebody.
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        self.should_exit = True
        self.interrupted = sig == signal.SIGINT


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _cannot_open(where: str, error: OSError) -> CapacityError:
    return CapacityError(f"{where}: cannot be opened ({error.strerror or error}); choose another port or host")
