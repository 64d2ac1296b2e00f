"""Where an MTP layer is found, what is taken from it, and which layers are refused: named by tensor or key."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_deepseek
import tiny_mtp
import torch
from conftest import Run
from decoding import engine, greedy_params, model, mtp_draft, outputs
from fixtures import Make
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.drafts.mtp_checkpoint import find_mtp, is_mtp_alone, load_mtp
from specctl.errors import CheckpointError, IncompatiblePair, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.pair import open_draft, open_policy, open_target

WIDTH = 32
PROMPTS = [[tiny.BOS, *(3 * j % 11 for j in range(n))] for n in (4, 17)]


@pytest.fixture(scope="module")
def base(make: Make) -> Path:
    return make(tiny.llama, seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def inside(make: Make, base: Path) -> Path:
    return make(tiny_mtp.mtp, of=base)


@pytest.fixture(scope="module")
def alone(make: Make, base: Path) -> Path:
    return make(tiny_mtp.mtp, of=base, alone="deepseek")


def changed(
    path: Path, of: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], object] = lambda config, tensors: None
) -> Path:
    config, tensors = tiny.read(of)
    edit(config, tensors)
    return tiny.write(path, config, tensors, tokenizer=False)


def drafted(target: Path, draft: Path) -> list[int]:
    e = engine(model(target), mtp_draft(draft, target), 2)
    e.run([(p, greedy_params(20)) for p in PROMPTS])
    return e.stats.speculation.accepted_per_position


# What is taken


@pytest.mark.parametrize("layout", ["deepseek", "sglang"])
@pytest.mark.parametrize("copies", ["none", "equal"])
def test_it_drafts_the_same_wherever_it_lies(
    make: Make, base: Path, inside: Path, layout: tiny_mtp.Alone, copies: tiny_mtp.Copies
) -> None:
    path = make(tiny_mtp.mtp, of=base, alone=layout, copies=copies)
    expected = engine(model(inside), mtp_draft(inside), 2)
    expected.run([(p, greedy_params(20)) for p in PROMPTS])
    assert drafted(base, path) == expected.stats.speculation.accepted_per_position
    assert is_mtp_alone(Checkpoint(path).names())
    assert not is_mtp_alone(Checkpoint(inside).names())


def test_the_target_is_what_it_is_without_the_layer(base: Path, inside: Path) -> None:
    requests = [(p, greedy_params(20)) for p in PROMPTS]
    assert outputs(engine(model(inside)).run(requests)) == outputs(engine(model(base)).run(requests))


def test_copies_equal_to_the_targets_are_left_out(make: Make, base: Path) -> None:
    bare, equal, own = (
        mtp_draft(make(tiny_mtp.mtp, of=base, copies=copies)).model for copies in ("none", "equal", "own")
    )
    names = [{name for name, _ in each.named_parameters()} for each in (bare, equal, own)]
    assert names[0] == names[1]
    assert names[2] - names[0] == {"model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight"}


def test_copies_of_its_own_are_used(make: Make, base: Path, tmp_path: Path) -> None:
    """A head of zeros has no favourite, and then it is the lowest id."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.shared_head.head.weight"] *= 0

    path = changed(tmp_path / "zero", make(tiny_mtp.mtp, of=base, alone="deepseek", copies="own"), edit)
    e, seen = engine(model(base), mtp_draft(path, base), 2), list[Tensor]()
    e.observer = lambda sequences, draft, scores, verdict: seen.append(draft.token_BK)
    e.run([(PROMPTS[0], greedy_params(8))])
    assert sum(block.numel() for block in seen) > 8
    assert not any(block.any() for block in seen)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_every_family_has_one(make: Make, model_type: str) -> None:
    path = make(tiny_mtp.mtp, of=make(tiny.llama, seed=1, num_hidden_layers=1, model_type=model_type))
    requests = [(p, greedy_params(20)) for p in PROMPTS]
    e = engine(model(path), mtp_draft(path), 2)
    assert outputs(e.run(requests)) == outputs(engine(model(path)).run(requests))
    assert e.stats.speculation.num_accepted_tokens > 0


