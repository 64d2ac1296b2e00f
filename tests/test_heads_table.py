"""Heads with a reduced vocabulary for an exact table: they are accepted as often as anything is that has these tokens.

Where the target says p after a token, a proposal drawn from any q over the tokens S is accepted with the probability
sum over S of min(p, q), and that is at most p(S), which q = p / p(S) reaches. At T = 0 it is accepted where the
likeliest token is in S, and nowhere else. So both are known for every slot from the token before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
import torch
from decoding import ALPHA, eagle3_draft, engine, model, mtp_draft, outputs
from fixtures import Make
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.drafts import Draft as Block
from specctl.drafts.head import HeadDrafter
from specctl.engine.sequence import Sequence as Text
from specctl.engine.verify import Verdict
from specctl.finetune.start_heads import HeadStart, plan_eagle3, plan_mtp
from specctl.sampling.params import SamplingParams
from specctl.schemas.recipe import Draft
from specctl.train.examples import Example
from specctl.train.feed import Feed
from specctl.train.hidden import HiddenStates, Reads
from specctl.train.loop import Trainer
from specctl.train.losses import Objective
from specctl.train.optimiser import Optimiser, Schedule
from specctl.train.packing import Chain

Rows = dict[int, dict[int, float]]
K = 3


def rows_over(tokens: Sequence[int], seed: int) -> Rows:
    """Random rows: a likeliest token that is so by some margin, and all the others possible."""
    source, found = random.Random(seed), Rows()
    for last in tokens:
        weights = {token: source.random() ** 3 + 0.02 for token in tokens}
        weights[source.choice(tokens)] = 2.0
        total = sum(weights.values())
        found[last] = {token: weight / total for token, weight in weights.items()}
    return found


@dataclass
class Slots:
    """Of the slots that verification reached: how many were accepted, and the most that could have been expected to be,
    with its variance."""

    rows: Rows
    ids: frozenset[int]
    greedy: bool
    reached: list[int] = field(default_factory=lambda: [0] * K)
    accepted: list[int] = field(default_factory=lambda: [0] * K)
    best: list[float] = field(default_factory=lambda: [0.0] * K)
    variance: list[float] = field(default_factory=lambda: [0.0] * K)

    def note(self, texts: list[Text], draft: Block, scores_BMV: Tensor, verdict: Verdict) -> None:
        tokens_BK, accepted_B = draft.token_BK.tolist(), verdict.num_accepted_B.tolist()
        for text, tokens, length, accepted in zip(texts, tokens_BK, draft.length, accepted_B, strict=True):
            before = [text.output[-1] if text.output else text.prompt[-1], *tokens]
            for slot in range(min(accepted + 1, length)):
                chance = self.chance(before[slot])
                self.reached[slot] += 1
                self.accepted[slot] += accepted > slot
                self.best[slot] += chance
                self.variance[slot] += chance * (1 - chance)

    def chance(self, last: int) -> float:
        row = self.rows[last]
        if self.greedy:
            return float(max(row, key=lambda token: row[token]) in self.ids)
        return sum(probability for token, probability in row.items() if token in self.ids)

    def deviations(self, slot: int) -> float:
        return (self.accepted[slot] - self.best[slot]) / math.sqrt(self.variance[slot])

    def share_of_best(self, slot: int) -> float:
        return self.accepted[slot] / self.best[slot]


def run_over(
    path: Path,
    drafter: HeadDrafter,
    rows: Rows,
    ids: Sequence[int],
    temperature: float,
    texts: int = 96,
    length: int = 40,
) -> Slots:
    """Texts of a length from every token on."""
    slots = Slots(rows, frozenset(ids), temperature == 0)
    pages = texts * (length // 16 + 2)
    e = engine(model(path), drafter, K, pages=pages, max_sequences=texts, chunk=texts, seed=3, check_pages=False)
    e.observer = slots.note
    starts, params = list(rows), SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
    for number in range(texts):
        e.add([starts[number % len(starts)]], params)
    while e.has_work:
        e.step()
    assert min(slots.reached) > 0
    assert slots.reached[0] > 1000
    return slots


FAR = math.sqrt(2 * math.log(2 / ALPHA))  # deviations that a sum of accepted slots is off by once in 1 / ALPHA


# -- heads that are set ------------------------------------------------------------------------------------------------

TOKENS = range(16)  # as many as the table is wide
IDS = (0, 1, 3, 4, 7, 8, 10, 13, 15)
ROWS = rows_over(TOKENS, 4)


def certain_eagle3(path: Path, *, of: Path, ids: Sequence[int]) -> Path:
    """A head whose attention looks for the token of its own row, of which it carries the embedding to the target's own
    rows of the head, and whose hidden state says nothing."""
    head = tiny_eagle3.table(path.with_name("table"), of=of, draft=of, ids=ids)
    config, tensors = tiny.read(head)
    width = config["hidden_size"]
    layer = "midlayer.self_attn"
    token = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    tensors |= {f"{layer}.{name}_proj.weight": size * token for name, size in (("q", 1e4), ("k", 1.0), ("v", 1.0))}
    tensors |= {f"{layer}.o_proj.weight": torch.eye(width), "midlayer.hidden_norm.weight": torch.zeros(width)}
    # The residual begins with the normed hidden state, and that is nothing.
    return tiny.write(path, config | {"head_dim": width, "norm_before_residual": True}, tensors, tokenizer=False)


@pytest.fixture(scope="module")
def table(make: Make) -> Path:
    return make(tiny.table, rows=ROWS, vocab=len(TOKENS), max_position_embeddings=256, tokenizer=False)


def head(make: Make, table: Path, kind: str, ids: Sequence[int]) -> HeadDrafter:
    if kind == "mtp":
        return mtp_draft(make(tiny_mtp.reduced, of=make(tiny_mtp.table, of=table), ids=ids), table)
    return eagle3_draft(make(certain_eagle3, of=table, ids=ids), table)


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_best_head_is_accepted_as_often_as_its_vocabulary_allows(make: Make, table: Path, kind: str) -> None:
    sampled = run_over(table, head(make, table, kind, IDS), ROWS, IDS, 1.0)
    for slot in range(K):
        assert abs(sampled.deviations(slot)) < FAR
        assert 0.3 < sampled.best[slot] / sampled.reached[slot] < 0.8
    greedy = run_over(table, head(make, table, kind, IDS), ROWS, IDS, 0.0)
    assert greedy.accepted == greedy.best
    assert 0 < greedy.accepted[0] < greedy.reached[0]


def test_another_vocabulary_than_it_has_is_told_apart(make: Make, table: Path) -> None:
    """The bound can be missed: with four tokens less than are reckoned with it is."""
    slots = run_over(table, head(make, table, "mtp", IDS[4:]), ROWS, IDS, 1.0)
    assert slots.deviations(0) < -FAR


# -- heads that are trained --------------------------------------------------------------------------------------------

STARTS: dict[str, Callable[[Checkpoint, Tensor], HeadStart]] = {
    "mtp": lambda target, ids_V: plan_mtp(Draft(), target, ids_V),
    "eagle3": lambda target, ids_V: plan_eagle3(Draft(heads=8, intermediate=64), target, ids_V),
}


def spoken(table: Path, texts: int, length: int) -> list[Example]:
    """What the target says at T = 1, from every token on."""
    e = engine(model(table), pages=texts * 3, max_sequences=texts, seed=5, check_pages=False)
    params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
    said = outputs(e.run([([number % len(TOKENS)], params) for number in range(texts)]))
    return [
        Example.of(str(number), [number % len(TOKENS), *text], [(1, length + 1)]).without_first()
        for number, text in enumerate(said)
    ]


def trained(table: Path, kind: str, steps: int) -> HeadDrafter:
    """From random weights, by the KL to the target's distributions."""
    target, data = model(table), spoken(table, 48, 24)
    start = STARTS[kind](Checkpoint(table), torch.tensor(IDS))
    built = start.build(0, torch.float64, torch.device("cpu"), target)
    work = Trainer(
        model=built,
        drafter=start.learner(built, checkpointing=False),
        objective=Objective(0.0, kl=1.0, teacher_head=target.logits),
        optimiser=Optimiser(built, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip=1.0),
        schedule=Schedule(2e-2, steps, warmup_steps=5, min_lr_ratio=0.02),
        feed=Feed(data, 256, 1, 0),
        chain=Chain(K, shift=1),
        teacher=HiddenStates(target, data, Reads(start.taps, every_row=True)),
    )
    for _ in range(steps):
        work.run_step()
    work.release()
    return start.drafter(built)


@pytest.mark.parametrize(("kind", "steps"), [("mtp", 100), pytest.param("eagle3", 400, marks=pytest.mark.slow)])
def test_a_trained_head_comes_to_the_best(table: Path, kind: str, steps: int) -> None:
    """In every slot as near as chance allows; before its training it was far below."""
    drafter = trained(table, kind, steps)
    sampled = run_over(table, drafter, ROWS, IDS, 1.0)
    for slot in range(K):
        assert abs(sampled.deviations(slot)) < FAR
    assert sampled.share_of_best(0) > 0.97
    greedy = run_over(table, drafter, ROWS, IDS, 0.0)
    assert greedy.accepted == greedy.best
    assert run_over(table, trained(table, kind, 0), ROWS, IDS, 1.0).share_of_best(0) < 0.8
