"""Pieces: what token ids mean as text, read off a tokenizer's decoder. It knows nothing about streams or prompts.

Two kinds of tokenizer matter. Byte-level BPE (Llama 3, Qwen, DeepSeek, SmolLM): a token *is* bytes, and a text is the
bytes of its tokens side by side. All others (SentencePiece-style with byte fallback, word pieces): a token is text
whose spelling depends on whether something stands before it, and only the fallback tokens <0x00>..<0xFF> are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_FALLBACK = re.compile(r"<0x([0-9a-fA-F]{2})>")


class Pieces:
    """The text of ids, one by one or a few after another. Ids that the tokenizer lacks (padding rows) have no text."""

    def __init__(self, backend: Backend, where: Path) -> None:
        decoders = list(_decoder_types(backend))
        self.byte_level = decoders == ["ByteLevel"]
        if "ByteLevel" in decoders and not self.byte_level:
            raise CheckpointError(
                f"{where}: a byte-level decoder combined with others ({', '.join(decoders)}) is unknown"
            )
        self._backend = backend
        self._has_fallback = "ByteFallback" in decoders
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def has_text(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def is_fallback_byte(self, token_id: int) -> bool:
        return self._has_fallback and _FALLBACK.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token adds in the middle of a text."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._spell(token_id)
        return self._bytes[token_id]

    def after(self, previous: int | None, ids: Sequence[int]) -> str:
        """The text `ids` add after the token `previous` (None: at the start, where some tokenizers drop a space)."""
        if previous is None:
            return self.join(ids)
        return self.join([previous, *ids])[len(self.join([previous])) :]

    def join(self, ids: Sequence[int]) -> str:
        """The whole text of `ids`, specials included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            byte_of = self._byte_of
            # A token with a character that stands for no byte was added as plain text.
            return bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
        if self.is_fallback_byte(token_id):
            return bytes.fromhex(token[3:5])
        return self.after(token_id, [token_id]).encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte-level vocabularies write printable Latin-1 bytes as themselves, the others as characters from 256 up."""
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_types(backend: Backend) -> Iterator[str]:
    decoder: Any = backend.decoder
    if decoder is None:
        return
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        node = waiting.pop(0)
        if node["type"] == "Sequence":
            waiting = node["decoders"] + waiting
        else:
            yield node["type"]