def test_names_are_the_checkpoints(inside: Path) -> None:
    """So that what is trained can be saved as it is."""
    stored = {name for name in Checkpoint(inside).names() if name.startswith("model.layers.1.")}
    target = open_target(str(inside), ModelOptions(dtype="float64"))
    trained = load_mtp(find_mtp(target.checkpoint), target.model, target.checkpoint, target.device, "train")
    assert set(trained.model.state_dict()) == stored
    assert all(parameter.requires_grad for parameter in trained.model.parameters())


# Opening


def test_mtp_names_the_layer_inside_the_target(base: Path, inside: Path, alone: Path) -> None:
    target = open_target(str(inside), ModelOptions())
    draft = open_draft("mtp", target)
    assert (draft.drafter.kind, draft.name, draft.checkpoint) == ("mtp", "mtp", target.checkpoint)
    assert open_draft(str(alone), target).drafter.kind == "mtp"
    assert open_draft(str(inside), target).drafter.kind == "llama"  # a whole model is a model
    with pytest.raises(IncompatiblePair, match=r"--draft mtp: .*num_nextn_predict_layers is 0 or absent"):
        open_draft("mtp", open_target(str(base), ModelOptions()))


def test_it_drafts_one_token_unless_told_otherwise(inside: Path) -> None:
    target = open_target(str(inside), ModelOptions())
    draft = open_draft("mtp", target)
    policy, _ = open_policy(DecodingOptions(drafts=("mtp",)), target, draft)
    assert policy(1, 1.0).k == 1
    policy, _ = open_policy(DecodingOptions(drafts=("mtp",), k=5), target, draft)
    assert policy(1, 1.0).k == 5


def test_of_several_layers_no_chain_is_made(make: Make, base: Path) -> None:
    target = open_target(str(make(tiny_mtp.mtp, of=base, layers=2)), ModelOptions())
    draft = open_draft("mtp", target)
    assert any("mtp has 2 MTP layers" in notice for notice in draft.notices)
    assert open_policy(DecodingOptions(drafts=("mtp",)), target, draft)[0](1, 1.0).k == 1
    with pytest.raises(UsageError, match="--k 2: mtp drafts at most 1 tokens: it has 2 MTP layers, and what a chain"):
        open_policy(DecodingOptions(drafts=("mtp",), k=2), target, draft)


def test_a_tokenizer_beside_it_is_compared(base: Path, alone: Path, tmp_path: Path) -> None:
    target = open_target(str(base), ModelOptions())
    other = changed(tmp_path / "other", alone)
    tiny.byte_tokenizer(other)
    assert open_draft(str(other), target).notices == []
    shutil.rmtree(other)
    tiny.byte_tokenizer(changed(other, alone), swap=(97, 98))
    with pytest.raises(IncompatiblePair, match="97"):
        open_draft(str(other), target)


# What is refused


