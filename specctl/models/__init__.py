"""Target architectures: ARCHITECTURES maps a config's model_type to its module; load() fills one from a checkpoint."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.heads import mtp
from specctl.layers import Purpose
from specctl.models.causal import CausalLM, DecoderLayer, Hidden
from specctl.models.config import FAMILIES, CommonConfig, ModelConfig
from specctl.models.deepseek import DeepSeek
from specctl.models.deepseek_config import GENERATIONS, DeepSeekConfig
from specctl.models.llama import Llama
from specctl.models.quantised import Weights

__all__ = [
    "ARCHITECTURES",
    "FAMILIES",
    "CausalLM",
    "CommonConfig",
    "DecoderLayer",
    "DeepSeek",
    "DeepSeekConfig",
    "Hidden",
    "Llama",
    "ModelConfig",
    "Weights",
    "load",
    "read_config",
    "weight_names",
]

ARCHITECTURES: dict[str, type[CausalLM]] = dict.fromkeys(FAMILIES, Llama) | dict.fromkeys(GENERATIONS, DeepSeek)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(config: Mapping[str, Any], where: str) -> CommonConfig:
    """Read a config.json mapping. `where` names the file in errors.

    Raises CheckpointError naming the key for anything missing, malformed or not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: model_type is {model_type!r}, which is not supported, expected {', '.join(ARCHITECTURES)}"
        )
    return (DeepSeekConfig if model_type in GENERATIONS else ModelConfig).read(config, where)


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, purpose: Purpose = "serve") -> CausalLM:
    """Build the checkpoint's model, and fill it and prepare it for `purpose` part by part.

    What a part was made from is freed before the next one is read, so that the peak is the model itself. Raises
    CheckpointError naming the first tensor that is missing, unexpected or not what the config says, before any is read.
    """
    config = read_config(checkpoint.config, str(checkpoint.path / "config.json"))
    model = skeleton(checkpoint, config)
    weights = Weights(checkpoint)
    _check_names(model, checkpoint, config)
    _check_formats(model, checkpoint, weights)

    def fill(prefix: str, part: nn.Module) -> None:
        if config.tied and part is model.lm_head:
            model.tie()
            return
        fill_part(weights, prefix, part, dtype, device, purpose)

    model.prepare(purpose, fill)
    give_back_freed_memory()
    return model


def fill_part(
    weights: Weights, prefix: str, part: nn.Module, dtype: torch.dtype, device: torch.device, purpose: Purpose
) -> None:
    """Give the parameters of `part` that have no numbers yet those of the tensors called prefix.name."""
    give_back_freed_memory()
    for name, parameter in list(part.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            own = torch.promote_types(dtype, torch.float32) if name.endswith(mtp.BIAS_LEAF) else dtype
            tensor = weights.tensor(f"{prefix}.{name}", own).to(device=device)
            setattr(part.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=purpose == "train"))


def give_back_freed_memory() -> None:
    """glibc keeps what is freed between blocks that stay: after all the weights were converted and packed, a tenth of
    them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def skeleton(checkpoint: Checkpoint, config: CommonConfig) -> CausalLM:
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


def weight_names(checkpoint: Checkpoint) -> set[str]:
    """Of the target's own weights: scales, and the layers of an MTP draft inside, are left out."""
    names = Weights(checkpoint).names()
    return names - mtp.names_in_target(checkpoint.config, str(checkpoint.path / "config.json"), names)


def _check_names(model: CausalLM, checkpoint: Checkpoint, config: CommonConfig) -> None:
    expected, found = {name for name, _ in model.named_parameters()}, weight_names(checkpoint)
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


def _check_formats(model: CausalLM, checkpoint: Checkpoint, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        shape = list(checkpoint.shape(name))
        if shape != list(parameter.shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {shape}, the config expects {list(parameter.shape)}"
            )
        if fault := weights.fault(name):
            raise CheckpointError(f"{checkpoint.path}: {fault}")
