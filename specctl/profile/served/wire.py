"""HTTP to a running engine: a page, or a stream with the moment each event came. It knows nothing about engines or what
is in an event. No proxy is asked: it would be timed, too.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specctl.errors import EngineUnreachable, UsageError

PAGE_SECONDS = 30.0
STREAM_SECONDS = 600.0  # between two events: a prompt may wait behind many others
READ = 65536
SHOWN = 300

Raw = list[tuple[float, bytes]]


class Refusal(UsageError):
    """Raised when the engine answers with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Wire:
    """url: as the user wrote it. prefix: of every path."""

    url: str
    secure: bool
    host: str
    port: int | None
    prefix: str
    key: str | None = None

    @classmethod
    def to(cls, url: str, key: str | None = None) -> Wire:
        """Raises UsageError for what is no address of a server."""
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            raise UsageError(f"--url {url}: expected the address of a server, like http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, parts.scheme == "https", host, port, prefix, key)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text. Raises EngineUnreachable."""
        with self._connected(PAGE_SECONDS) as connection:
            connection.request("GET", self.prefix + path, headers=self._headers())
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")

    def stream(self, path: str, body: Mapping[str, Any], ready: Callable[[], object]) -> tuple[float, Raw]:
        """When the request was sent, and the events of its answer. ready: called when the connection stands.

        Raises EngineUnreachable, and Refusal with what the engine says.
        """
        raw = json.dumps(body).encode()
        with self._connected(STREAM_SECONDS) as connection:
            ready()
            sent = time.perf_counter()
            connection.request("POST", self.prefix + path, raw, self._headers() | {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                said = reason(response.read().decode("utf-8", "replace"))
                raise Refusal(f"{self.url}{path}: answers {response.status}: {said}", response.status)
            return sent, list(_events(response))

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    @contextmanager
    def _connected(self, seconds: float) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=seconds)
        try:
            connection.connect()
        except OSError as error:
            raise EngineUnreachable(
                f"{self.url}: cannot be reached ({error.strerror or error}); is the engine up, and is this its address?"
            ) from None
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(f"{self.url}: went away while it was asked ({what}); look at its log") from None
        finally:
            connection.close()


def reason(text: str) -> str:
    """What an error's body says, in OpenAI's form, a flat one, or as it is; on one line."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, dict):
        error = value.get("error", value)
        value = (error.get("message") or error.get("detail") or error) if isinstance(error, dict) else error
    line = " ".join(str(value).split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[float, bytes]]:
    """As few words as possible between two reads: they are timed. What is in the events is read afterwards."""
    pending = b""
    while part := response.read1(READ):
        moment = time.perf_counter()
        pending = (pending + part).replace(b"\r\n", b"\n")
        *whole, pending = pending.split(b"\n\n")
        for event in whole:
            yield moment, event
