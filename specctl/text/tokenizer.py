"""Tokenizer: prompts and chats to token ids, ids to text, from the files beside a model. It knows nothing about models.

transformers reads the files and renders chat templates; the ids come straight from the Rust tokenizer under it, which
one thread may ask to encode while another decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import CheckpointError, RequestError
from specctl.text.messages import read_messages
from specctl.text.pieces import Pieces

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

# Whichever of these is there is what transformers reads a tokenizer from.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the characters of the text that each stands for: from starts[i] up to ends[i]."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


class Tokenizer:
    """The tokenizer of a local model directory. Raises CheckpointError when it cannot be read as data alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._transformers = _load(path)
        self._backend: Backend = self._transformers.backend_tokenizer
        # A file may ask for both; a prompt cut short or filled up behind the user's back is a wrong prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pieces = Pieces(self._backend, path)

    def __len__(self) -> int:
        """The number of tokens, added ones included; ids may have holes."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocab(self) -> dict[str, int]:
        """Token to id, added tokens included, as the tokenizer writes them."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        return _optional_id(self._transformers.bos_token_id)

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own EOS; what ends a text is said by `eos_ids`."""
        return _optional_id(self._transformers.eos_token_id)

    @property
    def kind(self) -> str:
        """The name of the class that transformers reads the files into."""
        return type(self._transformers).__name__

    @property
    def special_tokens(self) -> dict[str, str]:
        """Role (bos_token, pad_token, ...) to the token that has it."""
        return {role: str(token) for role, token in self._transformers.special_tokens_map.items()}

    @property
    def has_chat_template(self) -> bool:
        template = self._transformers.chat_template
        return bool(template.get("default") if isinstance(template, Mapping) else template)

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the special tokens the tokenizer puts around a text (as /v1/completions does)."""
        return self._encode(text, "prompt", add_special_tokens=True)

    def chat(self, messages: object, add_generation_prompt: bool = True) -> list[int]:
        """A conversation (see `read_messages`) through the chat template, which alone writes special tokens.

        Only a BOS doubled at the very start is taken back to one. Raises RequestError (param "messages") for a
        malformed conversation, when there is no template, and with the template's own sentence when it refuses.
        """
        text = self.render([message.as_dict() for message in read_messages(messages)], add_generation_prompt)
        ids = self.encode_rendered(text).ids
        if not ids:
            raise RequestError("messages gives an empty prompt by the chat template; expected some text", "messages")
        return ids

    def encode_rendered(self, text: str) -> Encoded:
        """What a template wrote: no special tokens are added to its own, and a BOS doubled at the start is one."""
        encoding = self._encoding(text, "messages", add_special_tokens=False)
        ids, offsets = list(encoding.ids), list(encoding.offsets)
        while len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            del ids[0], offsets[0]
        return Encoded(ids, [start for start, _ in offsets], [end for _, end in offsets])

    @cached_property
    def longest_token(self) -> int:
        """In characters, as the vocabulary spells it."""
        return max(map(len, self.vocab()), default=1)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that were added to the vocabulary as whole words: what templates mark turns with."""
        return frozenset(self._backend.get_added_tokens_decoder())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Spaces are left as the tokens have them (clean_up_tokenization_spaces is not followed)."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes one token adds in the middle of a text; they need not be whole characters."""
        return self.pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._encoding(text, param, add_special_tokens=add_special_tokens).ids)

    def _encoding(self, text: str, param: str, *, add_special_tokens: bool) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} has half a surrogate pair, which is no character", param) from error
        # A batch of one, because other threads may run meanwhile: a long text takes seconds.
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The text of messages by the chat template; they are not checked, see `read_messages`. Raises RequestError as
        `chat` does."""
        template = self._transformers.chat_template
        if isinstance(template, Mapping):  # several, by name
            template = template.get("default")
        if not template:
            raise RequestError(
                f"messages cannot be used: {self.path.name} has no chat template; add chat_template.jinja to its files "
                "or send a prompt",
                "messages",
            )
        try:
            text: str = self._transformers.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # an expression of the template can raise anything
            raise RequestError(f"messages is refused by the chat template: {_first_line(error)}", "messages") from error
        return text


def eos_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, tokenizer_eos: int | None = None
) -> tuple[int, ...]:
    """The ids that end a text, as `transformers.generate` takes them: generation_config.json's eos_token_id (one or
    several) when it names any, else config.json's, else the tokenizer's own.

    They are not united: a generation_config.json that leaves out the tokenizer's EOS means it. Raises CheckpointError
    for anything but ids.
    """
    for name, source in (("generation_config.json", generation_config or {}), ("config.json", config)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise CheckpointError(f"{name}: eos_token_id is {value!r}, expected a token id or a list of token ids")
        if ids:
            return tuple(dict.fromkeys(ids))
    return () if tokenizer_eos is None else (tokenizer_eos,)


def _load(path: Path) -> Any:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; expected a Hugging Face model directory")
    if not any((path / name).is_file() for name in _FILES):
        raise CheckpointError(f"{path}: tokenizer.json is missing; copy the model's tokenizer files there")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust side raises bare Exception, the Python side whatever its parsing ran into
        raise CheckpointError(
            f"{path}: the tokenizer cannot be read without running code from the checkpoint or is broken "
            f"({_first_line(error)}); expected a tokenizer.json that transformers can load"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(
            f"{path}: the tokenizer is a {type(tokenizer).__name__} without a Rust form; expected a tokenizer.json"
        )
    return tokenizer


def _optional_id(value: Any) -> int | None:
    return None if value is None else int(value)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
