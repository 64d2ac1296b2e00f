"""specctl convert-mtp: what comes out is the source's layer, bit for bit where it should be, or nothing comes out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseek
import torch
from conftest import Ran, Run
from fixtures import Make
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_deepseek import deepseek
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha

PREFIX = "model.layers.2."
COPIES = {"embed_tokens.weight", "shared_head.head.weight"}


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, from the files alone."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in found
            found[name] = tensor
    return found


def layer(path: Path, prefix: str = PREFIX) -> dict[str, Tensor]:
    """The tensors under a prefix, by their names within the layer."""
    return {name.removeprefix(prefix): tensor for name, tensor in read(path).items() if name.startswith(prefix)}


def config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (name, found[name].dtype, found[name].shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def without(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def in_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference: FP8 multiplied out, the bias as it is."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == tiny_deepseek.E4M3:
            tensor = tiny_deepseek.dequantise(tensor, tensors[f"{name}_scale_inv"])
        found[name] = tensor if name.endswith("bias") else tensor.bfloat16()
    return found


def consistent(path: Path) -> None:
    """Index, files and sizes say the same, and there is nothing else in the directory."""
    index = json.loads((path / tiny_deepseek.INDEX).read_text())
    found = {}
    for file in path.glob("*.safetensors"):
        assert file.name.startswith("model-mtp-")
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(path).values())
    others = {file.name for file in path.iterdir()} - set(found.values())
    assert others == {"config.json", "specctl.json", tiny_deepseek.INDEX}


def refused(ran: Ran, output: Path, *words: str) -> None:
    """Exit 2, one sentence with these words, and nothing left behind."""
    assert (ran.code, ran.out) == (2, "")
    sentence = ran.err.splitlines()[-1]
    assert sentence.startswith("Error: ")
    for word in words:
        assert word in sentence
    assert not output.exists()
    assert not list(output.parent.glob(f".{output.name}*"))


def convert(run: Run, source: Path, output: Path, *options: object) -> Ran:
    ran = run("convert-mtp", source, output, *options)
    assert ran.code == 0, ran.err
    consistent(output)
    return ran


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"fp8": True}, {"fp8": True, "scale_fmt": "ue8m0"}], ids=str)
def test_keep(run: Run, make: Make, tmp_path: Path, arguments: dict[str, Any]) -> None:
    source = make(deepseek, **arguments)
    convert(run, source, tmp_path / "o")
    same(layer(tmp_path / "o"), without(layer(source), COPIES))
    assert len(read(tmp_path / "o")) == len(layer(source)) - 2, "nothing of the other layers"
    assert config(tmp_path / "o") == config(source)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_bf16(run: Run, make: Make, tmp_path: Path, fp8: bool, scale_fmt: str | None) -> None:
    """CM7: what remains says nothing of FP8, in tensors, index or config."""
    source = make(deepseek, fp8=fp8, scale_fmt=scale_fmt)
    convert(run, source, tmp_path / "o", "--dtype", "bf16")
    found = layer(tmp_path / "o")
    same(found, without(in_bfloat16(layer(source)), COPIES))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}
    assert [name for name, tensor in found.items() if tensor.dtype == torch.float32] == [
        "mlp.gate.e_score_correction_bias"
    ]
    assert "quantization_config" not in config(tmp_path / "o")
    assert config(tmp_path / "o")["torch_dtype"] == "bfloat16"
    assert "scale_inv" not in (tmp_path / "o" / tiny_deepseek.INDEX).read_text()
    convert(run, tmp_path / "o", tmp_path / "again", "--dtype", "bf16", "--shared", "omit")
    same(layer(tmp_path / "again"), found)


def test_keep_then_bf16(run: Run, make: Make, tmp_path: Path) -> None:
    source = make(deepseek, fp8=True)
    convert(run, source, tmp_path / "kept")
    convert(run, tmp_path / "kept", tmp_path / "o", "--dtype", "bf16")
    same(layer(tmp_path / "o"), without(in_bfloat16(layer(source)), COPIES))


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_fp8(run: Run, make: Make, tmp_path: Path, scale_fmt: str | None) -> None:
    """The published quantisation, in the format of the target's config where it has one."""
    source, target = make(deepseek), make(deepseek, fp8=True, scale_fmt=scale_fmt)
    convert(run, source, tmp_path / "o", "--dtype", "fp8", "--target", target)
    same(layer(tmp_path / "o"), without(layer(target), COPIES))
    assert config(tmp_path / "o")["quantization_config"] == config(target)["quantization_config"]
    convert(run, source, tmp_path / "p", "--dtype", "fp8")
    same(layer(tmp_path / "p"), without(layer(make(deepseek, fp8=True)), COPIES))
    assert config(tmp_path / "p")["quantization_config"] == tiny_deepseek.FP8
    convert(run, target, tmp_path / "q", "--dtype", "fp8")
    same(layer(tmp_path / "q"), without(layer(target), COPIES))


