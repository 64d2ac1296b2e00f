"""Optimiser: AdamW over a model's gradients, and the learning rate of every step. It knows steps, not micro-batches.

The schedule is a function of the step alone, so that there is nothing of it to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specctl.train.gradients import trained_parameters
from specctl.train.sharding import whole

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Schedule:
    """The learning rate: up linearly over warmup_steps; then down to min_lr_ratio of lr, as a cosine or linearly over
    all the rest, or (wsd) linearly over the last decay_fraction of num_steps."""

    lr: float
    num_steps: int
    kind: Literal["cosine", "wsd", "linear"] = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    min_lr_ratio: float = 0.1

    def at(self, step: int) -> float:
        """Of optimiser step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        start = self.warmup_steps
        if self.kind == "wsd":
            start = max(start, self.num_steps - round(self.decay_fraction * self.num_steps))
        done = min(1.0, max(0, step - start) / max(1, self.num_steps - start))
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)


class Optimiser:
    """AdamW (Loshchilov and Hutter 2019). Vectors (norms, biases) do not decay. clip: largest norm of the gradient."""

    def __init__(
        self, model: nn.Module, *, betas: tuple[float, float], eps: float, weight_decay: float, clip: float | None
    ) -> None:
        self._parameters = trained_parameters(model)
        self._clip = clip
        parts = [
            {"params": [p for p in self._parameters.values() if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in self._parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
        # Fused: it computes in place, where the others make copies as large as the largest parameter.
        self._adamw = torch.optim.AdamW(parts, lr=0.0, betas=betas, eps=eps, fused=True)
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS},
            }

    def step(self, lr: float) -> float:
        """Move every parameter by its gradient, which is clipped first; the norm the gradient had."""
        norm = whole(nn.utils.get_total_norm([_gradient(p) for p in self._parameters.values()]))
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clip, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return float(norm)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What it remembers, by name: to be saved, or to be written into."""
        for name, parameter in self._parameters.items():
            for moment in MOMENTS:
                yield f"{moment}.{name}", self._adamw.state[parameter][moment]

    def release(self) -> None:
        """Forget everything."""
        self._adamw.state.clear()

    @property
    def num_steps(self) -> int:
        return int(next(iter(self._adamw.state.values()))["step"])

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(value)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
