"""A hub of one data set, org/set, on this machine: the files of a directory, and as much of the API as finds them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from local_hub import COMMIT, LocalHub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    directory: Path

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def _answer(self, *, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:5] == ["api", "datasets", "org", "set", "tree"]:
            self._send(200, json.dumps(self._files() if len(parts) == 6 else []).encode(), body)
        elif parts[:4] == ["api", "datasets", "org", "set"]:
            self._send(200, json.dumps({"id": "org/set", "sha": COMMIT, "siblings": self._files()}).encode(), body)
        elif parts[:4] != ["datasets", "org", "set", "resolve"]:
            self._send(404, b"", body, X_Error_Code="RepoNotFound")
        elif (file := self.directory / parts[5]).is_file():
            self._send(200, file.read_bytes(), body, ETag=f'"{file.name}"', X_Repo_Commit=COMMIT)
        else:
            self._send(404, b"", body, X_Error_Code="EntryNotFound")

    def _files(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file.name, "rfilename": file.name, "oid": "0" * 40, "size": file.stat().st_size}
            for file in sorted(self.directory.iterdir())
        ]

    def _send(self, code: int, data: bytes, body: bool, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def local_data_hub(directory: Path) -> Iterator[LocalHub]:
    """Serve the directory until the block ends."""
    handler = type("Handler", (_Handler,), {"directory": directory})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield LocalHub(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
