"""Drafting by an MTP layer: the text is the target's, and what is proposed is what the layer's definition says.

Text alone cannot show a wrong draft, so its proposals are compared with a forward pass written down in the tests, and
its cache with the one that a single pass over the same text builds.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import tiny_mtp
import torch
from decoding import all_back, design, engine, greedy_params, model, mtp_draft, outputs
from fixtures import Make
from mtp_reference import reference
from torch import Tensor

from specctl.drafts import Draft
from specctl.engine.sequence import Sequence
from specctl.engine.verify import Verdict
from specctl.sampling.params import SamplingParams

LENGTHS = (15, 16, 17, 31, 32, 33, 1, 5)  # around the ends of pages
COUNT = 20


def prompt(index: int, length: int) -> tuple[int, ...]:
    return (tiny.BOS, *((7 * index + 3 * (j % 11)) % 256 for j in range(length - 1)))


PROMPTS = [prompt(i, length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["llama", "deepseek_v3", "deepseek_v2"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def target(make: Make, family: str) -> Any:
    return tiny_mtp.with_mtp(make, family)


@pytest.fixture(scope="module")
def shallow(make: Make) -> Any:
    return tiny_mtp.with_mtp(make, "llama")


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    return outputs(engine(model(target)).run([(list(p), greedy_params(COUNT)) for p in PROMPTS]))


# The text


@pytest.mark.parametrize(("k", "batch", "chunk", "pages"), list(design()))
def test_greedy_text_is_the_plain_one(
    target: Any, plain: list[list[int]], k: int, batch: int, chunk: int, pages: int
) -> None:
    e = engine(model(target), mtp_draft(target), k, pages=pages, max_sequences=batch, chunk=chunk)
    found = e.run([(list(p), greedy_params(COUNT)) for p in PROMPTS])
    assert outputs(found) == plain
    assert all_back(e)
    assert e.stats.steps_by_k.keys() == {k}
    if pages == 6 and batch > 1:
        assert e.stats.preemptions > 0
    if k:
        assert e.stats.speculation.num_drafts > 0


def test_seeded_text_depends_on_no_draft_length(target: Any) -> None:
    params = [greedy_params(COUNT, temperature=0.9, seed=seed) for seed in range(len(PROMPTS))]
    requests = [(list(p), each) for p, each in zip(PROMPTS, params, strict=True)]
    texts = [
        outputs(engine(model(target), mtp_draft(target), k, max_sequences=3, chunk=9, pages=13).run(requests))
        for k in (0, 1, 3)
    ]
    assert texts[0] == texts[1] == texts[2] == outputs(engine(model(target)).run(requests))


def test_it_is_sometimes_right(target: Any) -> None:
    e = engine(model(target), mtp_draft(target), 3)
    e.run([(list(p), greedy_params(COUNT)) for p in PROMPTS])
    accepted = e.stats.speculation.accepted_per_position
    assert accepted[0] > accepted[1] > accepted[2] > 0
    assert e.stats.speculation.acceptance_rate != 1


# The proposals


@pytest.mark.parametrize(
    ("of", "layers", "k"),
    [
        *(("llama", layers, k) for layers in (1, 2) for k in (1, 3)),
        ("deepseek_v3", 2, 1),
        ("deepseek_v3", 2, 3),
        ("deepseek_v2", 2, 3),
    ],
)
def test_proposals_are_those_of_the_definition(make: Make, of: str, layers: int, k: int) -> None:
    """Through chunks, riders, preemption and rejections, at every place of a text."""
    plain = {"rope_scaling": None} if of == "deepseek_v2" else {}
    target = tiny_mtp.with_mtp(make, of, layers, **plain)
    definition, found = reference(target), list[tuple[list[int], list[int]]]()

    def observe(sequences: list[Sequence], draft: Draft, scores_BMV: Tensor, verdict: Verdict) -> None:
        for b, (s, length) in enumerate(zip(sequences, draft.length, strict=True)):
            if length:
                found.append((s.tokens(0, len(s)), draft.token_BK[b, :length].tolist()))

    e = engine(model(target), mtp_draft(target), k, max_sequences=3, chunk=11, pages=9)
    e.observer = observe
    e.run([(list(p), greedy_params(10)) for p in PROMPTS])
    assert len(found) > 30
    assert len({tuple(tokens) for _, tokens in found}) > 10
    assert all(tokens == definition.chain(text, len(tokens)) for text, tokens in found)


def test_the_definition_is_told_from_its_neighbours(shallow: Any) -> None:
    """The reference would notice: halves exchanged, the hidden state left out, the first embedding masked."""
    right, text = reference(shallow), list(PROMPTS[3])
    hidden = right.hidden(text[:-1])
    rows = right.rows(text[1:], hidden)
    assert not torch.allclose(rows, right.rows(text[1:], torch.zeros_like(hidden)), atol=1e-3)
    assert not torch.allclose(rows, reference(shallow, mask_first=True).rows(text[1:], hidden), atol=1e-3)
    swapped = reference(shallow)
    weight = swapped.tensors[f"{swapped.mtp}.eh_proj.weight"]
    swapped.tensors[f"{swapped.mtp}.eh_proj.weight"] = weight.roll(len(weight), 1)
    assert not torch.allclose(rows, swapped.rows(text[1:], hidden), atol=1e-3)


# Ends


@pytest.mark.parametrize("k", [1, 3])
def test_the_context_limit_ends_a_text_and_nothing_else_happens(make: Make, family: str, k: int) -> None:
    path = tiny_mtp.with_mtp(make, family, max_position_embeddings=40)
    e = engine(model(path), mtp_draft(path), k, max_sequences=3)
    found = e.run([(list(p), greedy_params(100)) for p in PROMPTS])
    assert all(len(s) == 40 and s.finish_reason == "length" for [s] in found)
    assert outputs(found) == outputs(engine(model(path)).run([(list(p), greedy_params(100)) for p in PROMPTS]))
    assert all_back(e)


def test_aborts_in_every_state(target: Any) -> None:
    e = engine(model(target), mtp_draft(target), 3, pages=9, max_sequences=3, chunk=8)
    ids = [e.add(list(p), SamplingParams(max_tokens=30, ignore_eos=True)) for p in PROMPTS]
    for step in range(60):
        e.step()
        if step % 7 == 3 and ids:
            e.abort(ids.pop(-(step % 2)))
    while e.has_work:
        e.step()
    assert all_back(e)
    assert e.stats.aborts.keys() >= {"decoding", "waiting"}
