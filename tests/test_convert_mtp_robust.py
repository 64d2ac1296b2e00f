"""convert-mtp under bad conditions: killed, short of memory, given damaged files. Whole results or none."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_deepseek
from conftest import Run
from fixtures import Make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_convert_mtp import consistent
from tiny_deepseek import INDEX, deepseek

from specctl.convert_mtp.convert import Wishes, prepare, write
from specctl.convert_mtp.inspection import inspect_mtp
from specctl.convert_mtp.report import plan
from specctl.convert_mtp.source import find_source
from specctl.errors import CheckpointError, SpecctlError

TESTS = Path(__file__).parent
# 30 M parameters in the layer: large enough that a tensor held twice would be seen, and that a kill hits the writing.
LARGE = {"hidden_size": 1024, "n_routed_experts": 8, "moe_intermediate_size": 1024, "vocab_size": 2048}


# -- killed -----------------------------------------------------------------------------------------------------------


FORKS = """
import json, os, sys
import specctl.convert_mtp.command
from specctl.cli.main import main
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr
        os._exit(main(json.loads(line)))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_at_any_moment(make: Make, tmp_path: Path) -> None:
    """kill -9 leaves no output, or a whole one; and what a killed run leaves beside it, the next one removes."""
    size = LARGE | {"hidden_size": 512, "moe_intermediate_size": 512}
    source, output = make(deepseek, fp8=True, **size), tmp_path / "o"
    line = json.dumps(["convert-mtp", str(source), str(output), "--dtype", "bf16"]) + "\n"
    command = [sys.executable, "-c", FORKS]  # Python and torch start once

    def run(seconds: float | None) -> tuple[int, float]:
        """Convert, killed after so many seconds; gives the exit code and how long it took."""
        assert server.stdin is not None
        assert server.stdout is not None
        begin = time.monotonic()
        server.stdin.write(line)
        server.stdin.flush()
        child = int(server.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(child, signal.SIGKILL)
        code = int(server.stdout.readline())
        return code, time.monotonic() - begin

    codes = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        run(None)
        shutil.rmtree(output)
        code, whole = run(None)
        assert code == 0
        chance = random.Random(0)
        left = 0
        for _ in range(20):
            shutil.rmtree(output, ignore_errors=True)
            codes.append(run(chance.uniform(0, whole))[0])
            if output.exists():
                consistent(output)
            left += len([path for path in tmp_path.iterdir() if path != output])
        shutil.rmtree(output, ignore_errors=True)
        assert run(None)[0] == 0
        assert server.stdin is not None
        server.stdin.close()
    consistent(output)
    assert list(tmp_path.iterdir()) == [output]
    assert codes.count(-signal.SIGKILL) > 5
    assert left > 0, "no run was killed while it wrote"


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "fp8"), [("keep", True), ("bf16", True), ("fp8", False)])
def test_memory_is_bounded(make: Make, tmp_path: Path, dtype: str, fp8: bool) -> None:
    """The promise is the largest tensor and 300 MB. Here the whole layer is less, so that much less is asked for."""
    source = make(deepseek, fp8=fp8, **LARGE)
    command = [sys.executable, str(TESTS / "convert_memory.py"), source, tmp_path / "o", "--dtype", dtype, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["code"] == 0
    assert report["looks"] > 20
    total = sum(file.stat().st_size for file in (tmp_path / "o").glob("*.safetensors"))
    assert total > 25e6
    assert report["above"] < 40e6


# -- damaged ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(make: Make, tmp_path: Path) -> Path:
    return Path(shutil.copytree(make(deepseek, fp8=True), tmp_path / "copy"))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def edit_index(path: Path, **changes: object) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    (path / INDEX).write_text(json.dumps(index))


ENORM = "model.layers.2.enorm.weight"


@pytest.mark.parametrize("output", ["o", None], ids=["convert", "plan"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: shards(path)[-1].write_bytes(shards(path)[-1].read_bytes()[:-1]), ["cut short"]),
        (lambda path: shards(path)[-1].write_bytes(b"\xff" * 8 + b"{}"), ["cannot hold"]),
        (lambda path: edit_index(path, **{ENORM: "gone.safetensors"}), ["gone.safetensors", "not there"]),
        (lambda path: edit_index(path, **{ENORM: "../x.safetensors"}), ["../x.safetensors", ENORM]),
        (lambda path: edit_index(path, **{ENORM: None}), ["enorm.weight"]),
        (lambda path: edit_index(path, **{"model.layers.2.more.weight": shards(path)[-1].name}), ["more.weight"]),
        (lambda path: (path / INDEX).write_text("{"), [INDEX, "JSON"]),
        (lambda path: (path / "config.json").write_text("[]"), ["config.json"]),
        (lambda path: (path / "config.json").unlink(), ["config.json"]),
        (lambda path: shutil.copyfile(shards(path)[0], path / "model.safetensors"), ["model.safetensors"]),
    ],
)
def test_damaged_files(run: Run, copy: Path, tmp_path: Path, change: object, words: list[str], output: str) -> None:
    change(copy)  # type: ignore[operator]
    arguments = ["--plan"] if output is None else [tmp_path / output]
    ran = run("convert-mtp", copy, *arguments)
    if output is None and ran.code == 0:
        assert words in (["cut short"], ["cannot hold"], ["model.safetensors"]), "names alone cannot show it"
        return
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err
    assert [path for path in tmp_path.iterdir() if path != copy] == []


