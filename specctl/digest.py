"""tensors_sha: a digest that tells two checkpoints apart without reading all of them. It knows nothing about models."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.shards import DTYPES

EDGE = 4096
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensors_sha(checkpoint: Checkpoint) -> str:
    """sha256 over the tensors sorted by name, each `name\\0dtype\\0shape-as-json\\0` and the sha256 (32 bytes) of the
    tensor's first and last 4 KiB, or of all of it when it has at most 8 KiB. dtype is safetensors' name."""
    total = hashlib.sha256()
    for name in checkpoint.names():
        info = checkpoint.info(name)
        total.update(f"{name}\0{_NAMES[info.dtype]}\0{json.dumps(list(info.shape))}\0".encode())
        total.update(hashlib.sha256(_edges(checkpoint.tensor(name))).digest())
    return total.hexdigest()


def _edges(tensor: Tensor) -> bytes:
    raw = tensor.contiguous().flatten().view(torch.uint8)
    if raw.numel() > 2 * EDGE:
        raw = torch.cat((raw[:EDGE], raw[-EDGE:]))
    return raw.numpy().tobytes()
