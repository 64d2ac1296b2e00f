"""A small Llama-family model that drafts for a larger one: the target-draft scheme.

Its keys and values lie in its own layers of the shared pages; it reads tokens only, so it may lag and catch up later.
Legend: B sequences, K slots, V ids shared with the target.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.drafts import Dense, Draft, Objective, OneHot
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.models import Hidden, Llama
from specctl.sampling.batch import Drawn, SamplingBatch


class LlamaDrafter:
    """`Drafter` of kind "llama". Set `attn` (the "draft" owner's backend) before the first pass.

    vocab_size: ids 0..vocab_size - 1 mean the same to draft and target; columns beyond it are padding and cut off.
    """

    kind = "llama"
    max_k: int | None = None
    taps: tuple[int, ...] = ()
    reads_hidden = False
    shift: Literal[0, 1] = 0
    # The last accepted token and the definite one. Drafting has run over all accepted tokens but the block's last, so
    # the first of the two is missing only when the whole block was accepted; two rows every time keep the shapes fixed.
    window: int | None = 2

    def __init__(self, model: Llama, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.max_length: int | None = model.config.max_length
        self.attn: AttentionBackend | None = None

    @property
    def kv_layers(self) -> list[LayerKV]:
        return self.model.kv_layers("draft")

    def new_carry(self, num_lanes: int) -> Tensor:
        """The carried logits, [lanes, V]."""
        norm = self.model.model.norm.weight
        return torch.zeros(num_lanes, self.vocab_size, dtype=norm.dtype, device=norm.device)

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Tensor) -> None:
        carry[rows.lane_B] = self._logits(rows)

    def draft(self, batch: Batch, carry: Tensor, k: list[int], sampling: SamplingBatch) -> Draft:
        drawn: list[Drawn] = []
        length = [0] * len(k)
        logits_BV = carry[batch.lane_B]
        for slot in range(max(k)):
            tokens_BK = _tokens(drawn) if drawn else None
            proposal = sampling.draw_draft(logits_BV, slot, tokens_BK)
            length = _extend(length, slot, k, proposal.confidence_B, sampling.min_confidence)
            if slot not in {n - 1 for n in length}:
                break  # nobody is confident enough for this slot
            drawn.append(proposal)
            if slot + 1 < max(k):
                logits_BV = self._logits(batch.at(slot, proposal.token_B))
        return _block(drawn, length, batch)

    def loss(
        self, batch: Batch, label_T: Tensor, teacher_RE: Tensor | None, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """See `Trainable`; `attn` is one with gradients."""
        assert self.attn is not None
        self.attn.plan(batch)
        row_R = (label_T >= 0).nonzero()[:, 0]
        final_RD = self.model(batch, self.attn).final_TD[row_R]
        return objective(final_RD, self.model.lm_head.weight, self.vocab_size, label_T[row_R], teacher_RE)

    def _logits(self, rows: Batch) -> Tensor:
        """Logits after the last row of every sequence, [B, V]."""
        assert self.attn is not None
        self.attn.plan(rows)
        hidden = self.model(rows, self.attn)
        return self.model.logits(hidden.final_TD[rows.last_row_B])[:, : self.vocab_size]


def _extend(
    length: list[int], slot: int, k: list[int], confidence_B: Tensor | None, min_confidence: float | None
) -> list[int]:
    """Lengths with `slot` added where it is asked for, nothing before it was stopped, and q is confident enough."""
    sure = [True] * len(k)
    if confidence_B is not None and min_confidence is not None:
        sure = (confidence_B >= min_confidence).tolist()
    return [n + 1 if n == slot < limit and ok else n for n, limit, ok in zip(length, k, sure, strict=True)]


def _tokens(drawn: list[Drawn]) -> Tensor:
    return torch.stack([proposal.token_B for proposal in drawn], dim=1)


def _block(drawn: list[Drawn], length: list[int], batch: Batch) -> Draft:
    if not drawn:
        return Draft(batch.token_T.new_zeros(batch.num_sequences, 0), length, OneHot())
    probs = [proposal.prob_BV for proposal in drawn if proposal.prob_BV is not None]
    confidences = [proposal.confidence_B for proposal in drawn if proposal.confidence_B is not None]
    return Draft(
        token_BK=_tokens(drawn),
        length=length,
        q=Dense(torch.stack(probs, dim=1)) if probs else OneHot(),
        confidence_BK=torch.stack(confidences, dim=1) if confidences else None,
    )
