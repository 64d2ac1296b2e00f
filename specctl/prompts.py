"""Prompts: a JSONL file of them, read and checked line by line. It knows nothing about tokenizers or templates.

A line is an object with one of `messages`, `prompt` and `token_ids`, and optionally `id`, `class` and `max_tokens`. A
foreign file is read through the name of one of its fields, a string or a list of strings of which the first counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specctl.errors import RequestError, UsageError
from specctl.text.messages import Message, read_messages
from specctl.text.shown import shown

KINDS = ("messages", "prompt", "token_ids")
KEYS = (*KINDS, "id", "class", "max_tokens")


@dataclass(frozen=True)
class Prompt:
    """Exactly one of messages, prompt and token_ids is set.

    id: the file's own, else the line's number. class_: the file's `class`. max_tokens: goes before the command's own.
    """

    id: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    class_: str | None = None
    max_tokens: int | None = None


def read_prompts(source: str, field: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, or of standard input for `-`. `field`: the field to read of a foreign file.

    Raises UsageError naming the file and the line for whatever is not as above, and for a file without a prompt.
    """
    name = "standard input" if source == "-" else source
    prompts = [_read(_Line(value, f"{name}: line {n}"), str(n), field) for n, value in _objects(_load(source), name)]
    if not prompts:
        raise UsageError(f"{name}: has no prompt in it; expected a JSON object a line with one of {', '.join(KINDS)}")
    return prompts


def _load(source: str) -> bytes:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror or error}") from None
    return data.removeprefix(b"\xef\xbb\xbf")


def _objects(data: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbered objects of the lines that are not blank. Lines end at a line feed only, as JSON strings may hold
    every other separator."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise UsageError(f"{where}: is not UTF-8; save the file in that encoding") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{where}: expected a JSON object, found {type(value).__name__}")
        yield number, value


@dataclass(frozen=True)
class _Line:
    values: Mapping[str, Any]
    where: str

    def refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{self.where}: {what}")

    def text(self, value: Any, what: str) -> str:
        """A string with something in it that UTF-8 can say."""
        if not isinstance(value, str) or not value:
            self.refuse(f"{what} is {shown(value)}, expected a string that is not empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(f"{what} has half of a surrogate pair in it, which is no text")
        return value


def _read(line: _Line, number: str, field: str | None) -> Prompt:
    if field is not None:
        return Prompt(id=number, prompt=_foreign(line, field))
    if unknown := [key for key in line.values if key not in KEYS]:
        line.refuse(f"key {unknown[0]!r} is unknown (known: {', '.join(KEYS)}); --prompt-field reads other files")
    given = [kind for kind in KINDS if line.values.get(kind) is not None]
    if len(given) != 1:
        line.refuse(f"has {' and '.join(given) or 'none'} of {', '.join(KINDS)}, expected one of them")
    kind, value = given[0], line.values[given[0]]
    return Prompt(
        id=_identity(line, number),
        messages=_messages(line, value) if kind == "messages" else None,
        prompt=line.text(value, "prompt") if kind == "prompt" else None,
        token_ids=_token_ids(line, value) if kind == "token_ids" else None,
        class_=None if line.values.get("class") is None else line.text(line.values["class"], "class"),
        max_tokens=_max_tokens(line),
    )


def _foreign(line: _Line, field: str) -> str:
    if field not in line.values:
        line.refuse(f"has no field {field!r} (--prompt-field); it has {', '.join(map(shown, line.values)) or 'none'}")
    value = line.values[field]
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, str)), value)
    if not isinstance(value, str):
        line.refuse(f"field {field!r} is {shown(value)}, expected a string or a list with one in it")
    return line.text(value, f"field {field!r}")


def _identity(line: _Line, number: str) -> str:
    value = line.values.get("id")
    if value is None:
        return number
    return str(value) if type(value) is int else line.text(value, "id")


def _max_tokens(line: _Line) -> int | None:
    value = line.values.get("max_tokens")
    if value is not None and (type(value) is not int or value < 1):
        line.refuse(f"max_tokens is {shown(value)}, expected a positive integer")
    return value


def _token_ids(line: _Line, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        line.refuse(f"token_ids is {shown(value)}, expected a list of token ids that is not empty")
    for token in value:
        if type(token) is not int or token < 0:
            line.refuse(f"token_ids holds {shown(token)}, expected integers from 0 up")
    return tuple(value)


def _messages(line: _Line, value: Any) -> tuple[Message, ...]:
    try:
        messages = read_messages(value)
    except RequestError as error:
        line.refuse(str(error))
    for index, message in enumerate(messages):
        if message.content:
            line.text(message.content, f"messages[{index}].content")
    return messages
