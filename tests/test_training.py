"""Training: losses and their gradients, their floors, packing, accumulation, the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from paged import Paged
from torch import nn
from torch.nn import functional as F
from training import CPU, draft, drafter, examples, furthest, gradients, small, trainer, weights

from specctl.attention.dense import DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.drafts import OutputHead, Scored
from specctl.errors import UsageError
from specctl.models import Llama, load
from specctl.train.examples import Example
from specctl.train.feed import Cursor, Feed
from specctl.train.gradients import zero_gradients
from specctl.train.hidden import HiddenStates, Reads
from specctl.train.losses import METRICS, Objective
from specctl.train.optimiser import Schedule
from specctl.train.packing import packed

MIXES = [(1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0.3, 0.5, 0.2, 1), (0.3, 0.5, 0.2, 2), (0, 0.5, 0.5, 0.7)]


@pytest.mark.parametrize(("ce", "kl", "tv", "temperature"), MIXES)
@pytest.mark.parametrize("chunk", [5, 100])
def test_losses_and_gradients_are_autograds(ce: float, kl: float, tv: float, temperature: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, vocab = 23, 31
    final, teacher, teacher_head = noise(rows, 7), noise(rows, 5), noise(vocab + 4, 5)
    label = torch.randint(0, vocab, (rows,), generator=generator)
    values = noise(vocab + 2, 7)  # two rows of padding, which nothing may reach

    ours = final.clone().requires_grad_(), nn.Parameter(values.clone())
    ours[1].grad = torch.zeros_like(values)
    objective = Objective(ce, kl, tv, temperature, chunk, lambda rows: rows @ teacher_head.T)
    scored = Scored(ours[0], label, torch.ones(rows, dtype=torch.float64), teacher)
    loss, sums = objective(scored, OutputHead(ours[1], vocab))
    (loss / 3).backward()

    theirs = final.clone().requires_grad_(), nn.Parameter(values.clone())
    logits = (theirs[0] @ theirs[1].T)[:, :vocab]
    log_q = (logits / temperature).log_softmax(-1)
    log_p = ((teacher @ teacher_head.T)[:, :vocab] / temperature).log_softmax(-1)
    parts = {
        "ce": F.cross_entropy(logits, label, reduction="sum"),
        "kl": (log_p.exp() * (log_p - log_q)).sum(),
        "tv": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(),
    }
    expected = ce * parts["ce"] + kl * parts["kl"] + tv * parts["tv"]
    (expected / 3).backward()

    assert loss.item() == pytest.approx(expected.item(), abs=1e-11)
    assert float((ours[0].grad - theirs[0].grad).abs().max()) < 1e-14
    assert float((ours[1].grad - theirs[1].grad).abs().max()) < 1e-14
    asked = METRICS[:3] if kl or tv else METRICS[:1]
    assert sums[: len(asked)].tolist() == pytest.approx([parts[name].item() for name in asked], abs=1e-11)
    assert int(sums[3]) == int((logits.argmax(-1) == label).sum())


@pytest.mark.parametrize("wide", ["target", "draft"])
@pytest.mark.parametrize(
    ("ce", "kl", "tv", "feature"), [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0.3, 0.5, 0.2, 0.1)]
)
@pytest.mark.parametrize("ids", [None, (1, 4, 9, 16)])
def test_draft_and_target_may_compute_in_two_dtypes(
    ce: float, kl: float, tv: float, feature: float, ids: tuple[int, ...] | None, wide: str
) -> None:
    """As a draft does that is trained in float32 for a target stored in float64."""
    generator = torch.Generator().manual_seed(3)
    rows, vocab, width = 9, 31, 7
    columns = vocab if ids is None else len(ids)
    final, teacher, theirs, head = (
        torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (rows, rows, vocab, columns)
    )
    label, ids_V = torch.arange(rows) % columns, None if ids is None else torch.tensor(ids)

    def run(ours: torch.dtype, of: torch.dtype) -> list[torch.Tensor]:
        begun, weight = final.to(ours).requires_grad_(), nn.Parameter(head.to(ours))
        weight.grad = torch.zeros_like(weight)
        objective = Objective(ce, kl, tv, 1.5, 4, lambda each: each @ theirs.to(of).T, feature)
        scored = Scored(begun, label, torch.ones(rows, dtype=torch.float64), teacher.to(of))
        loss, sums = objective(scored, OutputHead(weight, columns, ids_V))
        loss.backward()
        assert begun.grad.dtype == weight.grad.dtype == ours
        return [loss.detach(), sums, begun.grad.double(), weight.grad.double()]

    narrow = torch.float32
    found = run(narrow, torch.float64) if wide == "target" else run(torch.float64, narrow)
    for one, other in zip(found, run(torch.float64, torch.float64), strict=True):
        assert float((one - other).abs().max()) < 1e-4


@pytest.mark.parametrize(("ce", "kl", "feature"), [(0, 0, 1), (0.3, 0.5, 0.7)])
@pytest.mark.parametrize("chunk", [5, 100])
def test_the_distance_of_hidden_states_is_the_plain_formula(ce: float, kl: float, feature: float, chunk: int) -> None:
    """Smooth L1 with its knee at 1, averaged over a row's numbers, with weights of rows."""
    generator = torch.Generator().manual_seed(2)
    rows, vocab, width = 23, 31, 7
    final, teacher, weight = (1.5 * torch.randn(rows, n, generator=generator).double() for n in (width, width, 1))
    head, label = torch.randn(vocab, width, generator=generator).double(), torch.arange(rows)
    weight_R = weight[:, 0].abs()

    ours = final.clone().requires_grad_(), nn.Parameter(head.clone())
    objective = Objective(ce, kl, chunk=chunk, teacher_head=lambda rows: rows @ head.T, feature=feature)
    loss, sums = objective(Scored(ours[0], label, weight_R, teacher), OutputHead(ours[1], vocab))
    (loss / 3).backward()

    theirs = final.clone().requires_grad_(), nn.Parameter(head.clone())
    apart = (theirs[0] - teacher).abs()
    distance_R = torch.where(apart < 1, apart**2 / 2, apart - 0.5).sum(-1) / width
    log_q, log_p = (theirs[0] @ theirs[1].T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
    told_R = -ce * log_q[torch.arange(rows), label] + kl * (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = ((told_R + feature * distance_R) * weight_R).sum()
    (expected / 3).backward()

    assert bool((apart < 1).any())
    assert bool((apart > 1).any())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-11)
    assert sums[METRICS.index("feature")].item() == pytest.approx(distance_R.sum().item(), abs=1e-11)
    assert float((ours[0].grad - theirs[0].grad).abs().max()) < 1e-14
    assert float((ours[1].grad - theirs[1].grad).abs().max()) < 1e-14


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_the_whole_model_are_autograds(make: Callable[..., Path], tied: bool, checkpointing: bool) -> None:
    path = make(tiny.llama, seed=5, tie_word_embeddings=tied)
    row = packed(examples(3, seed=4))
    ours = draft(path, checkpointing=checkpointing)
    loss, _ = drafter(ours).loss(row, Objective(1.0, chunk=4))
    loss.backward()

    theirs = load(Checkpoint(path), torch.float64, CPU, "train")
    attn = DenseAttention()
    attn.plan(row.batch)
    logits = theirs.logits(theirs(row.batch, attn).final_TD)
    F.cross_entropy(logits, row.label_JT[0], ignore_index=-100, reduction="sum").backward()
    assert furthest(gradients(ours), gradients(theirs)) < 1e-10


# -- floors ------------------------------------------------------------------------------------------------------------


def overfit(model: Llama, data: list[Example], objective: Objective, steps: int, **more: object) -> dict[str, float]:
    schedule = Schedule(1e-2, steps, warmup_steps=5, min_lr_ratio=0.0)
    work = trainer(model, data, objective=objective, schedule=schedule, room=100, weight_decay=0.0, **more)
    for _ in range(steps):
        last = work.run_step()
    return last.as_dict()


def test_cross_entropy_falls_to_the_entropy_of_the_data(make: Callable[..., Path]) -> None:
    """The same beginning goes on in one way three times and in another once: no model can do better than that."""
    data = [Example.of(str(n), [7, 8, 50 if n else 60, 9], [(2, 4)]) for n in range(4)]
    last = overfit(draft(make(small, seed=1)), data, Objective(1.0), 150)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    floor = entropy / 2  # the second label of each example is certain
    assert floor <= last["ce"] < floor + 2e-3


def soft(path: Path, *, of: Path, factor: float) -> Path:
    """The same model, less sure of what it says."""
    config, tensors = tiny.read(of)
    tensors["lm_head.weight"] *= factor
    return tiny.write(path, config, tensors)


@pytest.mark.parametrize(("objective", "metric", "near"), [((0, 1, 0), "kl", 1e-3), ((0, 0, 1), "tv", 5e-3)])
def test_distance_to_the_target_falls_to_nothing(
    make: Callable[..., Path], objective: tuple[float, float, float], metric: str, near: float
) -> None:
    target = load(Checkpoint(make(soft, of=make(tiny.llama, seed=3), factor=0.3)), torch.float64, CPU)
    data = [Example.of(str(n), [65 + n, 70 + n, 80 + n, 90], [(1, 4)]) for n in range(2)]
    model = draft(make(soft, of=make(small, seed=2, hidden_size=32), factor=0.1))
    weighted = Objective(*objective, teacher_head=target.logits)
    last = overfit(model, data, weighted, 200, teacher=HiddenStates(target, data, Reads()), clip=None)
    assert last[metric] < near
    assert last["loss"] == pytest.approx(last[metric])


def test_a_mix_rests_where_its_parts_balance(make: Callable[..., Path]) -> None:
    """ce to one label and kl to p at weights a and b: the best q is a onehot + b p, with a + b = 1."""
    target = load(Checkpoint(make(soft, of=make(tiny.llama, seed=3), factor=0.3)), torch.float64, CPU)
    data = [Example.of("one", [65, 66], [(1, 2)])]
    states = HiddenStates(target, data, Reads())
    p = target.logits(states.example(0).final_TD).softmax(-1)[0]
    best = 0.25 * F.one_hot(torch.tensor(66), len(p)) + 0.75 * p
    floor = float(0.25 * -best[66].log() + 0.75 * (p * (p.log() - best.log())).sum())
    objective = Objective(0.25, 0.75, teacher_head=target.logits)
    model = draft(make(soft, of=make(small, seed=2, hidden_size=32), factor=0.1))
    last = overfit(model, data, objective, 120, teacher=states, clip=None)
    assert floor - 1e-9 <= last["loss"] < floor + 1e-3


# -- the same model as serves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_training_logits_are_the_engines(make: Callable[..., Path], family: str) -> None:
    path = make(tiny.llama, seed=6, model_type=family)
    data = examples(5, seed=2, least=3, most=40)
    row = packed(data)
    model, attn = draft(path), DenseAttention()
    attn.plan(row.batch)
    trained_TV = model.logits(model(row.batch, attn).final_TD).detach()
    serving = Paged(load(Checkpoint(path), torch.float64, CPU))
    begin = 0
    for number, example in enumerate(data):
        served_TV = serving.run(example.ids, [1] * len(example.ids) if number == 0 else None)
        end = begin + len(example.ids)
        assert float((trained_TV[begin:end] - served_TV).abs().max()) < 1e-11
        begin = end


def test_packed_examples_do_not_see_each_other(make: Callable[..., Path]) -> None:
    data = examples(6, seed=3)
    model = draft(make(tiny.llama, seed=7))
    ours = drafter(model)

    def run(parts: list[list[Example]]) -> tuple[float, dict[str, torch.Tensor]]:
        zero_gradients(model)
        total = 0.0
        for part in parts:
            row = packed(part)
            loss, _ = ours.loss(row, Objective(1.0, chunk=7))
            loss.backward()
            total += float(loss.detach())
        return total, gradients(model)

    together, alone = run([data]), run([[example] for example in data])
    assert together[0] == pytest.approx(alone[0], abs=1e-10)
    assert furthest(together[1], alone[1]) < 1e-10


def test_accumulation_changes_nothing(make: Callable[..., Path]) -> None:
    """15 examples of one length, 4 to a step however they are packed; the last step has 3."""
    path = make(tiny.llama, seed=8)
    data = examples(15, seed=5, least=8, most=8)
    runs = []
    for room, accumulate in ((32, 1), (16, 2), (8, 4)):
        model = draft(path)
        work = trainer(model, data, room=room, accumulate=accumulate, schedule=Schedule(1e-3, 4, "linear", 1))
        steps = [work.run_step() for _ in range(4)]
        assert work.cursor == Cursor(1, 0)
        assert [step.tokens for step in steps] == [32, 32, 32, 24]
        runs.append((weights(model), [step.lr for step in steps], [step.loss for step in steps]))
    for other in runs[1:]:
        assert furthest(runs[0][0], other[0]) < 1e-12
        assert other[1] == runs[0][1]
        assert other[2] == pytest.approx(runs[0][2], abs=1e-12)


def test_labels_count_alike_wherever_they_stand(make: Callable[..., Path]) -> None:
    """One row has a single label and the other many: the mean is over labels, not over rows."""
    data = [Example.of("few", list(range(65, 73)), [(7, 8)]), Example.of("many", list(range(75, 83)), [(1, 8)])]
    path = make(tiny.llama, seed=8)
    steps = [trainer(draft(path), data, room=room, accumulate=2).run_step() for room in (16, 8)]
    assert steps[0].labels == steps[1].labels == 8
    assert steps[0].loss == pytest.approx(steps[1].loss, abs=1e-12)
    assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, abs=1e-12)


