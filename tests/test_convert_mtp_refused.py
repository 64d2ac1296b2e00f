"""What convert-mtp does not attach or strip: a layer that does not fit, a target that is not whole, a wrong command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_deepseek
import torch
from conftest import Run
from fixtures import Make
from test_convert_mtp import config, lose, with_config
from test_convert_mtp_attach import STALE, Values, attach, contents, lost, put, refused
from tiny_deepseek import INDEX, deepseek
from torch import Tensor

__all__ = ["lost"]


# -- what does not fit ------------------------------------------------------------------------------------------------

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        *[({key: tiny_deepseek.TINY[key] + 1}, key) for key in ("hidden_size", "vocab_size", "num_hidden_layers")],
        *[({key: tiny_deepseek.TINY[key] * 2}, key) for key in ("num_attention_heads", "kv_lora_rank", "v_head_dim")],
        *[({key: 16}, key) for key in ("n_routed_experts", "moe_intermediate_size", "qk_rope_head_dim", "q_lora_rank")],
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"rope_theta": 50000.0}, "rope (theta)"),
        ({"rope_scaling": YARN}, "rope (kind)"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_group": 1}, "n_group"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ],
    ids=str,
)
def test_a_donor_of_another_kind(run: Run, make: Make, tmp_path: Path, change: Values, word: str) -> None:
    """Named before anything is read but headers; a rope that differs changes no shape and would never be noticed."""
    target = deepseek(tmp_path / "t", lose_mtp=True, **change)
    ran = run("convert-mtp", make(deepseek), tmp_path / "o", "--attach-to", target)
    refused(ran, str(target), word)
    assert not (tmp_path / "o").exists()
    assert run("convert-mtp", make(deepseek), "--attach-to", target, "--plan").code == 2


def test_two_spellings_of_one_rope(run: Run, tmp_path: Path) -> None:
    """rope_scaling and rope_theta, and what transformers 5 makes of them."""

    def rename(config: Values, tensors: dict[str, Tensor]) -> None:
        scaling = dict(config.pop("rope_scaling"))
        kind = scaling.pop("type")
        config["rope_parameters"] = scaling | {"rope_type": kind, "rope_theta": config.pop("rope_theta")}

    donor = deepseek(tmp_path / "d", rope_scaling=YARN)
    target = deepseek(tmp_path / "t", rope_scaling=YARN, lose_mtp=True, edit=rename)
    attach(run, donor, target, None)
    assert "rope_scaling" not in config(target)


def test_tokenizers_are_compared(run: Run, make: Make, tmp_path: Path) -> None:
    donor, target = deepseek(tmp_path / "d", vocab_size=264), tmp_path / "t"
    deepseek(target, vocab_size=264, lose_mtp=True)
    words = "has no tokenizer"
    assert words in attach(run, donor, target, tmp_path / "o").err
    for path in (donor, target):
        copy_tokenizer(make(tiny.llama), path)
    assert words not in attach(run, donor, target, tmp_path / "p").err
    text = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps(text, indent=1))
    attach(run, donor, target, tmp_path / "q")
    vocab = text["model"]["vocab"]
    first, second = list(vocab)[97:99]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (target / "tokenizer.json").write_text(json.dumps(text))
    ran = run("convert-mtp", donor, tmp_path / "r", "--attach-to", target)
    refused(ran, str(target), "tokenizer", f"token {min(vocab[first], vocab[second])} ", str(donor))


def copy_tokenizer(source: Path, path: Path) -> None:
    for file in source.iterdir():
        if "token" in file.name:
            shutil.copyfile(file, path / file.name)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / INDEX).unlink() or (path / "model-00001-of-000004.safetensors").unlink(), ["3 of 4"]),
        (lambda path: (path / "model-00001-of-000004.safetensors").unlink(), ["00001", "not there"]),
        (lambda path: (path / "config.json").unlink(), ["config.json"]),
        (lambda path: (path / INDEX).write_text("{"), [INDEX]),
        (lambda path: put(path, "model-00001-of-000004.safetensors", {"x": torch.ones(1)}), ["tensor x is not in"]),
        (lambda path: put(path, "model.safetensors", {"x": torch.ones(1)}), ["both model.safetensors and"]),
        (
            lambda path: put(path, "model-00001-of-000004.safetensors", {"lm_head.weight": torch.ones(1)}),
            ["lm_head.weight is in model-00004-of-000004.safetensors by the index"],
        ),
        (
            lambda path: put(
                path, "model-00001-of-000004.safetensors", {"model.layers.5.x.weight": torch.ones(1)}, in_index=True
            ),
            ["layer 5 is neither"],
        ),
        (
            lambda path: put(
                path, "model-00001-of-000004.safetensors", {"model.layers.1.enorm.weight": torch.ones(1)}, in_index=True
            ),
            ["layer 1 is an MTP layer, but num_hidden_layers is 2"],
        ),
        (
            lambda path: (path / "config.json").write_text(
                (path / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
            ),
            ["no tensor of layer 2"],
        ),
    ],
)
def test_a_target_that_is_not_whole(
    run: Run, make: Make, lost: Path, tmp_path: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    damage(lost)
    before = contents(lost)
    for where in ([tmp_path / "o"], ["--in-place"], ["--plan"]):
        refused(run("convert-mtp", make(deepseek), *where, "--attach-to", lost), *words)
    assert contents(lost) == before
    assert list(tmp_path.iterdir()) == [lost]


def test_a_layer_that_is_one_of_the_target_s(run: Run, make: Make, tmp_path: Path) -> None:
    """A config that counts too few layers would have the last one removed."""
    target = deepseek(tmp_path / "t", num_hidden_layers=3, lose_mtp=True, **with_config(num_nextn_predict_layers=0))
    (target / "config.json").write_text(json.dumps(config(target) | {"num_hidden_layers": 2}))
    for command in (["--strip"], ["--attach-to", target]):
        first = target if command == ["--strip"] else make(deepseek)
        refused(run("convert-mtp", first, *command, "--in-place"), "layer 2 is neither", "set the number right")


def test_a_donor_that_is_not_whole(run: Run, lost: Path, tmp_path: Path) -> None:
    before = contents(lost)
    for arguments, word in ((lose("hnorm.weight"), "hnorm.weight is missing"), ({"lose_mtp": True}, "there are none")):
        donor = deepseek(tmp_path / word, **arguments)
        refused(run("convert-mtp", donor, "--attach-to", lost, "--in-place"), word)
        refused(run("convert-mtp", donor, "--attach-to", lost, "--plan"), word)
    assert contents(lost) == before


def test_a_head_is_no_target(run: Run, make: Make, tmp_path: Path) -> None:
    for to, word in (("sglang", "NextN export"), ("deepseek", "no tensor of layer 0")):
        assert run("convert-mtp", make(deepseek), tmp_path / to, "--to", to).code == 0
        refused(run("convert-mtp", make(deepseek), "--attach-to", tmp_path / to, "--in-place"), word)
        refused(run("convert-mtp", tmp_path / to, "--strip", "--in-place"), word)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["D", "--attach-to", "T"], ["no OUT given", "--in-place"]),
        (["D", "O", "--attach-to", "T", "--in-place"], ["--in-place writes no other directory"]),
        (["D", "--attach-to", "T", "--in-place", "--force"], ["--in-place writes no other directory"]),
        (["D", "O", "--attach-to", "T", "--plan"], ["--plan writes nothing"]),
        (["D", "O", "--attach-to", "T", "--to", "deepseek"], ["--to", "leave it out"]),
        (["D", "O", "--attach-to", "T", "--target", "T"], ["--target", "leave it out"]),
        (["D", "O", "--in-place"], ["--in-place", "leave it out"]),
        (["T", "--strip"], ["--in-place"]),
        (["T", "O", "--strip", "--in-place"], ["--in-place writes no other directory"]),
        (["T", "--strip", "--in-place", "--dtype", "bf16"], ["--dtype", "leave it out"]),
        (["T", "--strip", "--in-place", "--attach-to", "T"], ["--attach-to", "leave it out"]),
        (["D", "T/o", "--attach-to", "T"], ["lies in", "read"]),
        (["D", ".", "--attach-to", "T", "--force"], ["holds", "read"]),
        (["D", "T", "--attach-to", "T", "--force"], ["read"]),
        (["D", "O", "--attach-to", "no/where@x"], ["no/where"]),
        (["D", "--attach-to", "nowhere", "--in-place"], ["nowhere"]),
        (["D", "--attach-to", "nowhere", "--plan"], ["nowhere"]),
        (["D", "--attach-to", "org/name", "--plan"], ["org/name", "fetch it first"]),
        (["nowhere", "O", "--attach-to", "T"], ["nowhere"]),
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together(
    run: Run, make: Make, lost: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    places = {"D": make(deepseek), "T": lost, "O": tmp_path / "o", "T/o": lost / "o", ".": tmp_path}
    before = contents(lost)
    refused(run("convert-mtp", *(places.get(word, word) for word in arguments)), *words)
    assert contents(lost) == before


def test_an_output_that_is_there(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    refused(run("convert-mtp", make(deepseek), tmp_path / "o", "--attach-to", lost), "--force")
    attach(run, make(deepseek), lost, tmp_path / "o", "--force")


def test_plans(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    """They change nothing and say what will be."""
    put(lost, "model-00002-of-000004.safetensors", STALE)
    before = contents(lost)
    plan = json.loads(run("convert-mtp", make(deepseek), "--attach-to", lost, "--plan", "--json").out)
    text = run("convert-mtp", make(deepseek), "--attach-to", lost, "--in-place", "--plan").out
    assert "model-00002-of-000004.safetensors" in text
    assert "what was there of layer 2 is removed" in text
    assert contents(lost) == before
    done = json.loads(run("convert-mtp", make(deepseek), "--attach-to", lost, "--in-place", "--json").out)
    least, most = plan["bytes_to_write"]
    assert least == done["bytes_written"] < most
    assert [file["file"] for file in plan["target_files"]["written"]] == ["model-00002-of-000004.safetensors"]
    assert plan["target_files"]["kept"] == done["target_files"]["kept"]
    assert plan["layers"] == done["layers"] == [2]
    plan = json.loads(run("convert-mtp", lost, "--strip", "--plan", "--json").out)
    assert plan["target_files"]["removed"] == ["model-mtp-00001-of-00001.safetensors"]
    assert (plan["layers"], plan["bytes_to_write"]) == ([2], [0, 0])
    assert "removed" in run("convert-mtp", lost, "--strip", "--in-place", "--plan").out


@pytest.mark.parametrize("in_place", [False, True])
def test_no_room(
    run: Run, make: Make, lost: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    usage: Callable[[object], Any] = lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    before = contents(lost)
    where = ["--in-place"] if in_place else [tmp_path / "o"]
    ran = run("convert-mtp", make(deepseek), *where, "--attach-to", lost)
    assert ran.code == 3
    assert "1000 are free" in ran.err
    assert contents(lost) == before
    assert list(tmp_path.iterdir()) == [lost]
