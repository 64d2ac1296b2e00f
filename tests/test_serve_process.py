"""The life of a server process: what keeps it from starting, what ends it, and how."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Run
from fixtures import Make
from serving import PATIENCE, Launcher, Server, local, until

from specctl.errors import CapacityError
from specctl.serve import listen
from specctl.serve.app import Serving
from specctl.serve.worker import STOPPING

LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


# -- what keeps it from starting --------------------------------------------------------------------------------------


@pytest.fixture
def target(make: Make) -> Path:
    return make(tiny.llama, seed=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min-speedup", "1.1"], ["--min-speedup", "--verify"]),
        (["--fallback", "plain"], ["--fallback", "--verify"]),
        (["--prompt-field", "q"], ["--prompt-field", "--verify"]),
        (["--verify", "nowhere.jsonl", "--draft", "ngram"], ["nowhere.jsonl", "cannot be read"]),
        (["--verify", "PROMPTS"], ["--verify", "--draft"]),
        (["--verify", "PROMPTS", "--draft", "ngram", "--k", "0"], ["--verify", "--k is 0"]),
        (["--k", "3"], ["--k", "--draft"]),
        (["--accept", "coupled"], ["--accept", "--draft"]),
        (["--api-key-file", "nowhere"], ["--api-key-file nowhere", "cannot be read"]),
        (["--api-key-file", os.devnull], ["--api-key-file", "no key"]),
        (["--host", ""], ["--host is empty"]),
        (["--host", "a" * 70], ["--host aaa", "no known host"]),
        (["--port", "65536"], ["--port"]),
        (["--max-queue", "0"], ["--max-queue"]),
        (["--min-speedup", "0", "--verify", "PROMPTS"], ["--min-speedup"]),
        (["--draft", "mtp"], ["--draft mtp"]),
        (["--draft", "nowhere"], ["nowhere"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_flags_are_one_sentence(
    run: Run, target: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    ran = run("serve", "--target", target, "--port", 0, *(str(prompts) if a == "PROMPTS" else a for a in arguments))
    assert ran.code == 2
    assert "serving" not in ran.err
    assert all(word in ran.err for word in words), ran.err
    assert ran.err.startswith("Usage") or len(ran.err.splitlines()) == 1


def test_a_target_that_cannot_be_served(run: Run, target: Path, make: Make, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    bare = make(tiny.llama, seed=1, tokenizer=False)
    for path, word in ((absent, "absent"), (bare, "tokenizer.json")):
        ran = run("serve", "--target", path, "--port", 0)
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)
        assert word in ran.err
    # A draft needs no tokenizer of its own, which is said.
    ran = run("serve", "--target", target, "--draft", bare, "--port", 0, "--max-model-len", 9999)
    assert ran.code == 2
    assert "--max-model-len 9999" in ran.err


def test_a_port_in_use_is_found_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run("serve", "--target", tmp_path / "absent", "--port", port)
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)
    assert f"--host 127.0.0.1 --port {port}" in ran.err


def test_an_address_of_another_machine_is_an_environment_error(run: Run, target: Path) -> None:
    ran = run("serve", "--target", target, "--host", "192.0.2.1")
    assert (ran.code, len(ran.err.splitlines())) == (3, 1)
    assert "192.0.2.1" in ran.err


def test_a_reserved_port_refuses_clients_until_it_is_served(target: Path) -> None:
    """And when two have reserved it, as two that start at once can, only one of them gets it."""
    with listen.reserve("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        with listen.reserve("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(CapacityError, match=str(port)):
                listen.run(local(target), second, lambda sentence: None)


def test_a_name_stands_for_the_older_address(target: Path) -> None:
    with listen.reserve("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


# -- what ends it -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(launcher: Launcher, make: Make, target: Path) -> Any:
    """With one place, so that the second request waits."""
    server = launcher.start(target, "--draft", make(tiny.near, of=target), "--batch", 1, "--k", 2)
    yield server.wait_up()
    server.kill()


def test_idle_and_unfinished_connections_do_not_keep_it(server: Server) -> None:
    silent, half_head, half_body, used = (server.connect() for _ in range(4))
    half_head.sendall(b"GET /v1/mod")
    half_body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    used.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert used.recv(1000).startswith(b"HTTP/1.1 200")
    start = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - start < 10
    assert half_body.recv(1000).startswith(b"HTTP/1.1 503")
    for connection in (silent, half_head, half_body, used):
        connection.close()
    assert "Traceback" not in server.log


def test_what_runs_and_what_waits_is_finished(server: Server) -> None:
    stream = server.client().completions.create(model=server.model, prompt="a", stream=True, **request())
    next(iter(stream))
    with ThreadPoolExecutor() as pool:
        # Few tokens: on a busy machine both have to end before the server gives up on them.
        waiting = pool.submit(server.complete, "b", **LONG | {"max_tokens": 20})
        until(lambda: server.metrics()["specctl:num_requests_waiting"] == 1)
        server.signal(signal.SIGTERM)
        until(lambda: "stopping: 2 answers" in server.log)
        assert not listens(server)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert waiting.result()["usage"]["completion_tokens"] == 20
    assert server.wait() == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_it_at_once(server: Server, first: signal.Signals, second: signal.Signals) -> None:
    with server.begin_stream({"prompt": ["a"] * 40, **LONG}) as stream:
        server.signal(first)
        until(lambda: "stopping: 40 answers" in server.log)
        server.signal(second)
        assert server.wait() == 130
        with suppress(ConnectionResetError):
            while part := stream.recv(4096):
                assert b"[DONE]" not in part
    assert server.log.splitlines()[-1] == "interrupted"


def test_ctrl_c_is_an_interruption(server: Server) -> None:
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert server.log.splitlines()[-1] == "interrupted"
    assert "Traceback" not in server.log


def test_draining_takes_no_longer_than_it_may(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, for which the time is made short."""
    monkeypatch.setattr(listen, "DRAIN_SECONDS", 0.2)
    serving, said = local(target), list[str]()
    serving.worker.engine.observer = lambda *decision: time.sleep(0.05)
    answers: list[tuple[int, Any]] = []

    def ask(server: Server) -> None:
        with ThreadPoolExecutor() as pool:
            stream = pool.submit(server.ask, "POST", "/v1/completions", {"prompt": "a", "stream": True, **LONG})
            whole = pool.submit(server.ask, "POST", "/v1/completions", {"prompt": "a", **LONG})
            until(lambda: serving.worker.num_open == 2 and serving.worker.engine.stats.speculation.emitted_tokens > 4)
            os.kill(os.getpid(), signal.SIGTERM)
            answers.extend(asked.result() for asked in (stream, whole))

    with listen.reserve("127.0.0.1", 0) as listener, client_of(listener, ask):
        listen.run(serving, listener, said.append)
    assert [sentence.split(" ")[0] for sentence in said] == ["serving", "stopping:"]
    (status, streamed), whole = answers
    assert status == 200
    assert STOPPING in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    assert (whole[0], whole[1]["error"]["message"]) == (503, STOPPING)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("debug", [False, True])
