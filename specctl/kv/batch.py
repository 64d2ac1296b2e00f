"""Batch: the rows of one forward pass, packed flat, with where each row's keys and values go and what each row may see.

Legend: T rows of the pass, B sequences. There is no batch axis and no padding axis; sequence b owns the rows
qo_indptr[b]:qo_indptr[b + 1], which are the *last* rows of its kv_len[b] slots (causal, bottom-right aligned).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.kv.pages import PAGE_SIZE, SCRATCH_PAGE


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: `tokens` at positions start, start + 1, ...; its pages; its lane.

    A lane is the sequence's place in per-sequence device buffers (Carry). Rows beyond the last page write to the
    scratch page; their output is meaningless and nobody reads it.
    """

    tokens: Seq[int]
    start: int
    pages: list[int]
    lane: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """One forward pass.

    token_T, position_T, slot_T: int64 on the device. lane_B: int64 on the device.
    parent_T: for token trees, the row each row follows; None means chains.
    qo_indptr [B + 1], kv_indptr [B + 1], kv_len [B], kv_indices [pages]: int32 on the host, where planning happens.
    spans: the same rows on the host, for drafts that think there. end_B: int64 on the device, the last row of every
    sequence that counts, where those after it are there for the shape only; None when all of them count.
    """

    token_T: Tensor
    position_T: Tensor
    slot_T: Tensor
    lane_B: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    page_size: int
    spans: tuple[Span, ...]
    parent_T: Tensor | None = None
    end_B: Tensor | None = None

    @classmethod
    def pack(
        cls,
        spans: Seq[Span],
        page_size: int = PAGE_SIZE,
        device: torch.device | str = "cpu",
        token_T: Tensor | None = None,
    ) -> Batch:
        """Pack spans into one pass. `token_T` (int64 [T], on the device) stands in for the spans' own tokens when they
        were drawn there; the spans then only say how many rows there are."""
        token: list[int] = []
        position: list[int] = []
        slot: list[int] = []
        qo_indptr, kv_indptr, kv_indices, kv_len = [0], [0], list[int](), list[int]()
        for span in spans:
            num_pages = -(-span.end // page_size)
            held = span.pages[:num_pages]
            pages = held + [SCRATCH_PAGE] * (num_pages - len(held))
            token.extend(span.tokens)
            position.extend(range(span.start, span.end))
            slot.extend(pages[i // page_size] * page_size + i % page_size for i in range(span.start, span.end))
            qo_indptr.append(len(position))
            kv_indices.extend(pages)
            kv_indptr.append(len(kv_indices))
            kv_len.append(span.end)

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        def on_host(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return cls(
            token_T=on_device(token) if token_T is None else token_T,
            position_T=on_device(position),
            slot_T=on_device(slot),
            lane_B=on_device([span.lane for span in spans]),
            qo_indptr=on_host(qo_indptr),
            kv_indptr=on_host(kv_indptr),
            kv_indices=on_host(kv_indices),
            kv_len=on_host(kv_len),
            page_size=page_size,
            spans=tuple(spans),
        )

    def at(self, offset: int, token_B: Tensor) -> Batch:
        """The same one row a sequence `offset` positions on, holding tokens that were drawn on the device."""
        spans = [Span((0,), span.start + offset, span.pages, span.lane) for span in self.spans]
        return Batch.pack(spans, self.page_size, token_B.device, token_T=token_B)

    def holding(self, token_T: Tensor, end_B: Tensor) -> Batch:
        """The same rows with other tokens, of which those up to end_B count."""
        return replace(self, token_T=token_T, end_B=end_B)

    def only(self, sequences: list[int]) -> tuple[Batch, Tensor]:
        """The rows of some of the sequences, and which rows of this batch they are."""
        first, device = self.qo_indptr.tolist(), self.token_T.device
        row_T = torch.tensor([row for b in sequences for row in range(first[b], first[b + 1])]).to(device)
        picked = Batch.pack([self.spans[b] for b in sequences], self.page_size, device, token_T=self.token_T[row_T])
        if self.end_B is None:
            return picked, row_T
        index_B = torch.tensor(sequences)
        moved_B = picked.qo_indptr[:-1].long() - self.qo_indptr[index_B].long()
        return replace(picked, end_B=self.end_B[index_B.to(device)] + moved_B.to(device)), row_T

    @property
    def num_sequences(self) -> int:
        return len(self.spans)

    @property
    def last_row_B(self) -> Tensor:
        """The last row of every sequence that counts, int64 on the device of the tokens."""
        if self.end_B is not None:
            return self.end_B
        return (self.qo_indptr[1:] - 1).to(self.token_T.device, torch.int64)
