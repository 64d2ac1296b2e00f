"""convert-mtp of a hub id: only the shards that hold the MTP layer are fetched, and --plan fetches none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Ran
from fixtures import Make
from local_hub import COMMIT, LocalHub, local_hub
from test_convert_mtp import COPIES, layer, same
from tiny_deepseek import INDEX, deepseek

SMALL = {"config.json", INDEX}


@pytest.fixture
def hub(make: Make) -> Iterator[LocalHub]:
    with local_hub(make(deepseek, fp8=True, shards=6)) as found:
        yield found


def process(hub: LocalHub, home: Path, *arguments: object, **environment: str) -> Ran:
    command = [sys.executable, "-m", "specctl", "convert-mtp", *map(str, arguments)]
    env = hub.environment(home) | environment
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def test_only_what_is_needed_is_fetched(make: Make, hub: LocalHub, tmp_path: Path) -> None:
    source = make(deepseek, fp8=True, shards=6)
    ran = process(hub, tmp_path / "home", "org/model", "--plan", "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    needed = {file["file"]: file["bytes"] for file in plan["files"]}
    file_of = json.loads((source / INDEX).read_text())["weight_map"]
    assert set(needed) == {file for name, file in file_of.items() if name.startswith("model.layers.2.")}
    assert 0 < len(needed) < 6
    assert needed == {name: (source / name).stat().st_size for name in needed}
    assert plan["bytes_to_fetch"] == plan["bytes_in_files"] == sum(needed.values())
    assert {name for name, count in hub.fetched.items() if count} == SMALL

    ran = process(hub, tmp_path / "home", "org/model", tmp_path / "o", "--json")
    assert ran.code == 0, ran.err
    fetched = {name: count for name, count in hub.fetched.items() if count}
    assert set(fetched) == SMALL | set(needed)
    assert {name: fetched[name] for name in needed} == needed, "each byte once"
    found, expected = layer(tmp_path / "o"), layer(source)
    same({name: found[name] for name in found.keys() - COPIES}, {n: expected[n] for n in expected.keys() - COPIES})
    target = json.loads((tmp_path / "o" / "specctl.json").read_text())["target"]
    assert (target["name"], target["revision"], target["tensors_sha"]) == ("org/model", COMMIT, None)

    before = dict(hub.fetched)
    ran = process(hub, tmp_path / "home", "org/model", "--plan", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(ran.out)["bytes_to_fetch"] == 0
    assert process(hub, tmp_path / "home", "org/model", tmp_path / "p", HF_HUB_OFFLINE="1").code == 0
    assert hub.fetched == before, "all of it is here now"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/other", ["org/other", "neither a local directory nor a repository"]),
        ("org/model@v2", ["org/model", "no revision v2"]),
    ],
)
def test_what_is_not_there(hub: LocalHub, tmp_path: Path, model: str, words: list[str]) -> None:
    ran = process(hub, tmp_path / "home", model, tmp_path / "o")
    assert ran.code == 2
    assert ran.err.startswith("Error: ")
    for word in words:
        assert word in ran.err
    assert not (tmp_path / "o").exists()
