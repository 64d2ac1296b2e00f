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
from safetensors.torch import load_file, save_file
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


# The reader check


def rotated(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.update(rotated(2e4)), "takes rope (theta) for 20000.0, the draft has 10000.0"),
        (lambda c: c.update(rms_norm_eps=1e-6), "takes rms_norm_eps for 1e-06, the draft has 1e-05"),
        (
            lambda c: c.update(max_position_embeddings=128),
            "takes max_position_embeddings for 128, the draft has 256",
        ),
        (lambda c: c.pop("num_key_value_heads"), "takes num_key_value_heads for 4, the draft has 2"),
        (lambda c: c.update(tie_word_embeddings=True), "takes tie_word_embeddings for True, the draft has False"),
        (lambda c: c.update(mlp_bias=True), "takes mlp_bias for True, the draft has False"),
    ],
)
def test_a_model_described_wrongly_is_not_written(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Any, said: str
) -> None:
    """Whatever the writer got wrong, and whatever a reader takes for an absent key."""
    from specctl.export import llama

    right = llama._config

    def wrong(*arguments: Any) -> dict[str, Any]:
        config = right(*arguments)
        edit(config)
        return config

    monkeypatch.setattr(llama, "_config", wrong)
    for to, reader in (("vllm", "vLLM"), ("sglang", "SGLang")):
        assert f"{reader} {said}" in refused(run, make(tiny.llama, seed=2), tmp_path / "o", to)


def exchanged(tensors: dict[str, Tensor], one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t["model.norm.weight"].add_(1), "would read other numbers in tensor model.norm.weight"),
        (
            lambda t: exchanged(t, "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            "would read other numbers in tensor model.layers.0.mlp.gate_proj.weight",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].bfloat16()}),
            "would read other numbers in tensor lm_head.weight",
        ),
        (lambda t: t.pop("model.layers.1.input_layernorm.weight"), "model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_models_tensors_written_wrongly_leave_nothing(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Any, said: str
) -> None:
    from specctl.export.job import Job

    right = Job.write

    def wrong(self: Job, directory: Path, progress: Any) -> None:
        right(self, directory, progress)
        rewrite(directory, edit)

    monkeypatch.setattr(Job, "write", wrong)
    assert said in refused(run, make(tiny.llama, seed=2), tmp_path / "o", "vllm")


def rewrite(directory: Path, edit: Any) -> None:
    """The one file of weights, edited."""
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.update(rope_theta=2e4), "takes rope (theta) for 20000.0, the draft has 10000.0"),
        (lambda c: c.update(rms_norm_eps=1e-5), "takes rms_norm_eps for 1e-05, the draft has 1e-06"),
        (
            lambda c: c.update(max_position_embeddings=128),
            "takes max_position_embeddings for 128, the draft has 256",
        ),
        (lambda c: c.update(routed_scaling_factor=1.0), "takes routing (scale) for 1.0, the draft has 2.5"),
        (lambda c: c.update(norm_topk_prob=False), "takes routing (normalised) for False, the draft has True"),
    ],
)
def test_an_mtp_layer_described_wrongly_is_not_written(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Any, said: str
) -> None:
    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        edit(config)
        (directory / "config.json").write_text(json.dumps(config))

    for to, reader in (("vllm", "vLLM"), ("sglang", "SGLang")):
        assert f"{reader} {said}" in spoilt(run, make, tmp_path, monkeypatch, spoil, to)


def spoilt(run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, to: str) -> str:
    """What is said of an MTP layer that was written, and then something happened to it."""
    from specctl.export.mtp import MtpJob

    alone, right = tmp_path / "alone", MtpJob.write
    if not alone.exists():
        assert run("convert-mtp", make(tiny_deepseek.deepseek), alone).code == 0

    def wrong(self: MtpJob, directory: Path, progress: Any) -> None:
        right(self, directory, progress)
        spoil(directory)

    with monkeypatch.context() as patch:
        patch.setattr(MtpJob, "write", wrong)
        return refused(run, alone, tmp_path / "o", to)


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        (
            "eh_proj.weight",
            lambda t, name: t[name].copy_(t[name].roll(160, 1)),
            "would read other numbers in tensor NAME",
        ),
        ("enorm.weight", lambda t, name: t[name].add_(1), "would read other numbers in tensor NAME"),
        (
            "mlp.experts.3.down_proj.weight",
            lambda t, name: t[name][5, 7].mul_(-1),
            "would read other numbers in tensor NAME",
        ),
        ("hnorm.weight", lambda t, name: t.pop(name), "NAME"),
    ],
)
def test_an_mtp_layers_tensors_written_wrongly_leave_nothing(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, edit: Any, said: str
) -> None:
    """The halves of eh_proj exchanged among them, which is what others have published."""
    for to, number in (("vllm", 2), ("sglang", 0)):
        whole = f"model.layers.{number}.{name}"
        found = spoilt(run, make, tmp_path, monkeypatch, lambda d, n=whole: rewrite(d, lambda t: edit(t, n)), to)
        assert said.replace("NAME", whole) in found


@pytest.mark.parametrize("kind", ["llama", "mtp"])
def test_logits_are_compared(run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Numbers and description may be right and the module that is made of them another one all the same."""
    from specctl.export import llama, mtp

    module: Any = {"llama": llama, "mtp": mtp}[kind]
    right, calls = module._logits, []

    def wrong(of: Any) -> Tensor:
        calls.append(of)
        found: Tensor = right(of)
        return found + (len(calls) - 1) * 1e-4 * (1 + found.abs())

    source = make(tiny.llama, seed=2)
    if kind == "mtp":
        source = tmp_path / "alone"
        assert run("convert-mtp", make(tiny_deepseek.deepseek), source).code == 0
    monkeypatch.setattr(module, "_logits", wrong)
    said = refused(run, source, tmp_path / "o", "vllm")
    assert "logits of the" in said
    assert "as vLLM reads it differ by" in said


def test_a_command_by_which_an_engine_would_draft_less(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the number of tokens that SGLang is told without the target's own, which it counts."""
    from specctl.export import run_md

    right = run_md._sglang

    def wrong(*arguments: Any) -> str:
        return right(*arguments).replace("--speculative-num-draft-tokens 4", "--speculative-num-draft-tokens 3")

    monkeypatch.setattr(run_md, "_sglang", wrong)
    said = refused(run, make(tiny.llama, seed=2), tmp_path / "o", "sglang")
    assert "--speculative-num-draft-tokens 3" in said
    assert "drafts 2 tokens at a time, expected 3" in said
    export(run, make(tiny.llama, seed=2), tmp_path / "o", "vllm")
