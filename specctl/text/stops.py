"""StopStrings: text in, text that may be shown out, until a stop string is complete. It knows nothing about tokens.

The rule, the same however the text is cut into pieces: reading character by character, the first character that
completes a stop string ends the text; of several strings it completes, the one that starts earliest is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from specctl.errors import RequestError


class StopStrings:
    """include_stop: the completed stop string stays in the text, as include_stop_str_in_output asks.

    Raises RequestError (param "stop") for an empty string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise RequestError("stop holds an empty string, which would end every text at once; leave it out", "stop")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown after `text`: all but an end that may yet become part of a stop string."""
        assert not self.stopped, "the text has ended"
        if not self._matchers:
            return text
        pending = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            if complete := [matcher.size for matcher in self._matchers if matcher.step(character)]:
                self.stopped, self._held = True, ""
                return pending[: end if self._include_stop else end - max(complete)]
        keep = 0 if self._include_stop else max(matcher.matched for matcher in self._matchers)
        split = len(pending) - keep
        self._held = pending[split:]
        return pending[:split]

    def flush(self) -> str:
        """What was held back, now that no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt: `matched` is how much of the stop string the text ends with, O(1) a character."""

    def __init__(self, stop: str) -> None:
        self.size = len(stop)
        self.matched = 0
        self._stop = stop
        self._shorter = [0]  # at i: the longest proper prefix of stop that stop[: i + 1] ends with
        for character in stop[1:]:
            self._shorter.append(self._advance(self._shorter[-1], character))

    def step(self, character: str) -> bool:
        """Whether `character` completes the stop string."""
        self.matched = self._advance(self.matched, character)
        return self.matched == self.size

    def _advance(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self._stop[matched] == character)
