"""StreamDecoder: token ids in, final text out, whatever the cuts. It knows nothing about stop strings or requests.

Everything pushed and flushed, put together, is what the tokenizer makes of all the ids at once; the cost of a token
does not grow with the text before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from specctl.text.tokenizer import Tokenizer


class StreamDecoder:
    """Text that has come out of `push` never changes, so some has to wait.

    Byte-level tokenizers: an incomplete UTF-8 sequence waits for its end. Others: a run of fallback bytes waits for the
    token that ends it, because one stray byte spoils the whole run (each of its bytes then reads as U+FFFD).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = self._pieces.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous: int | None = None
        self._run: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` make final."""
        kept = (token_id for token_id in ids if token_id not in self._skipped)
        step = self._push_bytes if self._pieces.byte_level else self._push_text
        return "".join(map(step, kept))

    def flush(self) -> str:
        """What was still waiting, now that nothing follows."""
        if self._pieces.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._end_run() if self._run else ""

    def _push_bytes(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces.bytes_of(token_id))

    def _push_text(self, token_id: int) -> str:
        if not self._pieces.has_text(token_id):
            return ""
        self._run.append(token_id)
        return "" if self._pieces.is_fallback_byte(token_id) else self._end_run()

    def _end_run(self) -> str:
        text = self._pieces.after(self._previous, self._run)
        self._previous = self._run[-1]
        self._run = []
        return text