def test_a_quantised_projection_becomes_bfloat16(run: Run, make: Make, tmp_path: Path) -> None:
    """Engines make eh_proj a plain module: numbers would be copied into it without their scale."""

    def quantise(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = f"{PREFIX}eh_proj.weight"
        tensors[name], tensors[f"{name}_scale_inv"] = tiny_deepseek.quantise(tensors[name])

    source = deepseek(tmp_path / "s", fp8=True, edit=quantise)
    convert(run, source, tmp_path / "o")
    found, given = layer(tmp_path / "o"), layer(source)
    expected = tiny_deepseek.dequantise(given["eh_proj.weight"], given["eh_proj.weight_scale_inv"]).bfloat16()
    assert torch.equal(found["eh_proj.weight"], expected)
    assert "eh_proj.weight_scale_inv" not in found


def test_a_bias_is_float32_again(run: Run, tmp_path: Path) -> None:
    def round_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = f"{PREFIX}mlp.gate.e_score_correction_bias"
        tensors[name] = tensors[name].bfloat16()

    convert(run, deepseek(tmp_path / "s", edit=round_bias), tmp_path / "o")
    assert layer(tmp_path / "o")["mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_a_half_quantised_layer(run: Run, tmp_path: Path) -> None:
    def multiply_out(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = f"{PREFIX}self_attn.o_proj.weight"
        tensors[name] = tiny_deepseek.dequantise(tensors[name], tensors.pop(f"{name}_scale_inv")).bfloat16()

    source = deepseek(tmp_path / "s", fp8=True, edit=multiply_out)
    refused(run("convert-mtp", source, tmp_path / "o"), tmp_path / "o", "self_attn.o_proj.weight", "--dtype")
    convert(run, source, tmp_path / "p", "--dtype", "bf16")
    convert(run, source, tmp_path / "q", "--dtype", "fp8")


# -- scales: CM2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp8"])
def test_a_missing_scale(run: Run, tmp_path: Path, dtype: str) -> None:
    scale = f"{PREFIX}self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    source = deepseek(tmp_path / "s", fp8=True, edit=lambda _, tensors: tensors.pop(scale))
    ran = run("convert-mtp", source, tmp_path / "o", "--dtype", dtype)
    refused(ran, tmp_path / "o", scale, "kv_a_proj_with_mqa.weight is FP8", "is missing")


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("wrong", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_scale_that_is_none(run: Run, tmp_path: Path, dtype: str, wrong: float) -> None:
    scale = f"{PREFIX}mlp.experts.3.down_proj.weight_scale_inv"
    source = deepseek(tmp_path / "s", fp8=True, edit=lambda _, tensors: tensors[scale].view(-1)[-1:].fill_(wrong))
    refused(run("convert-mtp", source, tmp_path / "o", "--dtype", dtype), tmp_path / "o", scale)


def test_a_scale_of_another_shape(run: Run, tmp_path: Path) -> None:
    scale = f"{PREFIX}self_attn.o_proj.weight_scale_inv"
    source = deepseek(tmp_path / "s", fp8=True, edit=lambda _, t: t.update({scale: torch.ones(1, 1)}))
    refused(run("convert-mtp", source, tmp_path / "o"), tmp_path / "o", scale, "[2, 1]")


def test_weights_and_scales_in_different_shards(make: Make) -> None:
    """The fixture has such pairs, so that every test above has converted some."""
    source = make(deepseek, fp8=True)
    file_of = json.loads((source / tiny_deepseek.INDEX).read_text())["weight_map"]
    apart = [n for n, f in file_of.items() if n.startswith(PREFIX) and file_of.get(f"{n}_scale_inv", f) != f]
    assert apart


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quant_method": "awq"}, ["awq"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size"]),
        ({"quant_method": "fp8"}, ["weight_block_size"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e5m2"}, ["scale_fmt"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, ["fmt"]),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ["scale_inv", "blocks of [64, 64]"]),
        ("fp8", ["quantization_config"]),
        (None, ["no quantization_config"]),
    ],
)
def test_a_quantisation_that_is_another(run: Run, tmp_path: Path, values: Any, words: list[str]) -> None:
    source = deepseek(tmp_path / "s", fp8=True, edit=lambda config, _: config.update(quantization_config=values))
    refused(run("convert-mtp", source, tmp_path / "o"), tmp_path / "o", *words)


# -- which layer: CM4 and CM6 -----------------------------------------------------------------------------------------


def bare(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Names without `model.`."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def test_names_without_a_prefix(run: Run, make: Make, tmp_path: Path) -> None:
    convert(run, deepseek(tmp_path / "s", fp8=True, edit=bare), tmp_path / "o")
    same(layer(tmp_path / "o"), without(layer(make(deepseek, fp8=True)), COPIES))


def test_a_stray_layer(run: Run, tmp_path: Path) -> None:
    stray = {"model.layers.5.x.weight": torch.ones(3)}
    source = deepseek(tmp_path / "s", edit=lambda _, tensors: tensors.update(stray))
    ran = convert(run, source, tmp_path / "o")
    assert "1 tensors of layer 5" in ran.err
    assert not [name for name in read(tmp_path / "o") if not name.startswith(PREFIX)]


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_layer_numbers_come_from_the_config(run: Run, tmp_path: Path, layers: int) -> None:
    source = deepseek(tmp_path / "s", num_hidden_layers=layers, first_k_dense_replace=9)
    ran = run("convert-mtp", source, tmp_path / "o")
    refused(ran, tmp_path / "o", f"layer {layers}", "is missing")  # a dense MTP layer is none
    shutil.rmtree(source)
    convert(run, deepseek(source, num_hidden_layers=layers), tmp_path / "o")
    assert {name.split(".")[2] for name in read(tmp_path / "o")} == {str(layers)}


def test_two_layers(run: Run, tmp_path: Path) -> None:
    source = deepseek(tmp_path / "s", num_nextn_predict_layers=2, copies="none")
    for name in ("deepseek", "vllm"):
        convert(run, source, tmp_path / name, "--to", name)
        assert {found.split(".")[2] for found in read(tmp_path / name)} == {"2", "3"}
    ran = run("convert-mtp", source, tmp_path / "o", "--to", "sglang")
    refused(ran, tmp_path / "o", "num_nextn_predict_layers 2", "exactly 1")


def lose(*names: str) -> dict[str, Any]:
    return {"edit": lambda _, tensors: [tensors.pop(PREFIX + name) for name in names]}


def with_config(**values: Any) -> dict[str, Any]:
    return {"edit": lambda config, _: config.update(values)}


def without_key(key: str, **more: Any) -> dict[str, Any]:
    return {"edit": lambda config, _: config.pop(key), **more}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lose_mtp": True}, ["layer 2", "there are none", "lost in saving"]),
        ({"lose_mtp": True, **with_config(num_nextn_predict_layers=0)}, ["no MTP layer is declared"]),
        (without_key("num_nextn_predict_layers", lose_mtp=True), ["no MTP layer is declared"]),
        (with_config(num_nextn_predict_layers=0), ["no MTP layer is declared", "layer 2 is one", "set it to 1"]),
        (with_config(num_nextn_predict_layers=10**9), ["num_nextn_predict_layers", "at most"]),
        (with_config(num_nextn_predict_layers=-1), ["num_nextn_predict_layers"]),
        (with_config(model_type="llama"), ["'llama'", "not a DeepSeek MTP model"]),
        (with_config(num_hidden_layers=61), ["layer 61", "found one at layer 2", "set num_hidden_layers"]),
        (with_config(num_nextn_predict_layers=2), ["layer 3", "found one at layer 2", "set num_nextn_predict_layers"]),
        (lose("hnorm.weight"), ["layer 2", "hnorm.weight is missing"]),
        (lose("hnorm.weight", "enorm.weight", "mlp.experts.1.up_proj.weight"), ["hnorm", "enorm", "experts.1"]),
        (
            with_config(n_routed_experts=5),
            ["mlp.experts.4.gate_proj.weight is missing", "gate.weight has shape [4, 160]"],
        ),
        (with_config(n_routed_experts=3), ["mlp.experts.3.down_proj.weight is not part of it"]),
        (with_config(n_routed_experts=10**15), ["n_routed_experts"]),
        (with_config(hidden_size=168), ["has shape", "168"]),
        (with_config(q_lora_rank=None), ["self_attn.q_proj.weight is missing"]),
        (with_config(topk_method="greedy"), ["topk_method"]),
        (with_config(attention_bias=True), ["attention_bias"]),
        (with_config(kv_lora_rank="x"), ["kv_lora_rank"]),
        ({"edit": lambda _, t: t.update({PREFIX + "enorm.weight": torch.ones(160, dtype=torch.int8)})}, ["int8"]),
        ({"edit": lambda _, t: t.update({"layers.2.enorm.weight": torch.ones(160)})}, ["enorm", "remove either"]),
    ],
)
def test_what_is_no_mtp_layer(run: Run, tmp_path: Path, arguments: dict[str, Any], words: list[str]) -> None:
    source = deepseek(tmp_path / "s", **arguments)
    refused(run("convert-mtp", source, tmp_path / "o"), tmp_path / "o", *words)


def test_a_layer_without_query_compression(run: Run, tmp_path: Path) -> None:
    """As in V2-Lite."""
    source = deepseek(tmp_path / "s", q_lora_rank=None)
    convert(run, source, tmp_path / "o", "--to", "sglang")
    assert "self_attn.q_proj.weight" in layer(tmp_path / "o", "model.layers.0.")


def test_what_saving_has_lost_in_the_config(run: Run, tmp_path: Path) -> None:
    """transformers 5 leaves keys out that vLLM and SGLang go by."""
    source = deepseek(tmp_path / "s", edit=lambda config, _: [config.pop(k) for k in ("topk_method", "scoring_func")])
    ran = convert(run, source, tmp_path / "o", "--to", "vllm")
    assert "topk_method" in ran.err
    assert (config(tmp_path / "o")["topk_method"], config(tmp_path / "o")["scoring_func"]) == ("noaux_tc", "sigmoid")


# -- other families ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (["mtp.0.main_proj.weight", "mtp.0.enorm.weight"], "DSpark"),
        (["mtp.1.markov_head.weight"], "DSpark"),
        (["mtp.0.e_proj.weight", "mtp.0.h_proj.weight", "mtp.0.enorm.weight"], "DeepSeek-V4"),
        (["model.layers.2.self_attn.indexer.wk.weight"], "DeepSeek-V3.2"),
        (["mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight"], "Qwen3-Next"),
        (["mtp.fc_embedding.weight", "mtp.fc_hidden.weight"], "Qwen4-Exp"),
        (["model.mtp_layers.0.input_proj.weight"], "MiMo-7B"),
        (["model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.pre_mlp_layernorm.weight"], "MiMo-V2"),
        (["model.mtp.layers.0.enorm.m.weight"], "LongCat"),
        (["model.mtp_block.0.norm.weight"], "ERNIE"),
        (["mtp.layers.0.eh_proj.weight"], "Nemotron-H"),
        (["model.layers.2.transformer.shared_head.output.weight"], "Step-3.5"),
        (["model.layers.2.eh_proj.weight", "model.layers.2.attention.dense.weight"], "Bailing"),
        (["model.layers.2.eh_proj.weight", "model.layers.2.final_layernorm.weight"], "Hunyuan"),
        (["model.mtp.layers.0.transformer_layer.norm.weight"], "MiniMax-M3"),
        (["model.mtp.layers.0.embed_norm.weight"], "Inkling"),
        (["pre_projection.weight"], "Gemma-4"),
        (["model.language_model.layers.2.eh_proj.weight"], "GLM-OCR"),
    ],
)
def test_families_are_told_by_their_modules(run: Run, tmp_path: Path, names: list[str], family: str) -> None:
    """Whatever the label in config.json: this one says deepseek_v3."""
    tensors = dict.fromkeys(names, torch.ones(2))
    source = tiny_deepseek.write(tmp_path / "s", tiny_deepseek.TINY, tensors, shards=1)
    refused(run("convert-mtp", source, tmp_path / "o"), tmp_path / "o", family)
    assert family in run("inspect", source).out


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("deepseek_v32", "DeepSeek-V3.2"), ("glm4_moe", "GLM-4.5"), ("kimi_k3", "Kimi-K3"), ("qwen3_next", "Qwen")],
)
def test_families_are_told_by_their_label(run: Run, tmp_path: Path, model_type: str, family: str) -> None:
    source = deepseek(tmp_path / "s", model_type=model_type)
    refused(run("convert-mtp", source, tmp_path / "o"), tmp_path / "o", family)


