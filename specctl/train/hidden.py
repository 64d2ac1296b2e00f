"""What the target leaves in the rows of examples: its final hidden states, and its residuals where they are tapped.

An example is run alone, so that its states depend on nothing else. Legend: T rows of a packed batch, R rows of an
example that are read, E the target's width, A taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.attention.dense import DenseAttention
from specctl.models import CausalLM, Hidden
from specctl.train.examples import IGNORED, Example
from specctl.train.packing import packed


@dataclass(frozen=True)
class Reads:
    """What training reads of the target. taps: residuals, besides the final hidden state. every_row: of all rows but an
    example's last, as heads do; else of those that say a label."""

    taps: tuple[int, ...] = ()
    every_row: bool = False

    def rows(self, example: Example) -> Tensor:
        """The rows of an example that are read, int64."""
        if self.every_row:
            return torch.arange(len(example.ids) - 1)
        return torch.tensor(example.labels[1:]).ne(IGNORED).nonzero()[:, 0]

    def num_rows(self, example: Example) -> int:
        return len(example.ids) - 1 if self.every_row else example.num_labels

    def of(self, example: Example, hidden: Hidden) -> Hidden:
        """Of what the target left in an example's rows, in order from the first, that which is read, [R, E]."""
        row_R = self.rows(example).to(hidden.final_TD.device)
        taps_ATE = hidden.taps_ATD
        return Hidden(hidden.final_TD[row_R], None if taps_ATE is None else taps_ATE[:, row_R])

    def whole(self, example: Example, found: Hidden) -> Hidden:
        """The way back: all rows of an example, zeros in those that are not read."""
        row_R = self.rows(example).to(found.final_TD.device)

        def spread(x_RE: Tensor) -> Tensor:
            return x_RE.new_zeros(len(example.ids), x_RE.shape[1]).index_copy_(0, row_R, x_RE)

        taps_ARE = found.taps_ATD
        taps = None if taps_ARE is None else torch.stack([spread(tap_RE) for tap_RE in taps_ARE])
        return Hidden(spread(found.final_TD), taps)


class HiddenStates:
    """Computes the states whenever they are asked for."""

    def __init__(self, target: CausalLM, examples: Sequence[Example], reads: Reads) -> None:
        self.reads = reads
        self.examples = examples
        self._target = target
        self._attn = DenseAttention()

    @property
    def device(self) -> torch.device:
        return self._target.model.norm.weight.device

    def hidden(self, indices: list[int]) -> Hidden:
        """Of all rows of these examples, one after the other, on the target's device; zeros in rows that are not
        read."""
        parts = [self.reads.whole(self.examples[index], self.example(index)) for index in indices]
        taps = [part.taps_ATD for part in parts if part.taps_ATD is not None]
        return Hidden(torch.cat([part.final_TD for part in parts]), torch.cat(taps, dim=1) if taps else None)

    @torch.no_grad()
    def example(self, index: int) -> Hidden:
        """Of the rows of one example that are read."""
        example = self.examples[index]
        rows = packed([example], device=self.device)
        self._attn.plan(rows.batch)
        return self.reads.of(example, self._target(rows.batch, self._attn, self.reads.taps))
