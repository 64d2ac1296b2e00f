"""Packing: examples side by side in rows of a given room, each with its own positions and blind to the others.

Legend: T rows of the packed batch, J steps of a chain. It knows nothing about models; that an example sees only itself
is what qo_indptr says to the attention backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafts import TrainingRows
from specctl.errors import UsageError
from specctl.kv.batch import Batch, Span
from specctl.models import Hidden
from specctl.train.examples import IGNORED, Example


@dataclass(frozen=True)
class Chain:
    """How far ahead a draft is trained, and how much what counts.

    steps: J, of its chain. shift: see Drafter; with 1, row i says token i + 2 at the first step. decay: of a step's
    weight against the one before. per_sequence: every example counts the same, whatever its length, in place of every
    label.
    """

    steps: int = 1
    shift: int = 0
    decay: float = 1.0
    per_sequence: bool = False

    def labels(self, example: Example) -> list[int]:
        """How many rows have a label, at every step. A row has one at a step if all the tokens from its first one on
        are trained: it stands for a block that begins there."""
        found = [0] * self.steps
        for run in example.runs:
            for step in range(self.steps):
                found[step] += max(0, run - step)
        return found

    def weight(self, example: Example) -> float:
        """Of all its rows at all steps."""
        return sum(
            self.decay**step * (1 if self.per_sequence else count)
            for step, count in enumerate(self.labels(example))
            if count
        )

    def row_weight(self, example: Example, step: int) -> float:
        """Of one labelled row at a step."""
        return self.decay**step / (max(1, self.labels(example)[step]) if self.per_sequence else 1)


PLAIN = Chain()


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


def packed(
    examples: Sequence[Example], chain: Chain = PLAIN, device: torch.device | str = "cpu", hidden: Hidden | None = None
) -> TrainingRows:
    """One packed row of these examples. hidden: what the target left in it."""
    parts = [_rows(example, chain) for example in examples]
    token_JT, label_JT, weight_JT = (torch.cat(each, dim=1).to(device) for each in zip(*parts, strict=True))
    spans = [Span(example.ids, 0, [], lane) for lane, example in enumerate(examples)]
    return TrainingRows(Batch.pack(spans, device=device), token_JT, label_JT, weight_JT, hidden, chain.shift)


def _rows(example: Example, chain: Chain) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and weights of an example's rows, [J, T] each."""
    id_T, trained_T = torch.tensor(example.ids), torch.tensor(example.labels) != IGNORED
    count_T = trained_T.long().cumsum(0)
    run_T = count_T - count_T.masked_fill(trained_T, 0).cummax(0).values  # trained tokens in a row that end here
    last = len(id_T) - 1
    tokens, labels, weights = [], [], []
    for step in range(chain.steps):
        held_T = torch.arange(len(id_T)) + chain.shift + step
        said_T = (held_T + 1).clamp(max=last)
        known_T = (held_T < last) & (run_T[said_T] > step)
        tokens.append(id_T[held_T.clamp(max=last)])
        labels.append(torch.where(known_T, id_T[said_T], IGNORED))
        weights.append(known_T.double() * chain.row_weight(example, step))
    return torch.stack(tokens), torch.stack(labels), torch.stack(weights)