def test_the_engine_may_fail_and_the_server_says_so(
    run: Run, target: Path, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    """The whole command in this process: a failing engine cannot be ordered from outside."""
    begin, statuses = listen.run, list[int]()

    def fail(*decision: Any) -> None:
        raise ValueError("two lines\nof it")

    def ask(server: Server) -> None:
        statuses.append(server.ask("POST", "/v1/completions", {"prompt": "a"})[0])
        statuses.append(server.ask("GET", "/health")[0])

    def served(serving: Serving, listener: socket.socket, say: Any) -> None:
        serving.worker.engine.observer = fail
        with client_of(listener, ask):
            begin(serving, listener, say)

    monkeypatch.setattr(listen, "run", served)
    ran = run("serve", "--target", target, "--port", 0, *(["--debug"] if debug else []))
    gc.unfreeze()  # this process does not end with the server
    assert (ran.code, statuses) == (0, [503, 503])
    (sentence,) = (line for line in ran.err.splitlines() if line.startswith("the engine has failed"))
    assert "ValueError: two lines" in sentence
    assert ("--debug" in sentence, "in fail" in ran.err) == (not debug, debug)


@contextmanager
def client_of(listener: socket.socket, ask: Callable[[Server], None]) -> Iterator[None]:
    """`ask` in a thread as soon as the server is up, which is told to end afterwards."""
    server = Server(os.getpid(), Path(os.devnull), lambda: None)
    server.port = listener.getsockname()[1]

    def ask_and_end() -> None:
        try:
            until(lambda: listens(server))
            ask(server)
        finally:
            if listener.fileno() >= 0:
                server.signal(signal.SIGTERM)

    thread = threading.Thread(target=ask_and_end)
    thread.start()
    yield
    thread.join()


def request() -> dict[str, Any]:
    return {"max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


def listens(server: Server) -> bool:
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return False
    return True
