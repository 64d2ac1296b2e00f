"""The streaming writer: what others read back is what was given, in shards no larger than asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.shard_writer import INDEX, Entry, write_shards
from specctl.shards import DTYPES, Shard, TensorInfo


def entry(name: str, tensor: Tensor, pieces: int = 1) -> Entry:
    return Entry(name, TensorInfo(tensor.dtype, tuple(tensor.shape)), lambda: tensor.flatten().chunk(pieces))


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        raw = torch.randint(0, 2, (3 + number, 5, dtype.itemsize), dtype=torch.uint8, generator=generator)
        found[f"t.{name}"] = raw.view(dtype).squeeze(-1)
    return found


@pytest.mark.parametrize("max_bytes", [1, 100, 10**9])
@pytest.mark.parametrize("workers", [1, 4])
def test_what_is_written_is_read(tmp_path: Path, max_bytes: int, workers: int) -> None:
    given = tensors()
    told: list[int] = []
    weight_map = write_shards(
        tmp_path,
        [entry(name, tensor, pieces=3) for name, tensor in given.items()],
        stem="model-mtp",
        max_bytes=max_bytes,
        workers=workers,
        progress=told.append,
    )
    index = json.loads((tmp_path / INDEX).read_text())
    total = sum(tensor.nbytes for tensor in given.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": weight_map}
    assert sum(told) == total
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(weight_map.values()))
    assert files[0] == f"model-mtp-00001-of-{len(files):05d}.safetensors"
    for file in files:
        shard = Shard.read(tmp_path / file)
        assert len(shard.tensors) == 1 or sum(info.num_bytes for info in shard.tensors.values()) <= max_bytes
        for name, tensor in load_file(tmp_path / file).items():
            assert weight_map[name] == file
            assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8))
            del given[name]
    assert not given


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, [entry(name, tensor) for name, tensor in tensors().items()], stem="m")
    raw = (tmp_path / next(iter(weight_map.values()))).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, value in header.items():
        if name != "__metadata__":
            assert (8 + length + value["data_offsets"][0]) % DTYPES[value["dtype"]].itemsize == 0


def test_an_error_in_one_tensor_ends_all(tmp_path: Path) -> None:
    begun = threading.Event()

    def fail() -> Iterator[Tensor]:
        begun.set()
        raise ValueError("no numbers")
        yield

    entries = [Entry("bad", TensorInfo(torch.float32, (2,)), fail), entry("good", torch.ones(2))]
    with pytest.raises(ValueError, match="no numbers"):
        write_shards(tmp_path, entries, stem="m")
    assert begun.is_set()
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize("pieces", [[torch.ones(3)], [torch.ones(5)], [torch.ones(4, dtype=torch.float16)]])
def test_an_announcement_that_is_wrong_is_our_bug(tmp_path: Path, pieces: list[Tensor]) -> None:
    with pytest.raises(AssertionError, match="w is"):
        write_shards(tmp_path, [Entry("w", TensorInfo(torch.float32, (4,)), lambda: pieces)], stem="m")
