"""Trainer: one optimiser step after the other. It knows no files, no clock and no validation.

The gradient of a step is that of the mean over all labels of the step, however they are spread over packed rows.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specctl.drafts import Objective, Trainable
from specctl.errors import UsageError
from specctl.models import CausalLM
from specctl.train.feed import Cursor, Feed
from specctl.train.gradients import drop_gradients, zero_gradients
from specctl.train.losses import METRICS
from specctl.train.optimiser import Optimiser, Schedule
from specctl.train.packing import packed


class Teacher(Protocol):
    """Whoever knows the target's final hidden states."""

    def rows(self, indices: list[int]) -> Tensor:
        """Of the labelled rows of these examples, one after the other: [R, E]."""


@dataclass(frozen=True)
class Step:
    """What one step did. step, epoch: from 1 and from 0. loss, ce, kl, tv, top1: means over its labels; kl and tv are 0
    where nobody asked for them. tokens: rows run, labels: of these trained."""

    step: int
    epoch: int
    loss: float
    ce: float
    kl: float
    tv: float
    top1: float
    lr: float
    grad_norm: float
    labels: int
    tokens: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class Trainer:
    """step: optimiser steps taken. autocast: compute in this dtype where torch thinks it right; None: in the
    weights'."""

    model: CausalLM
    drafter: Trainable
    objective: Objective
    optimiser: Optimiser
    schedule: Schedule
    feed: Feed
    teacher: Teacher | None = None
    autocast: torch.dtype | None = None
    cursor: Cursor = field(default_factory=Cursor)
    step: int = 0

    def run_step(self) -> Step:
        """Take one step. Raises UsageError when the loss is no number any more; nothing has changed then but the
        gradients."""
        rows, after = self.feed.take(self.cursor)
        examples = self.feed.examples
        num_labels = sum(examples[index].num_labels for row in rows for index in row)
        assert num_labels > 0, "examples without a label are not trained on"
        zero_gradients(self.model)
        sums = torch.zeros(1 + len(METRICS), dtype=torch.float64)
        for row in rows:
            sums += self._accumulate(row, num_labels)
        loss, ce, kl, tv, top1 = (sums / num_labels).tolist()
        self._check(loss)
        lr = self.schedule.at(self.step)
        norm = self.optimiser.step(lr)
        epoch = self.cursor.epoch
        self.step, self.cursor = self.step + 1, after
        tokens = sum(len(examples[index].ids) for row in rows for index in row)
        return Step(self.step, epoch, loss, ce, kl, tv, top1, lr, norm, num_labels, tokens)

    def release(self) -> None:
        """Free what only training needs: the model is all that is left."""
        self.optimiser.release()
        drop_gradients(self.model)

    def _accumulate(self, row: list[int], num_labels: int) -> Tensor:
        """Add one packed row's part to the gradients; its sums of the loss and of METRICS."""
        device = self.model.model.norm.weight.device
        batch = packed([self.feed.examples[index] for index in row], device)
        teacher_RE = None if self.teacher is None else self.teacher.rows(row)
        with self._precision(device):
            loss, sums = self.drafter.loss(batch.batch, batch.label_T, teacher_RE, self.objective)
        (loss / num_labels).backward()  # type: ignore[no-untyped-call]
        return torch.cat((loss.detach()[None], sums)).cpu()

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        # Without its cache: that would keep a second copy of every weight until the pass is over.
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise UsageError(f"step {self.step + 1}: the loss is {loss}; lower optimiser.lr, or use more warmup_steps")
