"""Drafting by an EAGLE-3 head: the text is the target's, what is proposed is what the definition says, and what does
not fit the target is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from decoding import all_back, design, eagle3_draft, engine, greedy_params, model, outputs
from eagle3_reference import Reference
from fixtures import Make
from test_eagle3_layouts import changed
from test_mtp import PROMPTS
from tiny_eagle3 import IDS
from torch import Tensor

from specctl.drafts import Draft
from specctl.engine.sequence import Sequence
from specctl.engine.verify import Verdict
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.options import DecodingOptions, ModelOptions
from specctl.pair import open_draft, open_policy, open_target

COUNT = 14


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target)


@pytest.fixture(scope="module", params=[None, IDS], ids=["full", "reduced"])
def head(make: Make, target: Path, request: pytest.FixtureRequest) -> Path:
    return make(tiny_eagle3.head, of=target, ids=request.param)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return outputs(engine(model(target)).run([(list(p), greedy_params(COUNT)) for p in PROMPTS]))


# The text


@pytest.mark.parametrize(("k", "batch", "chunk", "pages"), list(design()))
def test_greedy_text_is_the_plain_one(
    target: Path, head: Path, plain: list[list[int]], k: int, batch: int, chunk: int, pages: int
) -> None:
    e = engine(model(target), eagle3_draft(head, target), k, pages=pages, max_sequences=batch, chunk=chunk)
    assert outputs(e.run([(list(p), greedy_params(COUNT)) for p in PROMPTS])) == plain
    assert all_back(e)
    assert not k or e.stats.speculation.num_drafts > 0


def test_reference_text_is_diverse(plain: list[list[int]]) -> None:
    assert len({token for text in plain for token in text}) > 30


def test_it_is_sometimes_right(make: Make, target: Path, head: Path) -> None:
    """The reduced one less often."""
    e = engine(model(target), eagle3_draft(head, target), 3)
    e.run([(list(p), greedy_params(COUNT)) for p in PROMPTS])
    accepted = e.stats.speculation.accepted_per_position
    assert accepted[0] > accepted[1]
    assert head != make(tiny_eagle3.head, of=target) or accepted[1] > accepted[2] > 0


def test_seeded_text_depends_on_no_draft_length(target: Path, head: Path) -> None:
    params = [greedy_params(COUNT, temperature=0.9, seed=seed) for seed in range(4)]
    requests = [(list(p), each) for p, each in zip(PROMPTS[:4], params, strict=True)]
    texts = [
        outputs(engine(model(target), eagle3_draft(head, target), k, max_sequences=3, chunk=9, pages=13).run(requests))
        for k in (0, 1, 3)
    ]
    assert texts[0] == texts[1] == texts[2] == outputs(engine(model(target)).run(requests))


# The proposals


@pytest.mark.parametrize("layout", ["original", "vllm", "sglang", "speculators"])
def test_proposals_are_those_of_the_definition_in_every_layout(make: Make, target: Path, layout: Any) -> None:
    check_proposals(target, make(tiny_eagle3.head, of=target, layout=layout, ids=IDS))


@pytest.mark.parametrize("norm", tiny_eagle3.NORMS)
def test_every_norm_is_where_the_definition_has_it(make: Make, target: Path, norm: str) -> None:
    check_proposals(target, make(tiny_eagle3.head, of=target, norms=(norm,), hidden=1.0))


@pytest.mark.parametrize(("taps", "layout"), [((2, 5, 8), "vllm"), ((8,), "speculators")])
def test_the_last_tap_is_what_leaves_the_last_layer(
    make: Make, target: Path, taps: tuple[int, ...], layout: Any
) -> None:
    """And before the last norm."""
    head = make(tiny_eagle3.head, of=target, taps=taps, layout=layout, hidden=1.0)
    check_proposals(target, head)
    right, wrong = Reference(target, head), Reference(target, head)
    wrong.taps = [*taps[:-1], 7]
    text = list(PROMPTS[3])
    assert not torch.allclose(right.read(text), wrong.read(text), atol=1e-3)


def test_an_embedding_of_its_own_is_used(make: Make, target: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].flip(0)

    path = changed(tmp_path / "own", make(tiny_eagle3.head, of=target, embedding=True), edit)
    check_proposals(target, path)
    opened = open_target(str(target), ModelOptions())
    names = {name for name, _ in open_draft(str(path), opened).drafter.model.named_parameters()}  # type: ignore[attr-defined]
    assert "embed_tokens.weight" in names
    same = make(tiny_eagle3.head, of=target, embedding=True)
    names = {name for name, _ in open_draft(str(same), opened).drafter.model.named_parameters()}  # type: ignore[attr-defined]
    assert "embed_tokens.weight" not in names


def check_proposals(target: Path, head: Path) -> None:
    definition, found = Reference(target, head), list[tuple[list[int], list[int]]]()

    def observe(sequences: list[Sequence], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        for b, (s, length) in enumerate(zip(sequences, draft.length, strict=True)):
            if length:
                found.append((s.tokens(0, len(s)), draft.token_BK[b, :length].tolist()))

    e = engine(model(target), eagle3_draft(head, target), 3, max_sequences=3, chunk=11, pages=9)
    e.observer = observe
    e.run([(list(p), greedy_params(6)) for p in PROMPTS[:5]])
    assert len({tuple(tokens) for _, tokens in found}) > 8
    assert all(tokens == definition.chain(text, len(tokens)) for text, tokens in found)


def test_the_definition_is_told_from_its_neighbours(make: Make, target: Path) -> None:
    """The reference would notice: the halves exchanged, another order of taps, a tap one layer on."""
    right = Reference(target, make(tiny_eagle3.head, of=target, hidden=1.0))
    text = list(PROMPTS[3])
    expected = right.rows(text[1:], right.read(text[:-1]))[0]
    for taps in ([4, 2, 5], [3, 5, 6]):
        wrong = Reference(target, make(tiny_eagle3.head, of=target, hidden=1.0))
        wrong.taps = taps
        assert not torch.allclose(expected, wrong.rows(text[1:], wrong.read(text[:-1]))[0], atol=1e-3)
    wrong = Reference(target, make(tiny_eagle3.head, of=target, hidden=1.0))
    for name in ("q", "k", "v"):
        weight = wrong.head[f"self_attn.{name}_proj.weight"]
        wrong.head[f"self_attn.{name}_proj.weight"] = weight.roll(weight.shape[1] // 2, 1)
    assert not torch.allclose(expected, wrong.rows(text[1:], wrong.read(text[:-1]))[0], atol=1e-3)


# Opening


def refusal(target: Path, draft: Path) -> str:
    with pytest.raises((IncompatiblePair, CheckpointError)) as caught:
        open_draft(str(draft), open_target(str(target), ModelOptions()))
    return str(caught.value)


def test_how_many_tokens_it_drafts(make: Make, target: Path, tmp_path: Path) -> None:
    """What it was trained for, where something says so."""
    opened = open_target(str(target), ModelOptions())

    def length(path: Path) -> int:
        draft = open_draft(str(path), opened)
        assert draft.drafter.kind == "eagle3"
        return open_policy(DecodingOptions(drafts=(str(path),)), opened, draft)[0](1, 1.0).k

    path = make(tiny_eagle3.head, of=target)
    assert length(path) == 3
    recorded = changed(tmp_path / "recorded", path, lambda config, tensors: None)
    facts = {
        "schema": "specctl.draft/1",
        "provenance": {
            "specctl": "0",
            "torch": None,
            "transformers": None,
            "device": "cpu",
            "threads": 1,
            "command": "specctl",
            "date": "2026-01-01",
        },
        "kind": "eagle3",
        "head": None,
        "target": None,
        "recipe": {"loss": {"steps": 5}},
    }
    (recorded / "specctl.json").write_text(json.dumps(facts))
    assert length(recorded) == 5

    def four(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 4

    of = make(tiny_eagle3.head, of=target, layout="speculators")
    assert length(changed(tmp_path / "four", of, four)) == 4


def test_a_head_of_another_target(make: Make, target: Path) -> None:
    head = make(tiny_eagle3.head, of=target)
    shallow = make(tiny.llama, seed=1, num_hidden_layers=4)
    assert "reads tap 5, and the target has 4 layers, whose last tap is 4" in refusal(shallow, head)
    wide = make(tiny.llama, seed=1, num_hidden_layers=8, hidden_size=48, head_dim=8)
    assert "target_hidden_size is 32, the target has 48" in refusal(wide, head)
    other = make(tiny.llama, seed=1, num_hidden_layers=8, vocab_size=272)
    assert "vocab_size is 264, the target has 272" in refusal(other, head)


def test_what_differs_and_is_not_wrong_is_told(make: Make, target: Path) -> None:
    opened = open_target(str(target), ModelOptions())
    short = open_draft(str(make(tiny_eagle3.head, of=target, max_position_embeddings=128)), opened)
    assert short.drafter.max_length == 128
    assert any("has a context of 128, the target one of 256" in notice for notice in short.notices)
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    turned = open_draft(str(make(tiny_eagle3.head, of=target, **theta)), opened)
    assert any(
        "rotated otherwise than the target (default, theta 500; the target: default" in n for n in turned.notices
    )
    assert open_draft(str(make(tiny_eagle3.head, of=target)), opened).notices == []


def test_a_deepseek_target_with_a_head(make: Make, tmp_path: Path) -> None:
    """Its layer is a Llama's whatever the target's are."""
    of = make(tiny.deepseek, seed=1, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4)
    like = make(tiny_eagle3.head, of=make(tiny_eagle3.target))
    text = outputs(engine(model(of)).run([(list(PROMPTS[0]), greedy_params(12))]))
    drafted = engine(model(of), eagle3_draft(like, of), 2)
    assert outputs(drafted.run([(list(PROMPTS[0]), greedy_params(12))])) == text
    assert drafted.stats.speculation.num_drafts > 0
