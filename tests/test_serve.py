"""`python -m specctl serve` as its users meet it: through the official client, and many of them at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
import tiny_mtp
from fixtures import Make
from serving import Launcher, Server, process, until

EMOJI = b"x\xf0\x9f\x98\x80\xc3\xa9"
CHAT: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def alpha(tmp_path_factory: pytest.TempPathFactory, make: Make) -> Iterator[Server]:
    """Says ABCDEFGH after an x, with itself as its draft."""
    target = make(tiny.table, rows=tiny.chain("xABCDEFGH"))
    with process(tmp_path_factory.mktemp("alpha") / "log", target, "--draft", target, "--k", 4) as server:
        yield server


@pytest.fixture(scope="module", params=["llama", "deepseek with its MTP layer"])
def near(launcher: Launcher, make: Make, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A target with a draft that is right at times."""
    target, draft = make(tiny.llama, seed=1), "mtp"
    if request.param == "llama":
        draft = str(make(tiny.near, of=target))
    else:
        target = tiny_mtp.with_mtp(make, "deepseek_v3")
    with launcher.serve(target, "--draft", draft, "--dtype", "float64", "--batch", 6, "--k", 3) as server:
        yield server


@pytest.fixture(scope="module")
def client(alpha: Server) -> openai.OpenAI:
    return alpha.client()


# -- the official client ----------------------------------------------------------------------------------------------