def test_autocast_and_checkpointing_train_alike(make: Callable[..., Path]) -> None:
    path = make(tiny.llama, seed=8)
    data = examples(4, seed=6)
    plain = trainer(draft(path, torch.float32), data, room=64)
    again = trainer(draft(path, torch.float32, checkpointing=True), data, room=64)
    short = trainer(draft(path, torch.float32, checkpointing=True), data, room=64, autocast=torch.bfloat16)
    for _ in range(3):
        steps = [work.run_step() for work in (plain, again, short)]
        assert steps[1] == steps[0]
        assert steps[2].loss == pytest.approx(steps[0].loss, rel=0.03)
        assert steps[2].loss != steps[0].loss
    assert furthest(weights(plain.model), weights(again.model)) == 0


def test_a_loss_that_is_no_number_is_an_error(make: Callable[..., Path]) -> None:
    model = draft(make(tiny.llama, seed=8))
    work = trainer(model, examples(4))
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(UsageError, match=r"step 1: the loss is nan; lower optimiser\.lr"):
        work.run_step()


# -- schedule and feed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_schedule(kind: str) -> None:
    schedule = Schedule(1.0, 20, kind, warmup_steps=4, decay_fraction=0.25, min_lr_ratio=0.1)
    rates = [schedule.at(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(rates) == 1.0
    assert all(0.1 <= rate <= 1 for rate in rates[4:])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert schedule.at(20) == schedule.at(1000) == pytest.approx(0.1)
    if kind == "wsd":
        assert rates[4:16] == [1.0] * 12
        assert rates[16:] == pytest.approx([0.82, 0.64, 0.46, 0.28])
    if kind == "cosine":
        assert schedule.at(12) == pytest.approx(0.55)


def test_every_epoch_has_every_example_once_in_an_order_of_its_own() -> None:
    data = examples(11, seed=1)
    feed = Feed(data, 30, 2, seed=5)
    cursor, epochs = Cursor(), [[], [], []]
    while cursor.epoch < 3:
        epoch = cursor.epoch
        rows, cursor = feed.take(cursor)
        assert all(sum(len(data[index].ids) for index in row) <= 30 for row in rows)
        epochs[epoch] += [index for row in rows for index in row]
    assert all(sorted(order) == list(range(11)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert feed.take(Cursor(1, 0)) == Feed(data, 30, 2, seed=5).take(Cursor(1, 0))
    assert feed.take(Cursor(0, 0)) != Feed(data, 30, 2, seed=6).take(Cursor(0, 0))
