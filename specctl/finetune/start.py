"""Where a draft begins, whatever its kind: config, first weights and vocabulary, and how it is made to learn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specctl.checkpoint import Checkpoint
from specctl.drafts import Drafter, Trainable
from specctl.models import CausalLM, CommonConfig
from specctl.schemas.draft import Head
from specctl.schemas.recipe import Kind, Recipe


class Learner(Drafter, Trainable, Protocol):
    """A draft while it is trained."""


@dataclass(frozen=True)
class Start(ABC):
    """words: what it is, for people. config: the draft's config.json. source: where its weights come from, None for
    random ones. vocab_size: ids that mean the same to draft and target. notes: what else is to be said of it."""

    words: str
    config: dict[str, Any]
    source: Checkpoint | None
    vocab_size: int
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def kind(self) -> Kind: ...

    @property
    @abstractmethod
    def head(self) -> Head:
        """As specctl.json has it."""

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """What stands beside the weights in the draft's file."""
        return {}

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's residuals that it reads."""
        return ()

    def scored_rows(self, dtype: torch.dtype) -> Tensor | None:
        """Of the target's output head the rows that the draft scores, [V, E]; None where it scores them all."""
        return None

    @abstractmethod
    def skeleton(self) -> nn.Module:
        """The model without numbers, on the meta device."""

    @abstractmethod
    def build(self, seed: int, dtype: torch.dtype, device: torch.device, target: CausalLM | None) -> nn.Module:
        """The model with its first weights; random ones depend on the seed alone. target: for what is made of it."""

    @abstractmethod
    def drafter(self, model: nn.Module) -> Drafter:
        """The model as the engine runs it."""

    @abstractmethod
    def learner(self, model: nn.Module, checkpointing: bool, in_place: bool = True) -> Learner:
        """The model with gradients, and with attention that has them. in_place: gradients that stay where they are, see
        specctl/train/gradients.py."""

    @abstractmethod
    def multiplied(self) -> tuple[int, int, CommonConfig]:
        """How many weights every row is multiplied by, and every label besides; the sizes of what is multiplied."""

    @abstractmethod
    def memory(self, recipe: Recipe, rows: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes by part that training takes besides the target. rows: of the largest packed batch."""
