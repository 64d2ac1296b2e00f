"""OpenAI responses: whole answers, stream chunks, usage, log-probabilities and errors, as JSON data.

It knows nothing about HTTP or the engine. A stream's promises (role once a choice, finish_reason once a choice, usage
in a last chunk of its own) are kept here, so that no caller can break them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from specctl.errors import RequestError
from specctl.serve.openai import ModelNotFound
from specctl.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # how the API writes "next to impossible"; JSON has no infinity

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class Scored(NamedTuple):
    """A token and its log-probability. spelled: its bytes within a text, which need not be whole characters."""

    text: str
    spelled: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token, the likeliest ones at its place (best first), and where its text starts in the answer's."""

    token: Scored
    top: tuple[Scored, ...]
    offset: int

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, token_id: int, logprob: float, top: Sequence[tuple[int, float]], offset: int
    ) -> TokenLogprob:
        def scored(token_id: int, logprob: float) -> Scored:
            return Scored(tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), max(logprob, LEAST_LOGPROB))

        return cls(scored(token_id, logprob), tuple(scored(*pair) for pair in top), offset)


@dataclass(frozen=True)
class Choice:
    """One finished choice. logprobs: None when none were asked for."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True)
class Usage:
    """prompt_tokens: each prompt once, however many choices it has. speculation: the counters, if there is a draft."""

    prompt_tokens: int
    completion_tokens: int
    speculation: Mapping[str, object] | None = None

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return usage if self.speculation is None else {**usage, "speculation": dict(self.speculation)}


@dataclass(frozen=True)
class Envelope:
    """What every object of one response shares."""

    id: str
    created: int
    model: str
    chat: bool

    @classmethod
    def new(cls, model: str, *, chat: bool) -> Envelope:
        return cls(f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()), model, chat)

    def wrap(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def answer(envelope: Envelope, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
    """The whole response to a request that does not stream."""

    def one(choice: Choice) -> dict[str, Any]:
        text = {"message": {"role": "assistant", "content": choice.text}} if envelope.chat else {"text": choice.text}
        logprobs = _logprobs(envelope, choice.logprobs)
        return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    body = envelope.wrap([one(choice) for choice in sorted(choices, key=lambda c: c.index)], chunk=False)
    return {**body, "usage": usage.as_dict()}


class Chunks:
    """The chunks of one stream, in the order they are asked for."""

    def __init__(self, envelope: Envelope, include_usage: bool) -> None:
        self._envelope = envelope
        self._include_usage = include_usage
        self._started: set[int] = set()
        self._ended: set[int] = set()

    def delta(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None = None, usage: Usage | None = None
    ) -> dict[str, Any]:
        """More text of choice `index`; its first chunk carries the role too. usage: of this choice so far."""
        return self._chunk(index, text, logprobs, None, usage)

    def end(
        self,
        index: int,
        reason: FinishReason,
        text: str = "",
        logprobs: Sequence[TokenLogprob] | None = None,
        usage: Usage | None = None,
    ) -> dict[str, Any]:
        """The last chunk of choice `index`, with the rest of its text."""
        chunk = self._chunk(index, text, logprobs, reason, usage)
        self._ended.add(index)
        return chunk

    def usage(self, usage: Usage) -> dict[str, Any] | None:
        """The chunk after all choices have ended; None when the request did not ask for it."""
        assert self._ended == self._started, "a choice has not ended"
        if not self._include_usage:
            return None
        return {**self._envelope.wrap([], chunk=True), "usage": usage.as_dict()}

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        reason: FinishReason | None,
        usage: Usage | None,
    ) -> dict[str, Any]:
        assert index not in self._ended, f"choice {index} has ended"
        first = index not in self._started
        self._started.add(index)
        content: dict[str, Any] = {"text": text}
        if self._envelope.chat:
            delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
            content = {"delta": delta}
        scored = _logprobs(self._envelope, logprobs or None)
        chunk = self._envelope.wrap(
            [{"index": index, **content, "logprobs": scored, "finish_reason": reason}], chunk=True
        )
        return {**chunk, "usage": None if usage is None else usage.as_dict()} if self._include_usage else chunk


def sse(value: Mapping[str, Any]) -> bytes:
    """One server-sent event. Escaped to ASCII: some clients take U+2028 and its like for the end of a line."""
    return b"data: " + json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def failure(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error response, or an event of a stream that has already begun."""
    kind = _ERROR_TYPES.get(status, "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Status and body for a request that is wrong."""
    if isinstance(error, ModelNotFound):
        return 404, failure(404, str(error), error.param, "model_not_found")
    return 400, failure(400, str(error), error.param)


def model_list(model: str, created: int, **facts: object) -> dict[str, Any]:
    """The body of /v1/models. facts: further keys of the one model (context length, measured speed-up)."""
    entry = {"id": model, "object": "model", "created": created, "owned_by": "specctl", **facts}
    return {"object": "list", "data": [entry]}


def _logprobs(envelope: Envelope, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return _chat_logprobs(tokens) if envelope.chat else _completion_logprobs(tokens)


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: Scored) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelled)}

    return {"content": [{**entry(t.token), "top_logprobs": [entry(top) for top in t.top]} for t in tokens]}


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def best(scored: TokenLogprob) -> dict[str, float]:
        """Best first, the chosen token last if it is not among them; of tokens that read alike the best one stands."""
        found: dict[str, float] = {}
        for token in (*scored.top, scored.token):
            found.setdefault(token.text, token.logprob)
        return found

    return {
        "tokens": [scored.token.text for scored in tokens],
        "token_logprobs": [scored.token.logprob for scored in tokens],
        "top_logprobs": [best(scored) for scored in tokens],
        "text_offset": [scored.offset for scored in tokens],
    }
