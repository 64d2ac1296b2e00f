"""Logits of the Llama family against transformers: every family, rotation, spelling and option, through pages.

transformers takes norms and rotations in float32 whatever the dtype, and so does the product. In float64 a difference
beyond 1e-12 is therefore a difference in the formula, not in rounding.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from paged import Paged
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specctl.checkpoint import Checkpoint
from specctl.kv.batch import Span
from specctl.layers import Purpose
from specctl.models import CausalLM, load

CPU = torch.device("cpu")
MAX_LENGTH = 96

ROTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 2.5}),
    "yarn": ("yarn", {"factor": 4.0, "original_max_position_embeddings": 24}),
    "yarn-betas": ("yarn", {"factor": 4.0, "attention_factor": 1.3, "beta_fast": 4, "beta_slow": 2, "truncate": False}),
    "yarn-mscale": (
        "yarn",
        {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 24},
    ),
    "yarn-untruncated": ("yarn", {"factor": 4.0, "original_max_position_embeddings": 24, "truncate": False}),
    "yarn-factor-from-lengths": ("yarn", {"factor": None, "original_max_position_embeddings": 24}),
    "llama3": (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "dynamic": ("dynamic", {"factor": 3.0}),
}
HEADS = {
    "grouped": {},
    "one for each": {"num_key_value_heads": 4},
    "single": {"num_key_value_heads": 1},
    "wide": {"head_dim": 16},
    "narrow": {"head_dim": 6},
}
FACTORS: dict[str, Sequence[Any]] = {
    "model_type": list(tiny.ARCHITECTURES),
    "rotation": list(ROTATIONS),
    "spelling": ["parameters", "scaling", "type"],
    "heads": list(HEADS),
    "tied": [False, True],
    "attention_bias": [False, True],
    "mlp_bias": [False, True],
    "shards": [1, 3],
    "purpose": ["serve", "train"],
}


def every_pair(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases in which every value of every factor meets every value of every other one, chosen greedily."""
    rng = random.Random(0)
    names = list(factors)
    open_pairs = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }  # fmt: skip

    def met(case: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)} & open_pairs

    cases: list[dict[str, Any]] = []
    while open_pairs:
        candidates = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(60)]
        a, x, b, y = min(open_pairs)
        best = max(({**candidate, a: x, b: y} for candidate in candidates), key=lambda case: len(met(case)))
        open_pairs -= met(best)
        cases.append(best)
    return cases


def write(path: Path, case: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Path:
    kind, values = ROTATIONS[case["rotation"]]
    return tiny.llama(
        path,
        seed=3,
        model_type=case["model_type"],
        dtype=dtype,
        shards=case["shards"],
        tokenizer=False,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=case["tied"],
        attention_bias=case["attention_bias"],
        mlp_bias=case["mlp_bias"],
        **HEADS[case["heads"]],
        **tiny.rope(kind, case["spelling"], theta=5000.0, **values),
    )


def ours(path: Path, dtype: torch.dtype = torch.float64, purpose: Purpose = "serve") -> CausalLM:
    return load(Checkpoint(path), dtype, CPU, purpose)


def theirs(path: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    # sdpa: the eager attention of transformers takes the softmax in float32.
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(tiny.VOCAB) for _ in range(length)]


def random_chunks(length: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, length), rng.randrange(1, 6)))
    return [end - start for start, end in itertools.pairwise([0, *cuts, length])]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest logit."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def case_id(case: Mapping[str, Any]) -> str:
    flags = [name for name in ("tied", "attention_bias", "mlp_bias") if case[name]]
    return "-".join(map(str, [v for k, v in case.items() if k not in ("tied", "attention_bias", "mlp_bias")] + flags))


@pytest.mark.parametrize("case", every_pair(FACTORS), ids=case_id)
def test_logits_are_those_of_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    path, ids, rng = write(tmp_path / "m", case), text(36), random.Random(1)
    ways = [None, random_chunks(36, rng), random_chunks(36, rng), [1] * 36]
    expected = logits_of(theirs(path), ids)
    runner = Paged(ours(path, purpose=case["purpose"]))
    assert max(error(runner.run(ids, chunks), expected) for chunks in ways) < 1e-12

    expected = logits_of(theirs(path, torch.float32), ids)
    runner = Paged(ours(path, torch.float32, case["purpose"]))
    assert max(error(runner.run(ids, chunks), expected) for chunks in ways) < 5e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", tiny.ARCHITECTURES)
