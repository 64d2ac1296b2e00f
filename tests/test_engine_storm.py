"""2,000 random requests: every page comes back, and whatever is repeatable is what it would have been alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
from decoding import all_back, engine, llama_draft, model, tokenizer
from fixtures import Make

from specctl.engine.engine import Engine
from specctl.engine.scheduler import DraftLength
from specctl.engine.sequence import Sequence, Status
from specctl.sampling.params import SamplingParams

REQUESTS, LANES, CHUNK, PAGES = 2000, 20, 48, 17
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """One of the requests there are: many are alike, so that few have to be run alone."""

    prompt: Prompt
    params: SamplingParams

    @property
    def repeatable(self) -> bool:
        return self.params.greedy or self.params.seed is not None


def kinds(rng: random.Random) -> Iterator[Kind]:
    ways: list[dict[str, Any]] = [{}, {}, {"seed": 5, "temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0}]
    ways += [{"seed": 6, "temperature": 0.8, "frequency_penalty": 0.5, "n": 2}, {"repetition_penalty": 1.3}]
    stops = [(), (), ("a",), ("e", "zz"), tuple("0123456789")]
    for i in range(48):
        prompt = (tiny.BOS, *(rng.randrange(256) for _ in range(rng.choice([1, 2, 6, 15, 15, 16, 31, 40]))))
        common = {"max_tokens": rng.choice([1, 3, 8, 20, 33]), "stop": stops[i % 5], "ignore_eos": i % 7 == 0}
        k = {3: 0, 11: 1, 19: 5}.get(i % 24)  # rows are uniform, so one that wants 5 makes a step of K = 5
        yield Kind(prompt, SamplingParams(k=k, **common, **ways[i % 6]))


class Storm:
    def __init__(self, e: Engine, alone: dict[Kind, list[list[int]]], rng: random.Random) -> None:
        self.engine, self.alone, self.rng = e, alone, rng
        self.live: dict[int, tuple[Kind, list[Sequence]]] = {}
        self.finished: Counter[str] = Counter()
        self.compared = 0

    def rage(self) -> None:
        offered = 0
        while offered < REQUESTS or self.engine.has_work:
            # A crowd, then a lull: both a long queue and single sequences come up.
            room = (45 if offered // 50 % 10 else 3) - len(self.live)
            for _ in range(min(room, REQUESTS - offered, self.rng.randint(0, 12))):
                kind = self.rng.choice(list(self.alone))
                request = self.engine.add(list(kind.prompt), kind.params)
                self.live[request] = kind, self.engine.choices(request)
                offered += 1
            self.abort_some()
            self.engine.step()
            self.collect()

    def abort_some(self) -> None:
        for request, (_, choices) in list(self.live.items()):
            states = {s.status for s in choices}
            chance = 0.3 if Status.PREEMPTED in states else 0.05 if Status.PREFILLING in states else 0.005
            if self.rng.random() < chance:
                self.engine.abort(request)
                self.live.pop(request)
                self.finished["abort"] += 1

    def collect(self) -> None:
        for request, (kind, choices) in list(self.live.items()):
            if all(s.finished for s in choices):
                self.live.pop(request)
                self.finished.update(str(s.finish_reason) for s in choices)
                if kind.repeatable:
                    assert [s.output for s in choices] == self.alone[kind]
                    self.compared += 1


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def target(make: Make, request: pytest.FixtureRequest) -> Any:
    if request.param == "deepseek":
        return make(tiny.deepseek, seed=1, num_hidden_layers=1, first_k_dense_replace=0)
    return make(tiny.llama, seed=1, num_hidden_layers=1)


def policy(batch: int, context: float) -> DraftLength:
    """Every length from 0 to 5: shorter the more there are, and shorter for longer texts."""
    return DraftLength(max(0, 6 - batch // 2 - (context > 20)) % 6)


def test_two_thousand_requests(make: Make, target: Any, record_property: Callable[[str, object], None]) -> None:
    rng = random.Random(1)
    options = {"tokens": tokenizer(target), "eos_ids": frozenset(range(0, 256, 29)) | {tiny.END}}
    alone = {}
    for kind in kinds(rng):
        [choices] = engine(model(target), **options).run([(list(kind.prompt), _without_k(kind.params))])
        alone[kind] = [s.output for s in choices]
    draft = llama_draft(make(tiny.near, of=target))
    e = engine(model(target), draft, policy, pages=PAGES, chunk=CHUNK, max_sequences=LANES, max_length=96, **options)
    storm = Storm(e, alone, rng)
    storm.rage()
    assert all_back(e)
    stats = e.stats
    counts = {
        "preemptions": stats.preemptions,
        **{f"aborts while {s.value}": stats.aborts.get(s.value, 0) for s in Status if s is not Status.FINISHED},
        **{f"steps with K = {k}": stats.steps_by_k.get(k, 0) for k in range(6)},
        "answers compared": storm.compared,
        "accepted": stats.speculation.num_accepted_tokens,
        "rejected": stats.speculation.num_draft_tokens - stats.speculation.num_accepted_tokens,
        **{f"ended by {reason}": storm.finished[reason] for reason in ("stop", "length", "abort")},
    }
    record_property("storm of 2,000 requests", ", ".join(f"{name} {count}" for name, count in counts.items()))
    assert all(counts.values())
    assert storm.compared > REQUESTS / 2


def _without_k(params: SamplingParams) -> SamplingParams:
    return SamplingParams(**{**vars(params), "k": None})
