"""OpenAI responses: names, roles, finish reasons, usage, log-probabilities and errors, read by the official client."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny

from specctl.errors import RequestError
from specctl.serve.answers import (
    DONE,
    Choice,
    Chunks,
    Envelope,
    TokenLogprob,
    Usage,
    answer,
    failure,
    model_list,
    refusal,
    sse,
)
from specctl.serve.openai import ModelNotFound
from specctl.text.tokenizer import Tokenizer

CHAT = Envelope("chatcmpl-1", 1, "tiny", chat=True)
COMPLETION = Envelope("cmpl-1", 1, "tiny", chat=False)
USAGE = Usage(21, 5)
LINE_ENDS = "a\u2028b\u0085c\r\nd\N{GRINNING FACE}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.byte_tokenizer(Path(tmp_path_factory.mktemp("byte")) / "model"))


def client(body: bytes, status: int = 200, kind: str = "application/json") -> openai.OpenAI:
    """The official client, talking to a server that answers everything with `body`."""

    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body, headers={"content-type": kind})

    http = httpx.Client(transport=httpx.MockTransport(respond))
    return openai.OpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)


def scored(tokenizer: Tokenizer, *ids: int, logprob: float = -0.5) -> list[TokenLogprob]:
    return [TokenLogprob.of(tokenizer, i, logprob, [(i, logprob), (98, -1.25)], at) for at, i in enumerate(ids)]


# Whole answers


def test_a_chat_answer() -> None:
    assert answer(CHAT, [Choice(0, "ABCDE", "length")], USAGE) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ABCDE"},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 21, "completion_tokens": 5, "total_tokens": 26},
    }


def test_choices_are_in_order_whoever_finished_first() -> None:
    body = answer(COMPLETION, [Choice(1, "b", "stop"), Choice(0, "a", "length")], USAGE)
    assert body["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]


def test_what_speculation_did_stands_under_its_own_key() -> None:
    counters = {"num_drafts": 2, "acceptance_rate": 0.5}
    usage = answer(CHAT, [Choice(0, "", "stop")], Usage(1, 2, counters))["usage"]
    assert usage == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "speculation": counters}


def test_each_response_has_an_id_of_its_own() -> None:
    first, second = Envelope.new("tiny", chat=True), Envelope.new("tiny", chat=True)
    assert first.id != second.id
    assert first.id.startswith("chatcmpl-")
    assert Envelope.new("tiny", chat=False).id.startswith("cmpl-")


# Streams


def _stream(envelope: Envelope, include_usage: bool) -> list[dict[str, Any]]:
    chunks = Chunks(envelope, include_usage)
    made = [
        chunks.delta(0, ""),
        chunks.delta(1, "x"),
        chunks.delta(0, "AB"),
        chunks.end(1, "stop"),
        chunks.end(0, "length", LINE_ENDS),
        chunks.usage(USAGE),
    ]
    return [chunk for chunk in made if chunk is not None]


@pytest.mark.parametrize("include_usage", [False, True])
def test_chunks_of_a_chat(include_usage: bool) -> None:
    chunks = _stream(CHAT, include_usage)
    body = [chunk for chunk in chunks if chunk["choices"]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index, roles, text, reason in ((0, 1, "AB" + LINE_ENDS, "length"), (1, 1, "x", "stop")):
        mine = [chunk["choices"][0] for chunk in body if chunk["choices"][0]["index"] == index]
        assert [("role" in choice["delta"]) for choice in mine] == [True] * roles + [False] * (len(mine) - roles)
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [reason]
    if include_usage:
        assert all(chunk["usage"] is None for chunk in body)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == USAGE.as_dict()
    assert len(chunks) - len(body) == include_usage
    assert include_usage or all("usage" not in chunk for chunk in chunks)


def test_chunks_of_a_completion() -> None:
    chunks = _stream(COMPLETION, True)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == 0]
    assert texts == ["", "AB", LINE_ENDS]
    assert all("delta" not in chunk["choices"][0] for chunk in chunks[:-1])


def test_a_choice_ends_once_and_before_the_usage() -> None:
    chunks = Chunks(CHAT, include_usage=True)
    chunks.delta(0, "a")
    with pytest.raises(AssertionError, match="has not ended"):
        chunks.usage(USAGE)
    chunks.end(0, "stop")
    with pytest.raises(AssertionError, match="has ended"):
        chunks.delta(0, "b")
    with pytest.raises(AssertionError, match="has ended"):
        chunks.end(0, "stop")


def test_an_event_is_one_line_of_ascii() -> None:
    event = sse(_stream(CHAT, False)[-1])
    assert event.isascii()
    assert event.startswith(b"data: {")
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event[6:])["choices"][0]["delta"]["content"] == LINE_ENDS


def test_the_official_client_reads_a_stream() -> None:
    events = b"".join(map(sse, _stream(CHAT, True))) + DONE
    stream = client(events, kind="text/event-stream").chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    assert "".join(choice.delta.content or "" for choice in mine) == "AB" + LINE_ENDS
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 26


# Log-probabilities


def test_logprobs_of_a_chat(tokenizer: Tokenizer) -> None:
    body = answer(CHAT, [Choice(0, "a", "stop", scored(tokenizer, 97))], USAGE)
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.25, "bytes": [98]}]
    assert body["choices"][0]["logprobs"] == {"content": [{**top[0], "top_logprobs": top}]}


def test_logprobs_of_a_completion(tokenizer: Tokenizer) -> None:
    body = answer(COMPLETION, [Choice(0, "ac", "stop", scored(tokenizer, 97, 99))], USAGE)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.25}, {"c": -0.5, "b": -1.25}],
        "text_offset": [0, 1],
    }


def test_the_chosen_token_is_among_the_top_of_a_completion(tokenizer: Tokenizer) -> None:
    tokens = [TokenLogprob.of(tokenizer, 97, -3.0, [(98, -0.1), (0xF0, -2.0), (0xF1, -2.5)], 0)]
    body = answer(COMPLETION, [Choice(0, "a", "stop", tokens)], USAGE)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.1, "\N{REPLACEMENT CHARACTER}": -2.0, "a": -3.0}]
    alone = answer(COMPLETION, [Choice(0, "a", "stop", [TokenLogprob.of(tokenizer, 97, -3.0, [], 0)])], USAGE)
    assert alone["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -3.0}]


def test_asked_for_but_without_tokens_is_not_absent(tokenizer: Tokenizer) -> None:
    assert answer(CHAT, [Choice(0, "", "stop", [])], USAGE)["choices"][0]["logprobs"] == {"content": []}


def test_bytes_of_part_of_a_character_and_an_impossible_token(tokenizer: Tokenizer) -> None:
    body = answer(CHAT, [Choice(0, "", "length", scored(tokenizer, 0xF0, logprob=-math.inf))], USAGE)
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("\N{REPLACEMENT CHARACTER}", [0xF0])
    assert entry["logprob"] == -9999.0
    sse(body)


def test_logprobs_travel_with_chunks(tokenizer: Tokenizer) -> None:
    chunks = Chunks(CHAT, include_usage=False)
    assert chunks.delta(0, "")["choices"][0]["logprobs"] is None
    held = chunks.delta(0, "", scored(tokenizer, 97))["choices"][0]
    assert (held["delta"], held["logprobs"]["content"][0]["token"]) == ({}, "a")
    end = chunks.end(0, "stop", "ab", scored(tokenizer, 98))["choices"][0]
    assert (end["delta"], end["logprobs"]["content"][0]["token"]) == ({"content": "ab"}, "b")


@pytest.mark.parametrize("envelope", [CHAT, COMPLETION])
def test_the_official_client_reads_answers(tokenizer: Tokenizer, envelope: Envelope) -> None:
    choices = [Choice(0, "a", "stop", scored(tokenizer, 97))]
    official = client(json.dumps(answer(envelope, choices, Usage(1, 1, {"num_drafts": 3}))).encode())
    usage: Any
    if envelope.chat:
        chat = official.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        logprobs, usage = chat.choices[0].logprobs, chat.usage
        assert chat.choices[0].message.content == "a"
        assert logprobs is not None
        assert logprobs.content is not None
        assert logprobs.content[0].top_logprobs[1].bytes == [98]
    else:
        completion = official.completions.create(model="tiny", prompt="x")
        usage = completion.usage
        assert completion.choices[0].text == "a"
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.token_logprobs == [-0.5]
    assert usage.speculation == {"num_drafts": 3}


# Errors and the model list


def test_refusals() -> None:
    status, body = refusal(RequestError("n is 0, expected more", "n"))
    assert status == 400
    expected = {"message": "n is 0, expected more", "type": "invalid_request_error", "param": "n", "code": None}
    assert body == {"error": expected}
    status, body = refusal(ModelNotFound("no such model", "model"))
    assert (status, body["error"]["type"], body["error"]["code"]) == (404, "not_found_error", "model_not_found")


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", openai.BadRequestError),
        (401, "authentication_error", openai.AuthenticationError),
        (404, "not_found_error", openai.NotFoundError),
        (413, "invalid_request_error", openai.APIStatusError),
        (500, "internal_error", openai.InternalServerError),
        (503, "service_unavailable_error", openai.InternalServerError),
    ],
)
def test_the_official_client_reads_errors(status: int, kind: str, raised: type[openai.APIStatusError]) -> None:
    official = client(json.dumps(failure(status, "what happened", "n", "why")).encode(), status)
    ask: Callable[[], object] = lambda: official.completions.create(model="tiny", prompt="x")  # noqa: E731
    with pytest.raises(raised, match="what happened") as caught:
        ask()
    assert (caught.value.type, caught.value.param, caught.value.code) == (kind, "n", "why")


def test_the_official_client_lists_the_model() -> None:
    body = model_list("tiny", 5, max_model_len=64, measured_speedup=None)
    models = client(json.dumps(body).encode()).models.list().data
    assert [(model.id, model.owned_by, model.created) for model in models] == [("tiny", "specctl", 5)]
    assert body["data"][0]["max_model_len"] == 64
