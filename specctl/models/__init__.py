"""Target architectures: ARCHITECTURES maps a config's model_type to its module; load() fills one from a checkpoint."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import nn

from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.layers import Purpose
from specctl.models.config import FAMILIES, ModelConfig
from specctl.models.llama import Hidden, Llama

__all__ = ["ARCHITECTURES", "FAMILIES", "Hidden", "Llama", "ModelConfig", "load"]

ARCHITECTURES: dict[str, type[Llama]] = dict.fromkeys(FAMILIES, Llama)

# Left in checkpoints by old versions of transformers; computed from the config instead.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Anything else is a number format that needs scales or a table to be read.
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, purpose: Purpose = "serve") -> Llama:
    """Build the checkpoint's model, and fill it and prepare it for `purpose` part by part.

    What a part was made from is freed before the next one is read, so that the peak is the model itself. Raises
    CheckpointError naming the first tensor that is missing, unexpected or not what the config says, before any is read.
    """
    config = ModelConfig.read(checkpoint.config, str(checkpoint.path / "config.json"))
    model = skeleton(checkpoint, config)
    _check_names(model, checkpoint, config)
    _check_formats(model, checkpoint)

    def fill(prefix: str, part: nn.Module) -> None:
        _give_back_freed_memory()
        if config.tied and part is model.lm_head:
            model.tie()
            return
        for name, _ in list(part.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            tensor = checkpoint.tensor(f"{prefix}.{name}").to(device=device, dtype=dtype)
            setattr(part.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=purpose == "train"))

    model.prepare(purpose, fill)
    _give_back_freed_memory()
    return model


def _give_back_freed_memory() -> None:
    """glibc keeps what is freed between blocks that stay: after all the weights were converted and packed, a tenth of
    them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def skeleton(checkpoint: Checkpoint, config: ModelConfig) -> Llama:
    """The model without numbers: names and shapes on the meta device.

    Raises CheckpointError for a config of another size altogether, which to build even so would take for ever.
    """
    where, stored = checkpoint.path / "config.json", len(checkpoint.names())
    if config.num_layers > stored:
        raise CheckpointError(f"{where}: num_hidden_layers is {config.num_layers}, the weights are {stored} tensors")
    try:
        with torch.device("meta"):
            return ARCHITECTURES[config.model_type](config)
    except (RuntimeError, TypeError, OverflowError):  # what torch says about sizes beyond 64 bits
        raise CheckpointError(f"{where}: describes tensors of a size that no machine can hold") from None


def _check_names(model: Llama, checkpoint: Checkpoint, config: ModelConfig) -> None:
    expected = {name for name, _ in model.named_parameters()}
    found = {name for name in checkpoint.names() if not name.endswith(IGNORED_SUFFIX)}
    if config.tied and HEAD in found:
        _check_tied(checkpoint)
        found.discard(HEAD)
    if missing := sorted(expected - found):
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unexpected := sorted(found - expected):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {unexpected[0]} is not part of a {config.model_type} model of "
            f"{config.num_layers} layers ({len(unexpected)} such tensors)"
        )


def _check_tied(checkpoint: Checkpoint) -> None:
    """A tied checkpoint may hold the head twice. When it holds another head, programs differ in which one they use."""
    if EMBEDDING in checkpoint and not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
        raise CheckpointError(
            f"{checkpoint.path}: tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}; set it to false, or "
            f"remove {HEAD}"
        )


def _check_formats(model: Llama, checkpoint: Checkpoint) -> None:
    for name, parameter in model.named_parameters():
        shape, dtype = list(checkpoint.shape(name)), checkpoint.dtype(name)
        if shape != list(parameter.shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {shape}, the config expects {list(parameter.shape)}"
            )
        if dtype not in PLAIN:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} is stored as {str(dtype).removeprefix('torch.')}: quantised "
                "checkpoints are not supported; use the original"
            )
