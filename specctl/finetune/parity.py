"""Whether training sees what decoding does: of every block that the engine drafted in validation, how many of its
tokens training's own pass over the finished text finds, slot by slot.

Both go over the same texts from the same rows, one step by step through pages and a cache, the other all at once with
gradients in mind. They may differ by near-ties and by nothing else; where they do, the first slot is named.
Legend: J steps of the chain, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.attention.dense import ChainAttention
from specctl.drafts.head import HeadDrafter
from specctl.finetune.blocks import Blocks
from specctl.models import CausalLM
from specctl.train.examples import Example
from specctl.train.hidden import HiddenStates, Reads
from specctl.train.packing import Chain, packed

ALLOWED = 0.02  # of the blocks: near-ties between tokens that are as good as equal


@dataclass(frozen=True)
class Parity:
    """accepted, found: blocks whose tokens up to a slot were all right, by the engine and by training's pass; drafted:
    blocks that had the slot."""

    drafted: list[int]
    accepted: list[int]
    found: list[int]

    @property
    def accepted_shares(self) -> list[float]:
        return _shares(self.accepted, self.drafted)

    @property
    def found_shares(self) -> list[float]:
        return _shares(self.found, self.drafted)

    @property
    def first_difference(self) -> int | None:
        """The first slot, from 1, at which they part by more than near-ties explain."""
        for slot, (drafted, ours, theirs) in enumerate(zip(self.drafted, self.accepted, self.found, strict=True), 1):
            if abs(ours - theirs) > max(1, ALLOWED * drafted):
                return slot
        return None

    @property
    def words(self) -> str | None:
        slot = self.first_difference
        if slot is None:
            return None
        return (
            f"training's pass finds {self.found[slot - 1]} of {self.drafted[slot - 1]} blocks right up to token {slot}"
            f", decoding accepts {self.accepted[slot - 1]}: what is served is not what is trained, from token {slot} on"
        )


def _shares(counts: list[int], of: list[int]) -> list[float]:
    return [count / max(1, total) for count, total in zip(counts, of, strict=True)]


@torch.no_grad()
def compare(target: CausalLM, drafter: HeadDrafter, blocks: Blocks, k: int) -> Parity:
    """drafter: a fresh one over the weights in question; its attention is set here. At T = 0 only."""
    texts = {id(block.text): block.text for block in blocks.found}
    examples = [Example.of("", text.tokens(0, len(text)), [(1, len(text))]) for text in texts.values()]
    states = HiddenStates(target, examples, Reads(drafter.taps, every_row=True))
    drafter.attn = ChainAttention()
    right = {key: _right(drafter, states, index, k) for index, key in enumerate(texts)}
    drafted, accepted, found = [0] * k, [0] * k, [0] * k
    for block in blocks.found:
        for step in range(min(block.length, len(block.text) - block.start)):
            drafted[step] += 1
            accepted[step] += block.accepted > step
            found[step] += bool(right[id(block.text)][: step + 1, block.start - 2].all())
    return Parity(drafted, accepted, found)


def _right(drafter: HeadDrafter, states: HiddenStates, index: int, k: int) -> Tensor:
    """Whether the token that training's pass finds likeliest is the text's, for every row at every step, [J, T]."""
    rows = packed([states.examples[index]], Chain(k, 1), states.device, states.hidden([index]))
    ids_V, found = drafter.model.ids_V, []
    for final_TD, label_T in zip(drafter.unroll(rows), rows.label_JT, strict=True):
        best_T = drafter.model.logits(final_TD).argmax(-1)
        found.append((best_T if ids_V is None else ids_V[best_T]) == label_T)
    return torch.stack(found).cpu()
