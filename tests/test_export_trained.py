"""specctl export of what `specctl finetune` wrote: how much it drafts, a target that is found from anywhere, and MTP
layers of targets whose weights are in FP8."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_deepseek
import tiny_mtp
import torch
from conftest import Run
from exporting import export, refused
from finetuning import jsonl, recipe
from fixtures import Make
from safetensors.torch import load_file
from test_hub import REVISION, cached

from specctl.checkpoint import Checkpoint

__all__ = ["cached"]

HELLO = "256,104,101,108,108,111"
BIAS = "mlp.gate.e_score_correction_bias"


def trained(run: Run, tmp_path: Path, kind: str, target: object, **values: Any) -> Path:
    """A draft after two steps."""
    found = recipe(tmp_path / "recipe.json", kind, epochs=None, max_steps=2, **values)
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "draft")
    assert ran.code == 0, ran.err
    return tmp_path / "draft"


def says_what_the_target_says(run: Run, target: Path, draft: object) -> dict[str, Any]:
    asked = ["generate", "--target", target, "--token-ids", HELLO, "--max-tokens", 16, "--ignore-eos", "--json"]
    asked += ["--dtype", "float64"]
    plain, drafted = (json.loads(run(*asked, *more).out) for more in ([], ["--draft", draft, "--k", 2]))
    assert drafted["results"][0]["token_ids"] == plain["results"][0]["token_ids"]
    assert drafted["speculation"]["num_drafts"] > 0
    found: dict[str, Any] = drafted
    return found


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_a_model_that_was_trained_drafts_as_much_as_anywhere(run: Run, make: Make, tmp_path: Path, to: str) -> None:
    """Its recipe has steps of one, of which a model has no more."""
    target = make(tiny.llama, seed=11)
    draft = trained(run, tmp_path, "llama", target)
    assert json.loads((draft / "specctl.json").read_text())["recipe"]["loss"]["steps"] == 1
    done = run("generate", "--target", target, "--draft", draft, "--token-ids", HELLO, "--max-tokens", 4, "--json")
    assert json.loads(done.out)["effective"]["draft_length"] == 3
    report = export(run, draft, tmp_path / "o", to)
    assert report["k"] == 3
    flags = ['"num_speculative_tokens": 3'] if to == "vllm" else ["num-steps 3", "num-draft-tokens 4"]
    page = (tmp_path / "o" / "RUN.md").read_text()
    assert all(flag in report["commands"][to] and flag in page for flag in flags)
    assert "3 tokens are drafted at a time" in page
    assert str(target) in report["commands"][to]
    export(run, tmp_path / "o", tmp_path / "again", to)
    assert report["commands"][to].replace("/o", "/again") in (tmp_path / "again" / "RUN.md").read_text()


@pytest.fixture
def deepseek(make: Make) -> Path:
    return make(tiny_mtp.mtp, of=make(tiny.deepseek, seed=1, dtype=torch.bfloat16, **SMALL))


SMALL: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "rope_scaling": None}


@pytest.mark.parametrize("begin", ["random", "inside"])
def test_an_mtp_layer_that_was_trained(run: Run, tmp_path: Path, deepseek: Path, begin: str) -> None:
    draft = {} if begin == "random" else {"init": str(deepseek)}
    path = trained(run, tmp_path, "mtp", deepseek, draft=draft)
    number = Checkpoint(path)
    assert number.dtype("model.layers.1.eh_proj.weight") == torch.bfloat16
    assert number.dtype(f"model.layers.1.{BIAS}") == torch.float32, "choices hang on it"
    assert run("inspect", path).code == 0
    says_what_the_target_says(run, deepseek, path)
    for to in ("vllm", "sglang"):
        report = export(run, path, tmp_path / to, to)
        assert (report["k"], report["checked"]["largest_difference"]) == (2, 0)
        assert run("inspect", tmp_path / to).code == 0
        says_what_the_target_says(run, deepseek, tmp_path / to)
    again = export(run, tmp_path / "sglang", tmp_path / "again", "vllm")
    assert again["k"] == 2
    before, after = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("vllm", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def in_fp8(path: Path, *, of: Path) -> Path:
    """As DeepSeek-R1 is: every matrix in FP8, those of the MTP layer among them."""
    config, tensors = tiny.read(of)
    quantised = tiny_deepseek.quantised(tensors)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in quantised.values())
    return tiny.derive(path, of, config | {"quantization_config": tiny_deepseek.FP8}, quantised)


@pytest.mark.parametrize("begin", ["random", "inside"])
def test_an_mtp_layer_of_a_target_in_fp8(run: Run, make: Make, tmp_path: Path, deepseek: Path, begin: str) -> None:
    """The layer is plain, and so says its config. For an engine that goes by the target's it has to be put in FP8."""
    target = make(in_fp8, of=deepseek)
    path = trained(run, tmp_path, "mtp", target, draft={} if begin == "random" else {"init": str(target)})
    assert not {"quantization_config", "compression_config"} & Checkpoint(path).config.keys()
    ran = run("inspect", path, "--json")
    assert ran.code == 0, ran.out
    assert json.loads(ran.out)["mtp"]["quantisation"] is None
    says_what_the_target_says(run, target, path)

    report = export(run, path, tmp_path / "sglang", "sglang")
    assert (report["k"], report["checked"]["largest_difference"]) == (2, 0)
    assert "quantization_config" not in Checkpoint(tmp_path / "sglang").config
    says_what_the_target_says(run, target, tmp_path / "sglang")

    said = refused(run, path, tmp_path / "vllm", "vllm")
    assert "is stored as bfloat16 and would be misread, expected float8_e4m3fn" in said
    assert "specctl convert-mtp writes it in FP8 (--to vllm --dtype fp8 --target)" in said
    flags = ["--to", "vllm", "--dtype", "fp8", "--target", target]
    assert run("convert-mtp", path, tmp_path / "fp8", *flags).code == 0
    assert export(run, tmp_path / "fp8", tmp_path / "vllm", "vllm", "--target", target)["kind"] == "mtp"
    says_what_the_target_says(run, target, tmp_path / "vllm")

    whole = tmp_path / "whole"
    assert run("convert-mtp", path, whole, "--attach-to", target).code == 0
    says_what_the_target_says(run, whole, "mtp")
    export(run, path, tmp_path / "plain", "vllm", "--target", whole)


