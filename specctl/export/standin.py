"""A target that is there for its parts only: an embedding of a few rows, a head beside it, and what a family's layers
are. A head that is to be compared with itself needs no more of its target, and no target of any size need be loaded.

Legend: T rows, A taps, E the target's width, J steps of a chain, V columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from specctl.attention.dense import ChainAttention
from specctl.drafts import TrainingRows
from specctl.drafts.head import HeadDrafter, HeadModule
from specctl.kv.batch import Batch, Span
from specctl.layers import Linear
from specctl.models import ARCHITECTURES, CausalLM, CommonConfig, Hidden
from specctl.models.causal import Decoder

ROWS, STEPS, IDS = 13, 4, 96
"""Rows and steps of the chain that is compared, and token ids that it is made of."""
SEED = 20
FAR = 60  # a position that short texts have too


def stand_in(config: CommonConfig) -> CausalLM:
    """A model of the family without layers, its numbers drawn at random; `config` says how many layers it would
    have."""
    rows = min(IDS, config.vocab_size)
    family, small = ARCHITECTURES[config.model_type], replace(config, vocab_size=rows, tied=False)
    model = family.__new__(family)
    nn.Module.__init__(model)
    model.config = small
    model.model = Decoder(small, iter(()))
    model.lm_head = Linear(small.hidden_size, rows)
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 1.0, generator=generator).requires_grad_(False)
    return model


@torch.no_grad()
def chain_logits(model: HeadModule, vocab_size: int, max_position: int, target_width: int) -> Tensor:
    """[J, T, V] in float32: a chain over random rows and hidden states, the same for every module of one shape, at
    positions up to the last of the context."""
    generator = torch.Generator().manual_seed(SEED + 1)
    token_JT = torch.randint(min(IDS, vocab_size), (STEPS, ROWS), generator=generator)
    states = torch.randn(1 + len(model.taps), ROWS, target_width, generator=generator)
    hidden = Hidden(states[0], states[1:] if model.taps else None)
    batch = Batch.pack([Span(token_JT[0].tolist(), 0, list(range(1, 2 + ROWS)), 0)])
    batch = replace(batch, position_T=positions(max_position))
    nothing_JT = torch.zeros(STEPS, ROWS)
    drafter = HeadDrafter("compared", model)
    drafter.attn = ChainAttention()
    rows = TrainingRows(batch, token_JT, nothing_JT.long(), nothing_JT, hidden, 1)
    return torch.stack([model.logits(final_TD) for final_TD in drafter.unroll(rows)])


def positions(max_position: int) -> Tensor:
    """Of the rows, rising: near ones, one at FAR, and the others as far apart as the context allows."""
    last = max(max_position - 1 - STEPS, ROWS)
    spread = torch.linspace(0, last, ROWS).round().long()
    near = torch.arange(ROWS)
    position_T = torch.maximum(near, spread)
    if last > FAR:
        position_T[int((position_T <= FAR).sum()) - 1] = FAR
    return position_T
