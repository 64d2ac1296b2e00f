"""What a fine-tuning run is told besides its recipe: nothing that changes what it makes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from specctl.options import ModelOptions


@dataclass(frozen=True)
class RunOptions:
    """model: how target and draft are run. resume: go on from the last checkpoint. force: replace the output."""

    model: ModelOptions = field(default_factory=ModelOptions)
    resume: bool = False
    force: bool = False
