"""--show-mask: examples as text in which one sees what is trained. In colour on a terminal, between marks elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import groupby

from specctl.text.tokenizer import Tokenizer
from specctl.train.examples import IGNORED, Example

TRAINED, READ, PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
OPEN, CLOSE = "⟦", "⟧"


def legend(colours: bool) -> str:
    trained = f"{TRAINED}trained{PLAIN}" if colours else f"{OPEN}trained{CLOSE}"
    return f"{trained}, {f'{READ}read only{PLAIN}' if colours else 'read only'}"


def show(example: Example, tokenizer: Tokenizer, colours: bool) -> str:
    """The example's text with its special tokens, what has labels set off."""
    head = f"{_harmless(example.id)}: {len(example.ids)} tokens, {example.num_labels} trained"
    parts = []
    for trained, text in _runs(example, tokenizer):
        if colours:
            parts.append(f"{TRAINED if trained else READ}{_harmless(text)}{PLAIN}")
        else:
            parts.append(f"{OPEN}{_harmless(text)}{CLOSE}" if trained else _harmless(text))
    return f"{head}\n{''.join(parts)}\n"


def wants_colours() -> bool:
    """On a terminal, unless NO_COLOR is set; elsewhere when FORCE_COLOR is."""
    if os.environ.get("NO_COLOR"):
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def _runs(example: Example, tokenizer: Tokenizer) -> Iterator[tuple[bool, str]]:
    """Text that is trained or read only, in turns. Bytes, so that a run cut inside a character stays what it is."""
    pairs = zip(example.ids, example.labels, strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        yield trained, tokenizer.decode([token for token, _ in run], skip_special_tokens=False)


def _harmless(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
