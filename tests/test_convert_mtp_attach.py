"""convert-mtp --attach-to and --strip: a whole checkpoint comes out, the target's own tensors as they were."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran, Run
from fixtures import Make
from safetensors.torch import load_file, save_file
from test_convert_mtp import COPIES, PREFIX, config, in_bfloat16, layer, read, same, without
from tiny_deepseek import INDEX, deepseek
from torch import Tensor

Values = dict[str, Any]


def whole(path: Path) -> None:
    """Index, files and sizes say the same, no tensor is in two files, and nothing is left beside."""
    index = json.loads((path / INDEX).read_text())
    found = {name: file.name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(path).values())
    assert not (path / "model.safetensors").exists()
    assert not [file.name for file in path.iterdir() if file.name.startswith(".specctl")]
    assert not list(path.parent.glob(f".{path.name}.*"))


def attach(run: Run, source: Path, target: Path, output: Path | None, *options: object) -> Ran:
    where = ["--in-place"] if output is None else [output]
    ran = run("convert-mtp", source, *where, "--attach-to", target, *options)
    assert ran.code == 0, ran.err
    whole(target if output is None else output)
    return ran


def refused(ran: Ran, *words: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    sentence = ran.err.splitlines()[-1]
    assert sentence.startswith("Error: ")
    for word in words:
        assert word in sentence


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def own(path: Path) -> dict[str, Tensor]:
    """The tensors that are not of the MTP layer."""
    return {name: tensor for name, tensor in read(path).items() if not name.startswith(PREFIX)}


@pytest.fixture
def lost(make: Make, tmp_path: Path) -> Path:
    """Row 1: fine-tuned and saved; the MTP layer is gone and the config claims it as before."""
    return Path(shutil.copytree(make(deepseek, lose_mtp=True, shards=4), tmp_path / "lost"))


# -- a whole checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_lost_is_there_again(run: Run, make: Make, lost: Path, tmp_path: Path, in_place: bool) -> None:
    assert run("inspect", lost).code == 2
    before, tensors = contents(lost), own(lost)
    output = None if in_place else tmp_path / "o"
    ran = attach(run, make(deepseek), lost, output)
    found = lost if in_place else tmp_path / "o"
    same(own(found), tensors)
    same(layer(found), without(layer(make(deepseek)), COPIES))
    assert config(found) == config(make(deepseek))
    assert "taken whole by deepseek, vllm, sglang" in ran.out
    assert in_place or contents(lost) == before
    assert run("inspect", found).code == 0


def test_a_lost_key_of_the_config(run: Run, tmp_path: Path, make: Make) -> None:
    def drop(config: Values, tensors: dict[str, Tensor]) -> None:
        for key in ("topk_method", "scoring_func", "num_nextn_predict_layers"):
            del config[key]

    target = deepseek(tmp_path / "t", lose_mtp=True, edit=drop)
    ran = attach(run, make(deepseek), target, None)
    assert config(target) == config(make(deepseek)), "but for the order of keys"
    for key in ("topk_method", "scoring_func", "num_nextn_predict_layers"):
        assert key in ran.err


def test_unchanged_files_are_linked(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    """Weights share their inodes with the target; what people edit does not."""
    (lost / "README.md").write_text("read me")
    (lost / "more").mkdir()
    (lost / "more" / "original.pth").write_bytes(b"weights")
    (lost / ".git").mkdir()
    (lost / ".git" / "large").write_bytes(b"objects")
    attach(run, make(deepseek), lost, tmp_path / "o")
    for file in [*lost.glob("*.safetensors"), lost / "more" / "original.pth"]:
        assert (tmp_path / "o" / file.relative_to(lost)).samefile(file)
    assert (tmp_path / "o" / "README.md").read_text() == "read me"
    assert not (tmp_path / "o" / "README.md").samefile(lost / "README.md")
    assert not (tmp_path / "o" / ".git").exists()


def test_links_of_a_cache_lead_to_the_file(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    """As the hub's cache has it: a directory of links."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in lost.iterdir():
        (snapshot / file.name).symlink_to(file)
    attach(run, make(deepseek), snapshot, tmp_path / "o")
    for file in lost.glob("*.safetensors"):
        assert (tmp_path / "o" / file.name).samefile(file)
        assert not (tmp_path / "o" / file.name).is_symlink()
    before = contents(lost)
    attach(run, make(deepseek), snapshot, None)
    assert contents(lost) == before, "nothing is written through a link"
    assert (snapshot / "model-00001-of-000004.safetensors").is_symlink()


