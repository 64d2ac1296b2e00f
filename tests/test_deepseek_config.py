"""What a DeepSeek config.json may say, in every spelling; what cannot be told is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoConfig

from specctl.errors import CheckpointError
from specctl.models import DeepSeekConfig, read_config
from specctl.moe import Routing

V2, V3 = "deepseek_v2", "deepseek_v3"
LITE = {
    "model_type": V2,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "vocab_size": 102400,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "tie_word_embeddings": False,
}
R1 = LITE | {
    "model_type": V3,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "ep_size": 1,
    "rope_scaling": LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
FP8 = R1["quantization_config"]
V31 = R1 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}


def read(values: dict[str, Any], **overrides: Any) -> DeepSeekConfig:
    values = {key: value for key, value in (values | overrides).items() if value is not tiny.ABSENT}
    found = read_config(values, "config.json")
    assert isinstance(found, DeepSeekConfig)
    return found


def refusal(values: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(values, **overrides)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


def test_the_published_configs() -> None:
    lite, r1 = read(LITE), read(R1)
    assert lite.routing == Routing(64, 6, "softmax", False, 1, 1, 1, normalised=False, scale=1.0)
    assert r1.routing == Routing(256, 8, "sigmoid", True, 8, 4, 2, normalised=True, scale=2.5)
    assert (lite.q_rank, lite.kv_rank, lite.head_dim, lite.shared_inner) == (None, 512, 192, 2816)
    assert (r1.q_rank, r1.first_dense, r1.shared_inner, r1.max_length) == (1536, 3, 2048, 163840)
    assert r1.score_scale == pytest.approx(0.1352338, rel=1e-6)
    assert lite.score_scale == pytest.approx(192**-0.5 * 1.5896262, rel=1e-6)
    assert read(V31) == r1
    v2 = read(LITE, n_group=8, topk_group=3, topk_method="group_limited_greedy", n_routed_experts=160)
    assert v2.routing == Routing(160, 6, "softmax", False, 8, 3, 1, normalised=False, scale=1.0)


@pytest.mark.parametrize("values", [LITE, R1], ids=["V2-Lite", "R1"])
def test_what_transformers_writes_back_reads_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    """It spells the rotation anew, adds keys of its own and may leave out what it does not know."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "rope_parameters" in again
    assert read(again) == read(values)


@pytest.mark.parametrize(
    "lost", ["topk_method", "scoring_func", "n_shared_experts", "norm_topk_prob", "moe_layer_freq"]
)
def test_a_key_that_was_lost_means_what_the_model_type_means(lost: str) -> None:
    expected = 0 if lost == "n_shared_experts" else None
    for values in (LITE, R1):
        found = read(values, **{lost: tiny.ABSENT})
        assert found.routing == read(values).routing
        assert expected is None or found.shared_inner == expected


def test_a_v3_that_lost_all_of_its_routing_is_v3() -> None:
    keys = ("topk_method", "scoring_func", "n_group", "topk_group", "num_experts_per_tok", "norm_topk_prob")
    lost = dict.fromkeys((*keys, "routed_scaling_factor", "first_k_dense_replace", "q_lora_rank"), tiny.ABSENT)
    assert read(R1, **lost) == read(R1)


@pytest.mark.parametrize("key", ["n_group", "topk_group", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank"])
@pytest.mark.parametrize("model_type", [V2, V3])
def test_an_absent_key_means_what_it_means_to_transformers(model_type: str, key: str, tmp_path: Path) -> None:
    values = {name: value for name, value in R1.items() if name != key} | {"model_type": model_type}
    if model_type == V2:
        values |= {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs, found = AutoConfig.from_pretrained(tmp_path), read(values)
    assert (found.q_rank, found.kv_rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    assert found.first_dense == theirs.first_k_dense_replace
    if model_type == V3:
        assert (found.routing.groups, found.routing.kept_groups) == (theirs.n_group, theirs.topk_group)


@pytest.mark.parametrize(
    ("values", "overrides", "words"),
    [
        (LITE, {"topk_method": tiny.ABSENT, "n_group": 8, "topk_group": 3}, "topk_method is missing and n_group is 8"),
        (LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', which deepseek_v2 does not have"),
        (LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', which deepseek_v2 does not have"),
        (LITE, {"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "norm_topk_prob is True, which programs"),
        (R1, {"topk_method": "greedy"}, "topk_method is 'greedy', which deepseek_v3 does not have"),
        (R1, {"scoring_func": "softmax"}, "scoring_func is 'softmax', which deepseek_v3 does not have"),
        (R1, {"n_group": 7}, "n_routed_experts 256 cannot be chosen from topk_group 4 of n_group 7"),
        (R1, {"topk_group": 9}, "cannot be chosen from topk_group 9 of n_group 8"),
        (R1, {"n_group": 256, "topk_group": 16}, "cannot be chosen from topk_group 16 of n_group 256"),
        (R1, {"num_experts_per_tok": 200}, "num_experts_per_tok 200 of n_routed_experts 256 cannot be chosen"),
        (R1, {"num_experts_per_tok": tiny.ABSENT, "model_type": V2, "topk_method": "greedy", "scoring_func": None}
            | {"norm_topk_prob": False}, "key num_experts_per_tok is missing"),
        (R1, {"n_routed_experts": tiny.ABSENT}, "key n_routed_experts is missing"),
        (R1, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (R1, {"attention_bias": True}, "attention_bias is True"),
        (R1, {"num_key_value_heads": 8}, "num_key_value_heads is 8, expected num_attention_heads"),
        (R1, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, expected an even number"),
        (R1, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (R1, {"index_topk": 2048}, "index_topk is 2048"),
        (R1, {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        (R1, {"model_type": "deepseek_v32"}, "model_type is 'deepseek_v32'"),
        (R1, {"quantization_config": {"quant_method": "awq"}}, "quantization_config names 'awq'"),
    ],
)  # fmt: skip
def test_what_is_refused(values: dict[str, Any], overrides: dict[str, Any], words: str) -> None:
    assert re.search(re.escape(words), refusal(values, **overrides))
