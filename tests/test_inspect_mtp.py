"""specctl inspect of DeepSeek checkpoints: what is claimed, what is there, and what to do about the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from fixtures import Make
from test_convert_mtp import PREFIX, lose, with_config
from tiny_deepseek import deepseek


def test_facts(run: Run, make: Make) -> None:
    ran = run("inspect", make(deepseek, fp8=True), "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["servable"]
    model = found["model"]
    assert (model["family"], model["latent"], model["experts"], model["experts_per_token"]) == ("deepseek_v3", 72, 4, 2)
    assert model["kv_bytes_per_token"] == 2 * 72 * 2, "two layers, in the bfloat16 that the config names"
    mtp = found["mtp"]
    assert (mtp["family"], mtp["role"], mtp["dialect"]) == ("deepseek_v3", "target with MTP", "deepseek")
    assert (mtp["claimed"], mtp["found"], mtp["quantisation"]) == (1, [2], "fp8 in blocks of 128 x 128")
    (layer,) = mtp["layers"]
    assert layer["dtypes"] == {"bfloat16": 11, "float8_e4m3fn": 20, "float32": 21}
    assert layer["copies"] == {"embed_tokens.weight": "equal", "shared_head.head.weight": "equal"}
    assert layer["whole"]
    text = run("inspect", make(deepseek, fp8=True)).out
    for words in (
        "layers claimed: 1, found: 2",
        "20 float8_e4m3fn",
        "embed_tokens.weight: equal",
        "can be served; its MTP",
    ):
        assert words in text


@pytest.mark.parametrize(("to", "number"), [("deepseek", 2), ("vllm", 2), ("sglang", 0)])
def test_a_head_by_itself(run: Run, make: Make, tmp_path: Path, to: str, number: int) -> None:
    source = make(deepseek, fp8=True, scale_fmt="ue8m0")
    assert run("convert-mtp", source, tmp_path / "o", "--to", to).code == 0
    ran = run("inspect", tmp_path / "o", "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert (found["servable"], found["model"]) == (False, None)
    mtp = found["mtp"]
    assert (mtp["role"], mtp["found"]) == ("MTP head", [number])
    assert mtp["dialect"] == ("sglang" if to == "sglang" else "deepseek")
    assert mtp["quantisation"].endswith("ue8m0")
    assert mtp["layers"][0]["copies"] == {"embed_tokens.weight": "absent", "shared_head.head.weight": "absent"}


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        ({"lose_mtp": True}, "claims 1 MTP layer, and no tensor of any is there", "num_nextn_predict_layers to 0"),
        (with_config(num_nextn_predict_layers=0), "layer 2 is an MTP layer, but num_nextn", "set it to 1"),
        (lose("hnorm.weight"), "layer 2 is not whole (1 faults): hnorm.weight is missing", "original"),
        (with_config(num_hidden_layers=61), "layer 61", "config.json"),
        ({"edit": lambda _, t: t.update({PREFIX + "x.weight": torch.ones(2)})}, "x.weight is not part of it", "orig"),
        (with_config(num_nextn_predict_layers="x"), "num_nextn_predict_layers", "right"),
    ],
)
def test_what_is_wrong(run: Run, tmp_path: Path, arguments: dict[str, Any], what: str, remedy: str) -> None:
    source = deepseek(tmp_path / "s", **arguments)
    ran = run("inspect", source, "--json")
    assert ran.code == 2
    found = json.loads(ran.out)
    assert found["mtp"]["convertible"] is False
    problems = [problem for problem in found["problems"] if what in problem["what"]]
    assert [problem["severity"] for problem in problems] == ["error"]
    assert remedy in problems[0]["remedy"]


def test_a_head_of_its_own(run: Run, make: Make) -> None:
    ran = run("inspect", make(deepseek, copies="differ"), "--json")
    assert ran.code == 0
    problems = [p for p in json.loads(ran.out)["problems"] if "differs from the target's own" in p["what"]]
    assert [problem["severity"] for problem in problems] == ["warning", "warning"]


def test_a_stray_layer(run: Run, tmp_path: Path) -> None:
    source = deepseek(tmp_path / "s", edit=lambda _, t: t.update({"model.layers.5.x.weight": torch.ones(3)}))
    ran = run("inspect", source, "--json")
    assert ran.code == 0
    assert "1 tensors of layer 5 belong to no layer of the config" in [
        p["what"] for p in json.loads(ran.out)["problems"]
    ]


def test_a_model_of_another_family_has_no_section(run: Run, make: Make) -> None:
    import tiny

    assert json.loads(run("inspect", make(tiny.llama), "--json").out)["mtp"] is None
