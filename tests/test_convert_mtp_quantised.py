"""Attaching to quantised targets, where the layer is left out of the quantisation; and stripping, which undoes it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseek
import torch
from conftest import Run
from fixtures import Make
from safetensors.torch import save_file
from test_convert_mtp import COPIES, PREFIX, config, in_bfloat16, layer, read, same, with_config, without
from test_convert_mtp_attach import Values, attach, contents, lost, own, refused, whole
from tiny_deepseek import INDEX, deepseek

__all__ = ["lost"]


# -- quantised targets ------------------------------------------------------------------------------------------------

MODULES = {
    f"{PREFIX}{name.removesuffix('.weight')}"
    for name, shape in (
        (name.removeprefix(PREFIX), shape) for name, shape in tiny_deepseek.shapes(tiny_deepseek.TINY).items()
    )
    if len(shape) == 2 and not name.startswith(("model.", "lm_head", "embed_tokens"))
}
SCHEMES: dict[str, Values] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}, "-:.*\\.0\\..*": {}}},
    "awq": {"quant_method": "awq", "modules_to_not_convert": ["mlp.gate"]},
}


def quantised(path: Path, values: Values, key: str = "quantization_config") -> Path:
    return deepseek(path, lose_mtp=True, edit=lambda config, _: config.update({key: values}))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_entries_in_the_target_s_own_scheme(run: Run, make: Make, tmp_path: Path, name: str, fp8: bool) -> None:
    """Rows 5 and 6: every module by its unfused name, and whole layers the way each reader looks for them."""
    target = quantised(tmp_path / "t", SCHEMES[name])
    ran = attach(run, make(deepseek, fp8=fp8), target, None)
    reference = in_bfloat16(layer(make(deepseek, fp8=fp8)))
    same(layer(target), without(reference, COPIES))
    assert ("written in bfloat16" in ran.err) == fp8
    assert "taken whole by deepseek, vllm, sglang" in ran.out
    values = config(target)["quantization_config"]
    had = SCHEMES[name]
    if name == "gptq":
        patterns = list(values["dynamic"])
        assert patterns[-2:] == list(had["dynamic"]), "ours come first, for the first that takes a name decides"
        for module in MODULES:
            assert re.match(patterns[0].removeprefix("-:"), module)
            assert not re.match(patterns[0].removeprefix("-:"), module.replace(".2.", ".1.").replace(".2.", ".20."))
        return
    listed = values[{"fp8": "ignored_layers", "compressed-tensors": "ignore", "awq": "modules_to_not_convert"}[name]]
    assert set(listed) >= MODULES | set(had.get("ignore", had.get("modules_to_not_convert", [])))
    if name == "compressed-tensors":
        ours = [entry.removeprefix("re:") for entry in listed if entry.startswith("re:") and "layers" in entry]
        assert any(re.fullmatch(pattern, f"{PREFIX}self_attn.fused_qkv_a_proj") for pattern in ours)
        assert not any(re.match(pattern, "model.layers.1.mlp.gate_proj") for pattern in ours)
    else:
        assert "model.layers.2" in listed


def test_a_plain_layer_beside_fp8(run: Run, make: Make, tmp_path: Path) -> None:
    """Left out of FP8; and when the layer is replaced by one in FP8, no longer."""
    target = deepseek(tmp_path / "t", fp8=True, lose_mtp=True)
    attach(run, make(deepseek), target, None)
    listed = config(target)["quantization_config"]["ignored_layers"]
    assert set(listed) == MODULES | {"lm_head", "model.layers.2", "model.decoder"}
    assert listed[0] == "lm_head", "transformers leaves it out by itself only where no list is given"
    attach(run, make(deepseek, fp8=True), target, None)
    assert config(target)["quantization_config"]["ignored_layers"] == ["lm_head"]
    same(layer(target), without(layer(make(deepseek, fp8=True)), COPIES))
    attach(run, make(deepseek), target, None, "--dtype", "fp8")
    same(layer(target), without(layer(make(deepseek, fp8=True)), COPIES))


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_the_list_that_is_there_is_used(run: Run, make: Make, tmp_path: Path, key: str) -> None:
    values = tiny_deepseek.FP8 | {key: ["lm_head", "model.layers.0.self_attn.o_proj"]}
    target = deepseek(
        tmp_path / "t", fp8=True, lose_mtp=True, edit=lambda config, _: config.update(quantization_config=values)
    )
    attach(run, make(deepseek), target, None)
    found = config(target)["quantization_config"]
    assert found.keys() == values.keys()
    assert found[key][:2] == values[key]


def test_the_number_that_sglang_knows(run: Run, tmp_path: Path) -> None:
    """For 61 it reads model.layers.61 as its own name; for every other number that name is on the list."""
    small = {
        "num_hidden_layers": 61,
        "hidden_size": 8,
        "n_routed_experts": 1,
        "vocab_size": 8,
        "q_lora_rank": 4,
        "first_k_dense_replace": 61,
    }
    donor = deepseek(tmp_path / "d", **small)
    target = deepseek(tmp_path / "t", fp8=True, lose_mtp=True, **small)
    ran = attach(run, donor, target, None)
    assert "taken whole by deepseek, vllm, sglang" in ran.out
    listed = config(target)["quantization_config"]["ignored_layers"]
    assert "model.layers.61" in listed
    assert "model.decoder" not in listed


@pytest.mark.parametrize(
    ("theirs", "ours", "dtype"),
    [
        (None, None, torch.float8_e4m3fn),
        ("ue8m0", "ue8m0", torch.float8_e4m3fn),
        (None, "ue8m0", torch.float8_e4m3fn),
        ("ue8m0", None, torch.bfloat16),
    ],
)
def test_fp8_is_kept_where_it_is_read(
    run: Run, make: Make, tmp_path: Path, theirs: str | None, ours: str | None, dtype: torch.dtype
) -> None:
    """Scales that are powers of two are scales; others are none to a reader of powers of two."""
    target = deepseek(tmp_path / "t", fp8=True, lose_mtp=True, scale_fmt=theirs)
    attach(run, make(deepseek, fp8=True, scale_fmt=ours), target, None)
    assert layer(target)["self_attn.o_proj.weight"].dtype == dtype
    assert config(target)["quantization_config"].get("scale_fmt") == theirs
    ran = run("convert-mtp", make(deepseek, fp8=True, scale_fmt=ours), "--attach-to", target, "--plan", "--json")
    assert json.loads(ran.out)["dtype"] == ("keep" if dtype == torch.float8_e4m3fn else "bf16")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "fp8, compressed-tensors, gptq, awq"]),
        ("x", ["quantization_config", "'x'"]),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert"]),
        ({"quant_method": "gptq", "dynamic": {"-:(": {}}}, ["regular expression"]),
        ({"quant_method": "compressed-tensors", "ignore": ["re:(a+)+b"]}, ["repeats too much"]),
        ({"quant_method": "compressed-tensors", "ignore": [1]}, ["ignore", "names of modules"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, ["weight_block_size"]),
    ],
)
def test_a_scheme_that_cannot_be_written(run: Run, make: Make, tmp_path: Path, values: Any, words: list[str]) -> None:
    target = quantised(tmp_path / "t", values)
    before = contents(target)
    refused(run("convert-mtp", make(deepseek), "--attach-to", target, "--in-place"), *words)
    assert contents(target) == before


def test_a_config_that_says_nothing_of_fp8(run: Run, make: Make, tmp_path: Path) -> None:
    target = deepseek(tmp_path / "t", fp8=True, lose_mtp=True, edit=lambda config, _: config.pop("quantization_config"))
    refused(run("convert-mtp", make(deepseek), tmp_path / "o", "--attach-to", target), "no quantization_config")


def test_fp8_for_a_target_that_is_not(run: Run, make: Make, lost: Path, tmp_path: Path) -> None:
    ran = run("convert-mtp", make(deepseek), tmp_path / "o", "--attach-to", lost, "--dtype", "fp8")
    refused(ran, "--dtype fp8", str(lost), "bf16")


def test_a_layer_left_out_comes_out_again(run: Run, make: Make, tmp_path: Path) -> None:
    """Of a target in any scheme, the plain layer that was put into it is extracted, and vLLM reads it beside it."""
    for name, values in SCHEMES.items():
        target = quantised(tmp_path / name, values)
        attach(run, make(deepseek), target, None)
        head = tmp_path / f"{name}-head"
        ran = run("convert-mtp", target, head, "--to", "vllm", "--target", target)
        assert ran.code == 0, ran.err
        same(layer(head), without(layer(make(deepseek)), COPIES))
        assert "quantization_config" not in config(head)
        facts = json.loads(run("inspect", target, "--json").out)["mtp"]
        assert facts["quantisation"].startswith(name)


@pytest.mark.parametrize("listed", [True, False])
def test_vllm_goes_by_the_target_s_list(run: Run, make: Make, tmp_path: Path, listed: bool) -> None:
    """A plain layer beside an FP8 target is taken where the target leaves out its modules, each by its name."""
    values = tiny_deepseek.FP8 | {"ignored_layers": sorted(MODULES) if listed else ["model.layers.2"]}
    target = deepseek(
        tmp_path / "t", fp8=True, edit=lambda config, _: config.update(quantization_config=values), lose_mtp=True
    )
    ran = run("convert-mtp", make(deepseek), tmp_path / "o", "--to", "vllm", "--target", target)
    assert (ran.code == 0) == listed
    if not listed:
        refused(ran, "vLLM would not read the result", "misread")


def test_half_of_a_joint_module(run: Run, make: Make, tmp_path: Path) -> None:
    values = tiny_deepseek.FP8 | {"ignored_layers": sorted(MODULES - {f"{PREFIX}mlp.shared_experts.up_proj"})}
    target = deepseek(
        tmp_path / "t", fp8=True, edit=lambda config, _: config.update(quantization_config=values), lose_mtp=True
    )
    ran = run("convert-mtp", make(deepseek), tmp_path / "o", "--to", "vllm", "--target", target)
    refused(ran, "mlp.shared_experts.gate_proj, mlp.shared_experts.up_proj", "only a part")


# -- strip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"fp8": True}, {"lose_mtp": True}, {"shards": 1}], ids=str)
def test_strip(run: Run, tmp_path: Path, arguments: Values) -> None:
    target = deepseek(tmp_path / "t", **arguments)
    tensors, had = own(target), config(target)
    ran = run("convert-mtp", target, "--strip", "--in-place")
    assert ran.code == 0, ran.err
    whole(target)
    same(read(target), tensors)
    assert config(target) == had | {"num_nextn_predict_layers": 0}
    assert json.loads(run("inspect", target, "--json").out)["mtp"]["found"] == []
    refused(run("convert-mtp", target, "--strip", "--in-place"), "nothing to strip")


@pytest.mark.parametrize("name", [None, *sorted(SCHEMES)])
def test_strip_undoes_what_attach_did(run: Run, make: Make, tmp_path: Path, name: str | None) -> None:
    target = tmp_path / "t"
    if name is None:
        deepseek(target, lose_mtp=True)
    else:
        quantised(target, SCHEMES[name])
    before, had = {n: d for n, d in contents(target).items() if "config" not in n and n != INDEX}, config(target)
    attach(run, make(deepseek), target, None)
    assert run("convert-mtp", target, "--strip", "--in-place").code == 0
    whole(target)
    assert {n: d for n, d in contents(target).items() if "config" not in n and n != INDEX} == before
    found = config(target) | {"num_nextn_predict_layers": 1}
    if name == "fp8":
        assert found["quantization_config"].pop("ignored_layers") == ["lm_head"]
    assert found == had


def test_strip_of_a_lone_file(run: Run, make: Make, tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.mkdir()
    save_file(read(make(deepseek)), target / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(make(deepseek) / "config.json", target / "config.json")
    tensors = own(target)
    assert run("convert-mtp", target, "--strip", "--in-place").code == 0
    assert {file.name for file in target.iterdir()} == {"config.json", "model.safetensors"}
    same(read(target), tensors)


def test_a_claim_of_nothing_with_a_layer(run: Run, tmp_path: Path) -> None:
    """Row 20: the opposite mismatch; either remedy works."""
    target = deepseek(tmp_path / "t", **with_config(num_nextn_predict_layers=0))
    attach(run, deepseek(tmp_path / "d"), target, tmp_path / "o")
    assert run("convert-mtp", target, "--strip", "--in-place").code == 0
    assert not layer(target)
