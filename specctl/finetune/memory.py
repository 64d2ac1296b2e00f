"""What training takes of memory, part by part, from shapes alone.

The largest part is exact: weights, gradients and AdamW's two moments, all in the training dtype. What lives for a pass
only is an estimate. Legend: T rows of a packed batch, D width, I inner width, N and G heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specctl.models import Llama, ModelConfig
from specctl.schemas.recipe import Recipe

GIB = 2**30
SMALLEST_CHUNK_BUFFERS, TEACHER_BUFFERS, MIXED_BUFFERS = 2, 4, 5


@dataclass(frozen=True)
class Memory:
    """Bytes by part."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def estimate(recipe: Recipe, draft: Llama, rows: int, dtype: torch.dtype, target: int, base: int) -> Memory:
    """The most that is held at a time. draft: a skeleton will do; rows: of the largest packed batch, all of them with a
    label; dtype: of the weights trained; target: bytes of the target, 0 where it is not loaded; base: what the process
    holds already."""
    size = dtype.itemsize
    weights = sum(parameter.numel() for parameter in draft.parameters()) * size
    return Memory(
        {
            "process": base,
            "target": target,
            "weights": weights,
            "gradients": weights,
            "optimiser": 2 * weights,
            "activations": _activations(draft.config, rows, size, recipe.optimiser.checkpointing),
            "logits": _logits(recipe, draft.config, min(recipe.loss.chunk, rows), size),
        }
    )


def _activations(config: ModelConfig, rows: int, size: int, checkpointing: bool) -> int:
    """Of the layers, and of the one that is being gone back through, its largest weight's new gradient included.

    A layer keeps the inputs of two norms and of what they scale (6 D), of attention (queries, keys and values, the keys
    and queries before they were turned, and what came out), and of the gated MLP (4 I).
    """
    width, inner = config.hidden_size, config.intermediate_size
    heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
    layer = rows * (6 * width + (3 * heads + 3 * groups) * dim + 4 * inner)
    kept = rows * width if checkpointing else layer
    working = layer + rows * (2 * inner + 2 * width) + max(inner * width, heads * dim * width)
    return (config.num_layers * kept + working + 4 * rows * width) * size


def _logits(recipe: Recipe, config: ModelConfig, chunk: int, size: int) -> int:
    """A chunk's logits with what is made of them, and the head in another dtype where there is one."""
    loss = recipe.loss
    teacher = loss.kl > 0 or loss.tv > 0
    buffers = SMALLEST_CHUNK_BUFFERS if not teacher else MIXED_BUFFERS if loss.ce > 0 else TEACHER_BUFFERS
    copy = 2 * config.vocab_size * config.hidden_size if recipe.optimiser.autocast else 0
    return buffers * chunk * config.vocab_size * max(4, size) + copy


def anonymous() -> int:
    """RssAnon of this process in bytes, mapped files left out; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
