"""A request with a seed has one text: at any draft length, alone or in company, after preemption (in float64)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
from decoding import eagle3_draft, engine, greedy_params, llama_draft, model, mtp_draft, outputs
from fixtures import Make

from specctl.drafts import Drafter
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.engine import Engine
from specctl.sampling.params import Accept, SamplingParams

COUNT = 16
PROMPTS = [[tiny.BOS, *text.encode()] for text in ("seed", "a longer prompt, over a page", "x x x x x")]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k": {"temperature": 1.5, "top_k": 12},
    "min-p": {"temperature": 1.2, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "frequency_penalty": 1.0},
}
RUNS = [
    (0, "near", 200),
    (1, "ngram", 10),
    (2, "eagle3", 200),
    (3, "mtp", 10),
    (4, "ngram", 10),
    (5, "near", 10),
]  # K, draft, pages


@pytest.fixture(scope="module", params=[tiny.llama, tiny.deepseek], ids=["llama", "deepseek"])
def target(make: Make, request: pytest.FixtureRequest) -> Any:
    return make(request.param, seed=1)


@pytest.fixture(scope="module")
def drafters(make: Make, target: Any) -> dict[str, Drafter]:
    layer = make(tiny_mtp.mtp, of=target, alone="deepseek")
    head = make(tiny_eagle3.head, of=make(tiny.llama, seed=1), taps=(0, 1), ids=tiny_eagle3.IDS)
    return {
        "near": llama_draft(make(tiny.near, of=target)),
        "ngram": NgramDrafter(),
        "mtp": mtp_draft(layer, target),
        "eagle3": eagle3_draft(head, target),
    }


def seeded(way: str, **more: Any) -> SamplingParams:
    return greedy_params(COUNT, **{"temperature": 1.0, "seed": 11, "n": 3, **WAYS[way], **more})


def texts(e: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return outputs(e.run([(p, params) for p in prompts]))


@pytest.mark.parametrize("way", list(WAYS))
def test_a_seeded_text_is_the_same_at_every_k(target: Any, drafters: dict[str, Drafter], way: str) -> None:
    """K from 0 to 5 in turn over the drafts, some with so few pages that sequences are preempted."""
    expected = texts(engine(model(target)), seeded(way))
    assert len({tuple(text) for text in expected}) == 9, "three choices of three prompts, all different"
    preemptions, accepted = 0, 0
    for k, kind, pages in RUNS:
        e = engine(model(target), drafters[kind], k, pages=pages, max_sequences=5, chunk=24, seed=k)
        assert texts(e, seeded(way)) == expected, f"k {k}, {kind}"
        preemptions += e.stats.preemptions
        accepted += e.stats.speculation.num_accepted_tokens
    assert preemptions > 0
    assert accepted > 0


@pytest.mark.parametrize("kind", ["near", "mtp", "eagle3"])
def test_a_seeded_text_is_the_same_alone_and_in_any_company(
    target: Any, drafters: dict[str, Drafter], kind: str
) -> None:
    params = seeded("all", n=1)
    alone = texts(engine(model(target)), params)
    for seed in range(2 if kind == "near" else 1):
        rng = random.Random(seed)
        e = engine(model(target), drafters[kind], 3, pages=30, max_sequences=6, chunk=32, seed=seed)
        requests = [(p, params) for p in PROMPTS]
        for _ in range(8):
            mate = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
            own = {
                "temperature": rng.choice([0.0, 1.0]),
                "k": rng.choice([None, 0, 5]),
                "top_p": rng.choice([1.0, 0.5]),
            }
            requests.append((mate, greedy_params(rng.randint(1, 30), **own)))
        order = list(range(len(requests)))
        rng.shuffle(order)
        found = outputs(e.run([requests[i] for i in order]))
        assert [found[order.index(i)] for i in range(3)] == alone


def test_each_choice_of_a_seed_is_the_same_however_many_there_are(target: Any) -> None:
    one, three = (texts(engine(model(target)), seeded("plain", n=n), PROMPTS[:1]) for n in (1, 3))
    assert three[:1] == one
    assert len({tuple(t) for t in three}) == 3


@pytest.mark.parametrize("seeds", [(1, 2), (0, -1), (2**63 - 1, 2**63)])
def test_another_seed_is_another_text(target: Any, seeds: tuple[int, int]) -> None:
    first, second = (texts(engine(model(target)), seeded("plain", n=1, seed=seed)) for seed in seeds)
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("accept", [None, Accept("exact")])
def test_the_engines_seed_repeats_a_run_and_another_does_not(
    target: Any, drafters: dict[str, Drafter], accept: Accept | None
) -> None:
    """Requests without a seed are told apart by their order: the same prompt twice gives two texts."""

    def run(seed: int) -> list[list[int]]:
        e = engine(model(target), drafters["near"], 3, seed=seed, accept=accept)
        return texts(e, greedy_params(COUNT, temperature=1.0, n=2), [PROMPTS[0], *PROMPTS])

    first = run(5)
    assert run(5) == first
    assert len({tuple(text) for text in first}) == 8
    assert all(a != b for a, b in zip(first, run(6), strict=True))


def test_an_accept_that_is_asked_for_wins_over_the_seed(target: Any, drafters: dict[str, Drafter]) -> None:
    """Exact acceptance of a seeded request: repeatable, but another text than the coupled one."""
    params = seeded("plain", n=1, accept=Accept("exact"))
    runs = [texts(engine(model(target), drafters["near"], 3, seed=seed), params) for seed in (1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != texts(engine(model(target), drafters["near"], 3), seeded("plain", n=1))
    engines_own = engine(model(target), drafters["near"], 3, accept=Accept("exact"))
    assert texts(engines_own, seeded("plain", n=1)) == runs[0]