SMALL = {
    "n_routed_experts": 1,
    "shards": 2,
    "hidden_size": 8,
    "q_lora_rank": 4,
    "vocab_size": 4,
    "num_hidden_layers": 1,
}
_PUT = [b'"', b"{", b"[", b"0", b"9" * 30, b"-", b"null", b"61", b"true", b'"x"', b",", b"e9", b"\xff", b"."]


@st.composite
def mutations(draw: st.DrawFn, files: dict[str, bytes]) -> dict[str, bytes]:
    """A small checkpoint with bytes changed, taken out or put in, in any file; in shards mostly in the header."""
    found = dict(files)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(found)))
        data = found[name]
        at = draw(st.integers(0, min(len(data), 6000)))
        taken = draw(st.integers(0, 8))
        put = draw(st.one_of(st.binary(max_size=6), st.sampled_from(_PUT)))
        found[name] = data[:at] + put + data[at + taken :]
    return found


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_checkpoints(make: Make, tmp_path: Path, data: st.DataObject) -> None:
    """Whole results or a sentence, within a second, and nothing beside."""
    source = make(deepseek, fp8=True, **SMALL)
    whole = {file.name: file.read_bytes() for file in source.iterdir()}
    place, output = tmp_path / "s", tmp_path / "o"
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    place.mkdir()
    for name, content in data.draw(mutations(whole)).items():
        (place / name).write_bytes(content)
    begin = time.process_time()
    sentence = None
    try:
        plan(find_source(str(place)), Wishes(str(place)))
        job = prepare(Wishes(str(place), dtype="bf16", shared="copy"))
        write(job, output, force=False, progress=lambda num_bytes: None)
    except SpecctlError as error:
        sentence = str(error)
    assert time.process_time() - begin < 1
    if sentence is None:
        consistent(output)
    else:
        assert "\n" not in sentence
        assert not output.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"s", "o"}


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_checkpoints_are_inspected(make: Make, tmp_path: Path, data: st.DataObject) -> None:
    from specctl.checkpoint import Checkpoint

    source = make(deepseek, fp8=True, **SMALL)
    whole = {file.name: file.read_bytes() for file in source.iterdir()}
    for name, content in data.draw(mutations(whole)).items():
        (tmp_path / name).write_bytes(content)
    try:
        checkpoint = Checkpoint(tmp_path)
    except CheckpointError:
        return
    facts = inspect_mtp(checkpoint)
    assert facts is None or facts.layers or facts.findings or facts.claimed == 0


# -- as large as they come --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_r1_without_its_numbers(run: Run, tmp_path: Path) -> None:
    """All headers of DeepSeek-R1: planned and inspected in seconds, by the sizes that are known of it."""
    path = tiny_deepseek.sparse_r1(tmp_path / "r1")
    begin = time.process_time()
    plan = json.loads(run("convert-mtp", path, "--plan", "--json").out)
    assert (plan["layers"], plan["tensors"], plan["bytes_of_layers"]) == ([61], 1564, 15_424_227_552)
    assert [file["file"][6:11] for file in plan["files"]] == ["00160", "00161", "00162", "00163"]
    assert plan["of_files"] == 163
    attached = json.loads(run("convert-mtp", path, "--attach-to", path, "--plan", "--json").out)
    assert attached["layers"] == [61]
    assert [file["file"][6:11] for file in attached["target_files"]["written"]] == ["00160"]
    assert [name[6:11] for name in attached["target_files"]["removed"]] == ["00161", "00162", "00163"]
    ran = run("inspect", path, "--json")
    assert time.process_time() - begin < 60
    assert ran.code == 0
    found = json.loads(ran.out)
    weights, mtp = found["weights"], found["mtp"]
    assert (weights["files"], weights["tensors"], weights["bytes"]) == (163, 91_991, 688_574_839_360)
    assert (mtp["claimed"], mtp["found"], mtp["role"], mtp["convertible"]) == (1, [61], "target with MTP", True)
    assert mtp["layers"][0]["dtypes"] == {"bfloat16": 11, "float8_e4m3fn": 776, "float32": 777}
    assert mtp["layers"][0]["bytes"] == 15_424_227_552
