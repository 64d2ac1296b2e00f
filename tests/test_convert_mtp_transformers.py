"""What transformers drafts with the MTP layer of a checkpoint: the same after it was lost and attached again.

transformers knows the layer by its number in the published models, so the target has 61 layers, however small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from fixtures import Make
from test_convert_mtp import in_bfloat16, read
from tiny_deepseek import deepseek, write
from transformers_mtp import propose

SMALL: dict[str, Any] = {
    "num_hidden_layers": 61,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "first_k_dense_replace": 58,
}
PROMPT = [5, 17, 40, 3]

Drafts = tuple[list[int], list[list[int]]]


def drafts(path: Path) -> Drafts:
    """The tokens that a checkpoint generates and those that its MTP layer proposed on the way."""
    text, found = propose(path, PROMPT, 24)
    return text, [tokens for _, tokens in found]


def lost(source: Path, path: Path) -> Path:
    """The checkpoint without its MTP layer, its config unchanged: as transformers saves it."""
    config = json.loads((source / "config.json").read_text())
    kept = {name: tensor for name, tensor in read(source).items() if not name.startswith("model.layers.61.")}
    return write(path, config, kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_drafts(run: Run, make: Make, tmp_path: Path) -> None:
    whole = make(deepseek, **SMALL)
    expected = drafts(whole)
    assert len(expected[1]) > 10
    assert len({token for found in expected[1] for token in found}) > 5, "the drafts are no echo"
    target = lost(whole, tmp_path / "t")
    with pytest.raises((RuntimeError, ValueError)):
        drafts(target)
    assert run("convert-mtp", whole, tmp_path / "o", "--attach-to", target).code == 0
    assert drafts(tmp_path / "o") == expected
    other = make(deepseek, seed=1, **SMALL)
    assert run("convert-mtp", other, "--attach-to", target, "--in-place").code == 0
    found = drafts(target)
    assert found[0] == expected[0], "what is generated is the target's say"
    assert found[1] != expected[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fp8_is_multiplied_out_for_it(run: Run, make: Make, tmp_path: Path) -> None:
    """transformers reads a layer's FP8 numbers without their scales and says nothing, so they must not get there."""
    donor, plain = make(deepseek, fp8=True, **SMALL), make(deepseek, **SMALL)
    target = lost(plain, tmp_path / "t")
    config = json.loads((plain / "config.json").read_text())
    layer = {name: t for name, t in read(donor).items() if name.startswith("model.layers.61.")}
    reference = write(tmp_path / "r", config, read(target) | in_bfloat16(layer))
    ran = run("convert-mtp", donor, "--attach-to", target, "--in-place")
    assert ran.code == 0
    assert "written in bfloat16" in ran.err
    assert drafts(target) == drafts(reference)
