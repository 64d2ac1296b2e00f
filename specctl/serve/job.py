"""Job: one API request on its way through the engine, and what comes of it as an answer or as a stream of events.

It knows nothing about HTTP. Cancelling it is allowed at any time and costs nothing when it has ended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from specctl.engine.output import Output
from specctl.engine.stats import SpeculationCounters
from specctl.errors import RequestError
from specctl.serve import answers, openai
from specctl.serve.worker import EngineWorker, Ticket
from specctl.text.messages import Message
from specctl.text.tokenizer import Tokenizer

# A tokenizer may write several characters as one before it looks for tokens (accents, repeated spaces).
_SHRINKS = 4


class Job:
    """prompts: the request's, as token ids. Raises QueueFull and EngineStopped when it is not taken in."""

    def __init__(
        self, worker: EngineWorker, tokenizer: Tokenizer, request: openai.Request, prompts: list[list[int]]
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._request = request
        self._prompt_tokens = [len(token_ids) for token_ids in prompts]
        limit = worker.engine.options.max_length
        self._ticket: Ticket = worker.submit(
            [(token_ids, request.sampling(max(1, limit - len(token_ids)))) for token_ids in prompts]
        )
        self._first: tuple[int, Output] | None = None
        self._num_left = request.num_choices
        self._completion_tokens = [0] * request.num_choices
        self._counters = SpeculationCounters()

    async def start(self) -> None:
        """Wait for the first output. Raises RequestError and CapacityError when the engine refuses, EngineStopped."""
        self._first = await self._ticket.next()

    def cancel(self) -> None:
        self._worker.cancel(self._ticket)

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises EngineStopped."""
        request = self._request
        texts = [""] * request.num_choices
        logprobs: list[list[answers.TokenLogprob]] = [[] for _ in texts]
        reasons: dict[int, answers.FinishReason] = {}
        while (event := await self._next()) is not None:
            index, output = event
            texts[index] += output.text
            logprobs[index].extend(self._logprobs(output) or ())
            if output.finish_reason is not None:
                reasons[index] = _reason(output)
        wanted = request.params.logprobs is not None
        choices = [answers.Choice(i, text, reasons[i], logprobs[i] if wanted else None) for i, text in enumerate(texts)]
        return answers.answer(answers.Envelope.new(request.model, chat=request.chat), choices, self._usage())

    async def stream(self, explain: Callable[[Exception], Mapping[str, Any]]) -> AsyncGenerator[bytes, None]:
        """Server-sent events, always with the end mark. The status has been sent, so what goes wrong is an event:
        `explain` of it."""
        request = self._request
        chunks = answers.Chunks(answers.Envelope.new(request.model, chat=request.chat), request.include_usage)
        try:
            while (event := await self._next()) is not None:
                index, output = event
                logprobs, usage = self._logprobs(output), self._running_usage(index)
                if output.finish_reason is not None:
                    yield answers.sse(chunks.end(index, _reason(output), output.text, logprobs, usage))
                elif output.text or logprobs or usage is not None:
                    yield answers.sse(chunks.delta(index, output.text, logprobs, usage))
            if (last := chunks.usage(self._usage())) is not None:
                yield answers.sse(last)
        except Exception as error:  # noqa: BLE001 - a stream that just ends would look complete to some clients
            yield answers.sse(explain(error))
        yield answers.DONE

    async def _next(self) -> tuple[int, Output] | None:
        """(choice index, output) in the order they come; None when every choice has ended."""
        if not self._num_left:
            return None
        event, self._first = self._first, None
        index, output = event or await self._ticket.next()
        self._completion_tokens[index] += len(output.token_ids)
        if output.finish_reason is not None:
            self._num_left -= 1
            self._counters.add(output.counters)
        return index, output

    def _usage(self) -> answers.Usage:
        engine = self._worker.engine
        speculation = None
        if engine.drafter is not None:
            accept = engine.options.accept or self._request.params.acceptance
            speculation = {**self._counters.as_dict(), "accept": str(accept), "lossy": accept.lossy}
        return answers.Usage(sum(self._prompt_tokens), sum(self._completion_tokens), speculation)

    def _running_usage(self, index: int) -> answers.Usage | None:
        """Of one choice so far. None when it is not wanted."""
        if not self._request.running_usage:
            return None
        return answers.Usage(self._prompt_tokens[index // self._request.params.n], self._completion_tokens[index])

    def _logprobs(self, output: Output) -> list[answers.TokenLogprob] | None:
        """None when they are not wanted."""
        if self._request.params.logprobs is None:
            return None
        return [
            answers.TokenLogprob.of(self._tokenizer, token_id, entry.logprob, entry.top, offset)
            for token_id, entry, offset in zip(output.token_ids, output.logprobs, output.offsets, strict=True)
        ]


def encode(request: openai.Request, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
    """Token ids of each prompt. Raises RequestError naming the parameter. limit: tokens of the context."""
    for prompt in request.prompts:
        _check_length(prompt, tokenizer, limit)
    return [_encode(prompt, request.chat, tokenizer) for prompt in request.prompts]


def _check_length(prompt: openai.Prompt, tokenizer: Tokenizer, limit: int) -> None:
    """Refuse what is too long by far without reading it: encoding takes time that others want."""
    texts = [prompt] if isinstance(prompt, str) else [part.content for part in prompt if isinstance(part, Message)]
    length = sum(map(len, texts))
    if length > limit and length > _SHRINKS * tokenizer.longest_token * limit:
        name = "prompt" if isinstance(prompt, str) else "messages"
        raise RequestError(f"{name} has {length} characters, far more than the context of {limit} tokens holds", name)


def _encode(prompt: openai.Prompt, chat: bool, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if chat:
        return tokenizer.chat(prompt)
    return [token for token in prompt if isinstance(token, int)]


def _reason(output: Output) -> answers.FinishReason:
    return "stop" if output.finish_reason == "stop" else "length"
