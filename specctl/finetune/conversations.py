"""A data set's row as a conversation or a plain text, whichever of the forms in use it is written in. It knows nothing
about templates or tokens.

Forms, by the first of these keys that is there: `messages` or `conversations` (turns of role and content, or from and
value), `prompt` with `completion` (texts, or lists of messages), `text`. What would change what the target sees and
cannot be shown to it (tools, images, roles that are not known) makes the row one to skip, by RequestError; what says
something about the row only is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from specctl.errors import RequestError
from specctl.text.messages import ROLES, read_messages
from specctl.text.shown import shown
from specctl.train.examples import Conversation, PlainText, Row, Turn

KEYS = ("messages", "conversations", "conversation")
_ROLES = ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_TOOLS = ("tool_calls", "function_call", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def read_row(values: Mapping[str, Any], id: str, *, chat: bool) -> Row:
    """The row's conversation, from the first user's turn on (system turns before it stay) to the last one. chat:
    whether a prompt and its completion are a user's turn and the answer to it, or plain text.

    Raises RequestError saying what keeps the row from being used.
    """
    present = {key: value for key, value in values.items() if value is not None}
    if present.get("tools") or present.get("functions"):
        _refuse("has tools, which are not supported")
    turns = next((present[key] for key in KEYS if key in present), None)
    if turns is not None:
        return Conversation(id, _started([_turn(item) for item in _list(turns)]))
    if "prompt" in present:
        return _prompted(present["prompt"], present.get("completion"), id, chat=chat)
    if "text" in present:
        return PlainText(id, None, _text(present["text"], "text"))
    keys = ", ".join(shown(key) for key in list(values)[:8]) or "no keys"
    _refuse(f"has none of messages, conversations, prompt and text (it has {keys})")


def _prompted(prompt: Any, completion: Any, id: str, *, chat: bool) -> Row:
    if isinstance(prompt, list):
        read = [_turn(item, trained=False) for item in _list(prompt)]
        learnt = [] if completion is None else [_turn(item) for item in _list(completion)]
        return Conversation(id, _started(read + learnt))
    asked = _text(prompt, "prompt")
    answered = None if completion is None else _text(completion, "completion")
    if not chat:
        return PlainText(id, asked, answered)
    turns = [Turn("user", asked)]
    return Conversation(id, tuple(turns if answered is None else [*turns, Turn("assistant", answered)]))


def _turn(item: Any, trained: bool = True) -> Turn:
    if not isinstance(item, Mapping):
        _refuse(f"has {shown(item)} where a turn should be")
    present = {key: value for key, value in item.items() if value is not None and value != []}
    named = present.get("role", present.get("from"))
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        _refuse(f"has a turn of role {shown(named)}, which is not supported ({', '.join(_ROLES)})")
    if tools := [key for key in _TOOLS if present.get(key)]:
        _refuse(f"has {tools[0]}, which is not supported")
    content = present.get("content", present.get("value", present.get("text")))
    if content is None and role != "assistant":
        _refuse(f"has a {role} turn without content")
    name, answer = present.get("name"), role == "assistant"
    return Turn(
        role,
        "" if content is None else read_messages([{"role": role, "content": content}])[0].content,
        name if isinstance(name, str) else None,
        {key: value for key in _REASONING if answer and isinstance(value := present.get(key), str) and value.strip()},
        trained=trained and present.get("weight") != 0,
    )


def _started(turns: list[Turn]) -> tuple[Turn, ...]:
    """Without the answers before the first question: nobody asked for them, and few templates can show them."""
    first = next((index for index, turn in enumerate(turns) if turn.role == "user"), len(turns))
    return tuple(turn for turn in turns[:first] if turn.role == "system") + tuple(turns[first:])


def _list(turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        _refuse(f"has {shown(turns)} where a list of turns should be")
    if not turns:
        _refuse("has no turns")
    return turns


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        _refuse(f"has {shown(value)} as {key}, expected a string")
    if not value.strip():
        _refuse(f"has an empty {key}")
    return value


def _refuse(reason: str) -> NoReturn:
    raise RequestError(reason)
