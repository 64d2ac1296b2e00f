"""Checkpoint: what is whole is read, what is damaged or hostile is refused in a sentence that names it."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fixtures import Make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specctl.checkpoint import INDEX, LEGACY, SINGLE, Checkpoint
from specctl.errors import CheckpointError
from specctl.shards import DTYPES, Shard

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def raw(header: Any, data: bytes = b"") -> bytes:
    """The bytes of a safetensors file with this header: an object, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def directory(path: Path, **files: Any) -> Path:
    """A model directory. files: SINGLE, index, first, second (safetensors bytes), config and others by their name."""
    names = {"single": SINGLE, "index": INDEX, "first": FIRST, "second": SECOND, "config": "config.json"}
    path.mkdir(exist_ok=True)
    for key, content in {"config": {"model_type": "llama"}, **files}.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / names.get(key, key)).write_bytes(data)
    return path


def refused(path: Path, *words: str) -> None:
    """Opening `path` fails, in one sentence with these words in it."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def index_of(**weight_map: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": weight_map}


# -- what is whole ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_what_was_saved(make: Make, shards: int) -> None:
    path = make(tiny.llama, shards=shards)
    config, tensors = tiny.read(path)
    checkpoint = Checkpoint(path)
    assert checkpoint.config == config
    assert checkpoint.generation_config["eos_token_id"] == tiny.END
    assert checkpoint.names() == sorted(tensors)
    assert len(checkpoint.files) == shards
    for name, tensor in tensors.items():
        assert name in checkpoint
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_every_dtype_survives(tmp_path: Path) -> None:
    tensors = {}
    for name, dtype in DTYPES.items():
        tensors[name] = torch.arange(32, dtype=torch.uint8).clamp(max=1).view(dtype)
    directory(tmp_path)
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    for name, dtype in DTYPES.items():
        assert checkpoint.dtype(name) == dtype
        assert torch.equal(checkpoint.tensor(name).view(torch.uint8), tensors[name].view(torch.uint8))


def test_generation_config_may_be_absent(tmp_path: Path) -> None:
    assert Checkpoint(directory(tmp_path, single=raw({"w": F32}, bytes(24)))).generation_config == {}


def test_shards_without_an_index(tmp_path: Path) -> None:
    directory(tmp_path, first=raw({"a": F32}, bytes(24)), second=raw({"b": F32}, bytes(24)))
    assert Checkpoint(tmp_path).names() == ["a", "b"]


def test_links_into_a_cache_are_followed(make: Make, tmp_path: Path) -> None:
    for file in make(tiny.llama).iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert Checkpoint(tmp_path).names() == Checkpoint(make(tiny.llama)).names()


def test_opening_reads_no_numbers(tmp_path: Path) -> None:
    """A file of 64 GiB without blocks on the disk opens at once."""
    size = 2**36
    header = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    directory(tmp_path, single=raw(header))
    os.truncate(tmp_path / SINGLE, len(raw(header)) + size)
    start = time.process_time()
    assert Checkpoint(tmp_path).shape("w") == (size // 4,)
    assert time.process_time() - start < 1


def test_many_shards_open_quickly(tmp_path: Path) -> None:
    """As many headers as the largest open models have: 163 files with 560 tensors each, 0.4 s on an idle core.

    The yardstick on a busy machine is the time that JSON alone takes.
    """
    weight_map, headers = {}, []
    for number in range(163):
        names = [f"model.layers.{number}.mlp.experts.{i}.down_proj.weight" for i in range(560)]
        file = f"model-{number + 1:05d}-of-00163.safetensors"
        header = {n: {"dtype": "U8", "shape": [1, 1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
        headers.append(raw(header, bytes(560)))
        (tmp_path / file).write_bytes(headers[-1])
        weight_map |= dict.fromkeys(names, file)
    directory(tmp_path, index=index_of(**weight_map))
    start = time.process_time()
    parsed = [json.loads(header[8:-560]) for header in headers]
    json_time, start = time.process_time() - start, time.process_time()
    checkpoint = Checkpoint(tmp_path)
    assert time.process_time() - start < 10 * json_time
    assert len(checkpoint.names()) == sum(map(len, parsed))


# -- a directory that is wrong ----------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "nothing", "no such directory")


def test_no_weights(tmp_path: Path) -> None:
    refused(directory(tmp_path), str(tmp_path), SINGLE)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (b"[1, 2]", "list"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "JSON"),
    ],
)
def test_config_is_no_object(tmp_path: Path, config: bytes, word: str) -> None:
    refused(directory(tmp_path, config=config, single=raw({"w": F32}, bytes(24))), "config.json", word)


def test_config_is_missing(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(raw({"w": F32}, bytes(24)))
    refused(tmp_path, "config.json", "no such file")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, SINGLE])
@pytest.mark.parametrize("kind", [Path.mkdir, os.mkfifo])
def test_a_file_is_something_else(tmp_path: Path, name: str, kind: Callable[[Path], None]) -> None:
    if name != SINGLE:
        directory(tmp_path, single=raw({"w": F32}, bytes(24)))
    else:
        directory(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    kind(tmp_path / name)
    refused(tmp_path, name)


def test_generation_config_is_broken(tmp_path: Path) -> None:
    path = directory(tmp_path, single=raw({"w": F32}, bytes(24)), **{"generation_config.json": b"nope"})
    refused(path, "generation_config.json")


def test_absent_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint(directory(tmp_path, single=raw({"w": F32}, bytes(24))))
    assert "lm_head.weight" not in checkpoint
    for ask in (checkpoint.tensor, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            ask("lm_head.weight")


# -- a header that is wrong -------------------------------------------------------------------------------------------


def changed(**values: Any) -> dict[str, Any]:
    return {"some.weight": {**F32, **values}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["cut short"]),
        (b"\x05\0\0", ["cut short"]),
        (struct.pack("<Q", 10**6) + b"{}", ["cut short"]),
        (struct.pack("<Q", 2**63) + b"{}", ["cut short"]),
        (struct.pack("<Q", 0), ["cut short"]),
        (raw(b"{"), ["JSON"]),
        (raw(b"\xff{}"), ["JSON"]),
        (raw(b"[]"), ["object"]),
        (raw(b"{}"), ["no tensor"]),
        (raw(b"[" * 100_000), ["JSON"]),
        (raw(b'{"a": 1, "a": 1}'), ["'a'", "twice"]),
        (raw({"some.weight": [1]}, bytes(24)), ["some.weight", "data_offsets"]),
        (raw(changed(extra=1), bytes(24)), ["some.weight"]),
        (raw(changed(dtype="Q4_0"), bytes(24)), ["some.weight", "Q4_0", "F32"]),
        (raw(changed(dtype=None), bytes(24)), ["some.weight", "dtype"]),
        (raw(changed(shape=[2, -3]), bytes(24)), ["some.weight", "shape"]),
        (raw(changed(shape=[2, 3.0]), bytes(24)), ["some.weight", "shape"]),
        (raw(changed(shape=[True] * 6), bytes(24)), ["some.weight", "shape"]),
        (raw(changed(shape=[1] * 1000), bytes(24)), ["some.weight", "shape"]),
        (raw(changed(shape=[2**40, 2**40]), bytes(24)), ["some.weight", "needs"]),
        (raw(changed(shape=[0, 3], data_offsets=[0, 0])), ["some.weight", "no elements"]),
        (raw(changed(data_offsets=[0]), bytes(24)), ["some.weight"]),
        (raw(changed(data_offsets=[24, 0]), bytes(24)), ["some.weight"]),
        (raw(changed(), bytes(23)), ["some.weight", "cut short"]),
        (raw(changed(), bytes(25)), ["some.weight", "1 bytes"]),
        (raw(changed(data_offsets=[8, 32]), bytes(32)), ["some.weight", "gap"]),
        (raw(changed(data_offsets=[2**62, 2**62 + 24]), bytes(24)), ["some.weight"]),
        (raw({"a": F32, "b": {**F32, "data_offsets": [12, 36]}}, bytes(36)), ["tensor b overlaps a"]),
        (raw({"a": F32, "b": F32}, bytes(24)), ["tensor b overlaps a"]),
        (raw({"line\nbreak": F32}, bytes(24)), ["line\\nbreak"]),
        (raw({"x" * 5000: F32}, bytes(24)), ["xxx"]),
    ],
)
def test_damaged_header(tmp_path: Path, content: bytes, words: list[str]) -> None:
    refused(directory(tmp_path, single=content), str(tmp_path / SINGLE), *words)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    """The announced length is checked against a limit, even where the file is as long as it says."""
    directory(tmp_path, single=struct.pack("<Q", 2**37))
    os.truncate(tmp_path / SINGLE, 2**38)
    start = time.process_time()
    refused(tmp_path, SINGLE, "header")
    assert time.process_time() - start < 1


def test_a_shard_that_lost_its_end(make: Make, tmp_path: Path) -> None:
    """An interrupted download: whatever the place, it is said, and the file is named."""
    whole = (make(tiny.llama) / SINGLE).read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        refused(directory(tmp_path, single=whole[:length]), SINGLE, "cut short")


# -- an index that is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_index_without_a_map(tmp_path: Path, index: Any) -> None:
    refused(directory(tmp_path, index=index, first=raw({"a": F32}, bytes(24))), INDEX, "weight_map")


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "", "a\0b", 3, None]
)
def test_index_leaves_the_directory(tmp_path: Path, file: Any) -> None:
    (tmp_path / "a.safetensors").write_bytes(raw({"a": F32}, bytes(24)))
    refused(directory(tmp_path / "model", index=index_of(a=file)), INDEX, "tensor a")


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    path = directory(tmp_path, index=index_of(a=FIRST, b=SECOND), first=raw({"a": F32}, bytes(24)))
    refused(path, INDEX, SECOND)


def test_index_promises_a_tensor_too_many(tmp_path: Path) -> None:
    path = directory(tmp_path, index=index_of(a=FIRST, tied=FIRST), first=raw({"a": F32}, bytes(24)))
    refused(path, INDEX, "tensor tied", FIRST)


def test_index_leaves_a_tensor_out(tmp_path: Path) -> None:
    header = {"a": F32, "b": {**F32, "data_offsets": [24, 48]}}
    refused(directory(tmp_path, index=index_of(a=FIRST), first=raw(header, bytes(48))), FIRST, "tensor b")


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    both = raw({"a": F32, "b": {**F32, "data_offsets": [24, 48]}}, bytes(48))
    path = directory(tmp_path, index=index_of(a=FIRST, b=SECOND), first=both, second=raw({"b": F32}, bytes(24)))
    refused(path, FIRST, "tensor b", SECOND)


def test_single_file_beside_a_foreign_index(tmp_path: Path) -> None:
    weights = raw({"a": F32}, bytes(24))
    refused(directory(tmp_path, single=weights, index=index_of(a=FIRST), first=weights), SINGLE, INDEX)


def test_shards_without_an_index_share_a_tensor(tmp_path: Path) -> None:
    weights = raw({"a": F32}, bytes(24))
    refused(directory(tmp_path, first=weights, second=weights), "tensor a", FIRST, SECOND)


def test_shards_without_an_index_are_not_all_there(tmp_path: Path) -> None:
    refused(directory(tmp_path, second=raw({"a": F32}, bytes(24))), FIRST)


def test_shards_of_two_checkpoints(tmp_path: Path) -> None:
    third = {"model-00001-of-00003.safetensors": raw({"a": F32}, bytes(24))}
    refused(directory(tmp_path, first=raw({"a": F32}, bytes(24)), **third), "00003", "two checkpoints")


# -- legacy files -----------------------------------------------------------------------------------------------------


class Harmful:
    """What a pickle must not be able to do."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("harm",))


