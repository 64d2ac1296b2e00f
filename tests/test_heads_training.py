"""Training of heads: a chain as decoding runs it, in float64; its labels, weights and gradients; reduced vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_mtp
import torch
from decoding import engine, greedy_params, model
from fixtures import Make
from torch import Tensor, nn
from torch.nn import functional as F
from training import CPU

from specctl.attention.dense import ChainAttention, DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.drafts import OutputHead, Scored
from specctl.drafts.eagle3 import Eagle3
from specctl.drafts.head import HeadDrafter, HeadModule
from specctl.drafts.mtp import Mtp
from specctl.drafts.mtp_checkpoint import find_mtp, load_mtp
from specctl.heads.eagle3 import Eagle3Head
from specctl.kv.batch import Batch, Span
from specctl.models import CausalLM, ModelConfig
from specctl.train.examples import IGNORED, Example
from specctl.train.gradients import trainable_head, trained_parameters, zero_gradients
from specctl.train.hidden import HiddenStates, Reads
from specctl.train.losses import METRICS, Objective
from specctl.train.packing import Chain, packed

IDS = tuple(range(1, 90, 2))
Build = Callable[[CausalLM], HeadDrafter]
DTYPES = {torch.float64: 1e-11, torch.float32: 3e-3}  # and how far logits may be apart


def filled(found: HeadModule, seed: int = 5, dtype: torch.dtype = torch.float64) -> None:
    """Numbers for a module on the meta device: norms near one, everything else large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(found.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        value = 1 + 0.1 * noise if parameter.dim() == 1 else noise / math.sqrt(parameter.shape[-1])
        owner, _, leaf = name.rpartition(".")
        setattr(found.get_submodule(owner), leaf, nn.Parameter(value))


def dtype_of(target: CausalLM) -> torch.dtype:
    return target.model.norm.weight.dtype


def mtp(target: CausalLM, ids: tuple[int, ...] | None = None) -> HeadDrafter:
    ids_V = None if ids is None else torch.tensor(ids)
    with torch.device("meta"):
        found = Mtp(target, target.config.num_layers, ids_V=ids_V)
    filled(found, dtype=dtype_of(target))
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(found.num_columns, found.width, generator=generator, dtype=dtype_of(target))
    found.use_rows(rows / math.sqrt(found.width))
    return HeadDrafter("mtp", found)


def mtp_over_the_targets_head(target: CausalLM) -> HeadDrafter:
    """As it is trained: a target's distribution is within its reach."""
    drafter = mtp(target)
    assert isinstance(drafter.model, Mtp)
    drafter.model.use_rows(target.lm_head.weight.detach())
    return drafter


def eagle3(target: CausalLM, ids: tuple[int, ...] | None = None, **flags: bool) -> HeadDrafter:
    config = target.config
    off = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
    head = Eagle3Head(
        taps=(0, 1),
        target_hidden=config.hidden_size,
        target_vocab=config.vocab_size,
        draft_vocab=config.vocab_size if ids is None else len(ids),
        own_embedding=False,
        layer={},
        **(off | flags),
    )
    layer = ModelConfig.read(
        {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": config.max_position,
            "rms_norm_eps": 1e-5,
        },
        "here",
    )
    ids_V = None if ids is None else torch.tensor(ids)
    with torch.device("meta"):
        found = Eagle3(head, layer, target, ids_V)
    filled(found, dtype=dtype_of(target))
    return HeadDrafter("eagle3", found)


# With the family of the target, whose architecture an MTP layer has.
HEADS: dict[str, tuple[str, Build]] = {
    "mtp": ("llama", mtp),
    "mtp-reduced": ("llama", lambda target: mtp(target, IDS)),
    "mtp-qwen3": ("qwen3", mtp),
    "mtp-deepseek_v3": ("deepseek_v3", mtp),
    "mtp-deepseek_v3-reduced": ("deepseek_v3", lambda target: mtp(target, IDS)),
    "mtp-deepseek_v2": ("deepseek_v2", mtp),
    "eagle3": ("llama", eagle3),
    "eagle3-reduced": ("llama", lambda target: eagle3(target, IDS)),
    "eagle3-deepseek_v3": ("deepseek_v3", eagle3),
    "eagle3-norms": (
        "llama",
        lambda target: eagle3(target, norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True),
    ),
}
heads = pytest.mark.parametrize(("target", "build"), HEADS.values(), ids=HEADS, indirect=["target"])


def made(make: Make, family: str) -> Path:
    """Two layers, of which a DeepSeek has one with experts; its rotation is scaled."""
    if family.startswith("deepseek"):
        return make(tiny.deepseek, seed=3, model_type=family)
    return make(tiny.llama, seed=3, model_type=family, tie_word_embeddings=False)


@pytest.fixture
def target(make: Make, request: pytest.FixtureRequest) -> CausalLM:
    return model(made(make, getattr(request, "param", "llama")))


def learner(drafter: HeadDrafter, checkpointing: bool = False) -> HeadDrafter:
    found = trainable_head(drafter, checkpointing)
    found.attn = ChainAttention()
    return found


def spoken(target: CausalLM, prompt: str, count: int) -> Example:
    """What the target says by itself."""
    ids = list(prompt.encode())
    e = engine(target)
    choice = e.choices(e.add(list(ids), greedy_params(count)))[0]
    while e.has_work:
        e.step()
    return Example.of(prompt, [*ids, *choice.output], [(len(ids), len(ids) + count)]).without_first()


# -- the chain of training is that of decoding -------------------------------------------------------------------------


class Watched(HeadDrafter):
    """Notes every block: where it begins, its tokens, and the logits that each of them was drawn from."""

    def __init__(self, inner: HeadDrafter) -> None:
        super().__init__(inner.kind, inner.model)
        self.blocks: list[tuple[int, list[int], list[Tensor]]] = []
        self._slots: list[Tensor] | None = None

    def draft(self, batch: Batch, carry: Any, k: list[int], sampling: Any) -> Any:
        self._slots = [carry.logits_LV[batch.lane_B[0]].clone()]
        found = super().draft(batch, carry, k, sampling)
        self.blocks.append((batch.spans[0].start, found.token_BK[0].tolist(), self._slots))
        self._slots = None
        return found

    def _last(self, rows: Batch, read_TD: Tensor) -> tuple[Tensor, Tensor]:
        fed_BD, logits_BV = super()._last(rows, read_TD)
        if self._slots is not None:
            self._slots.append(logits_BV[0].clone())
        return fed_BD, logits_BV


@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize(("family", "build"), HEADS.values(), ids=HEADS)
def test_training_logits_are_the_engines_at_every_step_of_the_chain(
    make: Make, family: str, build: Build, dtype: torch.dtype
) -> None:
    """Of every slot of a block, in a text that goes on as the block does: what training then sees at the step of
    that slot is what decoding saw, whatever came of it."""
    target = model(made(make, family), dtype)
    prompt, count, k = list(b"once upon a time"), 16, 4
    watched = Watched(build(target))
    e = engine(target, watched, k)
    choice = e.choices(e.add(list(prompt), greedy_params(count)))[0]
    while e.has_work:
        e.step()
    text, drafter = [*prompt, *choice.output], build(target)
    drafter.attn = ChainAttention()
    assert len(watched.blocks) > 8
    for start, tokens, slots in watched.blocks[::3]:
        assert len(slots) == len(tokens) == k
        example = Example.of("one", [*text[:start], *tokens], [(1, start + k)])
        states = HiddenStates(target, [example], Reads(watched.taps, every_row=True))
        rows = packed([example], Chain(k, 1), hidden=states.hidden([0]))
        with torch.no_grad():
            for final_TD, logits_V in zip(drafter.unroll(rows), slots, strict=True):
                trained_V = drafter.model.logits(final_TD)[start - 2]
                assert float((trained_V - logits_V).abs().max()) < DTYPES[dtype]


@heads
def test_a_chains_step_is_the_last_row_of_a_pass_over_what_it_sees(target: CausalLM, build: Build) -> None:
    """Written out: a cache of the target's rows up to i, then the chain's own, one at a time."""
    example = Example.of("one", list(b"the quick brown fox"), [(3, 19)])
    drafter, hidden = build(target), None
    states = HiddenStates(target, [example], Reads(drafter.taps, every_row=True))
    hidden = states.hidden([0])
    drafter.attn = ChainAttention()
    rows = packed([example], Chain(3, 1), hidden=hidden)
    with torch.no_grad():
        chained = drafter.unroll(rows)
        head, attn = drafter.model, DenseAttention()
        for i in (0, 4, 11):
            read, tokens = head.read(hidden)[: i + 1], list(example.ids[1 : i + 2])
            for step in range(3):
                batch = Batch.pack([Span(tokens, 0, [], 0)])
                attn.plan(batch)
                given = head(batch, read, attn)
                assert float((given.final_TD[-1] - chained[step][i]).abs().max()) < 1e-12
                read = torch.cat((read, given.fed_TD[-1:]))
                tokens.append(example.ids[i + 2 + step])


@heads
def test_packed_examples_do_not_see_each_other_at_any_step(target: CausalLM, build: Build) -> None:
    data = [spoken(target, prompt, 9) for prompt in ("one", "two and", "the third of them")]
    drafter = learner(build(target))
    states = HiddenStates(target, data, Reads(drafter.taps, every_row=True))

    def run(parts: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
        zero_gradients(drafter.model)
        total = 0.0
        for part in parts:
            row = packed([data[index] for index in part], Chain(3, 1, 0.8), hidden=states.hidden(part))
            loss, _ = drafter.loss(row, Objective(1.0, chunk=7))
            loss.backward()
            total += float(loss.detach())
        return total, {name: each.grad.clone() for name, each in trained_parameters(drafter.model).items()}

    together, alone = run([[0, 1, 2]]), run([[0], [1], [2]])
    assert together[0] == pytest.approx(alone[0], abs=1e-10)
    for name, gradient in together[1].items():
        assert float((gradient - alone[1][name]).abs().max()) < 1e-10


@heads
def test_gradients_are_autograds_and_the_same_when_steps_are_run_again(target: CausalLM, build: Build) -> None:
    data = [spoken(target, prompt, 8) for prompt in ("one", "two and")]
    chain, found = Chain(3, 1, 0.7), []
    for checkpointing in (False, True):
        drafter = learner(build(target), checkpointing)
        states = HiddenStates(target, data, Reads(drafter.taps, every_row=True))
        row = packed(data, chain, hidden=states.hidden([0, 1]))
        loss, sums = drafter.loss(row, Objective(0.5, 0.3, 0.2, chunk=5, teacher_head=target.logits, feature=0.4))
        loss.backward()
        found.append({name: each.grad.clone() for name, each in trained_parameters(drafter.model).items()})
    assert sums.shape == (3, len(METRICS))

    plain = build(target)
    plain.attn = ChainAttention()
    for parameter in plain.model.trained():
        parameter.requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    ids_V = plain.model.ids_V
    for step, final_TD in enumerate(plain.unroll(row)):
        for row_index in (row.label_JT[step] >= 0).nonzero()[:, 0].tolist():
            log_q = plain.model.logits(final_TD[row_index : row_index + 1])[0].log_softmax(-1)
            theirs_E = row.hidden.final_TD[row_index + 1 + step]
            log_p = target.logits(theirs_E[None])[0].log_softmax(-1)
            label = int(row.label_JT[step, row_index])
            if ids_V is not None:
                log_p = log_p[ids_V]
            columns = list(range(len(log_p))) if ids_V is None else ids_V.tolist()
            ce = -log_q[columns.index(label)] if label in columns else 0.0
            p, q, mass = log_p.exp(), log_q.exp(), log_p.exp().sum()
            kl = (p * (log_p - log_q)).sum() - mass * mass.log()
            tv = 0.5 * ((p - q).abs().sum() + (1 - mass).clamp(min=0))
            feature = F.smooth_l1_loss(final_TD[row_index], theirs_E)
            total = total + 0.7**step * (0.5 * ce + 0.3 * kl + 0.2 * tv + 0.4 * feature)
    total.backward()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), abs=1e-10)
    for name, gradient in found[0].items():
        theirs = dict(plain.model.named_parameters())[name].grad
        assert theirs is not None
        assert float((gradient - theirs).abs().max()) < 1e-10, name
        assert float((found[1][name] - gradient).abs().max()) < 1e-12, name


