"""What a user waits for a token beside other users' prompts: decoding steps and the share of the others' prefill.

Of `batch` requests that are always running (a closed loop), with equal lengths, each sees the prompts of the batch - 1
others once while it writes its osl tokens. What such a prompt costs it depends on the engine:

- mixed: a prompt joins a decoding step. That step takes what the prompt and the batch's rows together take, so
  the weights it would have read anyway are not paid twice.
- prefill-first: decoding stops while prompts are taken in chunks. Requests of equal lengths that start together stay
  together, so all prompts come at once, and a request waits for the chunks after its own: half of them on average.

A batch that does not fit into memory waits outside: it does not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Load:
    """isl, osl: tokens of prompt and answer of every request."""

    batch: int
    isl: int
    osl: int

    @property
    def context(self) -> float:
        """Of a sequence in the middle of its answer."""
        return self.isl + self.osl / 2

    def running(self, tokens: int) -> int:
        """Requests that fit into caches of so many tokens at once."""
        return max(1, min(self.batch, tokens // math.ceil(self.context)))


def tpot_mixed_ms(decode_ms: float, mixed_ms: float, load: Load) -> float:
    """mixed_ms: a step with a prompt in it."""
    return decode_ms + (load.batch - 1) / load.osl * max(0.0, mixed_ms - decode_ms)


def tpot_prefill_first_ms(decode_ms: float, chunk_ms: Callable[[int], float], load: Load, chunk: int) -> float:
    """chunk_ms(n): a pass over n prompts. chunk: tokens of one, at most."""
    together = min(load.batch, max(1, chunk // load.isl))
    chunks = math.ceil(load.batch / together)
    return decode_ms + (chunks - 1) / 2 * chunk_ms(together) / max(1, load.osl - 1)


Scheduling = Literal["mixed", "prefill-first"]