def test_across_file_systems_files_are_copied(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev or not os.access(shm, os.W_OK):
        pytest.skip("/dev/shm is no other file system here")
    output = shm / f"specctl-test-{os.getpid()}"
    try:
        attach(run, make(deepseek), lost, output)
        same(own(output), own(lost))
        assert {file.stat().st_nlink for file in lost.iterdir()} == {1}
    finally:
        shutil.rmtree(output, ignore_errors=True)


def test_where_links_are_refused_files_are_copied(
    run: Run, make: Make, lost: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    attach(run, make(deepseek), lost, tmp_path / "o")
    same(own(tmp_path / "o"), own(lost))
    attach(run, make(deepseek), lost, None)


def test_a_donor_may_be_a_layer_by_itself(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    """In any layout; an export's layer gets the target's number."""
    for to in ("deepseek", "vllm", "sglang"):
        head = tmp_path / to
        assert run("convert-mtp", make(deepseek, fp8=True), head, "--to", to, "--dtype", "bf16").code == 0
        attach(run, head, lost, tmp_path / f"{to}-o")
        same(layer(tmp_path / f"{to}-o"), without(in_bfloat16(layer(make(deepseek, fp8=True))), COPIES))


def test_a_layer_comes_out_as_it_went_in(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    attach(run, make(deepseek), lost, None)
    assert run("convert-mtp", lost, tmp_path / "back", "--shared", "copy").code == 0
    same(layer(tmp_path / "back"), layer(make(deepseek)))


def test_two_layers(run: Run, tmp_path: Path) -> None:
    """SGLang takes one only, which is told; the others take both."""
    donor = deepseek(tmp_path / "d", num_nextn_predict_layers=2)
    target = deepseek(tmp_path / "t", num_nextn_predict_layers=2, lose_mtp=True, fp8=True)
    ran = attach(run, donor, target, None, "--json")
    readers = json.loads(ran.out)["readers"]
    assert (readers["deepseek"], readers["vllm"]) == ([], [])
    assert "exactly 1" in readers["sglang"][0]
    assert "SGLang would not read the layer" in ran.err
    listed = config(target)["quantization_config"]["ignored_layers"]
    assert "model.layers.3.self_attn.o_proj" in listed


@pytest.mark.parametrize("shared", ["auto", "copy", "omit"])
@pytest.mark.parametrize("copies", ["equal", "differ", "none"])
def test_copies(run: Run, make: Make, lost: Path, tmp_path: Path, shared: str, copies: str) -> None:
    """Compared with the target's own: those that differ were trained, and are never replaced unasked."""
    donor = make(deepseek, copies=copies)
    ran = attach(run, donor, lost, tmp_path / "o", "--shared", shared)
    kept = shared == "copy" or (shared == "auto" and copies == "differ")
    assert (layer(tmp_path / "o").keys() >= COPIES) == kept
    if kept:
        same(layer(tmp_path / "o"), layer(donor if copies == "differ" else make(deepseek)))
    if copies == "differ":
        assert "differs from the target's" in ran.err


# -- what was there before --------------------------------------------------------------------------------------------


def put(path: Path, file: str, tensors: dict[str, Tensor], *, in_index: bool = False) -> None:
    """Add tensors to a file that is there or not."""
    had = load_file(path / file) if (path / file).exists() else {}
    save_file(
        {name: tensor.clone() for name, tensor in (had | tensors).items()}, path / file, metadata={"format": "pt"}
    )
    if in_index:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(tensors, file)
        (path / INDEX).write_text(json.dumps(index))


STALE = {f"{PREFIX}enorm.weight": torch.full((160,), 7.0), f"{PREFIX}mlp.experts.0.up_proj.weight": torch.ones(3, 3)}


@pytest.mark.parametrize("in_index", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_remains_in_a_kept_file(
    run: Run, make: Make, lost: Path, tmp_path: Path, in_place: bool, in_index: bool
) -> None:
    """Row 9: vLLM reads every tensor of a file that the index names, so they have to be out of the file."""
    tensors = own(lost)
    put(lost, "model-00002-of-000004.safetensors", STALE, in_index=in_index)
    nodes = {file.name: file.stat().st_ino for file in lost.glob("*.safetensors")}
    ran = attach(run, make(deepseek), lost, None if in_place else tmp_path / "o")
    found = lost if in_place else tmp_path / "o"
    same(own(found), tensors)
    same(layer(found), without(layer(make(deepseek)), COPIES))
    assert "what was there of layer 2 is removed" in ran.err
    changed = {name for name, node in nodes.items() if (found / name).stat().st_ino != node}
    assert changed == {"model-00002-of-000004.safetensors"}


def test_a_whole_layer_is_replaced(run: Run, make: Make, tmp_path: Path) -> None:
    target = deepseek(tmp_path / "t", seed=3, copies="differ")
    tensors = own(target)
    attach(run, make(deepseek), target, None, "--shared", "omit")
    same(own(target), tensors)
    same(layer(target), without(layer(make(deepseek)), COPIES))
    again = contents(target)
    attach(run, make(deepseek), target, None, "--shared", "omit")
    assert contents(target) == again


@pytest.mark.parametrize("in_index", [False, True])
def test_a_sidecar(run: Run, make: Make, lost: Path, in_index: bool) -> None:
    """Row 8: mtp.safetensors, which a loader of model*.safetensors passes over."""
    put(lost, "mtp.safetensors", layer_under(PREFIX, make(deepseek, seed=5)), in_index=in_index)
    attach(run, make(deepseek), lost, None)
    assert not (lost / "mtp.safetensors").exists()
    assert [file.name for file in lost.glob("model-mtp*")] == ["model-mtp-00001-of-00001.safetensors"]


def layer_under(prefix: str, path: Path) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in layer(path).items()}


def test_names_without_a_prefix_are_remains_too(run: Run, make: Make, lost: Path) -> None:
    """Row 21."""
    put(lost, "model-00004-of-000004.safetensors", {"layers.2.enorm.weight": torch.ones(160)}, in_index=True)
    attach(run, make(deepseek), lost, None)
    assert not [name for name in read(lost) if name.startswith("layers.")]


def test_a_file_of_remains_that_is_gone(run: Run, make: Make, lost: Path) -> None:
    put(lost, "mtp.safetensors", STALE, in_index=True)
    (lost / "mtp.safetensors").unlink()
    attach(run, make(deepseek), lost, None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("remains", [False, True])
def test_a_lone_file_gets_an_index(run: Run, make: Make, tmp_path: Path, in_place: bool, remains: bool) -> None:
    """Row 10: beside an index, loaders would take model.safetensors for all there is."""
    source = make(deepseek, lose_mtp=not remains, seed=1 if remains else 0)
    target = tmp_path / "t"
    target.mkdir()
    save_file(read(source), target / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", target / "config.json")
    tensors = own(target)
    attach(run, make(deepseek), target, None if in_place else tmp_path / "o", "--shared", "omit")
    found = target if in_place else tmp_path / "o"
    same(own(found), tensors)
    same(layer(found), without(layer(make(deepseek)), COPIES))
    assert {file.name for file in found.iterdir()} == {
        "config.json",
        INDEX,
        "model-00001-of-00001.safetensors",
        "model-mtp-00001-of-00001.safetensors",
    }
    assert in_place or (target / "model.safetensors").exists()


def test_other_files_stay(run: Run, make: Make, lost: Path) -> None:
    """Weights that no index names are not ours to remove, unless they are all of an MTP layer."""
    put(lost, "adapter.safetensors", {"lora.weight": torch.ones(2), f"{PREFIX}enorm.weight": torch.ones(160)})
    before = (lost / "adapter.safetensors").read_bytes()
    ran = run("convert-mtp", make(deepseek), "--attach-to", lost, "--in-place")
    assert ran.code == 0
    assert "adapter.safetensors is named by no index and stays as it is, although it has 1 tensors" in ran.err
    assert (lost / "adapter.safetensors").read_bytes() == before


def test_keys_of_the_index_are_kept(run: Run, make: Make, lost: Path) -> None:
    index = json.loads((lost / INDEX).read_text())
    index["metadata"] |= {"total_parameters": 5, "note": "x"}
    (lost / INDEX).write_text(json.dumps(index))
    attach(run, make(deepseek), lost, None)
    assert json.loads((lost / INDEX).read_text())["metadata"].keys() == {"total_size", "note"}
