"""A hub of one repository, org/model, on this machine: a directory over HTTP, and a count of what is fetched."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """url: for HF_ENDPOINT. fetched: bytes sent by file."""

    url: str
    fetched: Counter[str] = field(default_factory=Counter)

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that uses this hub and a cache of its own."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


@contextmanager
def local_hub(directory: Path) -> Iterator[LocalHub]:
    """Serve the directory until the block ends."""
    hub = LocalHub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

        def _answer(self, *, body: bool) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] != ["org", "model"] or parts[2:3] != ["resolve"] or parts[3] not in ("main", COMMIT):
                self._refuse("RevisionNotFound" if parts[:2] == ["org", "model"] else "RepoNotFound")
                return
            file = directory / parts[4]
            if not file.is_file():
                self._refuse("EntryNotFound")
                return
            data = file.read_bytes() if body else b""
            self.send_response(200)
            self.send_header("Content-Length", str(file.stat().st_size))
            self.send_header("ETag", f'"{parts[4]}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            self.wfile.write(data)
            hub.fetched[parts[4]] += len(data)

        def _refuse(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
