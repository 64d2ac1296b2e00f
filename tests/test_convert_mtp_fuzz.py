"""Thousands of damaged headers, indices and configs: a whole result or a sentence, and nothing beside.

Values are exchanged, taken out and doubled inside the JSON, so that most of what comes out can be read and goes far.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from fixtures import Make
from test_convert_mtp import consistent
from test_convert_mtp_attach import contents, whole
from tiny_deepseek import FP8, INDEX, deepseek

from specctl.errors import CheckpointError
from specctl.shards import Shard

SMALL: dict[str, Any] = {
    "n_routed_experts": 1,
    "shards": 2,
    "hidden_size": 8,
    "q_lora_rank": 4,
    "vocab_size": 4,
    "num_hidden_layers": 1,
}
WEIRD: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3, 61, 2**31, 2**63, 10**25, 0.5, -0.0, 1e308),
    *(
        "",
        "x",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a\x00b",
        "\ud800",
        "é",
        "BF16",
        "F8_E4M3",
        "F64",
        "NaN",
        "fp8",
        "awq",
    ),
    *([], {}, [[]], [1], [0, 0], [128, 128], {"a": 1}, [None], ["re:("], {"-:(": {}}, ["model.layers.1"], [0, 2**62]),
    *("model.layers.1.enorm.weight", "layers.1.hnorm.weight", "mtp.0.main_proj.weight", "gptq", "compressed-tensors"),
    *("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors", "yarn", "deepseek_v3", "llama"),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        for key in value:
            found += [(value, key), *places(value[key])]
    elif isinstance(value, list):
        for key in range(len(value)):
            found += [(value, key), *places(value[key])]
    return found


def mutate(value: Any, chance: random.Random) -> Any:
    """One thing in a JSON value is another, is gone, has another name or is there twice."""
    container, key = chance.choice(places(value) or [([value], 0)])
    match chance.randrange(5):
        case 0 if isinstance(container, dict):
            del container[key]
        case 1 if isinstance(container, dict):
            container[str(chance.choice(WEIRD))] = container.pop(key)
        case 2:
            other, from_key = chance.choice(places(value))
            container[key] = json.loads(json.dumps(other[from_key]))
        case 3 if isinstance(container, list):
            container.append(chance.choice(WEIRD))
        case _:
            container[key] = chance.choice(WEIRD)
    return value


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The JSON with mutations, or its bytes."""
    if chance.random() < 0.2:
        at, taken = chance.randrange(len(data)), chance.randrange(4)
        return data[:at] + chance.randbytes(chance.randrange(4)) + data[at + taken :]
    value = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = mutate(value, chance)
    return json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")


def damage(whole: bytes, name: str, chance: random.Random) -> bytes:
    """A file's new content; of a shard, its header's."""
    if not name.endswith(".safetensors"):
        return damaged(whole, chance)
    (length,) = struct.unpack("<Q", whole[:8])
    header = damaged(whole[8 : 8 + length], chance)
    announced = chance.choice((len(header),) * 8 + (0, 1, 2**63, 2**64 - 1, 10**8, len(header) + 1))
    return struct.pack("<Q", announced) + header + whole[8 + length :]


def files(path: Path, kind: str) -> list[str]:
    names = {"header": [file.name for file in path.glob("*.safetensors")], "index": [INDEX], "config": ["config.json"]}
    return sorted(names[kind])


def said(ran: Any) -> None:
    assert (ran.code, ran.out) == (2, ""), ran
    assert ran.err.splitlines()[-1].startswith("Error: "), ran.err
    assert "Internal error" not in ran.err


@pytest.mark.parametrize(("kind", "number"), [("header", 500), ("index", 350), ("config", 220)])
def test_converted(run: Run, make: Make, tmp_path: Path, kind: str, number: int) -> None:
    source, place, output = make(deepseek, fp8=True, **SMALL), tmp_path / "s", tmp_path / "o"
    shutil.copytree(source, place)
    chance = random.Random(kind)
    whole_ones = 0
    for _ in range(number):
        name = chance.choice(files(source, kind))
        (place / name).write_bytes(damage((source / name).read_bytes(), name, chance))
        options = chance.choice(([], ["--dtype", "bf16"], ["--to", "sglang"], ["--shared", "copy"], ["--json"]))
        ran = run("convert-mtp", place, output, *options)
        if ran.code == 0:
            whole_ones += 1
            consistent(output)
            shutil.rmtree(output)
        else:
            said(ran)
        assert {path.name for path in tmp_path.iterdir()} == {"s"}
        shutil.copyfile(source / name, place / name)
    assert 0 < whole_ones < number / 2


