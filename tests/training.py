"""What the tests of training share: tiny models with gradients, examples, and trainers over them in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from specctl.attention.dense import DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.drafts.llama import LlamaDrafter
from specctl.models import Llama, load
from specctl.train.examples import Example
from specctl.train.feed import Feed
from specctl.train.gradients import trainable
from specctl.train.loop import Teacher, Trainer
from specctl.train.losses import Objective
from specctl.train.optimiser import Optimiser, Schedule

CPU = torch.device("cpu")
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "clip": 1.0}


def draft(path: Path, dtype: torch.dtype = torch.float64, checkpointing: bool = False) -> Llama:
    """A checkpoint's model, ready to be trained."""
    return trainable(load(Checkpoint(path), dtype, CPU, "train"), checkpointing)


def drafter(model: Llama) -> LlamaDrafter:
    found = LlamaDrafter(model, model.config.vocab_size)
    found.attn = DenseAttention()
    return found


def examples(count: int, seed: int = 0, least: int = 4, most: int = 12) -> list[Example]:
    """Random bytes; about the last two thirds of each example are trained."""
    source = random.Random(seed)
    found = []
    for number in range(count):
        length = source.randint(least, most)
        ids = [source.randrange(256) for _ in range(length)]
        found.append(Example.of(str(number), ids, [(max(1, length // 3), length)]))
    return found


def trainer(
    model: Llama,
    data: Sequence[Example],
    *,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    teacher: Teacher | None = None,
    room: int = 32,
    accumulate: int = 1,
    seed: int = 0,
    **more: Any,
) -> Trainer:
    settings = ADAMW | {key: more.pop(key) for key in list(more) if key in ADAMW}
    return Trainer(
        model=model,
        drafter=drafter(model),
        objective=objective or Objective(1.0),
        optimiser=Optimiser(model, **settings),
        schedule=schedule or Schedule(1e-2, 100, warmup_steps=2),
        feed=Feed(data, room, accumulate, seed),
        teacher=teacher,
        **more,
    )


def weights(model: Llama) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: Llama) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between numbers of the same name."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def small(path: Path, **overrides: Any) -> Path:
    """A model of one narrow layer."""
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny.llama(path, **(settings | {"num_key_value_heads": 1} | overrides))