# -- embedding and head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["deepseek", "vllm", "sglang"])
@pytest.mark.parametrize(("shared", "written"), [("auto", False), ("copy", True), ("omit", False)])
@pytest.mark.parametrize("copies", ["equal", "none"])
def test_equal_copies(run: Run, make: Make, tmp_path: Path, to: str, shared: str, written: bool, copies: str) -> None:
    source = make(deepseek, copies=copies)
    convert(run, source, tmp_path / "o", "--to", to, "--shared", shared)
    found = layer(tmp_path / "o", "model.layers.0." if to == "sglang" else PREFIX)
    expected = layer(make(deepseek))
    same(found, expected if written else without(expected, COPIES))


def test_a_head_of_its_own_is_kept(run: Run, make: Make, tmp_path: Path) -> None:
    source = make(deepseek, copies="differ")
    ran = convert(run, source, tmp_path / "o")
    assert "shared_head.head.weight differs from the target's and is kept" in ran.err
    same(layer(tmp_path / "o"), layer(source))
    for to in ("vllm", "sglang"):
        ran = run("convert-mtp", source, tmp_path / to, "--to", to)
        refused(ran, tmp_path / to, "differs from the target's", "--shared omit")
        ran = convert(run, source, tmp_path / to, "--to", to, "--shared", "omit")
        assert "left out as asked" in ran.err


