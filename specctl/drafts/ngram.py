"""Prompt lookup: propose what followed the last occurrence of the newest tokens. The baseline for learned drafts.

It has no weights, no cache and no opinion about probabilities: its q is one-hot. It thinks on the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch

from specctl.attention import AttentionBackend
from specctl.drafts import Draft, OneHot
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.models import Hidden
from specctl.sampling.batch import SamplingBatch

MAX_MATCH, MIN_MATCH = 4, 2


@dataclass
class _Text:
    """One sequence's committed tokens and where each n-gram of them last ended."""

    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def append(self, tokens: Seq[int]) -> None:
        first_new = len(self.tokens)
        self.tokens.extend(tokens)
        # The n-grams that end in the last token are entered when the next one comes: until then nothing follows them.
        for end in range(first_new, len(self.tokens)):
            for n in range(MIN_MATCH, MAX_MATCH + 1):
                if end >= n:
                    self.after[tuple(self.tokens[end - n : end])] = end

    def continuation(self, k: int) -> list[int]:
        """Up to k tokens that followed the latest earlier occurrence of the longest matching end of the text."""
        for n in range(min(MAX_MATCH, len(self.tokens)), MIN_MATCH - 1, -1):
            at = self.after.get(tuple(self.tokens[-n:]))
            if at is not None:
                return self._repeat(at, k)
        return []

    def _repeat(self, at: int, k: int) -> list[int]:
        """Tokens from `at` on, reading on into the continuation itself when it reaches the end of the text."""
        out: list[int] = []
        for i in range(at, at + k):
            out.append(self.tokens[i] if i < len(self.tokens) else out[i - len(self.tokens)])
        return out


class NgramDrafter:
    """`Drafter` of kind "ngram"."""

    kind = "ngram"
    max_k: int | None = None
    depth: int | None = None
    max_length: int | None = None
    taps: tuple[int, ...] = ()
    reads_hidden = False
    shift: Literal[0, 1] = 0
    window: int | None = None
    attn: AttentionBackend | None = None

    @property
    def kv_layers(self) -> list[LayerKV]:
        return []

    def follow_rows(self, k: int) -> int:
        return 0

    def new_carry(self, num_lanes: int) -> list[_Text]:
        return [_Text() for _ in range(num_lanes)]

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: list[_Text]) -> None:
        for span in rows.spans:
            if span.start == 0:
                carry[span.lane] = _Text()
            assert span.start == len(carry[span.lane].tokens), "rows of the text are missing or come twice"
            carry[span.lane].append(span.tokens)

    def draft(self, batch: Batch, carry: list[_Text], k: list[int], sampling: SamplingBatch) -> Draft:
        blocks = [carry[span.lane].continuation(limit) for span, limit in zip(batch.spans, k, strict=True)]
        longest = max(map(len, blocks))
        padded = [block + [0] * (longest - len(block)) for block in blocks]
        token_BK = torch.tensor(padded, dtype=torch.int64).view(len(blocks), longest).to(batch.token_T.device)
        return Draft(token_BK, [len(block) for block in blocks], OneHot())