def test_half_precision_is_as_near_to_the_truth_as_transformers(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path, ids = tiny.llama(tmp_path / "m", model_type=model_type, dtype=dtype), text(40)
    truth = logits_of(theirs(path), ids)
    their_error = error(logits_of(theirs(path, dtype), ids), truth)
    runner = Paged(ours(path, dtype))
    for chunks in (None, [17, 16, 7], [1] * 40):
        assert error(runner.run(ids, chunks), truth) < 3 * their_error


@pytest.mark.parametrize("purpose", ["serve", "train"])
def test_a_chunk_may_end_anywhere_about_a_page(purpose: Purpose, tmp_path: Path) -> None:
    path = tiny.llama(tmp_path / "m", dtype=torch.float64)
    reference, runner = theirs(path), Paged(ours(path, purpose=purpose))
    for length in (1, 15, 16, 17, 31, 32, 33):
        ids = text(length, seed=length)
        expected = logits_of(reference, ids)
        for first in {1, 15, 16, 17, length} & set(range(1, length + 1)):
            chunks = [first] + [length - first] * (length > first)
            assert error(runner.run(ids, chunks), expected) < 1e-12, (length, first)


@pytest.mark.parametrize("pages", [[2, 3, 4], [2, 5, 4], [4, 3, 2], [3, 4, 2], [9, 2, 6]], ids=str)
def test_pages_may_lie_in_any_order(pages: list[int], tmp_path: Path) -> None:
    path, ids = tiny.llama(tmp_path / "m", dtype=torch.float64), text(40)
    runner = Paged(ours(path))
    parts = [runner.forward([Span(ids[a:b], a, pages, 0)])[0] for a, b in ((0, 20), (20, 39), (39, 40))]
    assert error(torch.cat(parts), logits_of(theirs(path), ids)) < 1e-12


def test_texts_of_different_lengths_share_a_pass(tmp_path: Path) -> None:
    path = tiny.llama(tmp_path / "m", dtype=torch.float64, model_type="qwen3")
    reference, runner, rng = theirs(path), Paged(ours(path)), random.Random(5)
    texts = [text(length, seed=length) for length in (1, 2, 15, 16, 17, 32, 33, 50)]
    mixed = [random_chunks(len(ids), rng) if len(ids) > 10 else [1] * len(ids) for ids in texts]
    for chunks in ([[len(ids)] for ids in texts], mixed):
        for ids, found in zip(texts, runner.run_together(texts, chunks), strict=True):
            assert error(found, logits_of(reference, ids)) < 1e-12


@pytest.mark.parametrize("purpose", ["serve", "train"])
def test_taps_are_the_residuals_between_layers(purpose: Purpose, tmp_path: Path) -> None:
    path, ids = tiny.llama(tmp_path / "m", dtype=torch.float64, num_hidden_layers=4), text(20)
    reference = theirs(path)
    last: list[Tensor] = []
    reference.model.layers[-1].register_forward_hook(lambda *call: last.append(call[2]))
    with torch.inference_mode():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    # The last of transformers' hidden states is normed already.
    expected = [state[0] for state in states[:-1]] + [last[0].view(20, -1)]
    assert error(expected[4], states[4][0]) > 0.1
    runner = Paged(ours(path, purpose=purpose))
    pages = runner.pages(20)
    for taps in ((0, 2, 4), (4, 0), (1,)):
        taps_ATD = torch.cat(
            [runner.forward([Span(ids[a:b], a, pages, 0)], taps)[1] for a, b in ((0, 13), (13, 20))], 1
        )
        assert error(taps_ATD, torch.stack([expected[k] for k in taps])) < 1e-12
    assert runner.forward([Span(ids, 0, pages, 0)])[1] is None
    with pytest.raises(AssertionError, match=r"taps \(5,\) of 4 layers"):
        runner.forward([Span(ids, 0, pages, 0)], (5,))


@pytest.mark.parametrize("inside", [None, 64])
def test_the_original_length_beside_the_rotation_outranks_the_one_inside(inside: int | None, tmp_path: Path) -> None:
    values = {"factor": 4.0} | ({"original_max_position_embeddings": inside} if inside else {})
    path = tiny.llama(
        tmp_path / "m",
        dtype=torch.float64,
        original_max_position_embeddings=24,
        max_position_embeddings=96,
        **tiny.rope("yarn", "scaling", **values),
    )
    ids = text(40)
    assert error(Paged(ours(path)).run(ids), logits_of(theirs(path), ids)) < 1e-12
    without = tiny.llama(
        tmp_path / "n", dtype=torch.float64, max_position_embeddings=96, **tiny.rope("yarn", "scaling", **values)
    )
    assert error(logits_of(theirs(without), ids), logits_of(theirs(path), ids)) > 1e-3


def test_dynamic_rotation_holds_up_to_the_limit_and_not_beyond(tmp_path: Path) -> None:
    path = tiny.llama(
        tmp_path / "m", dtype=torch.float64, max_position_embeddings=33, **tiny.rope("dynamic", factor=4.0)
    )
    model, reference, ids = ours(path), theirs(path), text(34)
    assert model.config.max_length == 33
    assert error(Paged(model).run(ids[:33], [1] * 33), logits_of(reference, ids[:33])) < 1e-12
    assert error(Paged(model).run(ids), logits_of(reference, ids)) > 1e-3


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weights_are_converted_to_the_dtype_asked_for(stored: torch.dtype, tmp_path: Path) -> None:
    path, ids = tiny.llama(tmp_path / "m", dtype=stored), text(20)
    model = ours(path, torch.float64)
    assert {layer.dtype for layer in model.kv_layers("target")} == {torch.float64}
    assert error(Paged(model).run(ids), logits_of(theirs(path, torch.float64), ids)) < 1e-12


def test_a_tied_checkpoint_may_hold_the_head_twice(tmp_path: Path) -> None:
    once = tiny.llama(tmp_path / "once", dtype=torch.float64, tie_word_embeddings=True)
    config, tensors = tiny.read(once)
    tensors |= {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    twice, ids = tiny.write(tmp_path / "twice", config, tensors), text(20)
    assert torch.equal(Paged(ours(twice)).run(ids), Paged(ours(once)).run(ids))


@pytest.mark.parametrize(
    ("model_type", "tied"), [(name, tied) for name in tiny.ARCHITECTURES for tied in (False, True)]
)
def test_before_serving_a_state_dict_is_the_checkpoint(model_type: str, tied: bool, tmp_path: Path) -> None:
    path = tiny.llama(tmp_path / "m", model_type=model_type, attention_bias=True, tie_word_embeddings=tied)
    _, tensors = tiny.read(path)
    state = ours(path, torch.float32, "train").state_dict()
    if tied:
        assert state.pop("lm_head.weight").data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_after_serving_there_is_no_state_dict(dtype: torch.dtype, tmp_path: Path) -> None:
    model = ours(tiny.llama(tmp_path / "m"), dtype)
    layer = model.model.layers[0]
    for module in (model, model.model, layer, layer.self_attn, layer.mlp, model.lm_head):
        with pytest.raises(AssertionError, match="prepared for serving"):
            module.state_dict()
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_model_in_training_does_not_write_to_its_checkpoint(tmp_path: Path) -> None:
    path = tiny.llama(tmp_path / "m")
    before = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
    model = ours(path, torch.float32, "train")
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter.add_(1.0)
    assert before == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def test_a_prepared_copy_of_a_trained_model_gives_the_same(tmp_path: Path) -> None:
    model, ids = ours(tiny.llama(tmp_path / "m", dtype=torch.float64), purpose="train"), text(20)
    expected = Paged(model).run(ids)
    model.prepare("serve")
    assert error(Paged(model).run(ids), expected) < 1e-12
    with pytest.raises(AssertionError, match="prepared for serving already"):
        model.prepare("serve")