def test_one_bit_makes_a_copy_another(run: Run, tmp_path: Path) -> None:
    def flip(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}embed_tokens.weight"].view(torch.int16)[63, 159] ^= 1

    source = deepseek(tmp_path / "s", edit=flip)
    convert(run, source, tmp_path / "o")
    assert set(layer(tmp_path / "o")) & COPIES == {"embed_tokens.weight"}


def test_a_target_decides_what_is_equal(run: Run, make: Make, tmp_path: Path) -> None:
    source, other = make(deepseek), make(deepseek, seed=1)
    convert(run, source, tmp_path / "o", "--target", other)
    same(layer(tmp_path / "o"), layer(source))
    convert(run, tmp_path / "o", tmp_path / "p", "--target", source)
    same(layer(tmp_path / "p"), without(layer(source), COPIES))


def test_copies_that_nothing_can_give(run: Run, make: Make, tmp_path: Path) -> None:
    convert(run, make(deepseek), tmp_path / "head")
    (tmp_path / "head" / "specctl.json").unlink()
    ran = run("convert-mtp", tmp_path / "head", tmp_path / "o", "--shared", "copy")
    refused(ran, tmp_path / "o", "embed_tokens.weight", "--target")
    convert(run, tmp_path / "head", tmp_path / "o", "--shared", "copy", "--target", make(deepseek))
    same(layer(tmp_path / "o"), layer(make(deepseek)))


