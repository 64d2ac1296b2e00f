"""Serving: open the pair, prove the speed-up if asked to, then open the port and stay until told to go."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import CheckpointError, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import say
from specctl.pair import OpenedDraft, Target, build_engine, constant, open_draft, open_policy, open_target
from specctl.prompts import Prompt
from specctl.sampling.params import Accept
from specctl.serve import listen
from specctl.serve.app import Serving, read_api_keys
from specctl.serve.metrics import Metrics
from specctl.serve.openai import Defaults
from specctl.serve.proof import Proof, prove
from specctl.serve.worker import EngineWorker


@dataclass(frozen=True)
class ServeOptions:
    """verify: prompts to prove the speed-up on before the port opens; min_speedup: what it has to be; fallback_plain:
    serve without the draft when it is less, in place of giving up. debug: say where in the program an error came from.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    max_queue: int = 256
    verify: Sequence[Prompt] | None = None
    min_speedup: float | None = None
    fallback_plain: bool = False
    debug: bool = False


def serve(target_name: str, model: ModelOptions, decoding: DecodingOptions, options: ServeOptions) -> None:
    """Serve until SIGTERM; requests under way are finished first. Raises KeyboardInterrupt for Ctrl-C.

    Raises GateFailed when the proof fails and there is no fallback. What can be known before a model is loaded (flags,
    keys, the address) is checked before.
    """
    if options.verify is not None and (decoding.draft is None or decoding.k == 0):
        missing = "--k is 0" if decoding.draft else "no --draft"
        raise UsageError(f"--verify is given but {missing}, so there is nothing to prove; name a draft, or ngram")
    api_keys = _api_keys(options.api_key_file)
    with listen.reserve(options.host, options.port) as listener:
        serving = open_serving(target_name, model, decoding, options, api_keys)
        try:
            listen.run(serving, listener, say)
        finally:
            # The process ends now, and Python would look through all of torch for garbage first, for seconds.
            gc.freeze()


def open_serving(
    target_name: str,
    model: ModelOptions,
    decoding: DecodingOptions,
    options: ServeOptions,
    api_keys: tuple[str, ...] = (),
) -> Serving:
    """All that is served, its engine not started yet. Raises CheckpointError, IncompatiblePair, UsageError,
    CapacityError and, by --verify, GateFailed."""
    target = open_target(target_name, model)
    if target.tokenizer is None:
        raise CheckpointError(f"{target.checkpoint.path}: has no tokenizer, which a server needs; add tokenizer.json")
    draft = None if decoding.draft is None else open_draft(decoding.draft, target)
    policy, accept = open_policy(decoding, target, draft)
    for notice in [] if draft is None else draft.notices:
        say(f"note: {notice}")
    if accept is not None and accept.lossy:
        say(f"note: --accept {accept} is lossy: answers are not the target's own")
    proof = None
    if options.verify is not None:
        assert draft is not None
        proof = prove(target, draft, list(options.verify), decoding, options.min_speedup, options.fallback_plain, say)
        if not proof.passed:
            draft, policy, accept = None, constant(0), None
    engine = build_engine(
        target, draft, policy, max_sequences=decoding.batch, accept=accept, seed=decoding.seed or 0, announce=say
    )
    metrics = Metrics(engine, None if proof is None else proof.speedup)
    report = _Report(options.debug)
    return Serving(
        worker=EngineWorker(engine, metrics, options.max_queue, report.failure),
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
        facts=_facts(target, draft, accept, engine.options.max_length, proof),
        api_keys=api_keys,
        report=report.bug,
    )


def _api_keys(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        keys = read_api_keys(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file}: cannot be read: {error}") from None
    if not keys:
        raise UsageError(f"--api-key-file {file}: has no key in it; expected one a line")
    return keys


def _facts(
    target: Target, draft: OpenedDraft | None, accept: Accept | None, max_length: int, proof: Proof | None
) -> dict[str, object]:
    facts: dict[str, object] = {
        "max_model_len": max_length,
        "draft": None if draft is None else draft.name,
        "lossy": accept is not None and accept.lossy,
    }
    if proof is not None:
        facts["measured_speedup"] = proof.as_dict()
    return facts


class _Report:
    """Says what went wrong while serving. debug: with the place in the program."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug

    def failure(self, error: Exception) -> None:
        self._say("the engine has failed, and every request is refused until the server is started again", error)

    def bug(self, error: Exception) -> None:
        self._say("internal error in answering a request", error)

    def _say(self, what: str, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        hint = "" if self._debug else "; start with --debug to see where"
        say(f"{what}: {type(error).__name__}: {lines[0] if lines else 'no message'}{hint}")
        if self._debug:
            say("".join(traceback.format_exception(error)).rstrip())
