"""convert-mtp --in-place under bad conditions: killed, interrupted, watched through other links, run twice at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from fixtures import Make
from test_convert_mtp_attach import PREFIX, contents, put, refused, whole
from test_convert_mtp_robust import LARGE
from tiny_deepseek import deepseek

SMALL: dict[str, Any] = {"n_routed_experts": 1, "hidden_size": 8, "q_lora_rank": 4, "vocab_size": 4}
STAGING = ".specctl-mtp"

# Runs command lines in children, each in a given directory. A child kills itself just before the n-th thing it does to
# the file system, where a number is given.
FORKS = """
import ctypes, json, os, signal, sys
import specctl.convert_mtp.command
from specctl.cli.main import main
EVENTS = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "os.chmod")
for line in sys.stdin:
    directory, number, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        sys.stdout = sys.stderr
        left = number
        def hook(event, values):
            global left
            writes = event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR)
            swaps = event == "ctypes.dlsym" and values[1] == "renameat2"
            if left is not None and (event in EVENTS or writes or swaps):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        code = main(arguments)
        os._exit(code if left is None or left >= 0 else 99)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Children:
    """Python and torch start once; each command line runs in a child of that."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(
        self, directory: Path, *arguments: object, seconds: float | None = None, events: int | None = None
    ) -> tuple[int, float]:
        """Run a command line, killed after so many seconds or events. Returns its exit code and how long it took."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        begin = time.monotonic()
        self._server.stdin.write(json.dumps([str(directory), events, [str(a) for a in arguments]]) + "\n")
        self._server.stdin.flush()
        child = int(self._server.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(child, signal.SIGKILL)
        code = int(self._server.stdout.readline())
        return code, time.monotonic() - begin


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        yield Children(server)
        assert server.stdin is not None
        server.stdin.close()


def prepared(path: Path, source: Path) -> Path:
    """A fresh target, with remains of an MTP layer in a file that the index does not know of."""
    shutil.rmtree(path, ignore_errors=True)
    for place in path.parent.glob(f".{path.name}.*"):
        shutil.rmtree(place)
    shutil.copytree(source, path)
    put(path, "model-00002-of-000003.safetensors", {f"{PREFIX}enorm.weight": torch.ones(8)})
    (path / "README.md").write_text("read me")
    (path / ".hidden").mkdir()
    (path / ".hidden" / "notes").write_text("notes")
    return path


def visible(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(path).items() if not name.startswith(STAGING)}


# -- killed -----------------------------------------------------------------------------------------------------------


def test_killed_at_twenty_random_moments(children: Children, make: Make, tmp_path: Path) -> None:
    """The directory is the old one or the new one, file by file, and the next run makes it the new one."""
    size = LARGE | {"hidden_size": 256, "moe_intermediate_size": 512}
    donor, lost, target = make(deepseek, **size), make(deepseek, lose_mtp=True, **size), tmp_path / "t"
    command = ["convert-mtp", donor, "--attach-to", target, "--in-place"]
    old = contents(shutil.copytree(lost, target))
    assert children.run(tmp_path, *command)[0] == 0
    new = contents(target)
    shutil.rmtree(target)
    shutil.copytree(lost, target)
    code, needed = children.run(tmp_path, *command)
    assert code == 0
    chance = random.Random(0)
    codes, left = [], 0
    for number in range(20):
        shutil.rmtree(target)
        shutil.copytree(lost, target)
        code, took = children.run(tmp_path, *command, seconds=chance.uniform(0, needed))
        codes.append(code)
        if code == 0:  # the machine is faster than it was
            needed = min(needed, took)
        assert contents(target) in (old, new)
        left += len(list(tmp_path.iterdir())) - 1
        if number % 5 == 4:
            assert children.run(tmp_path, *command)[0] == 0
            assert contents(target) == new
            assert list(tmp_path.iterdir()) == [target]
    assert codes.count(-signal.SIGKILL) > 5
    assert left > 0, "no run was killed while it wrote"


@pytest.mark.parametrize("command", ["attach", "strip"])
def test_killed_before_every_step_of_an_exchange(children: Children, make: Make, tmp_path: Path, command: str) -> None:
    """Whatever it does to the file system, just before it does that."""
    target, arguments, source = case(make, tmp_path, command)
    old = contents(prepared(target, source))
    assert children.run(tmp_path, *arguments)[0] == 0
    new = contents(target)
    whole(target)
    seen = []
    for number in range(200):
        prepared(target, source)
        code, _ = children.run(tmp_path, *arguments, events=number)
        found = contents(target)
        assert found in (old, new)
        seen.append(found == new)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if number % 12 == 0:
            assert children.run(tmp_path, *arguments)[0] in ((0,) if command == "attach" else (0, 2))
            assert contents(target) == new
            whole(target)
    assert code == 0, "all steps were tried"
    assert len(seen) > 25
    assert True in seen[:-1], "what is removed afterwards comes after that moment"
    assert seen == sorted(seen), "there is one moment at which the old one becomes the new one"


@pytest.mark.parametrize("command", ["attach", "strip"])
def test_killed_before_every_step_of_a_journal(children: Children, make: Make, tmp_path: Path, command: str) -> None:
    """A shell inside the directory would be left in the old one, so there files are replaced one by one."""
    target, arguments, source = case(make, tmp_path, command)
    old = visible(prepared(target, source))
    assert children.run(target, *arguments)[0] == 0
    new = contents(target)
    whole(target)
    between = 0
    for number in range(0, 200, 1 if command == "attach" else 2):
        prepared(target, source)
        code, _ = children.run(target, *arguments, events=number)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if (target / STAGING / "journal.json").exists():
            between += 1
            if between == 2:
                ran = children.run(target, "convert-mtp", target, tmp_path / "o")
                assert (ran[0], (tmp_path / "o").exists()) == (2, False), "nobody reads what is in between"
        else:
            assert visible(target) in (old, new)
        if (target / STAGING / "journal.json").exists() or ((target / STAGING).exists() and number % 4 == 0):
            assert children.run(target, *arguments)[0] in ((0,) if command == "attach" else (0, 2))
            assert contents(target) == new
            whole(target)
    assert code == 0, "all steps were tried"
    assert between > 1


def case(make: Make, tmp_path: Path, command: str) -> tuple[Path, list[object], Path]:
    target = tmp_path / "t"
    if command == "attach":
        arguments = ["convert-mtp", make(deepseek, **SMALL), "--attach-to", target, "--in-place"]
        return target, arguments, make(deepseek, lose_mtp=True, **SMALL)
    return target, ["convert-mtp", target, "--strip", "--in-place"], make(deepseek, **SMALL)


def test_a_journal_says_so_everywhere(run: Run, make: Make, tmp_path: Path) -> None:
    target = shutil.copytree(make(deepseek, **SMALL), tmp_path / "t")
    (target / STAGING).mkdir()
    (target / STAGING / "journal.json").write_text("{}")
    for arguments in ([target, tmp_path / "o"], [target, "--plan"], [target, "--attach-to", target, "--plan"]):
        refused(run("convert-mtp", *arguments), str(target), "--in-place", "run it again")
    assert "--in-place" in run("inspect", target).out


@pytest.mark.parametrize(
    "journal",
    [
        "{}",
        "[]",
        "{",
        '{"install": ["../x"], "move": {}, "remove": []}',
        '{"install": [], "move": {"config.json": "/tmp/x"}, "remove": []}',
        '{"install": [], "move": {}, "remove": [".."]}',
        '{"install": [], "move": {}, "remove": [1]}',
        '{"install": [""], "move": {}, "remove": []}',
    ],
)
def test_a_journal_of_somebody_else(run: Run, make: Make, tmp_path: Path, journal: str) -> None:
    """It comes from a file, so it is data: nothing outside the directory is touched."""
    target = shutil.copytree(make(deepseek, **SMALL), tmp_path / "t")
    (tmp_path / "x").write_text("outside")
    (target / STAGING).mkdir()
    (target / STAGING / "journal.json").write_text(journal)
    before = contents(tmp_path)
    refused(run("convert-mtp", target, "--strip", "--in-place"), "journal.json")
    assert contents(tmp_path) == before


def test_what_was_not_to_be_installed_yet_is_taken_back(run: Run, make: Make, tmp_path: Path) -> None:
    target = shutil.copytree(make(deepseek, lose_mtp=True, **SMALL), tmp_path / "t")
    (target / STAGING).mkdir()
    (target / STAGING / "config.json").write_text("half")
    assert run("convert-mtp", make(deepseek, **SMALL), "--attach-to", target, "--in-place").code == 0
    whole(target)


# -- watched ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_other_names_of_a_file_keep_what_they_had(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Every file has a second name elsewhere, as attaching to a new directory leaves it."""
    target, other = prepared(tmp_path / "t", make(deepseek, lose_mtp=True, **SMALL)), tmp_path / "other"
    other.mkdir()
    for file in target.iterdir():
        if file.is_file():
            os.link(file, other / file.name)
    before = contents(other)
    times = {file.name: file.stat().st_mtime_ns for file in other.iterdir()}
    if inside:
        monkeypatch.chdir(target)
    assert run("convert-mtp", make(deepseek, **SMALL), "--attach-to", target, "--in-place").code == 0
    whole(target)
    assert run("convert-mtp", target, "--strip", "--in-place").code == 0
    assert contents(other) == before
    assert times == {file.name: file.stat().st_mtime_ns for file in other.iterdir()}


@pytest.mark.parametrize("inside", [False, True])
def test_everything_else_stays(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Hidden files, directories, links, modes: of all but what is written, the same inodes."""
    target = prepared(tmp_path / "t", make(deepseek, lose_mtp=True, **SMALL))
    (target / "link").symlink_to("README.md")
    (target / "dangling").symlink_to("nowhere")
    (target / "config.json").chmod(0o640)
    target.chmod(0o750)
    nodes = {str(p.relative_to(target)): p.lstat().st_ino for p in target.rglob("*") if not p.is_dir()}
    alias = tmp_path / "alias"
    alias.symlink_to(target)
    if inside:
        monkeypatch.chdir(target)
    assert run("convert-mtp", make(deepseek, **SMALL), "--attach-to", alias, "--in-place").code == 0
    found = {str(p.relative_to(target)): p.lstat().st_ino for p in target.rglob("*") if not p.is_dir()}
    changed = {name for name, node in nodes.items() if found.get(name) != node}
    assert changed == {"config.json", "model.safetensors.index.json", "model-00002-of-000003.safetensors"}
    assert found.keys() - nodes.keys() == {"model-mtp-00001-of-00001.safetensors"}
    assert (target / "link").readlink() == Path("README.md")
    assert (target / "config.json").stat().st_mode & 0o777 == 0o640
    assert (target / "model-mtp-00001-of-00001.safetensors").stat().st_mode & 0o777 == 0o640
    assert target.stat().st_mode & 0o777 == 0o750
    assert alias.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alias", "t"]


def test_a_directory_that_is_worked_in(run: Run, make: Make, tmp_path: Path) -> None:
    target = shutil.copytree(make(deepseek, **SMALL), tmp_path / "t")
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(run("convert-mtp", target, "--strip", "--in-place"), str(target), "another run")
    finally:
        os.close(descriptor)
    assert run("convert-mtp", target, "--strip", "--in-place").code == 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_disk_that_fills_up(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Between the check and the writing: nothing is changed."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    target = prepared(tmp_path / "t", make(deepseek, lose_mtp=True, **SMALL))
    before = contents(target)
    monkeypatch.setattr(os, "posix_fallocate", full)
    if inside:
        monkeypatch.chdir(target)
    ran = run("convert-mtp", make(deepseek, **SMALL), "--attach-to", target, "--in-place")
    assert ran.code == 3
    assert "no disk space" in ran.err
    assert contents(target) == before
    assert list(tmp_path.iterdir()) == [target]


def test_the_layer_of_the_target_itself(run: Run, make: Make, tmp_path: Path) -> None:
    """Donor and target are one: the layer goes to a file of its own, and its old place is cut out."""
    target = shutil.copytree(make(deepseek, **SMALL), tmp_path / "t")
    before = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"].keys()
    assert run("convert-mtp", target, "--attach-to", target, "--in-place", "--shared", "copy").code == 0
    whole(target)
    after = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert after.keys() == before
    assert {file for name, file in after.items() if name.startswith(PREFIX)} == {"model-mtp-00001-of-00001.safetensors"}
