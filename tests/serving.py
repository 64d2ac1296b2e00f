"""Servers to talk to: `specctl serve` in a process of its own, and the HTTP application within this one.

A process that has imported everything forks for each server, so that starting one takes a moment and not ten seconds.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import tiny
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from specctl.engine.engine import Engine
from specctl.options import DecodingOptions, ModelOptions
from specctl.serve.app import Serving
from specctl.serve.server import ServeOptions, open_serving

PATIENCE = 60.0  # a busy machine is no error
_LAUNCHER = """
import json, os, signal, sys
from pathlib import Path
from specctl.cli.main import main
from specctl.text.tokenizer import Tokenizer
import specctl.serve.server

Tokenizer(Path(sys.argv[1]))  # which imports most
print("ready", flush=True)
children = []
while line := sys.stdin.readline():
    order = json.loads(line)
    if "poll" in order:
        pid, status = os.waitpid(order["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if not pid:
        log, nothing = os.open(order["log"], os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDWR)
        for source, number in ((nothing, 0), (nothing, 1), (log, 2)):
            os.dup2(source, number)
        sys.exit(main(order["arguments"]))
    children.append(pid)
    print(pid, flush=True)
for pid in children:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class Launcher:
    """Starts servers. logs: a directory for what they say."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._count = 0
        command = [sys.executable, "-c", _LAUNCHER, str(tiny.llama(logs / "model"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self, target: Path, *arguments: object) -> Server:
        """`specctl serve --target ...`, whether it comes up or not."""
        self._count += 1
        log = self._logs / f"{self._count}.log"
        pid = int(self._ask({"arguments": command_line(target, *arguments), "log": str(log)}))
        return Server(pid, log, lambda: json.loads(self._ask({"poll": pid})))

    def serve(self, target: Path, *arguments: object) -> AbstractContextManager[Server]:
        """A server that has come up; it has to end well afterwards."""
        return up(self.start(target, *arguments))

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)

    def _ask(self, order: Mapping[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


class Server:
    """One `specctl serve` and its clients. poll: its exit code once it has ended."""

    def __init__(self, pid: int, log: Path, poll: Callable[[], int | None]) -> None:
        self.pid = pid
        self.port = 0
        self.model = ""
        self._log = log
        self._poll = poll
        self._code: int | None = None

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def running(self) -> bool:
        return not self._ended()

    def wait_up(self) -> Server:
        said = until(lambda: [line for line in self.log.splitlines() if line.startswith("serving ")] or self._ended())
        assert isinstance(said, list), self.log
        self.model, address = said[0].removeprefix("serving ").split(" on http://127.0.0.1:")
        self.port = int(address)
        return self

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code."""
        until(self._ended)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if self.running:
            self.signal(signal.SIGKILL)
            self.wait()

    def _ended(self) -> bool:
        if self._code is None:
            self._code = self._poll()
        return self._code is not None

    def client(self, **options: Any) -> openai.OpenAI:
        base = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(**{"base_url": base, "api_key": "none", "max_retries": 0, "timeout": PATIENCE} | options)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, JSON body), the body as text when it is no JSON. body: bytes as they are, all else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return response.status, _parsed(response.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The body of a completion, which has to succeed."""
        status, body = self.ask("POST", "/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, body
        return body

    def events(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which has to end with the end mark."""
        status, text = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, text
        *events, last, rest = text.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def metrics(self) -> dict[str, float]:
        return scrape(self.ask("GET", "/metrics")[1])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def begin_stream(self, body: Mapping[str, Any]) -> socket.socket:
        """A connection on which the first event of a streamed completion has come."""
        raw = json.dumps({**body, "stream": True}).encode()
        connection = self.connect()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        got = b""
        while b"data: " not in got:
            part = connection.recv(4096)
            assert part, got
            got += part
        return connection

    def idle(self) -> bool:
        metrics = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(metrics[f"specctl:{name}"] for name in names)


def command_line(target: Path, *arguments: object) -> list[str]:
    return [str(word) for word in ("serve", "--target", target, "--port", 0, "--threads", 1, *arguments)]


@contextmanager
def up(server: Server) -> Iterator[Server]:
    """While it is up. It has to come up, and to end well when it is told to."""
    try:
        server.wait_up()
        yield server
        if server.running:
            server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
    finally:
        server.kill()


@contextmanager
def process(log: Path, target: Path, *arguments: object) -> Iterator[Server]:
    """A server that is started as a user starts it."""
    command = [sys.executable, "-m", "specctl", *command_line(target, *arguments)]
    with (
        log.open("w") as said,
        subprocess.Popen(command, stderr=said) as started,
        up(Server(started.pid, log, started.poll)) as server,
    ):
        yield server


def local(target: Path, draft: Path | str | None = None, *, max_queue: int = 256, **decoding: Any) -> Serving:
    """What `specctl serve` would serve, for this process, in float64 and with pages checked after every step."""
    keys = decoding.pop("api_keys", ())
    drafts = () if draft is None else (str(draft),)
    opened = open_serving(
        str(target),
        ModelOptions(dtype="float64", device="cpu", attention="torch"),
        DecodingOptions(**{"drafts": drafts, "batch": 8} | decoding),
        ServeOptions(max_queue=max_queue),
        keys,
    )
    engine = opened.worker.engine
    engine.options = replace(engine.options, check_pages=True)
    return opened


class Gate:
    """Holds an engine where it has decided on tokens and committed none, until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        engine.observer = self._hold

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE)

    def open(self) -> None:
        self._open.set()

    def _hold(self, *decision: Any) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE)


class Call:
    """A request to an ASGI application with the client's side in the test's hands: its body may come in parts, and it
    may leave at any moment. To be made inside a running loop."""

    def __init__(
        self,
        app: Starlette,
        method: str,
        path: str,
        *parts: bytes,
        headers: Mapping[str, str] | None = None,
        complete: bool = True,
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.got = asyncio.Event()  # something of the body
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for index, part in enumerate(parts or (b"",)):
            more = not complete or index + 1 < len(parts)
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int | None, Any]:
        await asyncio.wait_for(self.task, PATIENCE)
        return self.status, _parsed(self.body)

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            if self.body:
                self.got.set()


def until(condition: Any, seconds: float = PATIENCE) -> Any:
    """What `condition` gives once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def scrape(text: str) -> dict[str, float]:
    """Every sample of a metrics page; labels are written as `name{label=value}`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def _parsed(body: bytes) -> Any:
    text = body.decode()
    try:
        return json.loads(text)
    except ValueError:
        return text