# The target


def facts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "specctl.json").read_text())["target"]
    return found


def test_a_target_named_from_where_the_user_was(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(tiny.llama, seed=11)
    monkeypatch.chdir(target.parent)
    draft = trained(run, tmp_path, "llama", os.path.join(".", target.name))
    assert (facts(draft)["name"], facts(draft)["revision"]) == (str(target), None)
    monkeypatch.chdir(tmp_path)
    report = export(run, draft, tmp_path / "o", "vllm")
    assert report["target"] == str(target)
    assert f"vllm serve {target} --speculative-config" in report["commands"]["vllm"]


@pytest.mark.parametrize("asked", ["org/tiny", "org/tiny@main", f"org/tiny@{REVISION}"])
def test_a_target_of_the_hub_is_named_with_its_commit(run: Run, cached: Path, tmp_path: Path, asked: str) -> None:
    draft = trained(run, tmp_path, "llama", asked)
    assert (facts(draft)["name"], facts(draft)["revision"]) == ("org/tiny", REVISION)
    pinned = f"org/tiny --revision {REVISION} --speculative"
    assert f"vllm serve {pinned}" in export(run, draft, tmp_path / "v", "vllm")["commands"]["vllm"]
    assert f"--model-path {pinned}" in export(run, draft, tmp_path / "s", "sglang")["commands"]["sglang"]
    page = (tmp_path / "v" / "RUN.md").read_text()
    assert f"- name: `org/tiny`, revision `{REVISION}`" in page


def test_what_a_llama_records_of_itself_is_no_chain(run: Run, make: Make, tmp_path: Path) -> None:
    """Also where others write it down."""
    draft = trained(run, tmp_path, "llama", make(tiny.llama, seed=11))
    value = json.loads((draft / "specctl.json").read_text())
    value["recipe"]["loss"]["steps"] = 5
    (draft / "specctl.json").write_text(json.dumps(value))
    assert export(run, draft, tmp_path / "o", "vllm")["k"] == 3


def test_a_run_over_several_rows_says_the_same(run: Run, make: Make, tmp_path: Path, deepseek: Path) -> None:
    """Prompts of text, batch by batch, with the layer as SGLang reads it."""
    path = trained(run, tmp_path, "mtp", deepseek)
    export(run, path, tmp_path / "sglang", "sglang")
    prompts = jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in ("1?", "22?", "333?")])
    asked = ["generate", "--target", deepseek, "--prompts", prompts, "--max-tokens", 8, "--json", "--dtype", "float64"]
    plain, drafted = (
        json.loads(run(*asked, *more).out)["results"] for more in ([], ["--draft", tmp_path / "sglang", "--batch", 3])
    )
    assert [each["text"] for each in plain] == [each["text"] for each in drafted]
