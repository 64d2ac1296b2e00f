"""Target architectures: ARCHITECTURES maps a config's model_type to its module; load() fills one from a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.layers import Purpose
from specctl.models.config import FAMILIES, ModelConfig
from specctl.models.llama import Hidden, Llama

__all__ = ["ARCHITECTURES", "Hidden", "Llama", "ModelConfig", "load"]

ARCHITECTURES: dict[str, type[Llama]] = dict.fromkeys(FAMILIES, Llama)

# Left in checkpoints by old versions of transformers; computed from the config instead.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, purpose: Purpose = "serve") -> Llama:
    """Build the checkpoint's model and fill it, tensor by tensor; then prepare it for `purpose`.

    Raises CheckpointError naming the first tensor that is missing, unexpected or of another shape than the config says.
    """
    where = str(checkpoint.path / "config.json")
    config = ModelConfig.read(checkpoint.config, where)
    with torch.device("meta"):
        model = ARCHITECTURES[config.model_type](config)
    _check_names(model, checkpoint, config)
    for name, parameter in list(model.named_parameters()):
        shape = checkpoint.shape(name)
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {list(shape)}, the config expects {list(parameter.shape)}"
            )
        owner, _, leaf = name.rpartition(".")
        tensor = checkpoint.tensor(name).to(device=device, dtype=dtype)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=purpose == "train"))
    if config.tied:
        model.tie()
    model.prepare(purpose)
    return model


def _check_names(model: Llama, checkpoint: Checkpoint, config: ModelConfig) -> None:
    expected = {name for name, _ in model.named_parameters()}
    found = {name for name in checkpoint.names() if not name.endswith(IGNORED_SUFFIXES)}
    if config.tied:
        found.discard("lm_head.weight")
    if missing := sorted(expected - found):
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unexpected := sorted(found - expected):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {unexpected[0]} is not part of a {config.model_type} model of "
            f"{config.num_layers} layers ({len(unexpected)} such tensors)"
        )
