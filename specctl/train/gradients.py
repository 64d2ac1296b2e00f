"""Gradients that stay where they are: allocated once, added to in place, set to zero between steps.

For a matrix of vocabulary size autograd makes a gradient of its own in every pass and then adds it to the one that is
there. For a small draft with a large vocabulary that second copy is the largest thing in memory, so the embedding's is
added row by row (the head's: specctl/train/losses.py). Legend: T rows, D width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specctl.attention import AttentionBackend
from specctl.drafts.head import HeadDrafter, run_step_again
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


def trainable(model: CausalLM, checkpointing: bool = False, in_place: bool = True) -> CausalLM:
    """The model with a gradient for every parameter, which zero_gradients() and nothing else takes back to zero.
    checkpointing: layers are run by run_again(). in_place: false for weights that are to be spread over processes,
    whose gradients autograd makes."""
    if in_place:
        model.model.embed_tokens = TrainedEmbedding(model.model.embed_tokens.weight)
        if model.config.tied:
            model.tie()
    if checkpointing:
        model.run_layer = run_again
    for parameter in model.parameters():
        _begin(parameter, in_place)
    return model


def trainable_head(drafter: HeadDrafter, checkpointing: bool = False, in_place: bool = True) -> HeadDrafter:
    """The same for a head. What it has of the target's, embedding and output head, stays as it is. checkpointing: steps
    of its chain are run again for their gradients."""
    drafter.model.requires_grad_(False)
    for parameter in drafter.model.trained():
        _begin(parameter, in_place)
    if checkpointing:
        drafter.run_step = run_step_again
    return drafter


def _begin(parameter: nn.Parameter, in_place: bool) -> None:
    parameter.requires_grad_(True)
    parameter.grad = torch.zeros_like(parameter) if in_place else None


def run_again(layer: nn.Module, x_TD: Tensor, rope: tuple[Tensor, Tensor], attn: AttentionBackend) -> Tensor:
    """Run a layer and keep its input only: it is run again for its gradients, so the attention's plan has to stand."""
    if not torch.is_grad_enabled():
        return cast(Tensor, layer(x_TD, rope, attn))
    return cast(Tensor, checkpoint(layer, x_TD, rope, attn, use_reentrant=False, preserve_rng_state=False))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_gradients(model: nn.Module) -> None:
    """Gradients that are spread over processes are made anew in every step."""
    for parameter in trained_parameters(model).values():
        if isinstance(parameter, DTensor):
            parameter.grad = None
            continue
        assert parameter.grad is not None, "somebody took a gradient away"
        parameter.grad.zero_()
