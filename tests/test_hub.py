"""MODEL on the command line: directories, hub ids in the cache, and what is said when there is neither. No network."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from fixtures import Make
from huggingface_hub import constants

from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.hub import identity, locate

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds org/tiny, the way the hub's client lays it out: names that link to blobs."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / REVISION
    blobs = tmp_path / "models--org--tiny" / "blobs"
    refs = tmp_path / "models--org--tiny" / "refs"
    for directory in (snapshot, blobs, refs):
        directory.mkdir(parents=True)
    for number, file in enumerate(make(tiny.llama).iterdir()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (refs / "main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_directory(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tiny.llama)
    assert locate(str(path)) == path
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == Path("org/name"), "a directory goes before a hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/org/name") == tmp_path / "org" / "name"


@pytest.mark.parametrize("model", ["org/tiny", f"org/tiny@{REVISION}", "org/tiny@main"])
def test_hub_id_in_the_cache(cached: Path, model: str) -> None:
    path = locate(model)
    assert path.samefile(cached)
    assert Checkpoint(path).config["model_type"] == "llama"


@pytest.mark.parametrize("model", ["org/other", "org/tiny@v2"])
def test_hub_does_not_answer(cached: Path, model: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    assert str(caught.value).startswith(f"{model}: no such directory, not among the models already fetched")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model", ["/absent/model", "./model", "model", "a/b/c", "../a", "a/..", "org/na me", "~/x", "", "-"]
)
def test_no_such_directory(model: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    assert str(caught.value).startswith(f"{model}: no such directory; expected a model directory")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a file"):
        locate(str(tmp_path / "model.safetensors"))


def test_what_files_call_a_model(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tiny.llama)
    monkeypatch.chdir(path.parent)
    for name in (str(path), path.name, f"./{path.name}"):
        assert identity(name, Path(name)) == (str(path), None)
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / REVISION
    assert identity("org/tiny", snapshot) == ("org/tiny", REVISION)
    assert identity("org/tiny@main", snapshot) == ("org/tiny", REVISION)
    assert identity("org/tiny@v1", tmp_path) == ("org/tiny", "v1")
