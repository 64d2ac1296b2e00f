"""What a config.json and a device's constants say about passes: sizes against published ones, experts against a
simulation, kernels against what they are bound by, memory against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3, LLAMA_1B, LLAMA_8B, LLAMA_70B, MISTRAL_7B, MIXTRAL, QWEN2_7B, QWEN3_8B

from specctl.errors import CheckpointError
from specctl.roofline import drafts, memory, operators
from specctl.roofline.experts import distinct, fullest
from specctl.roofline.passes import Passes, Placement
from specctl.roofline.serving import Load, tpot_mixed_ms, tpot_prefill_first_ms
from specctl.roofline.shape import Experts, ModelShape, parameters
from specctl.schemas.profile import Constants, read_either
from specctl.schemas.roofline import AllReduce, Lane, Product, Roofline
from specctl.shipped import shipped


def constants(name: str = "h100-sxm") -> Constants:
    found = read_either(shipped("profiles") / f"{name}.yaml")
    assert isinstance(found, Constants)
    return found


@pytest.fixture(scope="module")
def h100() -> Roofline:
    return constants().roofline


def shape(config: dict[str, Any]) -> ModelShape:
    return ModelShape.read(config, "config.json")


def passes(config: dict[str, Any], roofline: Roofline, engine: str = "vllm", **place: Any) -> Passes:
    of = shape(config)
    return Passes(of, Placement(**({"weights": of.weights} | place)), roofline.lanes[engine], roofline.peaks)


def ms(of: Passes, batch: float, rows: float, context: float) -> float:
    return float(of.step(*(np.array([float(value)]) for value in (batch, rows, context))).total[0])


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (QWEN3_8B, 8_190_735_360),
        (QWEN2_7B, 7_615_616_512),
        (MISTRAL_7B, 7_248_023_552),
        (MIXTRAL, 46_702_792_704),
        (DEEPSEEK_V3, 671_026_419_200),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
    ],
)
def test_parameters_are_the_published_ones(config: dict[str, Any], published: int) -> None:
    assert parameters(shape(config)) == published


@pytest.mark.parametrize(("config", "published"), [(DEEPSEEK_V3, 37e9), (MIXTRAL, 12.9e9), (DEEPSEEK_V2_LITE, 2.7e9)])
def test_active_parameters_are_the_published_ones(config: dict[str, Any], published: float) -> None:
    assert parameters(shape(config), active=True) == pytest.approx(published, rel=0.03)


def test_all_parameters_of_a_dense_model_are_active() -> None:
    assert parameters(shape(LLAMA_8B), active=True) == parameters(shape(LLAMA_8B))


@pytest.mark.parametrize(
    ("quantisation", "weights"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        (None, "bf16"),
    ],
)
def test_how_weights_are_stored_is_read(quantisation: object, weights: str) -> None:
    assert shape(LLAMA_8B | {"quantization_config": quantisation}).weights == weights


def test_an_unknown_scheme_is_refused_unless_it_is_said_what_to_take_it_for() -> None:
    config = LLAMA_8B | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config names 'awq'.*--quantisation"):
        shape(config)
    assert ModelShape.read(config, "config.json", "fp8").weights == "fp8"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA_8B | {"model_type": "mamba"}, "config.json: model_type is 'mamba', whose passes are not known here"),
        ({k: v for k, v in LLAMA_8B.items() if k != "hidden_size"}, "config.json: key hidden_size is missing"),
        ({k: v for k, v in DEEPSEEK_V3.items() if k != "n_routed_experts"}, "key n_routed_experts is missing"),
        (LLAMA_8B | {"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        (LLAMA_8B | {"num_hidden_layers": "32"}, "num_hidden_layers is '32', expected a positive integer"),
        (DEEPSEEK_V3 | {"n_group": 7}, "cannot be chosen from topk_group 4 of n_group 7 equal groups"),
    ],
)
def test_a_wrong_config_is_named_in_a_sentence(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        shape(config)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(count: int, chosen: int, groups: int = 1, kept: int = 1) -> Experts:
    return Experts(count, chosen, 2048, 0, groups, kept, 0, biased=False)


def simulated(of: Experts, tokens: int, ranks: int, draws: int = 300) -> tuple[float, float]:
    """Distinct experts of all and of the fullest rank, with scores drawn anew for every token."""
    random = np.random.default_rng(tokens)
    size = of.count // of.groups
    total, most = [], []
    for _ in range(draws):
        score = random.random((tokens, of.groups, size))
        group = np.argsort(random.random((tokens, of.groups)), axis=1)[:, : of.kept_groups]
        allowed = np.zeros((tokens, of.groups, 1), dtype=bool)
        np.put_along_axis(allowed[:, :, 0], group, True, axis=1)
        flat = np.where(allowed, score, -1).reshape(tokens, -1)
        hit = np.zeros(of.count, dtype=bool)
        hit[np.unique(np.argsort(-flat, axis=1)[:, : of.chosen])] = True
        total.append(hit.sum())
        most.append(hit.reshape(ranks, -1).sum(1).max())
    return float(np.mean(total)), float(np.mean(most))


@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("of", [experts(256, 8, 8, 4), experts(256, 8), experts(64, 6), experts(8, 2)])
def test_distinct_experts_are_those_of_a_simulation(of: Experts, tokens: int) -> None:
    expected, _ = simulated(of, tokens, 1)
    assert float(distinct(np.array([tokens]), of)[0]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512])
def test_the_fullest_rank_is_that_of_a_simulation(tokens: int, ranks: int) -> None:
    of = experts(256, 8, 8, 4)
    _, expected = simulated(of, tokens, ranks, 100)
    # One token on sixteen devices is the worst: a few experts are no normal distribution, and 1.94 stand for 2.53.
    assert float(fullest(np.array([tokens]), of, ranks)[0]) == pytest.approx(expected, rel=0.25)


def test_one_token_reads_as_many_experts_as_it_chooses_and_many_all() -> None:
    of = experts(256, 8, 8, 4)
    assert distinct(np.array([1, 100_000]), of).tolist() == pytest.approx([8, 256])
    assert fullest(np.array([100_000]), of, 8).tolist() == pytest.approx([32])


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_product_is_bound_by_reading_at_few_rows_and_by_computing_at_many(h100: Roofline) -> None:
    kind = Product(bandwidth=1, flops=1, start_us=0, tile=1, norm=8)
    few, many = operators.product_us(np.array([1.0, 65536.0]), 8192, 8192, 2, kind, h100.peaks)
    assert few == pytest.approx(8192 * 8192 * 2 / 3350e3, rel=0.01)
    assert many == pytest.approx(2 * 65536 * 8192 * 8192 / 989.5e6, rel=0.01)


def test_a_row_beyond_a_tile_costs_a_tile(h100: Roofline) -> None:
    kind = Product(bandwidth=0.9, flops=0.1, start_us=5, tile=128, norm=2)
    within, beyond, next_one = operators.product_us(np.array([128.0, 129.0, 130.0]), 8192, 8192, 1, kind, h100.peaks)
    assert beyond > 1.5 * within
    assert next_one == pytest.approx(beyond, rel=0.001)


def test_a_large_all_reduce_goes_another_way() -> None:
    kind = AllReduce(devices=8, start_us=5, small_gbps=50, switch_us=10, gbps=200)
    small, large = operators.all_reduce_us(np.array([1.0, 8192.0]), 8192, kind)
    assert small == pytest.approx(5 + 8192 * 2 / 50e3)
    assert large == pytest.approx(5 + 10 + 8192 * 8192 * 2 / 200e3)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(
    ("config", "place"),
    [
        (LLAMA_8B, {}),
        (LLAMA_70B, {"tp": 8, "weights": "fp8", "cache": "fp8"}),
        (DEEPSEEK_V3, {"tp": 16, "ep": 16, "nodes": 2}),
    ],
)
def test_more_work_takes_longer(h100: Roofline, engine: str, config: dict[str, Any], place: dict[str, Any]) -> None:
    of = passes(config, h100, engine, **place)
    for values in (
        [ms(of, batch, 1, 1024) for batch in (1, 2, 8, 64, 256)],
        [ms(of, 8, rows, 1024) for rows in range(1, 10)],
        [ms(of, 8, 4, context) for context in (512, 2048, 8192, 32768)],
    ):
        assert all(later >= earlier for earlier, later in pairwise(values))


def test_known_steps_are_near(h100: Roofline) -> None:
    """Llama-3.1-8B on one H100 with SGLang, alone: 6.32 ms a token are published (CHANGELOG of nothing: a row of the
    engine's documentation), host included; 70B in FP8 on 8 with vLLM, 4 at a time: 9.1."""
    alone = ms(passes(LLAMA_8B, h100, "sglang"), 1, 1, 200) + h100.lanes["sglang"].overheads_ms.base
    assert alone == pytest.approx(6.32, rel=0.15)
    four = ms(passes(LLAMA_70B, h100, "vllm", tp=8, weights="fp8", cache="fp8"), 4, 1, 1536)
    assert four + h100.lanes["vllm"].overheads_ms.base == pytest.approx(9.1, rel=0.15)


def test_verifying_is_nearly_free_for_a_dense_model_and_not_with_experts(h100: Roofline) -> None:
    dense, sparse = passes(LLAMA_8B, h100), passes(DEEPSEEK_V3, h100, tp=8)
    assert ms(dense, 1, 4, 1024) / ms(dense, 1, 1, 1024) < 1.1
    assert ms(sparse, 1, 4, 1024) / ms(sparse, 1, 1, 1024) > 1.2


def test_nodes_cost_an_exchange_each(h100: Roofline) -> None:
    one, two = (passes(DEEPSEEK_V3, h100, tp=8, nodes=nodes) for nodes in (1, 2))
    across = h100.lanes["vllm"].across_us
    slower = h100.lanes["vllm"].model_copy(update={"across_us": across + 100})
    dearer = replace(two, lane=slower)
    assert ms(dearer, 1, 1, 512) - ms(two, 1, 1, 512) == pytest.approx(2 * 61 * 0.1)
    assert ms(replace(one, lane=slower), 1, 1, 512) == ms(one, 1, 1, 512)


def test_whole_experts_have_kernels_of_their_own(h100: Roofline) -> None:
    kind = h100.lanes["sglang"].experts
    slow = kind.model_copy(update={"start_us": kind.start_us + 100})
    lane = h100.lanes["sglang"].model_copy(update={"whole_experts": slow})
    parts, whole, both = (
        ms(replace(passes(DEEPSEEK_V3, h100, "sglang", tp=8, ep=ep), lane=lane), 1, 1, 512)
        - ms(replace(passes(DEEPSEEK_V3, h100, "sglang", tp=8, ep=ep), lane=without(lane)), 1, 1, 512)
        for ep in (1, 8, 4)
    )
    assert (parts, both) == (0, 0)
    assert whole == pytest.approx(58 * 0.1)


def without(lane: Lane) -> Lane:
    return lane.model_copy(update={"whole_experts": None})


def test_prompts_go_through_the_head_once_each(h100: Roofline) -> None:
    of = passes(LLAMA_8B, h100)
    step = of.step(np.array([64.0]), np.array([8.0]), np.array([1.0])).products[0]
    prompt = of.prompts(np.array([512.0]), np.array([512.0])).products[0]
    assert prompt < step


# -- memory ------------------------------------------------------------------------------------------------------------


def test_room_by_hand(h100: Roofline) -> None:
    """16.06 GB of weights (norms left out), 128 KiB of keys and values a token."""
    found = memory.room(h100, passes(LLAMA_8B, h100))
    assert found.weights == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert found.per_token == 32 * 2 * 8 * 128 * 2
    assert found.tokens == int((80e9 * h100.memory_share - h100.reserve_gb * 1e9 - found.weights) / found.per_token)


def test_devices_share_weights_and_caches_but_not_below_one_group(h100: Roofline) -> None:
    one, sixteen = (memory.room(h100, passes(LLAMA_70B, h100, tp=tp, nodes=-(-tp // 8))) for tp in (8, 16))
    assert one.weights == pytest.approx(2 * sixteen.weights)
    assert one.per_token == sixteen.per_token == 80 * 2 * 128 * 2


def test_a_latent_is_kept_by_every_device(h100: Roofline) -> None:
    found = memory.room(h100, passes(DEEPSEEK_V3, h100, tp=16, nodes=2))
    assert found.per_token == 61 * 576 * 2
    assert found.weights == pytest.approx(671e9 / 16, rel=0.01)
    assert memory.room(h100, passes(DEEPSEEK_V3, h100, tp=8)).tokens == 0


def test_drafts_are_charged(h100: Roofline) -> None:
    target = passes(LLAMA_8B, h100)
    small = drafts.small_model(shape(LLAMA_1B), target.lane, target.peaks, target.place)
    assert small.weights == pytest.approx(2 * 1_235_814_400, rel=1e-4)
    assert small.cache == 16 * 2 * 8 * 64 * 2
    head = drafts.eagle3_like(target)
    assert head.cache == 2 * 8 * 128 * 2
    assert ms(head.follow, 1, 4, 512) > ms(head.step, 1, 1, 512)
    layer = drafts.mtp_layer(passes(DEEPSEEK_V3, h100, tp=8))
    # A layer of experts in 8 bits, shared by all; what joins the hidden states in 16 bits, which each device has whole.
    assert layer.weights == pytest.approx(11.5e9 / 8 + 2 * 2 * 7168**2, rel=0.02)
    assert layer.cache == 576 * 2


# -- serving -----------------------------------------------------------------------------------------------------------


def test_other_users_prompts_by_hand() -> None:
    load = Load(batch=5, isl=1000, osl=100)
    assert load.context == 1050
    assert tpot_mixed_ms(10.0, 30.0, load) == pytest.approx(10 + 4 / 100 * 20)
    # 2 prompts a chunk of 2,100 tokens, 3 chunks: the first two wait for two more, the next two for one
    assert tpot_prefill_first_ms(10.0, lambda n: 40.0 * n, load, 2100) == pytest.approx(10 + 80 * (2 + 1 + 0) / 3 / 99)
    assert tpot_prefill_first_ms(10.0, lambda n: 40.0 * n, Load(2, 1000, 100), 2100) == 10.0


def test_what_does_not_fit_waits_outside() -> None:
    load = Load(batch=64, isl=1000, osl=200)
    assert (load.running(1100 * 10 + 5), load.running(10**9), load.running(3)) == (10, 64, 1)


@pytest.mark.parametrize("name", ["h200-sxm", "a100-sxm"])
def test_other_devices_differ_by_their_peaks(name: str, h100: Roofline) -> None:
    other = constants(name).roofline
    here, there = (ms(passes(LLAMA_8B, each), 1, 1, 1024) for each in (h100, other))
    assert there < here if name == "h200-sxm" else there > here


def test_a_lane_says_what_it_lacks(h100: Roofline) -> None:
    lanes: dict[str, Lane] = h100.lanes
    assert set(lanes) == {"vllm", "sglang", "trtllm"}
    assert lanes["vllm"].missing is not None
