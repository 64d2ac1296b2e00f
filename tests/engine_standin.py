"""What engines that are not ours say over HTTP, as far as `specctl profile --engine` asks: pages and streams, by hand.

Pages are what vLLM 0.32 and SGLang 0.5 show; what is in them is a test's to change. An answer streams all its tokens at
once, so nothing can be told from its times.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "acme/model", "root": "acme/model", "max_model_len": 4096}]}


@dataclass
class Standin:
    """pages: what GET answers, text or a value. block: tokens of an event. counts: whether events tell their tokens.
    refuses: what a completion is refused with. Keeps the bodies it was sent."""

    pages: dict[str, Any]
    block: int = 1
    counts: bool = True
    refuses: tuple[int, Any] | None = None
    breaks: Any = None
    ends: str = "\n\n"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    drafts: int = 0
    draft_tokens: int = 0
    k: int = 0
    url: str = ""

    def page(self, path: str) -> tuple[int, str]:
        value = self.pages.get(path)
        if value is None:
            return 404, '{"detail": "Not Found"}'
        if callable(value):
            value = value(self)
        return 200, value if isinstance(value, str) else json.dumps(value)

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        self.bodies.append(body)
        total, most = 0, body["max_tokens"]
        while total < most:
            total = min(most, total + (self.block if total else 1))
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
            choice = {"index": 0, "text": "x", "finish_reason": "length" if total == most else None}
            yield json.dumps({"choices": [choice]} | ({"usage": usage} if self.counts else {}))
            if total > 1:
                self.drafts += 1
                self.draft_tokens += self.k
            if self.breaks is not None:
                yield json.dumps(self.breaks)
                return
        yield json.dumps({"choices": [], "usage": {"completion_tokens": total}})
        yield "[DONE]"


@contextmanager
def running(standin: Standin) -> Iterator[Standin]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            standin.headers.append(dict(self.headers))
            self._answer(*standin.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if standin.refuses is not None:
                status, said = standin.refuses
                self._answer(status, said if isinstance(said, str) else json.dumps(said))
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in standin.events(body):
                raw = f"data: {event}{standin.ends}".encode()
                self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *said: Any) -> None:
            pass

        def _answer(self, status: int, text: str) -> None:
            raw = text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def vllm(k: int = 0, *, accepted: int = 0, engines: int = 1, busy: int = 0, **changes: Any) -> Standin:
    """k: of its drafts, 0 for none; accepted: of each."""

    def metrics(standin: Standin) -> str:
        lines = [f'vllm:num_requests_running{{engine="{i}"}} {busy}.0' for i in range(engines)]
        lines += ['vllm:cache_config_info{cache_dtype="auto",engine="0"} 1.0', "vllm:num_preemptions_total 0.0"]
        if k:
            lines += [f"vllm:spec_decode_num_drafts_total {standin.drafts}.0"]
            lines += [f"vllm:spec_decode_num_draft_tokens_total {standin.draft_tokens}.0"]
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} 0.0' for i in range(k)]
        return "\n".join(lines) + "\n"

    pages = {"/v1/models": MODELS, "/metrics": metrics, "/version": {"version": "0.32.0"}}
    return Standin(**{"pages": pages, "block": 1 + accepted, "k": k} | changes)


def sglang(info: dict[str, Any] | None = None, *, metrics: bool = True, **changes: Any) -> Standin:
    """info: of the server, over that of one which does not speculate. metrics: only with --enable-metrics."""
    told = {
        "model_path": "acme/model",
        "version": "0.5.14",
        "tp_size": 4,
        "ep_size": 1,
        "dtype": "auto",
        "quantization": "fp8",
        "kv_cache_dtype": "auto",
        "speculative_algorithm": None,
    } | (info or {})
    pages: dict[str, Any] = {"/v1/models": MODELS, "/get_server_info": told}
    if metrics:
        pages["/metrics"] = 'sglang:num_running_reqs{model_name="acme/model"} 0.0\n'
    return Standin(**{"pages": pages} | changes)
