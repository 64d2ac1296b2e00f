"""Each reader's rules: a layout of ours passes them, and every planted fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_deepseek
import torch
from tiny_deepseek import E4M3, TINY

from specctl.dialects import MTP, Reading, faults
from specctl.heads.mtp import MtpConfig
from specctl.heads.quantisation import Scheme
from specctl.shards import TensorInfo

Tensors = dict[str, TensorInfo]
SOURCE = TINY | {"quantization_config": tiny_deepseek.FP8}


def layout(name: str, *, fp8: bool = True, count: int = 1) -> tuple[Tensors, dict[str, Any]]:
    """What a whole layer of that dialect is, from the shapes that the tests know."""
    source = (SOURCE if fp8 else TINY) | {"num_nextn_predict_layers": count}
    found: Tensors = {}
    for tensor, shape in tiny_deepseek.shapes(source).items():
        if not tensor.startswith(tiny_deepseek.mtp_prefixes(source)):
            continue
        number = 0 if name == "sglang" else int(tensor.split(".")[2])
        written = f"model.layers.{number}." + tensor.split(".", 3)[3]
        if fp8 and tiny_deepseek.is_matrix(tensor):
            found[written] = TensorInfo(E4M3, shape)
            found[f"{written}_scale_inv"] = TensorInfo(torch.float32, (-(-shape[0] // 128), -(-shape[1] // 128)))
        else:
            found[written] = TensorInfo(torch.float32 if "bias" in tensor else torch.bfloat16, shape)
    return found, MTP[name].config(source)


def said(name: str, tensors: Tensors, config: dict[str, Any], target: dict[str, Any] | None = None) -> list[str]:
    """What is wrong, as the reader would see it."""
    by = config if target is None else target
    reading = Reading(tensors, MtpConfig.read(config, "c"), Scheme.read(by, "c"), config["num_nextn_predict_layers"])
    return faults(MTP[name], reading, by)


NAMES = sorted(MTP)
PREFIX = {"deepseek": "model.layers.2.", "vllm": "model.layers.2.", "sglang": "model.layers.0."}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_whole_layer(name: str, fp8: bool) -> None:
    tensors, config = layout(name, fp8=fp8)
    assert said(name, tensors, config) == []
    for copy in ("embed_tokens.weight", "shared_head.head.weight"):
        del tensors[PREFIX[name] + copy]
    assert said(name, tensors, config) == [], "readers fill these from the target"


@pytest.mark.parametrize("name", ["deepseek", "vllm"])
def test_two_layers(name: str) -> None:
    tensors, config = layout(name, count=2)
    assert said(name, tensors, config) == []
    del tensors["model.layers.3.eh_proj.weight"]
    assert ["eh_proj.weight" in fault for fault in said(name, tensors, config)] == [True]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_missed(name: str) -> None:
    """Whichever is gone, and no other; one half of a joint parameter too."""
    tensors, config = layout(name)
    for tensor in tensors:
        relative = tensor.removeprefix(PREFIX[name])
        if relative in ("embed_tokens.weight", "shared_head.head.weight"):
            continue
        found = said(name, {n: info for n, info in tensors.items() if n != tensor}, config)
        assert len(found) == 1
        assert found[0].endswith(f"is left unfilled: nothing gives its {relative}")


@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_dtype_is_seen(name: str) -> None:
    tensors, config = layout(name)
    wrong = {E4M3: torch.bfloat16, torch.float32: torch.bfloat16, torch.bfloat16: E4M3}
    for tensor, info in tensors.items():
        if name == "sglang" and tensor.endswith(("embed_tokens.weight", "head.weight")):
            continue
        found = said(name, tensors | {tensor: TensorInfo(wrong[info.dtype], info.shape)}, config)
        skipped = name == "vllm" and tensor.endswith(("embed_tokens.weight", "head.weight"))
        assert len(found) == (0 if skipped else 1), tensor
        assert skipped or (tensor in found[0] and "misread" in found[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_shape_is_seen(name: str) -> None:
    tensors, config = layout(name)
    for tensor, info in tensors.items():
        if not tensor.endswith(("embed_tokens.weight", "head.weight")):
            found = said(name, tensors | {tensor: TensorInfo(info.dtype, (*info.shape, 1))}, config)
            assert len(found) == 1
            assert f"tensor {tensor} has shape" in found[0]


@pytest.mark.parametrize(
    "surplus",
    [
        "model.layers.1.enorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "model.norm.weight",
        "{}eh_proj.weight_scale_inv",
        "{}mlp.experts.4.up_proj.weight",
        "{}self_attn.indexer.wk.weight",
        "{}self_attn.o_proj.bias",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_dropped(name: str, surplus: str) -> None:
    tensors, config = layout(name)
    tensor = surplus.format(PREFIX[name])
    found = said(name, tensors | {tensor: TensorInfo(torch.float32, (2, 3))}, config)
    assert len(found) == 1
    assert found[0].startswith(f"tensor {tensor} is dropped")


def test_an_export_is_nothing_to_vllm() -> None:
    """SGLang's layer 0 lies outside the MTP layers of the target that vLLM goes by."""
    tensors, _ = layout("sglang")
    _, config = layout("vllm")
    found = said("vllm", tensors, config)
    assert sum("is dropped" in fault for fault in found) == len(tensors)


