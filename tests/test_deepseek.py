"""Logits of DeepSeek models against transformers, through pages and with gradients; both forms of latent attention.

transformers takes the router in float32 whatever the dtype, and V2's rotation too. The product takes the router in
float64 then, so the two agree to what float32 can say; between its own forms it agrees to the last bits of float64.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fixtures import Make
from paged import Paged
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specctl.attention.dense import DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.kv.batch import Batch, Span
from specctl.layers import Purpose
from specctl.models import CausalLM, load

CPU = torch.device("cpu")
V2, V3 = "deepseek_v2", "deepseek_v3"
NO_YARN: dict[str, Any] = {"rope_scaling": None}
MODELS: dict[str, dict[str, Any]] = {
    "V2-Lite": {"model_type": V2},
    "V2": {"model_type": V2, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
    | {"routed_scaling_factor": 16.0, "n_shared_experts": 1},
    "V3": {"model_type": V3} | NO_YARN,
    "R1": {"model_type": V3},
    "V3 without a low rank": {"model_type": V3, "q_lora_rank": None, "norm_topk_prob": False},
    "V3 without groups": {"model_type": V3, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "V3 of halves": {"model_type": V3, "rope_interleave": False},
    "V3 of wide values": {"model_type": V3, "v_head_dim": 20, "kv_lora_rank": 12, "first_k_dense_replace": 0},
    "V3 of plain layers": {"model_type": V3, "first_k_dense_replace": 5, "rms_norm_eps": 1e-3},
    "V3 of several scales": {"model_type": V3, "rope_scaling": tiny.ABSENT}
    | tiny.rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.5, original_max_position_embeddings=32),
    "V2 with linear rotation": {"model_type": V2} | tiny.rope("linear", "type", factor=2.0),
}
LENGTH = 60


def ours(path: Path, dtype: torch.dtype = torch.float64, purpose: Purpose = "serve") -> CausalLM:
    return load(Checkpoint(path), dtype, CPU, purpose)


def theirs(path: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    # sdpa: the eager attention of transformers takes the softmax in float32. Its grouped experts know no float64.
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, ids = tiny.deepseek(tmp_path / "m", seed=3, dtype=torch.float64, **MODELS[name]), text(LENGTH)
    ways = [None, [40, 19, 1], [7, 30, 3, 20], [1] * LENGTH]  # with 27 rows and more, keys are expanded
    exact = 1e-5 if MODELS[name]["model_type"] == V2 else 1e-6
    for dtype, limit in ((torch.float64, exact), (torch.float32, 1e-4)):
        expected = logits_of(theirs(path, dtype), ids)
        assert len(set(expected.argmax(-1).tolist())) > LENGTH / 3, "an echo, or always the same"
        for purpose in ("serve", "train"):
            runner = Paged(ours(path, dtype, purpose))
            assert max(error(runner.run(ids, chunks), expected) for chunks in ways) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", [V2, V3])
def test_half_precision_is_as_near_to_the_truth_as_transformers(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path, ids = tiny.deepseek(tmp_path / "m", model_type=model_type, dtype=dtype), text(40)
    truth = logits_of(theirs(path), ids)

    def middle(found: Tensor) -> float:
        """Not the largest error: an expert that rounding chooses or not makes one of any size."""
        return float((found.double() - truth).abs().median())

    their_error = middle(logits_of(theirs(path, dtype), ids))
    runner = Paged(ours(path, dtype))
    for chunks in (None, [17, 16, 7], [1] * 40):
        assert middle(runner.run(ids, chunks)) < 3 * their_error


@pytest.mark.parametrize("name", ["V2-Lite", "R1", "V3 of wide values"])
def test_both_forms_of_attention_and_the_dense_one_say_the_same(name: str, tmp_path: Path) -> None:
    path, ids = tiny.deepseek(tmp_path / "m", seed=3, dtype=torch.float64, **MODELS[name]), text(LENGTH)
    model = ours(path)
    rows = model.model.layers[0].self_attn.kv_b_proj.rows_to_expand
    expanded = Paged(model).run(ids)
    assert rows < LENGTH or name == "V3 of wide values"
    assert error(Paged(model).run(ids, [1] * LENGTH), expanded) < 1e-12
    assert error(Paged(model).run(ids, [8] * 7 + [4]), expanded) < 1e-12
    attn, batch = DenseAttention(), Batch.pack([Span(ids, 0, [], 0)])
    attn.plan(batch)
    with torch.inference_mode():
        assert error(model.logits(model(batch, attn).final_TD), expanded) < 1e-12


def test_rows_of_many_and_of_few_share_a_pass(tmp_path: Path) -> None:
    """Chunks whose keys are expanded beside single rows and blocks whose queries are absorbed, in any order."""
    path = tiny.deepseek(tmp_path / "m", dtype=torch.float64)
    model = ours(path)
    texts = [text(length, seed=length) for length in (40, 3, 64, 31, 1, 17)]
    alone = [Paged(model).run(ids) for ids in texts]
    chunks = [[5, 35], [1, 1, 1], [64], [30, 1], [1], [1, 16]]
    for order in (range(6), [1, 2, 0, 5, 3, 4], [2, 4]):
        found = Paged(model).run_together([texts[i] for i in order], [chunks[i] for i in order])
        assert max(error(logits, alone[i]) for i, logits in zip(order, found, strict=True)) < 1e-12


@pytest.mark.parametrize("model_type", [V2, V3])
def test_gradients_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Two examples packed into one pass, of which ours sees each by itself."""
    path = tiny.deepseek(tmp_path / "m", seed=4, model_type=model_type, dtype=torch.float64, n_shared_experts=1)
    reference, model = theirs(path), ours(path, purpose="train")
    texts = [text(18, seed=1), text(11, seed=2)]
    weight_TV = torch.randn(29, tiny.VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits_TV = torch.cat([reference(torch.tensor([ids])).logits[0] for ids in texts])
    (logits_TV * weight_TV).sum().backward()
    attn, batch = DenseAttention(), Batch.pack([Span(ids, 0, [], i) for i, ids in enumerate(texts)])
    attn.plan(batch)
    (model.logits(model(batch, attn).final_TD) * weight_TV).sum().backward()
    expected = dict(reference.named_parameters())
    compared = 0
    for name, parameter in model.named_parameters():
        if name.endswith("correction_bias"):
            assert parameter.grad is None, "it has a part in the choice only"
            continue
        assert parameter.grad is not None, name
        if ".experts." not in name:
            assert error(parameter.grad, expected[name].grad) < 1e-5, name
            compared += 1
    assert compared > 20
    layer, theirs_layer = model.model.layers[1].mlp.experts, reference.model.layers[1].mlp.experts
    for index, expert in enumerate(layer):
        gate_up = torch.cat((expert.gate_proj.weight.grad, expert.up_proj.weight.grad))
        assert error(gate_up, theirs_layer.gate_up_proj.grad[index]) < 1e-5
        assert error(expert.down_proj.weight.grad, theirs_layer.down_proj.grad[index]) < 1e-5


def test_before_serving_a_state_dict_is_the_checkpoint(tmp_path: Path) -> None:
    path = tiny.deepseek(tmp_path / "m")
    _, tensors = tiny.read(path)
    state = ours(path, torch.float32, "train").state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_after_serving_there_is_no_state_dict(tmp_path: Path) -> None:
    model = ours(tiny.deepseek(tmp_path / "m"), torch.float32)
    for module in (model, model.model.layers[1].mlp.experts[0], model.model.layers[0].self_attn):
        with pytest.raises(AssertionError, match="prepared for serving"):
            module.state_dict()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_prepared_copy_of_a_trained_model_gives_the_same(tmp_path: Path) -> None:
    model, ids = ours(tiny.deepseek(tmp_path / "m", dtype=torch.float64), purpose="train"), text(20)
    expected = Paged(model).run(ids)
    model.prepare("serve")
    assert error(Paged(model).run(ids), expected) < 1e-12


def test_the_bias_of_the_choice_stays_float32(tmp_path: Path) -> None:
    path = tiny.deepseek(tmp_path / "m", dtype=torch.bfloat16)
    _, tensors = tiny.read(path)
    for purpose in ("serve", "train"):
        bias = ours(path, torch.bfloat16, purpose).model.layers[1].mlp.gate.e_score_correction_bias
        assert bias.dtype == torch.float32
        assert torch.equal(bias, tensors["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_what_a_token_keeps_is_its_latent_and_one_key(tmp_path: Path) -> None:
    for layer in ours(tiny.deepseek(tmp_path / "m")).kv_layers("draft"):
        assert (layer.owner, layer.shapes, layer.bytes_per_slot) == ("draft", ((20,),), 8 * 20)


# -- MTP layers of the checkpoint --------------------------------------------------------------------------------------


def with_mtp(path: Path, **overrides: Any) -> Path:
    return tiny.deepseek(path, dtype=torch.float64, num_nextn_predict_layers=1, **overrides)


def test_an_mtp_layer_is_left_to_the_draft(tmp_path: Path) -> None:
    path, ids = with_mtp(tmp_path / "m"), text(20)
    config, tensors = tiny.read(path)
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")}
    assert len(without) < len(tensors)
    plain = tiny.write(tmp_path / "plain", config | {"num_nextn_predict_layers": 0}, without)
    assert torch.equal(Paged(ours(path)).run(ids), Paged(ours(plain)).run(ids))


def test_an_mtp_layer_that_is_not_claimed_is_refused(tmp_path: Path) -> None:
    config, tensors = tiny.read(with_mtp(tmp_path / "m"))
    path = tiny.write(tmp_path / "n", config | {"num_nextn_predict_layers": 0}, tensors)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\.\S+ is not part of a deepseek_v3 model"):
        ours(path)


def test_what_is_missing_is_named(make: Make, tmp_path: Path) -> None:
    config, tensors = tiny.read(make(tiny.deepseek))
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    path = tiny.write(tmp_path / "m", config, tensors)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing"):
        ours(path)
