"""Packing: examples side by side in rows of a given room, each with its own positions and blind to the others.

Legend: T rows of the packed batch. It knows nothing about models; that an example sees only itself is what qo_indptr
says to the attention backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.errors import UsageError
from specctl.kv.batch import Batch, Span
from specctl.train.examples import IGNORED, Example


@dataclass(frozen=True)
class Packed:
    """batch: one sequence an example, positions from 0. label_T: int64, what the row should say next; IGNORED for none.
    ids: of the examples, in order. num_labels: rows with a label."""

    batch: Batch
    label_T: Tensor
    ids: tuple[str, ...]
    num_labels: int


def pack(
    examples: Sequence[Example], max_tokens: int, order: Iterable[int], device: torch.device | str = "cpu"
) -> Iterator[Packed]:
    """The rows that `fill` makes, packed."""
    for row in fill(examples, max_tokens, order):
        yield packed([examples[index] for index in row], device)


def fill(examples: Sequence[Example], max_tokens: int, order: Iterable[int]) -> Iterator[list[int]]:
    """Examples, by index, in the given order, each row filled until the next example does not fit. The last row may be
    shorter; none is dropped, nor is an example split.

    A row's end depends on the examples before it in `order` alone, so that whoever starts anew at a row's first example
    gets the same rows. Raises UsageError for an example longer than max_tokens.
    """
    row: list[int] = []
    room = max_tokens
    for index in order:
        length = len(examples[index].ids)
        if length > max_tokens:
            raise UsageError(
                f"optimiser.tokens_per_batch is {max_tokens} and example {examples[index].id} has {length} tokens; "
                f"raise it, or lower data.max_length to {max_tokens}"
            )
        if length > room:
            yield row
            row, room = [], max_tokens
        row.append(index)
        room -= length
    if row:
        yield row


def packed(examples: Sequence[Example], device: torch.device | str = "cpu") -> Packed:
    """One row of these examples. The target of a token's row is the label of the next token; the last token has
    none."""
    spans = [Span(example.ids, 0, [], lane) for lane, example in enumerate(examples)]
    label: list[int] = []
    for example in examples:
        label += [*example.labels[1:], IGNORED]
    label_T = torch.tensor(label, dtype=torch.int64)
    num_labels = int((label_T != IGNORED).sum())
    return Packed(
        Batch.pack(spans, device=device), label_T.to(device), tuple(example.id for example in examples), num_labels
    )