def test_a_numbered_layer_is_nothing_to_an_export() -> None:
    tensors, _ = layout("vllm")
    _, config = layout("sglang")
    assert any("left unfilled" in fault for fault in said("sglang", tensors, config))


def test_vllm_takes_names_without_model() -> None:
    tensors, config = layout("vllm")
    bare = {name.removeprefix("model."): info for name, info in tensors.items()}
    assert said("vllm", bare, config) == []
    assert any("is dropped" in fault for fault in said("deepseek", bare, config))
    twice = tensors | {"layers.2.enorm.weight": tensors["model.layers.2.enorm.weight"]}
    assert any("fill the same parameter" in fault for fault in said("vllm", twice, config))


def test_vllm_builds_by_the_target() -> None:
    tensors, config = layout("vllm", fp8=False)
    assert said("vllm", tensors, config, target=TINY) == []
    assert any("misread" in fault for fault in said("vllm", tensors, config, target=SOURCE))
    deeper = TINY | {"num_hidden_layers": 3}
    assert any("is dropped" in fault for fault in said("vllm", tensors, config, target=deeper))
    lost = {key: value for key, value in TINY.items() if key != "num_nextn_predict_layers"}
    assert any("num_nextn_predict_layers" in fault for fault in said("vllm", tensors, config, target=lost))


MODULES = [
    name.removesuffix(".weight")
    for name, shape in tiny_deepseek.shapes(TINY).items()
    if name.startswith("model.layers.2.") and len(shape) == 2
]


def plain_beside(name: str, values: dict[str, Any], number: int = 2) -> bool:
    """Whether a reader takes a plain layer of that number whole under a target's quantisation."""
    tensors, config = layout(name, fp8=False)
    if name != "sglang":
        tensors = {n.replace("layers.2.", f"layers.{number}."): info for n, info in tensors.items()}
        config["num_hidden_layers"] = number
    found = said(name, tensors, config, target=config | {"quantization_config": values})
    assert all("misread" in fault or "left unfilled" in fault or "only a part" in fault for fault in found)
    return not found


@pytest.mark.parametrize(
    ("entries", "vllm", "sglang"),
    [
        ([], False, False),
        (MODULES, True, False),
        (["model.layers.2"], False, False),
        (["model.decoder"], False, True),
        ([*MODULES, "model.decoder"], True, True),
        ([m for m in MODULES if "experts.0" in m or ".experts" not in m], True, False),
        ([m for m in MODULES if "kv_a_proj" not in m], False, False),
        ([m for m in MODULES if ".experts" not in m], False, False),
    ],
)
@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_names_that_fp8_leaves_out(entries: list[str], vllm: bool, sglang: bool, key: str) -> None:
    """vLLM wants every name whole, and of experts any; SGLang what its own name for the layer begins with."""
    values = tiny_deepseek.FP8 | {key: entries}
    assert (plain_beside("vllm", values), plain_beside("sglang", values)) == (vllm, sglang)


@pytest.mark.parametrize(("number", "taken"), [(61, True), (2, False)])
def test_the_one_number_that_sglang_renames(number: int, taken: bool) -> None:
    values = tiny_deepseek.FP8 | {"ignored_layers": [f"model.layers.{number}"]}
    assert plain_beside("sglang", values, number) == taken
    assert not plain_beside("vllm", values, number)


@pytest.mark.parametrize(
    ("method", "key", "entries", "vllm", "sglang"),
    [
        ("compressed-tensors", "ignore", MODULES, True, False),
        ("compressed-tensors", "ignore", [r"re:model\.layers\.2\..*"], True, False),
        ("compressed-tensors", "ignore", [r"re:model\.decoder\..*"], False, True),
        ("compressed-tensors", "ignore", ["re:.*gate_proj"], False, False),
        ("compressed-tensors", "ignore", ["model.layers.2"], False, False),
        ("gptq", "dynamic", {r"-:model\.layers\.2\..*": {}}, True, False),
        ("gptq", "dynamic", {r"-:model\.decoder\..*": {}}, False, True),
        ("gptq", "dynamic", {r"+:model\.layers\.2\..*": {}}, False, False),
        ("gptq", "dynamic", {key: {} for key in ["-:" + m for m in MODULES]}, False, False),
        ("awq", "modules_to_not_convert", ["model.layers.2."], True, False),
        ("awq", "modules_to_not_convert", ["model.decoder"], False, True),
        ("awq", "modules_to_not_convert", ["mlp"], False, False),
    ],
)
def test_what_other_schemes_leave_out(method: str, key: str, entries: Any, vllm: bool, sglang: bool) -> None:
    """By names, by patterns of the joint modules' names, by parts of names."""
    values = {"quant_method": method, key: entries}
    assert (plain_beside("vllm", values), plain_beside("sglang", values)) == (vllm, sglang)


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_method_is_named(name: str) -> None:
    tensors, config = layout(name)
    del config["topk_method"]
    assert any("topk_method" in fault for fault in said(name, tensors, config))


def test_files_know_no_other_reader() -> None:
    """The rules of one reader stand in one file."""
    for name in ("vllm", "sglang"):
        other = {"vllm": "sglang", "sglang": "vllm"}[name]
        text = Path(f"specctl/dialects/{name}.py")
        assert other not in (Path(__file__).parent.parent / text).read_text().lower()
