"""Serving: open the pair, prove the speed-up if asked to, then open the port and stay until told to go."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import uvicorn

from specctl.errors import CapacityError, CheckpointError, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.pair import OpenedDraft, Target, build_engine, constant, open_draft, open_policy, open_target
from specctl.prompts import Prompt
from specctl.serve.app import Serving, create_app, read_api_keys
from specctl.serve.metrics import Metrics
from specctl.serve.openai import Defaults
from specctl.serve.proof import Proof, prove
from specctl.serve.worker import EngineWorker

DRAIN_SECONDS = 30


@dataclass(frozen=True)
class ServeOptions:
    """verify: prompts to prove the speed-up on before the port opens; min_speedup: what it has to be; fallback_plain:
    serve without the draft when it is less, in place of giving up."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    max_queue: int = 256
    verify: Sequence[Prompt] | None = None
    min_speedup: float | None = None
    fallback_plain: bool = False


def serve(target_name: str, model: ModelOptions, decoding: DecodingOptions, options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; requests under way are finished first, for DRAIN_SECONDS at most.

    Raises GateFailed when the proof fails and there is no fallback, UsageError and the like before anything is loaded.
    """
    api_keys = _api_keys(options.api_key_file)
    target = open_target(target_name, model)
    if target.tokenizer is None:
        raise CheckpointError(f"{target.checkpoint.path}: has no tokenizer, which a server needs; add tokenizer.json")
    draft = None if decoding.draft is None else open_draft(decoding.draft, target)
    policy, accept = open_policy(decoding, target, draft)
    for notice in [] if draft is None else draft.notices:
        say(f"note: {notice}")
    proof = None
    if options.verify is not None:
        if draft is None:
            raise UsageError("--verify is given but no --draft; name a draft, or ngram")
        proof = prove(target, draft, list(options.verify), decoding, options.min_speedup, options.fallback_plain, say)
        if not proof.passed:
            draft, policy, accept = None, constant(0), None
    engine = build_engine(
        target, draft, policy, max_sequences=decoding.batch, accept=accept, seed=decoding.seed or 0, announce=say
    )
    worker = EngineWorker(engine, Metrics(engine, None if proof is None else proof.speedup), options.max_queue)
    serving = Serving(
        worker=worker,
        tokenizer=target.tokenizer,
        model=target.name,
        defaults=Defaults(
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            min_p=decoding.min_p,
            max_tokens=decoding.max_tokens,
            ignore_eos=decoding.ignore_eos,
        ),
        facts=_facts(target, draft, engine.options.max_length, proof),
        api_keys=api_keys,
    )
    _run(serving, options)


def say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


def _api_keys(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        keys = read_api_keys(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file}: cannot be read: {error}") from None
    if not keys:
        raise UsageError(f"--api-key-file {file}: has no key in it; expected one a line")
    return keys


def _facts(target: Target, draft: OpenedDraft | None, max_length: int, proof: Proof | None) -> dict[str, object]:
    facts: dict[str, object] = {"max_model_len": max_length, "draft": None if draft is None else draft.name}
    if proof is not None:
        facts["measured_speedup"] = proof.as_dict()
    return facts


class _Server(uvicorn.Server):
    """uvicorn's server, which says where it listens once it does."""

    def __init__(self, config: uvicorn.Config, model: str) -> None:
        super().__init__(config)
        self._model = model

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            say(f"serving {self._model} on http://{host}:{port}")


def _run(serving: Serving, options: ServeOptions) -> None:
    config = uvicorn.Config(
        create_app(serving),
        host=options.host,
        port=options.port,
        access_log=False,
        log_level="error",
        timeout_graceful_shutdown=DRAIN_SECONDS,
        lifespan="on",
    )
    server = _Server(config, serving.model)
    # uvicorn raises the signal that stopped it once more when it has drained; SIGTERM is how a server is told to end,
    # so it ends well.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        server.run()
    except SystemExit:
        raise CapacityError(
            f"--host {options.host} --port {options.port}: cannot be opened (in use, or not this machine's); "
            "choose another port"
        ) from None
    if not server.started:
        raise CapacityError(f"--host {options.host} --port {options.port}: cannot be opened; choose another port")
