"""Runners: ways of answering the same requests. One over our engine here, one over transformers in baseline.py.

Who measures asks a runner for answers and knows nothing else about it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specctl.bench.passes import BareModel
from specctl.bench.work import Request
from specctl.engine.engine import Engine
from specctl.engine.scheduler import DraftLength, Policy
from specctl.engine.sequence import Sequence
from specctl.engine.stats import EngineStats, SpeculationCounters
from specctl.options import DecodingOptions
from specctl.pair import Target, constant
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.noise import gumbel, make_key
from specctl.sampling.params import Accept, SamplingParams


@dataclass(frozen=True)
class Answer:
    """first, last: seconds from the arrival of the request to its first and its last token. counters: None for a run
    whose drafts are not counted."""

    token_ids: list[int]
    first: float
    last: float
    counters: SpeculationCounters | None


class Runner(Protocol):
    """name: unique among the runs. k: its draft length, 0 for none, None for a policy's. batch: requests it runs at a
    time. accept: how it accepts drafted tokens, and so how it draws; None for a runner that is not ours."""

    @property
    def name(self) -> str: ...
    @property
    def k(self) -> int | None: ...
    @property
    def batch(self) -> int: ...
    @property
    def accept(self) -> Accept | None: ...

    def warm_up(self, requests: list[Request]) -> None:
        """Answer them and forget it."""

    def answer(self, requests: list[Request]) -> list[Answer]:
        """Answer all of them, in order."""

    def scores_after(self, request: Request, answer: list[int]) -> Tensor:
        """[V], float64: what a deterministic run chooses its next token by after this much of an answer."""


class Dial:
    """A policy that is turned from run to run, so that one engine serves every draft length."""

    def __init__(self) -> None:
        self.policy: Policy = constant(0)

    def __call__(self, batch: int, context: float) -> DraftLength:
        return self.policy(batch, context)


@dataclass(frozen=True)
class EngineRunner:
    """Our engine, its dial set to one policy. draft: the label of what drafts, None for plain decoding. max_k: the
    longest draft of the policy. stats: of all it has answered."""

    name: str
    draft: str | None
    k: int | None
    max_k: int
    batch: int
    accept: Accept
    engine: Engine
    dial: Dial
    policy: Policy
    target: Target
    decoding: DecodingOptions
    stats: EngineStats

    def params(self, request: Request) -> SamplingParams:
        """accept is given in full: the seed, which makes repeats alike, shall not choose the method."""
        return replace(self.decoding.params(request.max_tokens, seed=request.seed), accept=self.accept)

    def warm_up(self, requests: list[Request]) -> None:
        replace(self, stats=EngineStats()).answer(requests)

    def answer(self, requests: list[Request]) -> list[Answer]:
        start = time.perf_counter()
        self.dial.policy = self.policy
        self.engine.stats = self.stats
        ids = [self.engine.add(request.token_ids, self.params(request)) for request in requests]
        choices: list[Sequence] = [self.engine.choices(request_id)[0] for request_id in ids]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        while self.engine.has_work:
            outputs = self.engine.step()
            at = time.perf_counter() - start  # the tokens are on the host, so whatever made them is done
            for output in outputs:
                first.setdefault(output.request_id, at)
                last[output.request_id] = at
        return [
            Answer(choice.output, first[request_id], last[request_id], choice.counters)
            for request_id, choice in zip(ids, choices, strict=True)
        ]

    def scores_after(self, request: Request, answer: list[int]) -> Tensor:
        params = self.params(request)
        key = make_key(0, request.seed, 0)
        state = SequenceState(params, key, request.token_ids, answer, self.accept)
        text = request.token_ids + answer
        logits_V = BareModel.of_target(self.target, len(text)).logits_after(text)
        scores_V = SamplingBatch([state], logits_V.device).scores(logits_V[None, None])[0, 0].double()
        if params.greedy or self.accept.method != "coupled":
            return scores_V
        noise_1V = gumbel(
            torch.tensor([key], device=logits_V.device),
            torch.tensor([state.position], device=logits_V.device),
            torch.arange(len(logits_V), device=logits_V.device),
        )
        return scores_V + noise_1V[0]
