"""Messages: a chat conversation as people write it, checked and brought to one form. It knows nothing about templates.

Anything in a message that would not reach the model is refused rather than dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from specctl.errors import RequestError
from specctl.text.shown import shown

# "developer" is the newer name of "system"; templates know the older one, and some drop roles they do not know.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KEYS = ("role", "content", "name")


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    name: str | None = None

    def as_dict(self) -> dict[str, str]:
        """What a chat template sees."""
        fields = {"role": self.role, "content": self.content}
        return fields if self.name is None else {**fields, "name": self.name}


def read_messages(value: object) -> tuple[Message, ...]:
    """A conversation from JSON data: a list of {"role", "content"}, content a string or a list of text parts.

    A key that is null or an empty list counts as absent: clients send a model's message back with all its fields.
    Raises RequestError (param "messages") saying which message is wrong and why.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RequestError(f"messages is {shown(value)}, expected a list of at least one message", "messages")
    return tuple(
        item if isinstance(item, Message) else _message(item, f"messages[{i}]") for i, item in enumerate(value)
    )


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        _refuse(f"{where} is {shown(item)}, expected an object with role and content")
    present = {key: value for key, value in item.items() if value is not None and value != []}
    role, name = present.get("role"), present.get("name")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{where}.role is {shown(role)}, expected one of {', '.join(ROLES)}")
    for key in present:
        if key not in _KEYS:
            _refuse(f"{where} has {shown(key)}, which is not supported; a message has role, content and name")
    if name is not None and not isinstance(name, str):
        _refuse(f"{where}.name is {shown(name)}, expected a string")
    return Message(ROLES[role], _content(item.get("content"), f"{where}.content"), name)


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _refuse(f"{where} is {shown(content)}, expected a string or a list of text parts")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        _refuse(f"{where} is {shown(part)}, expected an object of type text")
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        _refuse(f"{where} is of type {shown(kind)}; only text parts are supported")
    if not isinstance(text, str):
        _refuse(f"{where}.text is {shown(text)}, expected a string")
    for key, value in part.items():
        if key not in ("type", "text") and value is not None:
            _refuse(f"{where} has {shown(key)}, which is not supported; a text part has type and text")
    return text


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, "messages")