def test_models(alpha: Server, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (alpha.model, "model", "specctl")
    assert client.models.retrieve(alpha.model) == model
    extra: Any = model.model_extra
    assert (extra["max_model_len"], extra["lossy"]) == (256, False)


def test_a_chat(alpha: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=alpha.model, messages=CHAT, max_completion_tokens=5)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "ABCDE", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (21, 5, 26)


def test_a_streamed_chat(alpha: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=alpha.model, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "ABCDEFGH"
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


def test_chat_logprobs(alpha: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=alpha.model, messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs: Any = answer.choices[0].logprobs
    assert [entry.token for entry in logprobs.content] == ["A", "B", "C"]
    assert [entry.logprob for entry in logprobs.content] == pytest.approx([0, 0, 0], abs=1e-5)
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]


def test_a_completion_of_text_of_ids_and_of_several(alpha: Server, client: openai.OpenAI) -> None:
    def texts(prompt: Any, **more: Any) -> list[str]:
        answer = client.completions.create(model=alpha.model, prompt=prompt, max_tokens=20, **more)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        return [choice.text for choice in answer.choices]

    assert texts("x") == texts([ord("x")]) == ["ABCDEFGH"]
    assert texts(["x", "F"]) == texts([[ord("x")], [ord("F")]]) == ["ABCDEFGH", "GH"]
    assert texts(["F", "x"], n=2) == ["GH", "GH", "ABCDEFGH", "ABCDEFGH"]


def test_a_streamed_completion_of_several(alpha: Server, client: openai.OpenAI) -> None:
    found = ["", "", "", ""]
    ends = []
    for chunk in client.completions.create(model=alpha.model, prompt=["F", "x"], n=2, max_tokens=20, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert found == ["GH", "GH", "ABCDEFGH", "ABCDEFGH"]
    assert sorted(ends) == [0, 1, 2, 3]


def test_stop_strings(alpha: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=alpha.model, prompt="x", stop=["EF", "H"], max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ABCD", "stop")
    body = {"stop": "EF", "include_stop_str_in_output": True}
    assert client.completions.create(model=alpha.model, prompt="x", extra_body=body).choices[0].text == "ABCDEF"


def test_a_draft_length_of_its_own(alpha: Server, client: openai.OpenAI) -> None:
    def speculation(k: int) -> dict[str, Any]:
        body = {"speculation": {"k": k}}
        usage: Any = client.completions.create(model=alpha.model, prompt="x", max_tokens=20, extra_body=body).usage
        assert usage.completion_tokens == 9
        return usage.speculation

    assert speculation(0)["num_drafts"] == 0
    # Two blocks of four, all right, and what verification itself decides: A, BCDEF, GH and the end.
    assert speculation(4)["accepted_per_position"] == [2, 2, 2, 2]
    assert speculation(1)["drafted_per_position"] == speculation(1)["accepted_per_position"] == [4]


def test_seeds(near: Server) -> None:
    def text(seed: int | None, k: int = 3, **more: Any) -> list[str]:
        fields = {"max_tokens": 24, "temperature": 1.0, "n": 3, "ignore_eos": True, "speculation": {"k": k}} | more
        return [choice["text"] for choice in near.complete("hello", seed=seed, **fields)["choices"]]

    first = text(7)
    assert len(set(first)) == 3
    assert [text(7, k) for k in (0, 1, 5)] == [first] * 3
    assert text(8) != first
    assert text(None) != text(None)
    assert text(7, temperature=1e-9) == text(7, temperature=5e-324) == text(None, temperature=0)


def test_errors_are_the_clients_own(alpha: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=alpha.model, prompt="x", best_of=3)
    assert refused.value.param == "best_of"
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert absent.value.code == "model_not_found"


def test_a_key(launcher: Launcher, make: Make, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\ufeffsk-right\n# and no other\n", encoding="utf-8")
    with launcher.serve(make(tiny.table, rows=tiny.chain("xABCDEFGH")), "--api-key-file", keys) as server:
        assert len(server.client(api_key="sk-right").models.list().data) == 1
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="sk-wrong").models.list()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_characters_of_several_bytes_are_never_torn(launcher: Launcher, make: Make, path: str) -> None:
    target = make(tiny.table, rows=tiny.chain(EMOJI))
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    with launcher.serve(target, "--draft", target) as server:
        for k in range(6):
            body = {**asked, "max_tokens": 20, "speculation": {"k": k}}
            events = server.events(path, body)
            pieces = [piece for event in events for piece in _pieces(event)]
            assert "".join(pieces) == "\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}"
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
            status, whole = server.ask("POST", path, body)
            assert status == 200
            assert _pieces(whole) == ["".join(pieces)]
        # Cut in the middle of a character: what there is of it is said in the end, streamed or not.
        for k in range(6):
            body = {**asked, "max_tokens": 3, "speculation": {"k": k}}
            text = "".join(piece for event in server.events(path, body) for piece in _pieces(event))
            assert text == _pieces(server.ask("POST", path, body)[1])[0] == "\N{REPLACEMENT CHARACTER}"


def _pieces(event: dict[str, Any]) -> list[str]:
    (choice,) = event["choices"]
    content = choice.get("delta") or choice.get("message") or {}
    return [choice.get("text", content.get("content", ""))]


# -- many at once -----------------------------------------------------------------------------------------------------


def test_fifty_at_once_are_answered_as_if_alone(near: Server) -> None:
    """Streamed and not, greedy and seeded, of every draft length, some of which leave; more than there is room for."""
    draw = random.Random(5)
    requests: list[dict[str, Any]] = [
        {
            "prompt": "".join(draw.choices("abcdefgh ", k=draw.randint(1, 60))),
            "max_tokens": draw.randint(1, 24),
            "n": draw.choice((1, 1, 2)),
            "speculation": {"k": draw.randint(0, 5)},
            "ignore_eos": draw.random() < 0.5,
            **draw.choice(({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "seed": 4, "top_p": 0.9})),
            **draw.choice(({}, {"stop": ["e", "qu"]}, {"presence_penalty": 1.5})),
        }
        for _ in range(50)
    ]
    leaving = set(draw.sample(range(50), 12))
    alone = [_texts(near, request) for request in requests]
    before, start = near.metrics(), threading.Barrier(50)

    def together(index: int) -> list[str] | None:
        start.wait()
        if index in leaving:
            _leave(near, {**requests[index], "max_tokens": 150, "ignore_eos": True, "stop": None}, index % 2 == 0)
            return None
        return _streamed(near, requests[index]) if index % 2 else _texts(near, requests[index])

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(together, range(50)))
    for index, texts in enumerate(found):
        assert texts is None or texts == alone[index], requests[index]
    assert sum(texts is None for texts in found) == 12
    until(near.idle)
    after = near.metrics()

    def counted(reason: str) -> float:
        name = f"specctl:request_success_total{{finished_reason={reason}}}"
        return after[name] - before[name]

    stayed = sum(requests[index]["n"] for index in set(range(50)) - leaving)
    assert counted("stop") + counted("length") >= stayed
    assert counted("abort") > 0


def _texts(server: Server, request: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in server.complete(**request)["choices"]]


def _streamed(server: Server, request: dict[str, Any]) -> list[str]:
    texts = [""] * request["n"]
    for event in server.events("/v1/completions", request):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def _leave(server: Server, request: dict[str, Any], after_a_chunk: bool) -> None:
    client = server.client()
    extra = {name: request.pop(name) for name in ("speculation", "ignore_eos")}
    stream = client.completions.create(model=server.model, stream=True, extra_body=extra, **request)
    if after_a_chunk:
        next(iter(stream))
    stream.close()
    client.close()
