"""tensors_sha: as the contract words it, and different for every checkpoint that differs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import tiny
import torch
from fixtures import Make
from safetensors.torch import load_file, save_file

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha


def test_equals_a_plain_reading_of_its_definition(make: Make) -> None:
    path = make(tiny.llama, seed=1)
    total = hashlib.sha256()
    for name, tensor in sorted(load_file(path / "model.safetensors").items()):
        raw = tensor.numpy().tobytes()
        part = raw if len(raw) <= 8192 else raw[:4096] + raw[-4096:]
        total.update(name.encode() + b"\0F32\0" + json.dumps(list(tensor.shape)).encode() + b"\0")
        total.update(hashlib.sha256(part).digest())
    assert tensors_sha(Checkpoint(path)) == total.hexdigest()


def test_tells_checkpoints_apart_but_not_how_they_are_sharded(make: Make, tmp_path: Path) -> None:
    path = make(tiny.llama, seed=1)
    assert tensors_sha(Checkpoint(path)) == tensors_sha(Checkpoint(make(tiny.llama, seed=1, shards=3)))
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.nextafter(tensors["model.norm.weight"], torch.tensor(9.0))
    save_file(tensors, changed / "model.safetensors")
    assert tensors_sha(Checkpoint(path)) != tensors_sha(Checkpoint(changed))
