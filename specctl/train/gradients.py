"""Gradients that stay where they are: allocated once, added to in place, set to zero between steps.

For a matrix of vocabulary size autograd makes a gradient of its own in every pass and then adds it to the one that is
there. For a small draft with a large vocabulary that second copy is the largest thing in memory, so the embedding's is
added row by row (the head's: specctl/train/losses.py). Legend: T rows, D width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specctl.attention import AttentionBackend
from specctl.layers import Embedding
from specctl.models import CausalLM


class TrainedEmbedding(Embedding):
    """An embedding whose weight gets its gradient when the rows that were looked up have theirs."""

    def __init__(self, weight: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.weight = weight

    def forward(self, id_T: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(id_T)
        row_TD = F.embedding(id_T, self.weight.detach()).requires_grad_()

        def add(row_TD: Tensor) -> None:
            assert row_TD.grad is not None
            assert self.weight.grad is not None
            self.weight.grad.index_add_(0, id_T, row_TD.grad)
            row_TD.grad = None

        row_TD.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        return row_TD


def trainable(model: CausalLM, checkpointing: bool = False) -> CausalLM:
    """The model with a gradient for every parameter, which zero_gradients() and nothing else takes back to zero.
    checkpointing: layers are run by run_again()."""
    model.model.embed_tokens = TrainedEmbedding(model.model.embed_tokens.weight)
    if model.config.tied:
        model.tie()
    if checkpointing:
        model.run_layer = run_again
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)
    return model


def run_again(layer: nn.Module, x_TD: Tensor, rope: tuple[Tensor, Tensor], attn: AttentionBackend) -> Tensor:
    """Run a layer and keep its input only: it is run again for its gradients, so the attention's plan has to stand."""
    if not torch.is_grad_enabled():
        return cast(Tensor, layer(x_TD, rope, attn))
    return cast(Tensor, checkpoint(layer, x_TD, rope, attn, use_reentrant=False, preserve_rng_state=False))


def drop_gradients(model: CausalLM) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_gradients(model: CausalLM) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None, "somebody took a gradient away"
        parameter.grad.zero_()
