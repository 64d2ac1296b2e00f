"""EAGLE-3 heads in every layout that they are published in: told apart, read as the same head, and refused by name
where config and tensors contradict each other. The directories are written by hand, in other programs' words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from fixtures import Make
from tiny_eagle3 import IDS, LAYERS, TAPS
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.errors import CheckpointError
from specctl.heads.eagle3 import Eagle3Head

NAMES: tuple[tiny_eagle3.Layout, ...] = ("original", "vllm", "sglang", "speculators")
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target)


def read(path: Path, num_layers: int | None = LAYERS, taps: tuple[int, ...] | None = None) -> layouts.Stored:
    return layouts.read(Checkpoint(path), taps, num_layers)


def changed(path: Path, of: Path, edit: Edit) -> Path:
    config, tensors = tiny.read(of)
    edit(config, tensors)
    return tiny.write(path, config, tensors, tokenizer=False)


def refusal(path: Path, of: Path, edit: Edit) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(changed(path, of, edit))
    return str(caught.value)


# What is told


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("layout", NAMES)
def test_it_is_the_same_head_in_every_layout(make: Make, target: Path, layout: Any, reduced: bool) -> None:
    ids = IDS if reduced else None
    stored = read(make(tiny_eagle3.head, of=target, layout=layout, ids=ids))
    assert stored.layout == layout
    head = stored.view.head(LAYERS)
    expected = read(make(tiny_eagle3.head, of=target, layout="vllm", ids=ids)).view.head(LAYERS)
    assert head == expected
    assert (head.taps, head.draft_vocab, head.target_hidden) == (TAPS, len(ids or range(264)), 32)
    found = stored.ids()
    assert (None if found is None else tuple(found.tolist())) == ids
    assert sorted(stored.view.tensors.values()) == sorted(stored.view.parameters)
    assert stored.k == (3 if layout == "speculators" else None)


def test_what_is_no_head(make: Make, target: Path) -> None:
    assert not layouts.is_eagle3(Checkpoint(target))
    assert layouts.is_eagle3(Checkpoint(make(tiny_eagle3.head, of=target)))


def test_every_norm_is_found(make: Make, target: Path) -> None:
    for norm in tiny_eagle3.NORMS:
        for layout in ("vllm", "speculators"):
            view = read(make(tiny_eagle3.head, of=target, layout=layout, norms=(norm,))).view
            assert {name for name, has in view.norms.items() if has} == {norm}


def test_a_norm_that_only_eagle_config_names(make: Make, target: Path) -> None:
    """As some trainers write it, and vLLM reads it."""
    path = make(
        tiny_eagle3.head,
        of=target,
        layout="original",
        norms=("norm_before_fc",),
        eagle_config={"norm_before_fc": True},
    )
    stored = read(path)
    assert (stored.layout, stored.view.norms["norm_before_fc"]) == ("vllm", True)
    assert "input_norm.weight" in stored.view.tensors


@pytest.mark.parametrize("spelling", ["scaling", "type", "parameters"])
@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_both_spellings_of_a_rotation(make: Make, target: Path, layout: Any, spelling: str) -> None:
    values = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    rope = tiny.rope("llama3", spelling, theta=500000.0, **values)
    of = make(tiny_eagle3.target, **rope)
    stored = read(make(tiny_eagle3.head, of=of, layout=layout))
    written = stored.view.layer
    assert written["rope_parameters"] == LLAMA3 | {"rope_theta": 500000.0}
    assert written["rope_scaling"] == written["rope_parameters"]
    assert written["rope_theta"] == 500000.0
    plain = read(make(tiny_eagle3.head, of=target, layout=layout)).view.layer
    assert (plain["rope_scaling"], plain["rope_theta"]) == (None, 10000.0)


def test_a_layer_config_of_which_only_the_difference_was_written(make: Make, target: Path, tmp_path: Path) -> None:
    """What is absent is that of the class for the model_type, not of a Llama."""
    qwen = {"model_type": "qwen3", "rms_norm_eps": 1e-5, "head_dim": 8, "num_key_value_heads": 8}

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        layer = config["transformer_layer_config"]
        layer |= qwen
        del layer["hidden_act"], layer["rms_norm_eps"], layer["num_hidden_layers"]
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.0.self_attn.{name}.weight"] = torch.ones(8)

    of = make(tiny_eagle3.head, of=target, layout="speculators")
    layer = read(changed(tmp_path / "qwen", of, edit)).view.layer
    assert (layer["model_type"], layer["rms_norm_eps"], layer["hidden_act"]) == ("qwen3", 1e-6, "silu")

    def absent(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        edit(config, tensors)
        del config["transformer_layer_config"]["num_key_value_heads"]

    # Qwen3 then has 32 key-value heads, a Llama as many as heads.
    with pytest.raises(CheckpointError, match="num_key_value_heads 32 does not divide num_attention_heads 8"):
        read(changed(tmp_path / "absent", of, absent))


# How ids are counted


def nested_only(ids: list[int]) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config[IDS_KEY]
        config["eagle_config"] = {IDS_KEY: ids, "use_aux_hidden_state": True}

    return edit


def test_ids_in_eagle_config_alone(make: Make, target: Path, tmp_path: Path) -> None:
    """Two conventions are published. The original three are known in either; else specctl.json may tell; else they are
    taken as vLLM counts, and people are told."""
    of = make(tiny_eagle3.head, of=target)
    for number, (ids, layout) in enumerate((([2, 4, 5], "vllm"), ([1, 3, 4], "sglang"))):
        stored = read(changed(tmp_path / str(number), of, nested_only(ids)))
        assert (stored.layout, stored.view.head(LAYERS).taps, stored.view.notes) == (layout, TAPS, ())
    path = changed(tmp_path / "other", of, nested_only([1, 3, 6]))
    stored = read(path)
    assert stored.view.taps == (1, 3, 6)
    assert "nothing says how the ids 1, 3, 6 in eagle_config are counted" in stored.view.notes[0]
    assert "taps 2, 4, 7" in stored.view.notes[0]
    assert read(path, taps=(2, 4, 7)).view.taps == (2, 4, 7)
    assert read(path, taps=(1, 3, 6)).view.notes == ()
    with pytest.raises(CheckpointError, match=r"comes to taps 1, 3, 6, and specctl\.json beside it records 5, 6, 7"):
        read(path, taps=(5, 6, 7))


def test_ids_that_contradict_each_other(make: Make, target: Path, tmp_path: Path) -> None:
    of = make(tiny_eagle3.head, of=target)
    said = refusal(tmp_path / "a", of, lambda config, tensors: config["eagle_config"].update({IDS_KEY: [2, 4, 6]}))
    assert f"{IDS_KEY} is [2, 4, 5], and [2, 4, 6] in eagle_config" in said
    said = refusal(
        tmp_path / "b", of, lambda config, tensors: config.update({IDS_KEY: [4, 2, 5], "eagle_config": None})
    )
    assert "taps 4, 2, 5; readers take them in rising order" in said
    said = refusal(tmp_path / "c", of, lambda config, tensors: config.update(num_aux_hidden_states=2))
    assert "num_aux_hidden_states is 2, and there are 3 taps" in said


def test_the_taps_that_go_without_saying_depend_on_the_target(make: Make, target: Path) -> None:
    stored = read(make(tiny_eagle3.head, of=target, layout="original"), num_layers=None)
    assert stored.view.needs_layers
    assert stored.view.head(32).taps == (2, 16, 29)
    with pytest.raises(CheckpointError, match="which means 2, 2, 1 for a target of 4 layers"):
        stored.view.head(4)


# Contradictions


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers is 2, the tensors are those of 1 layer"),
        (lambda c, t: c.pop("num_hidden_layers"), "key num_hidden_layers is missing"),
        (
            lambda c, t: t.update({"fc.weight": t["fc.weight"][:, :64].clone()}),
            "tensor fc.weight has 64 columns, 3 taps of a target 32 wide are 96",
        ),
        (
            lambda c, t: c.update({IDS_KEY: [2, 4], "eagle_config": None, "num_aux_hidden_states": 2}),
            "tensor fc.weight has 96 columns, 2 taps of a target 32 wide are 64",
        ),
        (lambda c, t: c.update(draft_vocab_size=80), "tensor lm_head.weight has 87 rows, draft_vocab_size is 80"),
        (lambda c, t: c.pop("draft_vocab_size"), "tensor lm_head.weight has 87 rows, draft_vocab_size is 264"),
        (lambda c, t: t.pop("d2t"), "d2t is missing, and the head has rows for 87 of 264 token ids"),
        (lambda c, t: t.pop("norm.weight"), "tensor norm.weight is missing"),
        (lambda c, t: t.pop("midlayer.hidden_norm.weight"), "tensor midlayer.hidden_norm.weight is missing"),
        (lambda c, t: c.update(norm_before_fc=True, eagle_config=None), "tensor input_norm.weight is missing"),
        (lambda c, t: c.update(fc_norm=True), "tensor fc_norm.0.weight is missing"),
        (
            lambda c, t: t.update({"input_norm.weight": torch.ones(96)}),
            "tensor input_norm.weight is not part of the EAGLE-3 head that config.json describes",
        ),
        (
            lambda c, t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(64)}),
            "tensor midlayer.self_attn.q_proj.bias is not part",
        ),
        (
            lambda c, t: c.update(norm_before_fc=True),
            "norm_before_fc is true, and false in eagle_config",
        ),
        (
            lambda c, t: c.update(num_attention_heads=4, num_key_value_heads=4),
            "tensor midlayer.self_attn.q_proj.weight has shape [64, 64], config.json expects [32, 64]",
        ),
        (
            lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False),
            "use_aux_hidden_state is false",
        ),
        (lambda c, t: c.update(sliding_window=16, layer_types=["sliding_attention"]), "layer_types is"),
        (
            lambda c, t: c.update(model_type="deepseek_v3"),
            "model_type is 'deepseek_v3', an EAGLE-3 head has a layer of",
        ),
    ],
)
def test_config_and_tensors_that_contradict_each_other(
    make: Make, target: Path, tmp_path: Path, edit: Edit, said: str
) -> None:
    assert said in refusal(tmp_path / "head", make(tiny_eagle3.head, of=target, ids=IDS), edit)


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (list(IDS), "it looks like a table of ids, not of offsets"),
        ([0] * 86 + [200], "row 86 the target id 286"),
        ([0, *[index - row for row, index in enumerate(IDS)][1:-1], 0], "after"),
        ([0, 0, -1, *[index - row for row, index in enumerate(IDS)][3:]], "row 2 the target id 1 after 1"),
        ([0] * 80, "d2t is int64 [80], the head has 87 rows"),
    ],
)
def test_a_table_that_is_none(make: Make, target: Path, tmp_path: Path, d2t: list[int], said: str) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.tensor(d2t)
        del tensors["t2d"]

    assert said in refusal(tmp_path / "head", make(tiny_eagle3.head, of=target, ids=IDS), edit)


def test_t2d_that_says_something_else(make: Make, target: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["t2d"][3] = False

    said = refusal(tmp_path / "head", make(tiny_eagle3.head, of=target, ids=IDS), edit)
    assert "t2d says id 3 is not in the draft's vocabulary" in said


def test_a_tensor_without_elements(make: Make, target: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"] = torch.zeros(0)

    said = refusal(tmp_path / "head", make(tiny_eagle3.head, of=target), edit)
    assert "norm.weight: has no elements" in said


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.pop("speculators_config"), "speculators_config names no verifier.name_or_path"),
        (lambda c: c["speculators_config"].pop("verifier"), "speculators_config names no verifier.name_or_path"),
        (lambda c: c["speculators_config"].update(proposal_methods=[]), "proposal_methods[0].speculative_tokens"),
        (lambda c: c.update(transformer_layer_config=None), "transformer_layer_config is None, expected an object"),
        (
            lambda c: c.update(speculators_model_type="dflash"),
            "speculators_model_type is 'dflash', which is not supported",
        ),
        (lambda c: c["transformer_layer_config"].update(num_hidden_layers=2), "num_hidden_layers is 2, the tensors"),
        (lambda c: c["transformer_layer_config"].update(model_type="gemma"), "model_type is 'gemma'"),
    ],
)
def test_a_speculators_config_that_is_not_right(
    make: Make, target: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    of = make(tiny_eagle3.head, of=target, layout="speculators")
    assert said in refusal(tmp_path / "head", of, lambda config, tensors: edit(config))


def test_a_norm_that_readers_take_in_two_ways(make: Make, target: Path, tmp_path: Path) -> None:
    of = make(tiny_eagle3.head, of=target, layout="speculators")
    stored = read(changed(tmp_path / "head", of, lambda config, tensors: config.pop("norm_before_residual")))
    assert stored.view.norms["norm_before_residual"]
    assert "it is taken for true, as vLLM does, and the speculators library takes it for false" in stored.view.notes[0]


# Kin that is not supported


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda t: t.update({"mask_hidden": torch.ones(1, 1, 96)}), "a P-EAGLE head"),
        (
            lambda t: [t.pop(name) for name in ("midlayer.hidden_norm.weight", "lm_head.weight", "norm.weight")],
            "an EAGLE-1 or EAGLE-2 head",
        ),
        (lambda t: t.update({"hidden_norm.weight": torch.ones(32)}), "a DFlash draft"),
        (lambda t: t.update({"blocks.0.layers.0.weight": torch.ones(32)}), "a Medusa head"),
        (lambda t: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(32)}), "with latent attention"),
        (lambda t: t.update({"midlayer.mlp.experts.0.up_proj.weight": torch.ones(32)}), "with experts"),
    ],
)
def test_other_heads_are_named(
    make: Make, target: Path, tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], what: str
) -> None:
    said = refusal(tmp_path / "head", make(tiny_eagle3.head, of=target), lambda config, tensors: edit(tensors))
    assert what in said
    assert "which is not supported" in said


# What is written


def description(make: Make, target: Path, **of: Any) -> Eagle3Head:
    return read(make(tiny_eagle3.head, of=target, **of)).view.head(LAYERS)


@pytest.mark.parametrize("layout", NAMES)
def test_what_is_written_is_read_as_the_same_head(
    make: Make, target: Path, tmp_path: Path, layout: layouts.Name
) -> None:
    head = description(make, target, ids=IDS)
    about = layouts.Target("org/target", LAYERS, ("LlamaForCausalLM",))
    assert layouts.refusals(layout, head, about) == []
    config = layouts.written(layout, head, about, 5)
    _, tensors = tiny.read(make(tiny_eagle3.head, of=target, ids=IDS, layout=layout))
    stored = read(tiny.write(tmp_path / "head", config, tensors, tokenizer=False))
    assert stored.layout == layout
    assert stored.view.head(LAYERS) == head
    if layout == "speculators":
        assert stored.k == 5


def test_the_projects_own_layout_is_vllms(make: Make, target: Path) -> None:
    head = description(make, target, norms=("norm_output",), ids=IDS)
    config = layouts.native(head)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["model_type"], config["num_hidden_layers"], config["draft_vocab_size"]) == ("llama", 1, len(IDS))
    assert (config["target_hidden_size"], config["max_position_embeddings"]) == (32, 256)
    assert [config[norm] for norm in tiny_eagle3.NORMS] == [False, False, False, True]
    assert config[IDS_KEY] == config["eagle_config"][IDS_KEY] == list(TAPS)
    assert config["eagle_config"]["use_aux_hidden_state"]
    assert {"rope_theta", "rope_scaling", "rope_parameters"} <= config.keys()


@pytest.mark.parametrize(
    ("layout", "of", "num_layers", "said"),
    [
        ("sglang", {"norms": ("norm_before_residual",)}, LAYERS, "SGLang has no code for norm_before_residual"),
        ("sglang", {"norms": ("norm_before_fc",)}, LAYERS, "SGLang has no code for norm_before_fc"),
        ("sglang", {"taps": (0, 4, 5)}, LAYERS, "SGLang cannot read tap 0"),
        ("sglang", {"embedding": True}, LAYERS, "SGLang puts the target's embedding in the place of the head's own"),
        ("original", {"norms": ("fc_norm",)}, LAYERS, "the original layout has no fc_norm"),
        ("original", {"norms": ("norm_output",)}, LAYERS, "the original layout has no norm_output"),
        ("original", {"taps": (1, 4, 5)}, LAYERS, "reads taps 1, 4, 5, the original layout means 2, 4, 5 for 8 layers"),
        ("original", {}, None, "follow from the target's number of layers, which is not known here"),
    ],
)
def test_what_a_layout_cannot_say(
    make: Make, target: Path, layout: layouts.Name, of: dict[str, Any], num_layers: int | None, said: str
) -> None:
    found = layouts.refusals(layout, description(make, target, **of), layouts.Target("org/target", num_layers))
    assert said in found[0]