def test_copies_come_from_the_recorded_target(run: Run, tmp_path: Path) -> None:
    """specctl.json names it; a directory that has another config by now is not it."""
    source = deepseek(tmp_path / "s", fp8=True)
    convert(run, source, tmp_path / "there", "--to", "sglang")
    convert(run, tmp_path / "there", tmp_path / "back", "--shared", "copy")
    same(layer(tmp_path / "back"), layer(source))
    convert(run, tmp_path / "back", tmp_path / "auto")
    same(layer(tmp_path / "auto"), without(layer(source), COPIES))
    (source / "config.json").write_text(json.dumps(config(source) | {"rope_theta": 1.0}))
    ran = run("convert-mtp", tmp_path / "there", tmp_path / "o", "--shared", "copy")
    refused(ran, tmp_path / "o", "--target")
    assert "without a comparison" in convert(run, tmp_path / "back", tmp_path / "kept").err


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_target_of_another_size(run: Run, make: Make, tmp_path: Path, key: str) -> None:
    other = deepseek(tmp_path / "t", **{key: tiny_deepseek.TINY[key] + 1})
    ran = run("convert-mtp", make(deepseek), tmp_path / "o", "--target", other)
    refused(ran, tmp_path / "o", str(other))


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shared", ["auto", "copy"])
def test_to_sglang_and_back(run: Run, make: Make, tmp_path: Path, fp8: bool, shared: str) -> None:
    """Bit for bit; the layer's number comes from specctl.json, or from the target."""
    source = make(deepseek, fp8=fp8)
    convert(run, source, tmp_path / "there", "--to", "sglang", "--shared", shared)
    expected = layer(source) if shared == "copy" else without(layer(source), COPIES)
    same(layer(tmp_path / "there", "model.layers.0."), expected)
    written = config(tmp_path / "there")
    assert (written["num_hidden_layers"], written["architectures"]) == (1, ["DeepseekV3ForCausalLMNextN"])
    convert(run, tmp_path / "there", tmp_path / "back", "--shared", shared)
    same(layer(tmp_path / "back"), expected)
    assert config(tmp_path / "back") == {k: v for k, v in config(source).items() if k != "auto_map"}
    (tmp_path / "there" / "specctl.json").unlink()
    ran = run("convert-mtp", tmp_path / "there", tmp_path / "o")
    refused(ran, tmp_path / "o", "NextN", "--target")
    convert(run, tmp_path / "there", tmp_path / "o", "--target", source, "--shared", "copy")
    same(layer(tmp_path / "o"), layer(source))