def refusal(target: Path, draft: Path | str) -> str:
    with pytest.raises((IncompatiblePair, CheckpointError)) as caught:
        open_draft(str(draft), open_target(str(target), ModelOptions()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (
            {"hidden_size": 48, "head_dim": 8},
            "tensor model.layers.1.enorm.weight has shape [48], the target needs [32]",
        ),
        ({"intermediate_size": 80}, "tensor model.layers.1.mlp.gate_proj.weight has shape [80, 32]"),
        ({"num_hidden_layers": 2}, "tensor model.layers.2.eh_proj.weight follows the 2 layers of a model, the target "),
        ({"vocab_size": 272}, "vocab_size is 272, the target has 264"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the target has 1e-05"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "rope (theta) is 5000.0, the target"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, "num_attention_heads is 8, the target"),
    ],
)
def test_a_layer_of_another_model(make: Make, base: Path, of: dict[str, Any], said: str) -> None:
    other = make(tiny.llama, **({"seed": 1, "num_hidden_layers": 1} | of))
    assert said in refusal(base, make(tiny_mtp.mtp, of=other, alone="deepseek"))


def test_a_vocabulary_that_its_own_head_shows(make: Make, base: Path) -> None:
    other = make(tiny.llama, seed=1, num_hidden_layers=1, vocab_size=272)
    said = refusal(base, make(tiny_mtp.mtp, of=other, alone="deepseek", copies="own"))
    assert "tensor model.layers.1.embed_tokens.weight has shape [272, 32], the target needs [264, 32]" in said


def test_a_longer_context_is_no_difference(make: Make, base: Path) -> None:
    other = make(tiny.llama, seed=1, num_hidden_layers=1, max_position_embeddings=128)
    draft = open_draft(str(make(tiny_mtp.mtp, of=other, alone="deepseek")), open_target(str(base), ModelOptions()))
    assert draft.drafter.max_length == 256


@pytest.mark.parametrize("name", ["enorm", "hnorm", "shared_head.norm", "eh_proj", "self_attn.k_proj"])
def test_a_layer_that_lacks_something(base: Path, inside: Path, alone: Path, tmp_path: Path, name: str) -> None:
    tensor = f"model.layers.1.{name}.weight"
    path = changed(tmp_path / "alone", alone, lambda config, tensors: tensors.pop(tensor))
    assert f"{path}: tensor {tensor} is missing (1 in all)" in refusal(base, path)
    path = changed(tmp_path / "inside", inside, lambda config, tensors: tensors.pop(tensor))
    assert f"{path}: tensor {tensor} is missing (1 in all)" in refusal(path, "mtp")


def test_a_layer_with_something_more(base: Path, alone: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(4, WIDTH)

    said = refusal(base, changed(tmp_path / "more", alone, edit))
    assert "tensor model.layers.1.mlp.gate.weight is not part of an MTP layer of a llama model" in said


def test_a_layer_elsewhere_or_lost(base: Path, inside: Path, alone: Path, tmp_path: Path) -> None:
    def move(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("layers.1.", "layers.5.")] = tensors.pop(name)

    said = refusal(base, changed(tmp_path / "moved", alone, move))
    assert "expected an MTP layer in model.layers.1.*, found tensor model.layers.5.eh_proj.weight" in said

    def lose(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            del tensors[name]

    said = refusal(changed(tmp_path / "lost", inside, lose), "mtp")
    assert "expected an MTP layer in model.layers.1.*, saving may have lost it" in said


def test_a_layer_that_nothing_claims(inside: Path, alone: Path, base: Path, tmp_path: Path) -> None:
    """The target's own tensors are then one too many."""
    path = changed(tmp_path / "inside", inside, lambda config, tensors: config.pop("num_nextn_predict_layers"))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\..* is not part of a llama model of 1 layers"):
        open_target(str(path), ModelOptions())
    path = changed(tmp_path / "alone", alone, lambda config, tensors: config.pop("num_nextn_predict_layers"))
    assert "num_nextn_predict_layers is 0 or absent: no MTP layer is declared" in refusal(base, path)


def test_a_layer_stored_in_numbers_that_need_a_table(base: Path, alone: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.eh_proj.weight"] = tensors["model.layers.1.eh_proj.weight"].to(torch.int8)

    said = refusal(base, changed(tmp_path / "int8", alone, edit))
    assert "tensor model.layers.1.eh_proj.weight is stored as int8" in said


# What convert-mtp writes


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("to", ["deepseek", "vllm", "sglang"])
def test_what_convert_mtp_writes_drafts_as_the_layer_inside(
    run: Run, make: Make, tmp_path: Path, to: str, fp8: bool
) -> None:
    source = make(tiny_deepseek.deepseek, fp8=fp8)
    assert run("convert-mtp", source, tmp_path / "out", "--to", to).code == 0
    target = open_target(str(source), ModelOptions(dtype="float64"))
    blocks = []
    for name in ("mtp", str(tmp_path / "out")):
        e, seen = engine(target.model, open_draft(name, target).drafter, 2), list[Tensor]()
        e.observer = lambda sequences, draft, scores, verdict, seen=seen: seen.append(draft.token_BK.flatten())
        e.run([([3, 7, 2, 40, 5, 9], greedy_params(12))])
        blocks.append(torch.cat(seen))
    assert blocks[0].numel() > 8
    assert len(set(blocks[0].tolist())) > 3
    assert torch.equal(*blocks)
    other = make(tiny_deepseek.deepseek, num_hidden_layers=3) if to != "sglang" else make(tiny.llama, seed=1)
    assert str(tmp_path / "out") in refusal(other, tmp_path / "out")
