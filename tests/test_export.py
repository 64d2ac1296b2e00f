"""specctl export of models that draft and of MTP layers, for the engines that run them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_deepseek
import tiny_mtp
import torch
from conftest import Run
from exporting import export, refused
from fixtures import Make
from safetensors.torch import load_file
from test_eagle3_layouts import LLAMA3, changed
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.models import load

# Models


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_drafts(run: Run, make: Make, tmp_path: Path, to: str, tied: bool) -> None:
    target, source = make(tiny.llama, seed=1), make(tiny.llama, seed=2, tie_word_embeddings=tied, shards=3)
    report = export(run, source, tmp_path / "o", to, "--target", target)
    assert (report["kind"], report["k"], report["checked"]["largest_difference"]) == ("llama", 3, 0)
    config, tensors = tiny.read(tmp_path / "o")
    assert ("lm_head.weight" in tensors) != tied
    assert all(tensor.numel() for tensor in tensors.values())
    assert config["rope_theta"] == 10000.0
    same_logits(source, tmp_path / "o")
    algorithm = "draft_model" if to == "vllm" else "STANDALONE"
    assert algorithm in (tmp_path / "o" / "RUN.md").read_text()
    for other in ("speculators", "original"):
        assert "has no layout for a draft that is a model" in refused(run, source, tmp_path / "p", other)


def test_many_files(run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a large draft is written: index and headers say the same."""
    from specctl.export import job

    monkeypatch.setattr(job, "write_shards", partial(job.write_shards, max_bytes=20_000))
    for tied in (False, True):
        source, out = make(tiny.llama, seed=2, tie_word_embeddings=tied), tmp_path / str(tied)
        export(run, source, out, "vllm")
        index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 1
        headers = {name: file.name for file in out.glob("*.safetensors") for name in load_file(file)}
        assert headers == index
        assert ("lm_head.weight" in index) != tied
        same_logits(source, out)


def same_logits(one: Path, other: Path) -> None:
    a, b = (
        dict(load(Checkpoint(path), torch.float32, torch.device("cpu"), "train").named_parameters())
        for path in (one, other)
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_tied_head_that_is_stored_too(run: Run, make: Make, tmp_path: Path) -> None:
    source = make(tiny.llama, seed=2, tie_word_embeddings=True)

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    export(run, changed(tmp_path / "both", source, edit), tmp_path / "o", "vllm")
    assert "lm_head.weight" not in Checkpoint(tmp_path / "o")


def test_an_index_that_names_a_tied_head(run: Run, make: Make, tmp_path: Path) -> None:
    """Which no shard has: with tying it loads, without it is an error that names it."""
    source = make(tiny.llama, seed=2, tie_word_embeddings=True, shards=2)
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    index = copy / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["lm_head.weight"] = listed["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(listed))
    export(run, copy, tmp_path / "o", "vllm")
    assert "lm_head.weight" not in Checkpoint(tmp_path / "o")
    same_logits(source, tmp_path / "o")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert "tensor lm_head.weight" in refused(run, copy, tmp_path / "p", "vllm")


def test_a_model_of_another_vocabulary(run: Run, make: Make, tmp_path: Path) -> None:
    target, source = make(tiny.llama, seed=1, vocab_size=272), make(tiny.llama, seed=2)
    said = refused(run, source, tmp_path / "o", "vllm", "--target", target)
    assert "has 264 vocabulary rows" in said
    assert "has 272" in said


@pytest.mark.parametrize("spelling", ["scaling", "parameters"])
def test_a_models_rotation(run: Run, make: Make, tmp_path: Path, spelling: str) -> None:
    values = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    source = make(tiny.llama, seed=2, **tiny.rope("llama3", spelling, theta=500000.0, **values))
    report = export(run, source, tmp_path / "o", "vllm")
    assert report["checked"]["largest_difference"] == 0
    config = Checkpoint(tmp_path / "o").config
    assert config["rope_scaling"] == config["rope_parameters"] == LLAMA3 | {"rope_theta": 500000.0}


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_models_of_every_family(run: Run, make: Make, tmp_path: Path, model_type: str) -> None:
    report = export(run, make(tiny.llama, seed=2, model_type=model_type), tmp_path / "o", "sglang")
    assert report["checked"]["largest_difference"] == 0


# MTP layers


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_an_mtp_layer(run: Run, make: Make, tmp_path: Path, to: str, fp8: bool) -> None:
    target = make(tiny_deepseek.deepseek, fp8=fp8)
    assert run("convert-mtp", target, tmp_path / "alone").code == 0
    report = export(run, tmp_path / "alone", tmp_path / "o", to, "--target", target)
    assert (report["kind"], report["k"]) == ("mtp", 1)
    assert report["checked"]["largest_difference"] == 0
    page = (tmp_path / "o" / "RUN.md").read_text()
    assert ('"method": "mtp"' if to == "vllm" else "NEXTN") in page
    facts = json.loads((tmp_path / "o" / "specctl.json").read_text())
    assert facts["target"]["tensors_sha"] == tensors_sha(Checkpoint(target))
    number = 0 if to == "sglang" else 2
    assert f"model.layers.{number}.eh_proj.weight" in Checkpoint(tmp_path / "o")
    export(run, tmp_path / "o", tmp_path / "again", "vllm")
    before, after = (tiny.read(tmp_path / name)[1] for name in ("alone", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    for other in ("speculators", "original"):
        assert "has no layout for an MTP layer" in refused(run, tmp_path / "o", tmp_path / "p", other)


def test_a_reduced_vocabulary_is_left_out_of_an_mtp_layer(run: Run, make: Make, tmp_path: Path) -> None:
    target = make(tiny_deepseek.deepseek)
    assert run("convert-mtp", target, tmp_path / "alone").code == 0
    vocab = Checkpoint(target).config["vocab_size"]
    reduced = tiny_mtp.reduced(tmp_path / "reduced", of=tmp_path / "alone", ids=range(0, vocab, 3))
    report = export(run, reduced, tmp_path / "o", "vllm", "--target", target)
    assert any(f"scores {len(range(0, vocab, 3))} of {vocab} token ids here" in note for note in report["notices"])
    config, tensors = tiny.read(tmp_path / "o")
    assert "draft_vocab_size" not in config
    assert "d2t" not in tensors


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_no_engine_has_mtp_layers_of_other_models(run: Run, make: Make, tmp_path: Path, to: str) -> None:
    base = make(tiny.llama, seed=1, num_hidden_layers=1)
    said = refused(run, make(tiny_mtp.mtp, of=base, alone="deepseek"), tmp_path / "o", to)
    assert "is a llama layer" in said
    assert "MTP layers of DeepSeek models" in said
    assert "a whole model with an MTP layer" in refused(run, make(tiny_mtp.mtp, of=base), tmp_path / "o", to)