def test_vllm_alone(run: Run, make: Make, tmp_path: Path) -> None:
    """No key that names code, and the layer's own number."""
    convert(run, make(deepseek, fp8=True), tmp_path / "o", "--to", "vllm")
    written = config(tmp_path / "o")
    assert "auto_map" not in written
    assert (written["num_hidden_layers"], written["num_nextn_predict_layers"]) == (2, 1)
    assert (written["model_type"], written["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])


def test_vllm_goes_by_the_target(run: Run, make: Make, tmp_path: Path) -> None:
    """It builds the layer in the target's quantisation, so weights in another are refused."""
    fp8, plain = make(deepseek, fp8=True), make(deepseek)
    for source, target, dtype in ((fp8, fp8, "bf16"), (fp8, plain, "keep"), (plain, fp8, "keep")):
        ran = run("convert-mtp", source, tmp_path / "o", "--to", "vllm", "--dtype", dtype, "--target", target)
        refused(ran, tmp_path / "o", "vLLM would not read the result")
    convert(run, fp8, tmp_path / "o", "--to", "vllm", "--dtype", "bf16", "--target", plain, "--shared", "omit")
    convert(run, plain, tmp_path / "p", "--to", "vllm", "--dtype", "fp8", "--target", fp8)


@pytest.mark.parametrize("halves", ["embedding", "hidden"])
def test_the_order_of_the_projection(run: Run, tmp_path: Path, halves: str) -> None:
    """CM1: released weights take [enorm(embedding) ; hnorm(hidden)]; nothing exchanges the halves on the way."""
    identity, zero = torch.eye(160).bfloat16(), torch.zeros(160, 160).bfloat16()
    given = torch.cat([identity, zero] if halves == "embedding" else [zero, identity], dim=1)
    source = deepseek(tmp_path / "s", edit=lambda _, tensors: tensors.update({f"{PREFIX}eh_proj.weight": given}))
    for to in ("deepseek", "vllm", "sglang"):
        convert(run, source, tmp_path / to, "--to", to)
        found = next(tensor for name, tensor in read(tmp_path / to).items() if name.endswith("eh_proj.weight"))
        assert torch.equal(found, given)
        head = json.loads((tmp_path / to / "specctl.json").read_text())["head"]
        assert head["norms"]["order"] == "embedding, hidden"
        assert (head["reads"], head["feedback"]) == ("final", "after the output norm")


def test_what_it_says_of_itself(run: Run, make: Make, tmp_path: Path) -> None:
    source = make(deepseek, fp8=True)
    ran = convert(run, source, tmp_path / "o", "--json")
    said = json.loads(ran.out)
    assert (said["layers"], said["tensors"]) == ([2], len(read(tmp_path / "o")))
    assert said["bytes"] == sum(tensor.nbytes for tensor in read(tmp_path / "o").values())
    facts = json.loads((tmp_path / "o" / "specctl.json").read_text())
    assert (facts["schema"], facts["kind"]) == ("specctl.draft/1", "mtp")
    assert facts["target"]["name"] == str(source)
    assert facts["target"]["tensors_sha"] == tensors_sha(Checkpoint(source))
    assert facts["provenance"]["command"].startswith("specctl")
    convert(run, tmp_path / "o", tmp_path / "p")
    assert json.loads((tmp_path / "p" / "specctl.json").read_text())["target"] == facts["target"]


# -- sources ----------------------------------------------------------------------------------------------------------


def test_only_the_needed_shards(run: Run, make: Make, tmp_path: Path) -> None:
    """The other files need not be there; what is compared with them is then kept."""
    whole = make(deepseek, fp8=True, shards=6)
    plan = json.loads(run("convert-mtp", whole, "--plan", "--json").out)
    needed = [file["file"] for file in plan["files"]]
    assert 0 < len(needed) < 6
    assert plan["bytes_in_files"] == sum((whole / name).stat().st_size for name in needed)
    assert plan["bytes_of_layers"] == sum(tensor.nbytes for tensor in layer(whole).values())
    part = tmp_path / "part"
    part.mkdir()
    for name in (*needed, "config.json", tiny_deepseek.INDEX):
        shutil.copyfile(whole / name, part / name)
    assert run("convert-mtp", part, "--plan").code == 0
    ran = convert(run, part, tmp_path / "o")
    assert "without a comparison" in ran.err
    found = layer(tmp_path / "o")
    same({name: found[name] for name in found.keys() - COPIES}, without(layer(whole), COPIES))
    assert json.loads((tmp_path / "o" / "specctl.json").read_text())["target"]["tensors_sha"] is None
    convert(run, part, tmp_path / "p", "--target", whole)
    same(layer(tmp_path / "p"), without(layer(whole), COPIES))
    (part / needed[0]).unlink()
    refused(run("convert-mtp", part, tmp_path / "q"), tmp_path / "q", needed[0], "not there")
    assert run("convert-mtp", part, "--plan").code == 2


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp8"])
@pytest.mark.parametrize("shared", ["auto", "copy", "omit"])
def test_the_plan_knows_what_will_be_written(
    run: Run, make: Make, tmp_path: Path, fp8: bool, dtype: str, shared: str
) -> None:
    source, options = make(deepseek, fp8=fp8), ("--dtype", dtype, "--shared", shared)
    least, most = json.loads(run("convert-mtp", source, "--plan", "--json", *options).out)["bytes_to_write"]
    convert(run, source, tmp_path / "o", *options)
    written = sum(tensor.nbytes for tensor in read(tmp_path / "o").values())
    assert written == least
    assert (most > least) == (shared == "auto")
    assert "to write" in run("convert-mtp", source, "--plan", *options).out


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (lose("hnorm.weight"), [], ["hnorm.weight is missing"]),
        ({"lose_mtp": True}, [], ["layer 2", "there are none"]),
        ({"num_nextn_predict_layers": 2}, ["--to", "sglang"], ["exactly 1"]),
        ({"vocab_size": 65}, ["--target"], ["vocab_size is 64"]),
        ({}, ["--force"], ["--plan writes nothing"]),
        ({}, ["out"], ["--plan writes nothing"]),
    ],
)
def test_a_plan_that_cannot_be(
    run: Run, make: Make, tmp_path: Path, arguments: dict[str, Any], options: list[Any], words: list[str]
) -> None:
    source = deepseek(tmp_path / "s", **arguments)
    more = [*options, make(deepseek)] if options == ["--target"] else options
    refused(run("convert-mtp", source, "--plan", *more), tmp_path / "o", *words)


def test_the_source_is_not_touched(run: Run, tmp_path: Path) -> None:
    source = deepseek(tmp_path / "s", fp8=True)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()}
    convert(run, source, tmp_path / "o", "--dtype", "bf16")
    assert before == {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()}


def test_an_output_that_is_there(run: Run, make: Make, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    ran = run("convert-mtp", make(deepseek), tmp_path / "o")
    assert (ran.code, list((tmp_path / "o").iterdir())) == (2, [])
    assert "--force" in ran.err
    convert(run, make(deepseek), tmp_path / "o", "--force")


def test_no_output_given(run: Run, make: Make) -> None:
    ran = run("convert-mtp", make(deepseek))
    assert (ran.code, ran.err) == (2, "Error: no OUT given: expected a directory to write, or --plan\n")


def test_no_room(run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Callable[[object], Any] = lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    ran = run("convert-mtp", make(deepseek), tmp_path / "o")
    assert ran.code == 3
    assert "1000 are free" in ran.err
    assert not list(tmp_path.iterdir())
