"""What engines make of a head's directory: every way in which one of them would run another head is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from fixtures import Make
from test_eagle3_layouts import IDS_KEY, Edit, changed, read
from tiny_eagle3 import IDS, LAYERS
from torch import Tensor

from specctl.dialects import eagle3 as layouts


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target)


def said(path: Path) -> list[str]:
    return list(layouts.misreadings(read(path), LAYERS))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("layout", ["original", "sglang"])
def test_a_layout_that_everybody_reads(make: Make, target: Path, layout: Any, reduced: bool) -> None:
    assert said(make(tiny_eagle3.head, of=target, layout=layout, ids=IDS if reduced else None)) == []


def test_explicit_ids_are_off_by_one_in_sglang(make: Make, target: Path) -> None:
    path = make(tiny_eagle3.head, of=target, layout="vllm")
    assert said(path) == ["SGLang reads taps 3, 5, 6, the head 2, 4, 5"]


def test_norms_that_sglang_does_not_know(make: Make, target: Path) -> None:
    path = make(tiny_eagle3.head, of=target, norms=("norm_before_residual", "norm_before_fc"))
    found = said(path)
    assert "SGLang takes norm_before_residual for false, the head has true" in found
    assert "SGLang takes norm_before_fc for false, the head has true" in found
    assert "SGLang passes over tensor input_norm.weight" in found
    assert not any(what.startswith("vLLM") for what in found)


def test_a_norm_that_only_eagle_config_names(make: Make, target: Path, tmp_path: Path) -> None:
    """vLLM looks there for norm_before_fc and for no other norm."""
    of = make(tiny_eagle3.head, of=target, norms=("norm_before_fc", "norm_output"))

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config["norm_before_fc"], config["norm_output"]
        config["eagle_config"] |= {"norm_before_fc": True, "norm_output": True}

    found = said(changed(tmp_path / "head", of, edit))
    assert "vLLM takes norm_output for false, the head has true" in found
    assert not any("vLLM takes norm_before_fc" in what for what in found)


EDITS: list[tuple[Edit, str]] = [
    (
        lambda c, t: c.update({IDS_KEY: tiny.ABSENT}),
        "vLLM's newer runner looks for eagle_aux_hidden_state_layer_ids at the top level",
    ),
    (
        lambda c, t: (
            c.update({"num_aux_hidden_states": tiny.ABSENT, "eagle_config": tiny.ABSENT, IDS_KEY: [2, 4]})
            or t.update({"fc.weight": t["fc.weight"][:, :64].clone()})
        ),
        "vLLM does not load it: it builds fc for 3 taps",
    ),
    (lambda c, t: c.update(tie_word_embeddings=True), "SGLang passes over tensor lm_head.weight"),
    (lambda c, t: c.update(draft_vocab_size=None), "SGLang passes over tensor lm_head.weight"),
    (lambda c, t: c.update(draft_vocab_size=tiny.ABSENT), "SGLang does not load it: draft_vocab_size is not there"),
    (lambda c, t: c.update(architectures=["Eagle3LlamaForCausalLM"]), "SGLang does not load it: architectures is"),
    (
        lambda c, t: t.update(tiny_eagle3.tables(range(264), 264)),
        "vLLM does not load it: d2t is there though the head has a row for every token id",
    ),
    (
        lambda c, t: [t.update({n.replace("midlayer", "layers.0"): t.pop(n)}) for n in list(t) if "midlayer" in n],
        "SGLang passes over tensor layers.0.hidden_norm.weight",
    ),
    (
        lambda c, t: (
            c.update(attention_bias=True)
            or t.update({f"midlayer.self_attn.{n}_proj.bias": torch.ones(32 if n == "o" else 64) for n in "qkvo"})
        ),
        "SGLang takes attention_bias for false, the head has true",
    ),
]


@pytest.mark.parametrize(("edit", "expected"), EDITS)
def test_what_a_reader_would_take_for_something_else(
    make: Make, target: Path, tmp_path: Path, edit: Edit, expected: str
) -> None:
    def apply(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        edit(config, tensors)
        for key in [key for key, value in config.items() if value is tiny.ABSENT]:
            del config[key]

    found = said(changed(tmp_path / "head", make(tiny_eagle3.head, of=target), apply))
    assert any(what.startswith(expected) for what in found), found


def test_an_embedding_of_its_own(make: Make, target: Path) -> None:
    found = said(make(tiny_eagle3.head, of=target, embedding=True, layout="original"))
    assert found == ["SGLang passes over tensor embed_tokens.weight"]


SPECULATORS: list[tuple[Edit, str]] = [
    (
        lambda c, t: c["transformer_layer_config"].pop("max_position_embeddings"),
        # transformers' class has 2048, vLLM 8192: nothing is cut, and nobody is told
        "",
    ),
    (
        lambda c, t: c["transformer_layer_config"].update(rms_norm_eps=None),
        "vLLM does not load it: transformer_layer_config has no rms_norm_eps",
    ),
    (
        lambda c, t: (
            c["transformer_layer_config"].update(max_position_embeddings=None, model_type="qwen3")
            or t.update({f"layers.0.self_attn.{n}_norm.weight": torch.ones(8) for n in "qk"})
        ),
        "vLLM takes max_position_embeddings for 8192, the head has 32768",
    ),
]


@pytest.mark.parametrize(("edit", "expected"), SPECULATORS)
def test_what_vllm_makes_of_a_layer_config(make: Make, target: Path, tmp_path: Path, edit: Edit, expected: str) -> None:
    found = said(changed(tmp_path / "head", make(tiny_eagle3.head, of=target, layout="speculators"), edit))
    assert found[0] == "SGLang does not load it: config.json names no model_type"
    assert [what[: len(expected)] for what in found[1:]] == ([expected] if expected else [])