def test_long_sequences_are_attended_part_by_part_with_the_same_result(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [spoken(target, "a longer text than the others", 20)]
    drafter = learner(mtp(target))
    states = HiddenStates(target, data, Reads((), every_row=True))
    row = packed(data, Chain(3, 1), hidden=states.hidden([0]))
    found = []
    for at_once in (512, 7):
        monkeypatch.setattr("specctl.attention.dense.CHAIN_ROWS", at_once)
        zero_gradients(drafter.model)
        loss, _ = drafter.loss(row, Objective(1.0))
        loss.backward()
        found.append({name: each.grad.clone() for name, each in trained_parameters(drafter.model).items()})
    assert all(float((found[0][name] - found[1][name]).abs().max()) < 1e-12 for name in found[0])


# -- labels and weights ------------------------------------------------------------------------------------------------


def test_a_head_learns_what_follows_an_answers_first_token(target: CausalLM) -> None:
    """Tokens p0 p1 | a0 a1 a2 a3 of which the answer a is trained: the row of p1 holds a0 and says a1."""
    example = Example.of("one", [1, 2, 11, 12, 13, 14], [(2, 6)]).without_first()
    assert example.labels == (IGNORED, IGNORED, IGNORED, 12, 13, 14)
    rows = packed([example], Chain(3, 1, 0.5))
    assert rows.token_JT.tolist() == [[2, 11, 12, 13, 14, 14], [11, 12, 13, 14, 14, 14], [12, 13, 14, 14, 14, 14]]
    none = IGNORED
    assert rows.label_JT.tolist() == [
        [none, 12, 13, 14, none, none],
        [none, 13, 14, none, none, none],
        [none, 14, none, none, none, none],
    ]
    assert rows.weight_JT.tolist() == [[0, 1, 1, 1, 0, 0], [0, 0.5, 0.5, 0, 0, 0], [0, 0.25, 0, 0, 0, 0]]
    assert Chain(3, 1, 0.5).labels(example) == [3, 2, 1]
    assert Chain(3, 1, 0.5).weight(example) == 3 + 2 * 0.5 + 0.25


def test_a_block_does_not_reach_over_a_gap_between_answers() -> None:
    example = Example.of("two", list(range(10)), [(2, 5), (7, 10)]).without_first()
    rows = packed([example], Chain(2, 1))
    labelled = [(row_T >= 0).nonzero()[:, 0].tolist() for row_T in rows.label_JT]
    assert labelled == [[1, 2, 6, 7], [1, 6]]
    assert Chain(2, 1).labels(example) == [4, 2]


def test_examples_may_count_alike_whatever_their_length() -> None:
    short = Example.of("short", list(range(5)), [(2, 5)])
    long = Example.of("long", list(range(50)), [(2, 50)])
    chain = Chain(2, 0, 0.5, per_sequence=True)
    assert chain.weight(short) == chain.weight(long) == 1.5
    for example in (short, long):
        assert float(packed([example], chain).weight_JT.sum()) == pytest.approx(1.5)


def test_a_label_outside_the_drafts_vocabulary_is_no_label_and_no_hit() -> None:
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    head = OutputHead(nn.Parameter(torch.randn(3, 6, generator=generator, dtype=torch.float64)), 3, trained=False)
    label = torch.tensor([-1, 0, -1, 2])
    weight = torch.ones(4, dtype=torch.float64)
    loss, sums = Objective(1.0)(Scored(final, label, weight), head)
    log_q = (final @ head.weight.T).log_softmax(-1)
    assert float(loss) == pytest.approx(float(-(log_q[1, 0] + log_q[3, 2]).detach()))
    assert int(sums[3]) == int(log_q[1].argmax() == 0) + int(log_q[3].argmax() == 2)


def test_the_targets_parts_do_not_move(make: Callable[..., Path]) -> None:
    path = tiny_mtp.with_mtp(make, "llama")
    drafter = load_mtp(find_mtp(Checkpoint(path)), model(path), Checkpoint(path), CPU, "train")
    assert isinstance(drafter.model, Mtp)
    drafter.model.use_rows(torch.zeros(drafter.model.num_columns, drafter.model.width, dtype=torch.float64))
    learner(drafter)
    names = {name.rpartition("layers.1.")[2] for name in trained_parameters(drafter.model)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= names
    assert not any(name.startswith(("embed_tokens", "shared_head.head")) for name in names)


@pytest.mark.parametrize("build", [eagle3, mtp_over_the_targets_head], ids=["eagle3", "mtp"])
@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "feature"])
def test_overfitting_one_text_reaches_the_floor(target: CausalLM, loss: str, build: Build) -> None:
    """Of cross-entropy to a text that determines itself 0; of distances to the target with all of its vocabulary 0."""
    data = [spoken(target, "hello there", 8)]
    drafter = learner(build(target))
    states = HiddenStates(target, data, Reads(drafter.taps, every_row=True))
    row = packed(data, Chain(2, 1), hidden=states.hidden([0]))
    objective = Objective(**({"ce": 0.0} | {loss: 1.0}), teacher_head=target.logits)
    work = torch.optim.Adam(list(drafter.model.trained()), lr=5e-3)
    for step in range(300):
        for group in work.param_groups:
            group["lr"] = 5e-3 * min(1, (300 - step) / 100)  # total variation is not smooth at its floor
        zero_gradients(drafter.model)
        value, _ = drafter.loss(row, objective)
        value.backward()
        work.step()
    count = sum(Chain(2, 1).labels(data[0]))
    assert float(value.detach()) / count < (3e-2 if loss == "tv" else 2e-2)


