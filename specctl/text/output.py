"""TextOutput: the text of one choice while its tokens arrive one by one. It decides when a stop string ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specctl.text.stops import StopStrings
from specctl.text.stream import StreamDecoder
from specctl.text.tokenizer import Tokenizer


class TextOutput:
    """eos_ids: the ids that end this choice (none under ignore_eos); they are never text, special or not.

    The token that completes a stop string is the last one of the choice and counts as its token, though its text, or a
    part of it, is cut off.

    decoded_length: characters decoded so far, shown or not; the text of the next token starts there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        eos_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stop, include_stop)
        self._eos_ids = frozenset(eos_ids)
        self._shown: list[str] = []
        self.decoded_length = 0

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that may now be shown, and whether a stop string is complete: then no token may follow."""
        if token_id in self._eos_ids:
            return "", False
        return self._show(self._decoder.push([token_id])), self.stopped

    def finish(self) -> str:
        """The rest of the text, when no token follows. `stopped` may turn true: the rest can complete a stop string."""
        if self.stopped:
            return ""
        text = self._show(self._decoder.flush())
        if not self.stopped:
            rest = self._stops.flush()
            self._shown.append(rest)
            text += rest
        return text

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def _show(self, decoded: str) -> str:
        self.decoded_length += len(decoded)
        text = self._stops.push(decoded)
        self._shown.append(text)
        return text
