"""Prompt files: what is read, and that whatever is wrong is said with the file and the line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.prompts import Prompt, read_prompts
from specctl.text.messages import Message

GOOD: list[dict[str, Any]] = [
    {"prompt": "Once upon", "id": "tale", "class": "story", "max_tokens": 7},
    {"token_ids": [1, 2, 3], "id": 12},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
]
READ = [
    Prompt("tale", prompt="Once upon", class_="story", max_tokens=7),
    Prompt("12", token_ids=(1, 2, 3)),
    Prompt("3", messages=(Message("user", "hi"), Message("assistant", ""))),
    Prompt("4", messages=(Message("user", "hi"),)),
]


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def read(tmp_path: Path, content: bytes, field: str | None = None) -> list[Prompt]:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    return read_prompts(str(file), field)


def refused(tmp_path: Path, content: bytes, *words: str, field: str | None = None) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, content, field)
    for word in ("prompts.jsonl", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_form(tmp_path: Path) -> None:
    assert read(tmp_path, lines(*GOOD)) == READ


def test_the_same_content_in_other_bytes(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends and a last line without an end change nothing."""
    plain = lines(*GOOD)
    for other in (b"\xef\xbb\xbf" + plain, plain.replace(b"\n", b"\r\n"), plain.rstrip(b"\n")):
        assert read(tmp_path, other) == READ


def test_blank_lines_count_as_lines_only(tmp_path: Path) -> None:
    prompts = read(tmp_path, b"\n" + lines({"prompt": "a"}) + b"  \r\n\n" + lines({"prompt": "b"}) + b"\n")
    assert [(prompt.id, prompt.prompt) for prompt in prompts] == [("2", "a"), ("5", "b")]


def test_line_separators_inside_a_string(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\rfour"
    content = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    assert read(tmp_path, content)[0].prompt == text


def test_null_is_absent(tmp_path: Path) -> None:
    line = {"prompt": "a", "messages": None, "id": None, "class": None, "max_tokens": None}
    assert read(tmp_path, lines(line)) == [Prompt("1", prompt="a")]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines({"prompt": "a"}, {"prompt": 3}))))
    with pytest.raises(UsageError, match="standard input: line 2"):
        read_prompts("-")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_no_prompt_at_all(tmp_path: Path, content: bytes) -> None:
    refused(tmp_path, content, "no prompt")
    refused(tmp_path, content, "no prompt", field="text")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"):
        read_prompts(str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="directory"):
        read_prompts(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a', ["JSON"]),
        (b'{"prompt": "a"} {"prompt": "b"}', ["JSON"]),
        (b'{"prompt": "\xff"}', ["UTF-8"]),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", ["JSON"]),
        (b"[" * 100_000, ["JSON"]),
        (b'["a"]', ["object", "list"]),
        (b"{}", ["none", "messages", "token_ids"]),
        (lines({"prompt": None}), ["none"]),
        (lines({"prompt": "a", "token_ids": [1]}), ["prompt and token_ids"]),
        (lines({"prompt": "a", "promt": "b"}), ["'promt'", "--prompt-field"]),
        (lines({"prompt": ""}), ["prompt", "empty"]),
        (lines({"prompt": ["a"]}), ["prompt", "string"]),
        (b'{"prompt": "\\ud83d"}', ["surrogate"]),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', ["surrogate", "messages[0]"]),
        (lines({"prompt": "a", "id": ["x"]}), ["id"]),
        (lines({"prompt": "a", "id": True}), ["id"]),
        (lines({"prompt": "a", "class": 3}), ["class"]),
        (lines({"prompt": "a", "max_tokens": 0}), ["max_tokens", "positive"]),
        (lines({"prompt": "a", "max_tokens": True}), ["max_tokens"]),
        (lines({"prompt": "a", "max_tokens": 2.0}), ["max_tokens"]),
        (lines({"token_ids": []}), ["token_ids", "empty"]),
        (lines({"token_ids": "1,2"}), ["token_ids"]),
        (lines({"token_ids": [1, -2]}), ["token_ids", "-2"]),
        (lines({"token_ids": [1, 2.0]}), ["token_ids", "2.0"]),
        (lines({"token_ids": [1, True]}), ["token_ids", "True"]),
        (lines({"messages": []}), ["messages"]),
        (lines({"messages": [{"role": "function_call", "content": "a"}]}), ["messages[0].role", "function_call"]),
        (lines({"messages": [{"role": "user"}]}), ["messages[0].content"]),
        (lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), ["messages[0]", "image_url"]),
    ],
)
def test_broken_line(tmp_path: Path, line: bytes, words: list[str]) -> None:
    """The second line is the broken one, and it is never dropped."""
    refused(
        tmp_path, lines({"prompt": "fine"}) + line.rstrip(b"\n") + b"\n" + lines({"prompt": "fine"}), "line 2", *words
    )


def test_foreign_file(tmp_path: Path) -> None:
    content = lines({"question": "a", "answer": 1}, {"question": ["b", "c"], "id": "mine"}, {"question": [None, "d"]})
    assert read(tmp_path, content, "question") == [
        Prompt("1", prompt="a"),
        Prompt("2", prompt="b"),
        Prompt("3", prompt="d"),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"other": "b"}, ["'question'", "'other'"]),
        ({}, ["'question'", "none"]),
        ({"question": 3}, ["'question'", "3"]),
        ({"question": []}, ["'question'"]),
        ({"question": [1]}, ["'question'"]),
        ({"question": ""}, ["'question'", "empty"]),
    ],
)
def test_foreign_file_is_broken(tmp_path: Path, value: Any, words: list[str]) -> None:
    refused(tmp_path, lines({"question": "a"}, value), "line 2", *words, field="question")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["prompt", "messages", "token_ids", "id", "role", "content"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(value=JSON)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_is_read_or_refused(tmp_path: Path, value: Any) -> None:
    try:
        prompts = read(tmp_path, lines(value))
    except UsageError:
        return
    assert len(prompts) == 1
    assert sum(part is not None for part in (prompts[0].prompt, prompts[0].messages, prompts[0].token_ids)) == 1
