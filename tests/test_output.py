"""Outputs: complete or not there at all, and never over something that is."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import CapacityError, UsageError
from specctl.output import new_directory, new_file, to_json, write_json, write_text

Make = Callable[..., AbstractContextManager[Path]]


def fill(place: Path, text: str = "new") -> None:
    """Write into what new_file or new_directory gave."""
    (place / "inside" if place.is_dir() else place).write_text(text)


def fill_and_raise(place: Path, error: BaseException) -> None:
    fill(place)
    raise error


def fill_late(place: Path, path: Path) -> None:
    fill(place)
    path.write_text("another process's")


def content(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


both = pytest.mark.parametrize("make", [new_file, new_directory])


@both
def test_appears_when_complete(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "new" / "parents" / "out"
    with make(path) as place:
        fill(place)
        assert not path.exists()
        assert place.parent == path.parent
    assert content(path) == "new"
    assert os.listdir(path.parent) == ["out"]


@both
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, BrokenPipeError])
def test_failure_leaves_nothing(tmp_path: Path, make: Make, error: type[BaseException]) -> None:
    path = tmp_path / "out"
    with pytest.raises(error), make(path) as place:
        fill_and_raise(place, error())
    assert os.listdir(tmp_path) == []


@both
def test_failure_leaves_the_old_one(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "out"
    with make(path) as place:
        fill(place, "old")
    with pytest.raises(KeyboardInterrupt), make(path, force=True) as place:
        fill_and_raise(place, KeyboardInterrupt())
    assert content(path) == "old"
    assert os.listdir(tmp_path) == ["out"]


@both
def test_refuses_what_is_there_before_any_work(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "out"
    with make(path) as place:
        fill(place, "old")
    with pytest.raises(UsageError, match=r"out: exists.*--force"), make(path):
        pytest.fail("the work was begun")
    assert content(path) == "old"
    assert os.listdir(tmp_path) == ["out"]


@both
def test_refuses_what_came_meanwhile(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "out"
    with pytest.raises(UsageError, match="exists"), make(path) as place:
        fill_late(place, path)
    assert path.read_text() == "another process's"
    assert os.listdir(tmp_path) == ["out"]


@both
def test_force_replaces(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "out"
    with make(path) as place:
        fill(place, "old")
    with make(path, force=True) as place:
        fill(place)
        assert content(path) == "old"
    assert content(path) == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_force_does_not_mix_directories(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale").write_text("old")
    with new_directory(tmp_path / "out", force=True) as place:
        fill(place)
    assert os.listdir(tmp_path / "out") == ["inside"]


def test_force_replaces_like_by_like_only(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, make in (("directory", new_file), ("pipe", new_file), ("file", new_directory)):
        with pytest.raises(UsageError, match=f"{name}: is not"), make(tmp_path / name, force=True):
            pytest.fail("the work was begun")
    assert sorted(os.listdir(tmp_path)) == ["directory", "file", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_never_replaces_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, home = tmp_path / "work" / "here", tmp_path / "home" / "me"
    for place in (work, home):
        place.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    for path in (Path(), Path(".."), work, work.parent, home, home.parent, Path("~")):
        with pytest.raises(UsageError, match="working or home"), new_directory(path, force=True):
            pytest.fail("the work was begun")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UsageError, match="exists"), new_file(tmp_path / "link"):
        pytest.fail("the work was begun")
    write_text(tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_the_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "text")
        with new_directory(tmp_path / "directory"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "directory").stat().st_mode) == 0o755


@both
def test_a_place_that_cannot_be(tmp_path: Path, make: Make) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot be written"), make(path):
            pytest.fail("the work was begun")


@both
def test_a_full_disk(tmp_path: Path, make: Make) -> None:
    with pytest.raises(CapacityError, match="out: no disk space"), make(tmp_path / "out") as place:
        fill_and_raise(place, OSError(errno.ENOSPC, "No space left on device"))
    assert os.listdir(tmp_path) == []


def test_other_files_errors_are_not_ours(tmp_path: Path) -> None:
    """An input that cannot be read while the output is being made must not be told as the output's fault."""
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "out"):
        (tmp_path / "input").read_text()


def test_json_is_strict(tmp_path: Path) -> None:
    assert to_json({"a": [1.5, None, "é"]}, indent=None) == '{"a": [1.5, null, "é"]}'
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"\$\.runs\[1\]\.tok_s is"):
            to_json({"runs": [{}, {"tok_s": number}]})
        with pytest.raises(ValueError, match="JSON"):
            write_json(tmp_path / "out.json", {"x": number})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [{"a": [1, {"b": "\u2028"}]}, [], 3])
def test_json_file(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "out.json", value)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == value