def test_chunks_change_nothing(target: CausalLM) -> None:
    data = [spoken(target, "hello there", 12)]
    found = []
    for chunk in (3, 1000):
        drafter = learner(eagle3(target, IDS))
        states = HiddenStates(target, data, Reads(drafter.taps, every_row=True))
        row = packed(data, Chain(2, 1), hidden=states.hidden([0]))
        loss, sums = drafter.loss(row, Objective(0.2, 0.5, 0.3, chunk=chunk, teacher_head=target.logits))
        loss.backward()
        found.append((float(loss.detach()), sums, drafter.model.lm_head.weight.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-11)
    assert torch.allclose(found[0][1], found[1][1], rtol=0, atol=1e-10)
    assert torch.allclose(found[0][2], found[1][2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_targets_other_logits_may_be_computed_once(target: CausalLM, temperature: float, autocast: bool) -> None:
    """For all steps of a chain and the gradient; with the rows of its head that are scored it comes to the same."""
    data = [spoken(target, "hello there", 12), spoken(target, "and now", 7)]
    found, calls = [], []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return target.logits(rows)

    for rows in (None, target.lm_head.weight.detach()[list(IDS)]):
        drafter = learner(eagle3(target, IDS))
        states = HiddenStates(target, data, Reads(drafter.taps, every_row=True))
        row = packed(data, Chain(3, 1), hidden=states.hidden([0, 1]))
        objective = Objective(0.2, 0.5, 0.3, temperature, 4, logits, teacher_rows=rows)
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, sums = drafter.loss(row, objective)
        loss.backward()
        found.append((loss.detach(), sums, drafter.model.lm_head.weight.grad.clone(), sum(calls)))
    for one, other in zip(found[0][:3], found[1][:3], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    places = {place for labels in row.label_JT for place in (labels >= 0).nonzero()[:, 0].tolist()}
    assert len(places) <= found[1][3] <= len(places) + 2 * len(data) < found[0][3] / 4


def test_an_argmax_outside_the_vocabulary_is_what_a_draft_cannot_say(target: CausalLM) -> None:
    """Its q has columns of its own; the tokens that it proposes are the target's ids."""
    drafter = eagle3(target, IDS)
    e = engine(target, drafter, 3)
    seen: set[int] = set()
    e.observer = lambda texts, draft, scores, verdict: seen.update(draft.token_BK.flatten().tolist())
    e.add(list(b"once upon"), greedy_params(30))
    while e.has_work:
        e.step()
    assert seen <= set(IDS)
    assert len(seen) > 3
