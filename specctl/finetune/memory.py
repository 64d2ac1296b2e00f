"""What training takes of memory, part by part, from shapes alone.

The largest part is exact: weights, gradients and AdamW's two moments, all in the training dtype. What lives for a pass
only is an estimate. Legend: T rows of a packed batch, D width, I inner width, N and G heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specctl.drafts.head import HeadModule
from specctl.models import CommonConfig, Llama, ModelConfig
from specctl.schemas.recipe import Recipe

GIB = 2**30
SMALLEST_CHUNK_BUFFERS, TEACHER_BUFFERS, MIXED_BUFFERS = 2, 4, 5


def of_llama(recipe: Recipe, draft: Llama, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The most that a draft of kind llama takes at a time. draft: a skeleton will do; rows: of the largest packed
    batch, all of them with a label; dtype: of the weights trained."""
    size, config = dtype.itemsize, draft.config
    weights = sum(parameter.numel() for parameter in draft.parameters()) * size
    return {
        **_states(weights, weights),
        "activations": _activations(config, rows, size, recipe.optimiser.checkpointing),
        "logits": _logits(
            recipe, config.vocab_size, config.vocab_size, config.hidden_size, min(recipe.loss.chunk, rows), size
        ),
    }


def of_head(recipe: Recipe, draft: HeadModule, target: CommonConfig, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The same of a head, every step of whose chain keeps what it needs for its gradients. Its rows of the target's
    output head count as weights."""
    size, width, columns = dtype.itemsize, draft.width, draft.num_columns
    trained = sum(parameter.numel() for parameter in draft.trained()) * size
    weights = sum(parameter.numel() for parameter in draft.parameters()) * size + columns * width * size
    steps = recipe.loss.steps
    # Per row: the two inputs with their norms side by side (6 D), and the layer as in a Llama.
    inner, heads = target.intermediate_size, target.num_heads * target.head_dim
    row = 12 * width + 6 * heads + 4 * inner
    kept = width + 2 * heads if recipe.optimiser.checkpointing else row
    # What the target left, and of what losses compare with it a copy for every step.
    copies = steps if recipe.loss.kl > 0 or recipe.loss.tv > 0 or recipe.loss.feature > 0 else 0
    hidden = (1 + len(draft.taps) + copies) * rows * target.hidden_size * size
    return {
        **_states(weights, trained),
        "activations": (steps * kept + 2 * row) * rows * size + hidden,
        "logits": _logits(recipe, columns, target.vocab_size, width, min(recipe.loss.chunk, rows), size),
    }


def spread(parts: dict[str, int], size: int, here: int) -> dict[str, int]:
    """The parts of one process where `size` of them train together, `here` of which take from the same memory: each
    keeps its share of what is trained, and all weights of what it is in the middle of; one has them all once more, to
    decode with."""
    if size == 1:
        return parts
    shared = parts | {name: -(-parts[name] // size) for name in ("gradients", "optimiser")}
    shared["weights"] += -(-parts["weights"] // size)
    return {name: here * part for name, part in shared.items()} | {"weights to decode with": parts["weights"]}


def _states(weights: int, trained: int) -> dict[str, int]:
    return {"weights": weights, "gradients": trained, "optimiser": 2 * trained}


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


def _logits(recipe: Recipe, columns: int, vocab_size: int, width: int, chunk: int, size: int) -> int:
    """A chunk's logits with what is made of them, the target's before they are cut to the draft's columns, and the head
    in another dtype where there is one."""
    loss = recipe.loss
    teacher = loss.kl > 0 or loss.tv > 0
    buffers = SMALLEST_CHUNK_BUFFERS if not teacher else MIXED_BUFFERS if loss.ce > 0 else TEACHER_BUFFERS
    copy = 2 * columns * width if recipe.optimiser.autocast else 0
    whole = 2 * vocab_size if teacher and columns < vocab_size else 0
    return (buffers * columns + whole) * chunk * max(4, size) + copy


def anonymous() -> int:
    """RssAnon of this process in bytes, mapped files left out; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
