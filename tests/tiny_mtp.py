"""MTP layers for tiny models: inside the checkpoint or by themselves, in the layouts that convert-mtp writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tiny
import torch
from fixtures import Make
from torch import Tensor

Alone = Literal["deepseek", "sglang"]
Copies = Literal["none", "equal", "own"]


def mtp(
    path: Path,
    *,
    of: Path,
    alone: Alone | None = None,
    copies: Copies = "none",
    layers: int = 1,
    hidden: float = 0.1,
    noise: float = 0.02,
    seed: int = 11,
    **overrides: Any,
) -> Path:
    """The model with MTP layers behind its own, each much like its last layer over the embeddings: of a model with one
    layer, a draft that is sometimes right. alone: the MTP layers by themselves. copies: of embedding and head stored
    with each layer, equal to the model's or its own. hidden: how much the target's hidden states say; noise: how far
    everything else is moved."""
    config, tensors = tiny.read(of)
    generator = torch.Generator().manual_seed(seed)
    last, found = f"model.layers.{config['num_hidden_layers'] - 1}.", dict[str, Tensor]()
    for index in range(layers):
        prefix = f"model.layers.{(0 if alone == 'sglang' else config['num_hidden_layers']) + index}."
        parts = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
        parts |= _around(tensors, copies)
        for name, tensor in parts.items():
            error = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            amount = 0.0 if copies == "equal" and name.endswith(("embed_tokens.weight", "head.weight")) else noise
            moved = tensor.double() + amount * float(tensor.double().square().mean().sqrt()) * error
            if name == "eh_proj.weight":
                width = len(tensor)
                moved[:, width:] += hidden / math.sqrt(width) * error[:, width:]
            found[prefix + name] = moved.to(tensor.dtype)
    config |= {"num_nextn_predict_layers": layers}
    return _write(path, of, config, tensors, found, alone, overrides)


def with_mtp(make: Make, family: str, layers: int = 1, **config: Any) -> Path:
    """A model with one layer, so that its MTP layer is sometimes right, or with more. config: of the model."""
    if family == "llama":
        return make(mtp, of=make(tiny.llama, seed=1, num_hidden_layers=layers, **config))
    more: dict[str, Any] = {"model_type": family, "num_hidden_layers": layers, "first_k_dense_replace": 0}
    if family == "deepseek_v3":
        more["rope_scaling"] = None
    return make(mtp, of=make(tiny.deepseek, seed=1, **(more | config)))


def reduced(path: Path, *, of: Path, ids: Sequence[int]) -> Path:
    """The MTP layer that `of` is, alone, for some of the target's token ids."""
    config, tensors = tiny.read(of)
    vocab = config["vocab_size"]
    offsets = torch.tensor([index - row for row, index in enumerate(ids)])
    tables = {"d2t": offsets, "t2d": torch.tensor([index in ids for index in range(vocab)])}
    return tiny.write(path, config | {"draft_vocab_size": len(ids)}, tensors | tables, tokenizer=False)


def table(path: Path, *, of: Path, draft: Path | None = None) -> Path:
    """The exact table `of` with an MTP layer whose next-token distribution is exactly that of the table in `draft`,
    whatever the hidden states are: decoder and norms add nothing, and the head is the other table's. Without one it is
    the layer alone, with the target's head."""
    config, tensors = tiny.read(of)
    width, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    parts = {
        name.removeprefix("model.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    parts |= {name: torch.ones(width) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    parts["eh_proj.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    if draft is not None:
        parts["shared_head.head.weight"] = tiny.read(draft)[1]["lm_head.weight"]
    found = {prefix + name: tensor for name, tensor in parts.items()}
    alone: Alone | None = "deepseek" if draft is None else None
    return _write(path, of, config | {"num_nextn_predict_layers": 1}, tensors, found, alone, {})


def _around(tensors: Mapping[str, Tensor], copies: Copies) -> dict[str, Tensor]:
    """What an MTP layer has beside a decoder layer."""
    norm, embedding = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    width = len(norm)
    found = {
        "enorm.weight": torch.ones_like(norm),
        "hnorm.weight": torch.ones_like(norm),
        "eh_proj.weight": torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1).to(norm.dtype),
        "shared_head.norm.weight": norm,
    }
    if copies != "none":
        found["embed_tokens.weight"] = embedding
        found["shared_head.head.weight"] = tensors.get("lm_head.weight", embedding)
    return found


def _write(
    path: Path,
    of: Path,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    alone: Alone | None,
    overrides: Mapping[str, Any],
) -> Path:
    if alone is None:
        return tiny.derive(path, of, config | overrides, {**tensors, **found})
    if alone == "sglang":
        config |= {"num_hidden_layers": 1, "architectures": [f"{config['architectures'][0]}NextN"]}
    return tiny.write(path, config | overrides, found, tokenizer=False)
