"""Harvester: keeps what the target leaves in its rows while it answers, so that nobody has to run it over them again.

To the engine it is a draft that reads hidden states and never proposes anything: such a draft follows every pass of the
target over the same rows. Legend: T rows of a pass, E the target's width, A taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.drafts import Draft
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.models import Hidden
from specctl.sampling.batch import SamplingBatch


@dataclass
class _Text:
    """What has been seen of one text: the tokens behind its first, and what the target left in their rows."""

    tokens: list[int] = field(default_factory=list)
    finals: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)


class Harvester:
    """`Drafter`, for an engine whose K is 0. A text begins anew when it is preempted: what counts is that in the end
    all of its rows have come in order."""

    kind = "harvest"
    max_k: int | None = 1
    depth: int | None = None
    max_length: int | None = None
    reads_hidden = True
    shift: Literal[0, 1] = 1
    window: int | None = None
    attn: AttentionBackend | None = None

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self._lanes: dict[int, _Text] = {}
        self._done: list[_Text] = []

    @property
    def kv_layers(self) -> list[LayerKV]:
        return []

    def follow_rows(self, k: int) -> int:
        return 0

    def new_carry(self, num_lanes: int) -> None:
        return None

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Any) -> None:
        assert hidden is not None
        first, tokens = 0, rows.token_T.tolist()
        for span in rows.spans:
            part = slice(first, first + len(span.tokens))
            first = part.stop
            if span.start == 0:
                self._begin(span.lane)
            text = self._lanes[span.lane]
            text.tokens += tokens[part]
            text.finals.append(hidden.final_TD[part].cpu())
            if hidden.taps_ATD is not None:
                text.taps.append(hidden.taps_ATD[:, part].cpu())

    def draft(self, batch: Batch, carry: Any, k: list[int], sampling: SamplingBatch) -> Draft:
        raise AssertionError("nothing is drafted while states are kept")

    def take(self, ids: Sequence[int]) -> Hidden | None:
        """Of all rows of a text but its last, and forget it; None when they did not all come by."""
        for lane in list(self._lanes):
            self._begin(lane)
        wanted = list(ids[1:])
        for index, text in enumerate(self._done):
            if text.tokens[: len(wanted)] == wanted:
                del self._done[index]
                final_TE = torch.cat(text.finals)[: len(wanted)]
                taps = torch.cat(text.taps, dim=1)[:, : len(wanted)] if text.taps else None
                return Hidden(final_TE, taps)
        return None

    def _begin(self, lane: int) -> None:
        ended = self._lanes.pop(lane, None)
        if ended is not None and ended.tokens:
            self._done.append(ended)
        self._lanes[lane] = _Text()