def test_legacy_file(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    torch.save({"w": weight}, directory(tmp_path) / LEGACY)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape("w") == (3, 4)
    assert torch.equal(checkpoint.tensor("w"), weight)


@pytest.mark.parametrize(
    "content", [{"w": Harmful()}, [torch.ones(2)], {1: torch.ones(2)}, {"w": 3}, {"w": torch.ones(0)}, {}]
)
def test_legacy_file_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    torch.save(content, directory(tmp_path) / LEGACY)
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, LEGACY)
    assert not (tmp_path / "harm").exists()


def test_legacy_file_is_damaged(tmp_path: Path) -> None:
    refused(directory(tmp_path, **{LEGACY: b"\x80\x02broken"}), LEGACY)


def test_safetensors_go_before_a_legacy_file(tmp_path: Path) -> None:
    path = directory(tmp_path, single=raw({"w": F32}, bytes(24)), **{LEGACY: b"\x80\x02broken"})
    assert Checkpoint(path).names() == ["w"]


# -- anything ---------------------------------------------------------------------------------------------------------

SMALL = {"config": b'{"model_type": "llama"}', "index": json.dumps(index_of(a=FIRST, b=SECOND)).encode()}
WEIGHTS = {"first": raw({"__metadata__": {"format": "pt"}, "a": F32}, bytes(24)), "second": raw({"b": F32}, bytes(24))}


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, bytes]:
    """A small sharded checkpoint with bytes changed, taken out or put in, in any of its files."""
    files = {**SMALL, **WEIGHTS}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(files)))
        data = files[name]
        at = draw(st.integers(0, len(data)))
        taken = draw(st.integers(0, 8))
        put = draw(
            st.one_of(st.binary(max_size=8), st.sampled_from([b'"', b"{", b"[", b"0", b"9" * 30, b"-", b"null"]))
        )
        files[name] = data[:at] + put + data[at + taken :]
    return files


@given(files=mutations())
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_raise_checkpoint_errors_only(tmp_path: Path, files: dict[str, bytes]) -> None:
    directory(tmp_path, **files)
    try:
        checkpoint = Checkpoint(tmp_path)
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    except CheckpointError:
        return
    assert all(tuple(tensor.shape) == checkpoint.shape(name) for name, tensor in tensors.items())


@given(data=st.binary(max_size=200))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_no_shard(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "random.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="random"):
        Shard.read(file)
