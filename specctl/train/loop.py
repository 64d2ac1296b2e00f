"""Trainer: one optimiser step after the other. It knows no files, no clock and no validation.

The gradient of a step is that of the mean over all labels of the step, or over its examples, however they are spread
over packed rows. Legend: J steps of a draft's chain, M metrics.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specctl.dist import ALONE, World
from specctl.drafts import Objective, Trainable
from specctl.errors import UsageError
from specctl.models import Hidden
from specctl.train.feed import Cursor, Feed
from specctl.train.gradients import drop_gradients, zero_gradients
from specctl.train.losses import METRICS
from specctl.train.optimiser import Optimiser, Schedule
from specctl.train.packing import PLAIN, Chain, packed
from specctl.train.sharding import counting_for_nothing, dealt


class Teacher(Protocol):
    """Whoever knows what the target leaves in its rows."""

    def hidden(self, indices: list[int]) -> Hidden:
        """Of all rows of these examples, one after the other, as far as training reads them."""


@dataclass(frozen=True)
class Step:
    """What one step did. step, epoch: from 1 and from 0. loss: weighted mean. ce, kl, tv, top1, feature: means over its
    labels at all steps of the chain; kl, tv and feature are 0 where nobody asked for them. accuracy: top1 at each step
    of the chain.
    tokens: rows run, labels: of these trained."""

    step: int
    epoch: int
    loss: float
    ce: float
    kl: float
    tv: float
    top1: float
    feature: float
    accuracy: list[float]
    lr: float
    grad_norm: float
    labels: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Trainer:
    """step: optimiser steps taken. autocast: compute in this dtype where torch thinks it right; None: in the weights'.
    world: whoever takes the steps together; with more than one, the drafter is a ShardedDraft."""

    model: nn.Module
    drafter: Trainable
    objective: Objective
    optimiser: Optimiser
    schedule: Schedule
    feed: Feed
    chain: Chain = PLAIN
    teacher: Teacher | None = None
    autocast: torch.dtype | None = None
    world: World = ALONE
    cursor: Cursor = field(default_factory=Cursor)
    step: int = 0

    def run_step(self) -> Step:
        """Take one step. Raises UsageError when the loss is no number any more; nothing has changed then but the
        gradients."""
        rows, after = self.feed.take(self.cursor)
        examples = [self.feed.examples[index] for row in rows for index in row]
        weight = sum(map(self.chain.weight, examples))
        count_J = [sum(each) for each in zip(*map(self.chain.labels, examples), strict=True)]
        assert count_J[0] > 0, "examples without a label are not trained on"
        zero_gradients(self.model)
        told = torch.zeros(1 + self.chain.steps * len(METRICS), dtype=torch.float64)
        for row, counts in dealt(rows, self.world):
            part, part_JM = self._accumulate(row, weight, counts)
            told += torch.cat((torch.tensor([part], dtype=torch.float64), part_JM.flatten())) * counts
        loss, sums_JM = float(self.world.sum(told)[0]), told[1:].view(self.chain.steps, -1)
        self._check(loss)
        lr = self.schedule.at(self.step)
        norm = self.optimiser.step(lr)
        epoch = self.cursor.epoch
        self.step, self.cursor = self.step + 1, after
        measured = dict(zip(METRICS, (sums_JM.sum(0) / sum(count_J)).tolist(), strict=True))
        hits = sums_JM[:, METRICS.index("top1")].tolist()
        return Step(
            self.step,
            epoch,
            loss,
            **measured,
            accuracy=[hit / max(1, count) for hit, count in zip(hits, count_J, strict=True)],
            lr=lr,
            grad_norm=norm,
            labels=sum(example.num_labels for example in examples),
            tokens=sum(len(example.ids) for example in examples),
        )

    def release(self) -> None:
        """Free what only training needs: the model is all that is left."""
        self.optimiser.release()
        drop_gradients(self.model)

    def _accumulate(self, row: list[int], weight: float, counts: bool) -> tuple[float, Tensor]:
        """Add one packed row's part to the gradients; its part of the loss, and its sums of METRICS, [J, M]. counts:
        false for a row that is another process's."""
        device = next(self.model.parameters()).device
        hidden = None if self.teacher is None else self.teacher.hidden(row)
        rows = packed([self.feed.examples[index] for index in row], self.chain, device, hidden)
        rows = rows if counts else counting_for_nothing(rows)
        with self._precision(device):
            loss, sums_JM = self.drafter.loss(rows, self.objective)
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) / weight / self.world.size, sums_JM.cpu()

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        # Without its cache: that would keep a second copy of every weight until the pass is over.
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise UsageError(f"step {self.step + 1}: the loss is {loss}; lower optimiser.lr, or use more warmup_steps")
