"""Ways in which a head that others have published is read otherwise than it was trained, each of them planted.

A context or a rotation that is not the target's is named wherever the head is looked at. Counting positions from one
is no such way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
import torch
from conftest import Run
from exporting import export
from fixtures import Make
from test_eagle3_layouts import LLAMA3, changed
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.drafts import eagle3_checkpoint, mtp_checkpoint
from specctl.drafts.mtp_checkpoint import find_mtp
from specctl.export import standin
from specctl.export.standin import chain_logits, stand_in
from specctl.models import ModelConfig, read_config
from specctl.pair import stored_head
from specctl.rope import Rope

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": LLAMA3 | {"rope_theta": 500000.0},
    "yarn": YARN,
}

# A context and a rotation of its own


def short(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    layer = config.get("transformer_layer_config", config)
    layer["max_position_embeddings"] = 2048


def stretched(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As a trainer does that gives every head a YaRN."""
    layer = config.get("transformer_layer_config", config)
    layer["rope_parameters"] = YARN | {"factor": 32.0, "original_max_position_embeddings": 128}


TRAPS: dict[str, tuple[Callable[..., None], str]] = {
    "context": (short, "has a context of 2048, the target one of 4096: beyond it nothing is drafted"),
    "rotation": (
        stretched,
        "is rotated otherwise than the target (yarn x 32 from 128, theta 10000; the target: default, theta 10000)",
    ),
}


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target, max_position_embeddings=4096, dtype=torch.float64)


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_what_is_not_the_targets_is_named(
    run: Run, make: Make, target: Path, tmp_path: Path, layout: Any, trap: str
) -> None:
    edit, said = TRAPS[trap]
    head = changed(tmp_path / "head", make(tiny_eagle3.head, of=target, layout=layout), edit)
    inspected = json.loads(run("inspect", head, "--json").out)
    told = any(each["severity"] == "warning" and said in each["what"] for each in inspected["problems"])
    assert told == (layout == "speculators"), "a layout that names its target, which is here"

    report = export(run, head, tmp_path / "o", "vllm", "--target", target)
    assert any(said in notice for notice in report["notices"])
    assert said in (tmp_path / "o" / "RUN.md").read_text()
    assert said in run("inspect", tmp_path / "o").out

    prompts, gates = tmp_path / "p.jsonl", tmp_path / "g.yaml"
    prompts.write_text('{"prompt": "abcabc"}\n')
    gates.write_text("compatible: {}\n")
    flags = ["--prompts", prompts, "--max-tokens", 4, "--gates", gates]
    ran = run("validate", "--target", target, "--draft", head, *flags)
    assert ran.code == 0, ran.out
    assert said in ran.out


def test_a_right_head_is_left_in_peace(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    head = make(tiny_eagle3.head, of=target, layout="speculators")
    words = ("context of", "rotated otherwise")
    assert not any(word in run("inspect", head).out for word in words)
    assert export(run, head, tmp_path / "o", "vllm", "--target", target)["notices"] == []
    other = changed(tmp_path / "gone", head, lambda config, tensors: moved(config, str(tmp_path / "nowhere")))
    assert run("inspect", other).code == 0


def moved(config: dict[str, Any], name: str) -> None:
    config["speculators_config"]["verifier"]["name_or_path"] = name


@pytest.mark.parametrize("name", ["", "org/model", "a\0b", "x" * 5000, "/dev/null"])
def test_a_target_that_is_nowhere(run: Run, make: Make, target: Path, tmp_path: Path, name: str) -> None:
    head = make(tiny_eagle3.head, of=target, layout="speculators")
    assert run("inspect", changed(tmp_path / "h", head, lambda config, _: moved(config, name))).code == 0


def test_the_head_of_another_target(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    """Which its own directory names."""
    other = make(tiny.llama, seed=1, vocab_size=272, num_hidden_layers=8)
    head = make(tiny_eagle3.head, of=target, layout="speculators")
    path = changed(tmp_path / "h", head, lambda config, _: moved(config, str(other)))
    ran = run("inspect", path)
    assert ran.code == 2
    assert "vocab_size is 264, the target has 272: the head is of another model" in ran.out


# Positions that begin at 1, as a trainer counts them


def eagle3_logits(make: Make, rotation: dict[str, Any]) -> Tensor:
    of = make(tiny_eagle3.target, layers=3, dtype=torch.float64, rope_parameters=rotation)
    path = make(tiny_eagle3.head, of=of, taps=(0, 1, 2), hidden=1.0)
    stored = stored_head(layouts.read(Checkpoint(path), None, 3), 3)
    config = ModelConfig.read(stored.head.layer, "the head")
    model = eagle3_checkpoint.build(stored, stand_in(config).double(), torch.float64, CPU, "train")
    return chain_logits(model, config.vocab_size, config.max_position, stored.head.target_hidden)


def mtp_logits(of: Path) -> Tensor:
    found = find_mtp(Checkpoint(of))
    config = read_config(found.checkpoint.config, "the target")
    model = mtp_checkpoint.build(found, stand_in(config).double(), torch.float64, CPU, "train")
    return chain_logits(model, config.vocab_size, config.max_position, config.hidden_size)


def llama_mtp_logits(make: Make, rotation: dict[str, Any]) -> Tensor:
    of = make(tiny.llama, seed=1, num_hidden_layers=1, dtype=torch.float64, rope_parameters=rotation)
    return mtp_logits(make(tiny_mtp.mtp, of=of, hidden=1.0))


def deepseek_mtp_logits(make: Make, rotation: dict[str, Any]) -> Tensor:
    config = {"rope_scaling": None, "rope_parameters": rotation, "first_k_dense_replace": 0, "num_hidden_layers": 1}
    of = make(tiny.deepseek, seed=1, dtype=torch.float64, **config)
    return mtp_logits(make(tiny_mtp.mtp, of=of, hidden=1.0))


def exact_turn(self: Rope, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin without the rounding of float32, so that nothing is left but what a rotation is."""
    angle_TF = position_T.double()[:, None] * self._inv_freq_F.double()
    cos_TF, sin_TF = angle_TF.cos() * self._scale, angle_TF.sin() * self._scale
    if self._interleaved:
        pairs = (torch.stack(pair, dim=-1).flatten(1) for pair in ((cos_TF, cos_TF), (-sin_TF, sin_TF)))
    else:
        pairs = (torch.cat(pair, dim=-1) for pair in ((cos_TF, cos_TF), (-sin_TF, sin_TF)))
    cos_TH, sin_TH = pairs
    return cos_TH[:, None], sin_TH[:, None]


HEADS = {"eagle3": eagle3_logits, "mtp": llama_mtp_logits, "mtp of DeepSeek": deepseek_mtp_logits}


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("head", HEADS)
def test_a_head_says_the_same_wherever_positions_begin(
    make: Make, monkeypatch: pytest.MonkeyPatch, head: str, rotation: str
) -> None:
    """At once over the near and the far end of the context."""
    right = standin.positions

    def moved_by(count: int, factor: int = 1) -> Tensor:
        monkeypatch.setattr(standin, "positions", lambda last: factor * right(last) + count)
        return HEADS[head](make, ROTATIONS[rotation])

    assert float((moved_by(1) - moved_by(0)).abs().max()) < 1e-3, "with the angles as they are computed, in float32"
    monkeypatch.setattr(Rope, "cos_sin", exact_turn)
    expected = moved_by(0)
    assert float((moved_by(1) - expected).abs().max()) < 1e-10
    assert float((moved_by(0, factor=2) - expected).abs().max()) > 1e-2, "it would be seen"
