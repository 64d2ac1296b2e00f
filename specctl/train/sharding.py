"""Training over several processes: FSDP2 keeps a part of every weight, gradient and moment on each of them.

The step is that of one process: its packed rows are dealt out, and the gradients are summed. A process that has no row
left goes through the motions with one that counts for nothing, so that none waits for another for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from specctl.dist import World
from specctl.drafts import Objective, Trainable, TrainingRows
from specctl.models import CausalLM
from specctl.moe import Experts


class Learning(nn.Module):
    """A draft's loss as one module's forward: inside it the weights are whole."""

    def __init__(self, model: nn.Module, drafter: Trainable) -> None:
        super().__init__()
        self.model = model
        self._drafter = (drafter,)  # no child of this one

    def forward(self, rows: TrainingRows, objective: Objective) -> tuple[Tensor, Tensor]:
        loss, sums = self._drafter[0].loss(rows, objective)
        return loss + _nothing_of_experts(self.model), sums


class ShardedDraft:
    """`Trainable` over a draft whose weights are to be spread. Its gradients are autograd's alone (in_place=False in
    specctl/train/gradients.py): those that are added to in place would not be seen."""

    def __init__(self, model: nn.Module, drafter: Trainable, world: World) -> None:
        self.world = world
        self.attn = drafter.attn
        assert all(parameter.grad is None for parameter in model.parameters())
        if isinstance(model, CausalLM):
            for layer in model.model.layers:
                fully_shard(layer)
        self._learning = cast(Any, fully_shard(Learning(model, drafter)))

    def loss(self, rows: TrainingRows, objective: Objective) -> tuple[Tensor, Tensor]:
        """Gradients are averaged over the processes, and what is wanted is their sum."""
        loss, sums = self._learning(rows, objective)
        return loss * self.world.size, sums


def _nothing_of_experts(model: nn.Module) -> Tensor | float:
    """0, whose gradient is that of all experts: no row may have chosen one of them, and what has no gradient in one
    process cannot be summed with what has one in another."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    firsts = [weight.flatten()[:1] for each in experts for weight in each.parameters() if weight.requires_grad]
    return 0.0 * torch.cat(firsts).sum() if firsts else 0.0


def dealt(rows: Sequence[list[int]], world: World) -> list[tuple[list[int], bool]]:
    """This process's packed rows of a step, each with whether it counts; all processes have equally many."""
    mine = [(row, True) for row in rows[world.rank :: world.size]]
    passes = -(-len(rows) // world.size)
    return mine + [(rows[0], False)] * (passes - len(mine))


def counting_for_nothing(rows: TrainingRows) -> TrainingRows:
    return replace(rows, weight_JT=torch.zeros_like(rows.weight_JT))


def whole(tensor: Tensor) -> Tensor:
    """A tensor's numbers, wherever they are; every process has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Iterator[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """All of them, on the leading process's CPU; nothing on the others, which have to ask all the same."""
    found = {}
    for name, tensor in tensors:
        numbers = whole(tensor.detach())
        if world.leads:
            found[name] = numbers.cpu()
    return found


def put(tensor: Tensor, numbers: Tensor) -> None:
    """Write whole numbers into a tensor that may be spread."""
    if isinstance(tensor, DTensor):
        spread = distribute_tensor(numbers.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(spread)
    else:
        tensor.copy_(numbers)
