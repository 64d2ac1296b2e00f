"""A small Llama-family model that drafts for a larger one: the target-draft scheme.

Its keys and values lie in its own layers of the shared pages; it reads tokens only, so it may lag and catch up later.
Legend: B sequences, V ids shared with the target.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.drafts import Draft, Objective, OutputHead, Scored, TrainingRows
from specctl.drafts.chain import draft_chain
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.models import CausalLM, Hidden
from specctl.sampling.batch import SamplingBatch

# The last accepted token and the definite one. Drafting has run over all accepted tokens but the block's last, so the
# first of the two is missing only when the whole block was accepted; two rows every time keep the shapes fixed.
WINDOW = 2


class LlamaDrafter:
    """`Drafter` of kind "llama". Set `attn` (the "draft" owner's backend) before the first pass.

    vocab_size: ids 0..vocab_size - 1 mean the same to draft and target; columns beyond it are padding and cut off.
    """

    kind = "llama"
    max_k: int | None = None
    depth: int | None = None
    taps: tuple[int, ...] = ()
    reads_hidden = False
    shift: Literal[0, 1] = 0
    window: int | None = WINDOW

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.max_length: int | None = model.config.max_length
        self.attn: AttentionBackend | None = None

    @property
    def kv_layers(self) -> list[LayerKV]:
        return self.model.kv_layers("draft")

    def follow_rows(self, k: int) -> int:
        return WINDOW if k else 0

    def new_carry(self, num_lanes: int) -> Tensor:
        """The carried logits, [lanes, V]."""
        norm = self.model.model.norm.weight
        return torch.zeros(num_lanes, self.vocab_size, dtype=norm.dtype, device=norm.device)

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Tensor) -> None:
        carry[rows.lane_B] = self._logits(rows)

    def draft(self, batch: Batch, carry: Tensor, k: list[int], sampling: SamplingBatch) -> Draft:
        def run(slot: int, token_B: Tensor) -> Tensor:
            return self._logits(batch.at(slot, token_B))

        return draft_chain(batch, carry[batch.lane_B], k, sampling, run)

    def loss(self, rows: TrainingRows, objective: Objective) -> tuple[Tensor, Tensor]:
        """See `Trainable`; `attn` is one with gradients."""
        assert self.attn is not None
        self.attn.plan(rows.batch)
        (label_T,), (weight_T,) = rows.label_JT, rows.weight_JT
        row_R = (label_T >= 0).nonzero()[:, 0]
        scored = Scored(
            final_RD=self.model(rows.batch, self.attn).final_TD[row_R],
            label_R=label_T[row_R],
            weight_R=weight_T[row_R],
            teacher_RE=rows.following(0, row_R) if objective.needs_teacher else None,
        )
        loss, sums = objective(scored, OutputHead(self.model.lm_head.weight, self.vocab_size))
        return loss, sums[None]

    def _logits(self, rows: Batch) -> Tensor:
        """Logits after the last row of every sequence, [B, V]."""
        assert self.attn is not None
        self.attn.plan(rows)
        hidden = self.model(rows, self.attn)
        return self.model.logits(hidden.final_TD[rows.last_row_B])[:, : self.vocab_size]