def test_read(make: Make, tmp_path: Path) -> None:
    """Headers alone, which are quick: what is read has every byte in one tensor."""
    source, path = make(deepseek, fp8=True, **SMALL), tmp_path / "x.safetensors"
    shards = [(source / name).read_bytes() for name in files(source, "header")]
    chance = random.Random(0)
    read = 0
    for number in range(3000):
        path.write_bytes(damage(shards[number % len(shards)], path.name, chance))
        try:
            tensors = Shard.read(path).tensors
        except CheckpointError:
            continue
        read += 1
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert sum(info.num_bytes for info in tensors.values()) == path.stat().st_size - 8 - length
    assert 50 < read < 1000


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_looked_at(run: Run, make: Make, tmp_path: Path, command: str) -> None:
    source, place = make(deepseek, fp8=True, **SMALL), tmp_path / "s"
    shutil.copytree(source, place)
    chance = random.Random(command)
    for _ in range(250):
        name = chance.choice(files(source, chance.choice(("header", "index", "config"))))
        (place / name).write_bytes(damage((source / name).read_bytes(), name, chance))
        as_json = chance.choice(([], ["--json"]))
        ran = run("inspect", place, *as_json) if command == "inspect" else run("convert-mtp", place, "--plan", *as_json)
        assert ran.code in (0, 2)
        assert "nternal error" not in ran.err + ran.out
        assert ran.code == 0 or command == "inspect" or ran.err.startswith("Error: ")
        shutil.copyfile(source / name, place / name)


LISTED = FP8 | {"ignored_layers": ["lm_head", "model.layers.1.self_attn.o_proj"], "modules_to_not_convert": ["x"]}


@pytest.mark.parametrize("damaged_one", ["donor", "target"])
def test_attached(run: Run, make: Make, tmp_path: Path, damaged_one: str) -> None:
    """In the target's own directory, which is changed wholly or not at all."""
    donor, target = tmp_path / "d", tmp_path / "t"
    shutil.copytree(make(deepseek, fp8=True, **SMALL), donor)
    lost = deepseek(
        tmp_path / "l", lose_mtp=True, edit=lambda c, _: c.update(quantization_config=LISTED), fp8=True, **SMALL
    )
    shutil.copytree(lost, target)
    chance = random.Random(damaged_one)
    path, source = (donor, make(deepseek, fp8=True, **SMALL)) if damaged_one == "donor" else (target, lost)
    whole_ones = 0
    for _ in range(150):
        name = chance.choice(files(source, chance.choice(("header", "index", "config", "config"))))
        (path / name).write_bytes(damage((source / name).read_bytes(), name, chance))
        before = contents(target)
        ran = run("convert-mtp", donor, "--attach-to", target, "--in-place", *chance.choice(([], ["--dtype", "bf16"])))
        if ran.code == 0:
            whole_ones += 1
            whole(target)
            shutil.rmtree(target)
            shutil.copytree(lost, target)
        else:
            said(ran)
            assert contents(target) == before
        assert {path.name for path in tmp_path.iterdir()} == {"d", "t", "l"}
        shutil.copyfile(source / name, path / name)
    assert 0 < whole_ones < 110


# -- hostile headers --------------------------------------------------------------------------------------------------


def nested(length: int) -> bytes:
    return b'{"a":' + b"[" * length


def lists(length: int) -> bytes:
    return b'{"a":[' + b"[]," * (length // 3) + b"[]]}"


def strings(length: int) -> bytes:
    return b'{"a":["\xf0\x9f\x98\x80"' + b',"ab"' * (length // 5) + b"]}"


def names(length: int) -> bytes:
    return b"{" + b",".join(b'"%x":[]' % number for number in range(length // 11)) + b"}"


def metadata(length: int) -> bytes:
    return b'{"__metadata__":{' + b",".join(b'"%x":"ab"' % number for number in range(length // 13)) + b"}}"


def entries(length: int) -> bytes:
    """The most that a header can honestly hold: the smallest tensors under the shortest names."""
    form = b'"%x":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    return b"{" + b",".join(form % (n, n, n + 1) for n in range(length // 66)) + b"}"


def doubled(length: int) -> bytes:
    return b"{" + b",".join(b'"%x":{"data_offsets":1}' % (number % 999) for number in range(length // 25)) + b"}"


def zeros(length: int) -> bytes:
    return bytes(length)


MAKERS = [nested, lists, strings, names, metadata, entries, doubled, zeros]
LONGEST = 5_900_000
READ = """
import json, resource, sys, time
from pathlib import Path
from specctl.errors import CheckpointError
from specctl.shards import Shard
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, found = peak(), {}
for path in map(Path, sys.argv[1:]):
    begin = time.process_time()
    try:
        said = f"{len(Shard.read(path).tensors)} tensors"
    except CheckpointError as error:
        said = str(error)
    found[path.name] = [time.process_time() - begin, said]
print(json.dumps([peak() - before, found]))
"""


def test_hostile_headers(tmp_path: Path) -> None:
    """As long as they may be, filled with what costs most: within 300 MB and, on an idle processor, a second."""
    paths = [tmp_path / maker.__name__ for maker in MAKERS]
    for maker, path in zip(MAKERS, paths, strict=True):
        header = maker(LONGEST)
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(LONGEST // 66 if maker is entries else 0))
    ran = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, check=True)
    peak, found = json.loads(ran.stdout)
    assert peak < 300e6
    assert found.keys() == {path.name for path in paths}
    for name, (seconds, said) in found.items():
        assert seconds < 4, name
        assert (said == f"{LONGEST // 66} tensors") == (name == "entries")
        assert len(said) < 1000


def test_a_header_that_is_too_long(tmp_path: Path) -> None:
    """It is not read: the file need not even have blocks on the disk."""
    path = tmp_path / "model.safetensors"
    for length in (6_000_001, 100_000_000, 2**40):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        os.truncate(path, 8 + length)
        with pytest.raises(CheckpointError, match=f"header of {length} bytes; 6000000 is the most"):
            Shard.read(path)
