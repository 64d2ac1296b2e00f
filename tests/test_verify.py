"""verify(): its output law, enumerated exactly, is the target's; lossy methods are what they are defined to be.

Probabilities are quarters and the uniform numbers the twelve midpoints of [0, 1): every threshold that p, q and the
residual can give lies between two of them, so counting outcomes gives their probabilities without any error.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specctl.drafts import Dense, Draft, OneHot
from specctl.engine.verify import Verdict, verify
from specctl.sampling import noise
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.params import Accept, SamplingParams

V, K = 4, 2
GRID = [(i + 0.5) / 12 for i in range(12)]
ALL = list(itertools.product(range(V), repeat=K))
SAMPLE = SamplingParams(temperature=1.0)
UNSHRUNK = (Phase.explicit, Phase.generate)  # an example takes a second or so, making one smaller takes minutes
Prefix = tuple[int, ...]
Table = dict[Prefix, list[float]]

quarters = st.lists(st.integers(0, V - 1), min_size=4, max_size=4).map(lambda ids: [ids.count(i) / 4 for i in range(V)])


@st.composite
def tables(draw: st.DrawFn, depth: int) -> Table:
    """A distribution over V tokens after every text of up to `depth` tokens."""
    prefixes = [p for n in range(depth + 1) for p in itertools.product(range(V), repeat=n)]
    return {prefix: draw(quarters) for prefix in prefixes}


def state(params: SamplingParams = SAMPLE, key: int = 1, length: int = 3) -> SequenceState:
    return SequenceState(params, key, tuple(range(length)), (), params.acceptance)


class Dice(SamplingBatch):
    """A batch of exact rows, one for every way the uniform numbers of a block can fall on the grid."""

    def __init__(self) -> None:
        u = torch.tensor(list(itertools.product(GRID, repeat=K + 1)), dtype=torch.float64)
        super().__init__([state()] * len(u))
        self.accept_BK, self.definite_B = u[:, :K], u[:, K]

    def uniform(self, offset_B: Tensor | int, purpose: int) -> Tensor:
        if purpose == noise.DEFINITE:
            return self.definite_B
        assert isinstance(offset_B, int)
        assert purpose == noise.ACCEPT
        return self.accept_BK[:, offset_B]


@cache
def dice() -> Dice:
    return Dice()


def outcomes(p: Table, block: Prefix, length: int, q: Dense | OneHot) -> dict[Prefix, float]:
    """The probability of every emitted text, given that `block` was proposed."""
    size = len(dice().states)
    scores = torch.tensor([[p[block[:m]] for m in range(K + 1)]], dtype=torch.float64).log().expand(size, -1, -1)
    if isinstance(q, Dense):
        q = Dense(q.prob_BKD.expand(size, -1, -1), q.ids_D)
    draft = Draft(torch.tensor([block]).expand(size, -1), [length] * size, q)
    verdict = verify(draft, scores, dice())
    law: dict[Prefix, float] = defaultdict(float)
    for tokens, accepted in zip(verdict.token_BM.tolist(), verdict.num_accepted_B.tolist(), strict=True):
        assert all(t >= 0 for t in tokens[: accepted + 1])
        assert all(t == -1 for t in tokens[accepted + 1 :])
        law[tuple(tokens[: accepted + 1])] += 1 / size
    return law


def assert_follows(law: dict[Prefix, float], p: Table, accepted: dict[Prefix, float]) -> None:
    """After every prefix that was accepted, the next emitted token is distributed as the target's."""
    for prefix, weight in accepted.items():
        for token in range(V):
            longer = (*prefix, token)
            mass = sum(share for text, share in law.items() if text[: len(longer)] == longer)
            assert mass == pytest.approx(weight * p[prefix][token], abs=1e-12)


def mixture(p: Table, q: Table, length: int, dense: Callable[[Prefix], Dense]) -> dict[Prefix, float]:
    """The law of the emitted text when blocks are drawn from q."""
    law: dict[Prefix, float] = defaultdict(float)
    for block in ALL:
        weight = math.prod(q[block[:k]][block[k]] for k in range(length)) / V ** (K - length)
        if weight:  # the token in a masked slot is anything
            for text, share in outcomes(p, block, length, dense(block)).items():
                law[text] += weight * share
    return law


def reached(p: Table, q: Table, length: int) -> dict[Prefix, float]:
    """How likely each prefix is accepted: min(p, q) at every step."""
    chances = {(): 1.0}
    for _ in range(length):
        last = {t: w for t, w in chances.items() if len(t) == max(map(len, chances))}
        chances |= {(*t, d): w * min(p[t][d], q[t][d]) for t, w in last.items() for d in range(V)}
    return chances


@settings(max_examples=12, phases=UNSHRUNK)
@given(tables(K), tables(K - 1), st.integers(0, K))
def test_the_law_is_the_targets_whatever_the_draft(p: Table, q: Table, length: int) -> None:
    """Slots from `length` on are masked: no rejection, so their token comes from p and not from a residual."""
    law = mixture(p, q, length, lambda block: Dense(torch.tensor([[q[block[:k]] for k in range(K)]])))
    assert_follows(law, p, reached(p, q, length))


@settings(max_examples=6, phases=UNSHRUNK)
@given(tables(K), tables(K - 1), st.permutations(range(V)), st.integers(1, V - 1))
def test_a_reduced_vocabulary_leaves_the_rest_to_the_residual(
    p: Table, full: Table, order: list[int], size: int
) -> None:
    """In any order of its ids; what the draft cannot say is in every residual."""
    ids = order[:size]
    q = {t: [w if i in ids else 0.0 for i, w in enumerate(row)] for t, row in full.items()}
    q = {t: row if sum(row) == 1 else [float(i == ids[0]) for i in range(V)] for t, row in q.items()}

    def dense(block: Prefix) -> Dense:
        return Dense(torch.tensor([[[q[block[:k]][i] for i in ids] for k in range(K)]]), torch.tensor(ids))

    assert_follows(mixture(p, q, K, dense), p, reached(p, q, K))


@settings(max_examples=6, phases=UNSHRUNK)
@given(tables(K), tables(K - 1))
def test_a_draft_with_fewer_columns_is_cut_short(p: Table, full: Table) -> None:
    q = {t: [row[0] + row[3], row[1], row[2], 0.0] for t, row in full.items()}
    law = mixture(p, q, K, lambda block: Dense(torch.tensor([[q[block[:k]][:3] for k in range(K)]])))
    assert_follows(law, p, reached(p, q, K))


@settings(max_examples=12, phases=UNSHRUNK)
@given(tables(K), st.sampled_from(ALL), st.integers(0, K))
def test_a_deterministic_proposal_changes_nothing(p: Table, block: Prefix, length: int) -> None:
    chances = {block[:k]: math.prod(p[block[:j]][block[j]] for j in range(k)) for k in range(length + 1)}
    assert_follows(outcomes(p, block, length, OneHot()), p, chances)


def test_an_empty_residual_falls_back_on_p() -> None:
    """Where q exceeds p by rounding alone, the last u can reject and leave nothing to draw from."""
    p = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    batch = Dice()
    batch.accept_BK = torch.full_like(batch.accept_BK, 1 - 2**-53)
    size = len(batch.states)
    scores = p.log().expand(size, K + 1, V)
    q = Dense((scores.softmax(-1)[:, :K] * (1 + 1e-15)).contiguous())
    verdict = verify(Draft(torch.zeros(size, K, dtype=torch.int64), [K] * size, q), scores, batch)
    assert verdict.num_accepted_B.tolist() == [0] * size
    share = torch.bincount(verdict.token_BM[:, 0], minlength=V) / size
    torch.testing.assert_close(share.double(), p, rtol=0, atol=1e-6)


METHODS = {
    "greedy": SamplingParams(),
    "exact": SAMPLE,
    "coupled": SamplingParams(temperature=0.8, seed=1),
    "typical": SamplingParams(temperature=1.0, accept=Accept("typical")),
    "typical, greedy": SamplingParams(accept=Accept("typical", epsilon=0.3, delta=0.9)),
    "threshold": SamplingParams(temperature=0.7, accept=Accept("threshold", threshold=0.1)),
    "threshold, greedy": SamplingParams(accept=Accept("threshold", threshold=0.2)),
}


def random_case(seed: int, count: int, dense: bool) -> tuple[list[SequenceState], Draft, Tensor]:
    """`count` sequences, methods in turn, with logits that make every outcome common."""
    rng = torch.Generator().manual_seed(seed)
    params = list(METHODS.values())
    states = [state(params[b % len(params)], key=seed * 1000 + b, length=1 + b) for b in range(count)]
    logits = torch.randn(count, 4, 6, generator=rng, dtype=torch.float64)
    q = torch.randn(count, 3, 6, generator=rng, dtype=torch.float64).softmax(-1)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=rng).view(count, 3)
    likely = logits[:, :3].argmax(-1)
    tokens = torch.where(torch.rand(count, 3, generator=rng) < 0.7, likely, tokens)
    length = torch.randint(0, 4, (count,), generator=rng).tolist()
    return states, Draft(tokens, length, Dense(q) if dense else OneHot()), logits


def one(draft: Draft, b: int) -> Draft:
    q = Dense(draft.q.prob_BKD[b : b + 1]) if isinstance(draft.q, Dense) else draft.q
    return Draft(draft.token_BK[b : b + 1], draft.length[b : b + 1], q)


def run(states: list[SequenceState], draft: Draft, logits: Tensor) -> tuple[Verdict, Tensor]:
    batch = SamplingBatch(states)
    scores = batch.scores(logits, draft.token_BK)
    return verify(draft, scores, batch), scores


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_of_a_mixed_batch_is_as_alone(seed: int, dense: bool) -> None:
    states, draft, logits = random_case(seed, 70, dense)
    together, _ = run(states, draft, logits)
    accepted = set()
    for b in range(70):
        alone, _ = run(states[b : b + 1], one(draft, b), logits[b : b + 1])
        assert torch.equal(together.token_BM[b], alone.token_BM[0])
        accepted.add((b % len(METHODS), int(alone.num_accepted_B)))
    for method, _ in enumerate(METHODS):
        assert len({n for m, n in accepted if m == method}) >= 2, "rejections and acceptances of every method"


def reference(s: SequenceState, block: list[int], length: int, scores: Tensor) -> list[int]:
    """What a greedy, coupled or lossy sequence emits, token by token from the definitions."""
    n, product = 0, 1.0
    chosen = [choice(s, m, row) for m, row in enumerate(scores)]
    while n < length:
        p = scores[n].softmax(-1).tolist()
        d = block[n]
        product *= p[d]
        entropy = -sum(w * math.log(w) for w in p if w > 0)
        if s.accept.method == "typical":
            ok = p[d] >= min(s.accept.epsilon, s.accept.delta * math.exp(-entropy))
        elif s.accept.method == "threshold":
            ok = product >= s.accept.threshold
        else:
            ok = d == chosen[n]
        if not ok:
            break
        n += 1
    if s.accept.method == "coupled" or s.params.greedy:
        return [*block[:n], chosen[n]]
    u = float(noise.uniform(torch.tensor([s.key]), torch.tensor([s.position + n]), noise.DEFINITE))
    cdf = list(itertools.accumulate(scores[n].softmax(-1).tolist()))
    return [*block[:n], next(i for i, c in enumerate(cdf) if c > u)]


def choice(s: SequenceState, m: int, row: Tensor) -> int:
    if s.params.greedy:
        return int(row.argmax())
    ids = torch.arange(len(row))
    return int((row + noise.gumbel(torch.tensor([s.key]), torch.tensor([s.position + m]), ids)[0]).argmax())


@pytest.mark.parametrize("seed", range(6))
def test_deterministic_and_lossy_methods_equal_their_definitions(seed: int) -> None:
    """Typical and threshold acceptance use the softmax at the request's temperature, at temperature 1 when it is 0;
    then the definite token is the argmax, else drawn from p itself."""
    states, draft, logits = random_case(100 + seed, 70, dense=seed % 2 == 0)
    verdict, scores = run(states, draft, logits)
    for b, s in enumerate(states):
        if s.accept.method == "exact" and not s.params.greedy:
            continue
        expected = reference(s, draft.token_BK[b].tolist(), draft.length[b], scores[b])
        assert verdict.token_BM[b].tolist() == expected + [-1] * (4 - len(expected))


def test_a_block_of_no_slots_decides_one_token() -> None:
    states, _, logits = random_case(7, 14, dense=False)
    empty = Draft(torch.zeros(14, 0, dtype=torch.int64), [0] * 14, OneHot())
    verdict, _ = run(states, empty, logits[:, :1])
    assert verdict.token_BM.shape == (14, 1)
    assert bool((verdict.token_BM >= 0).all())
    assert verdict.num_accepted_B.tolist() == [0] * 14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_any_dtype_are_verified(dtype: torch.dtype) -> None:
    states, draft, logits = random_case(9, 28, dense=True)
    verdict, _ = run(states, draft, logits.to(dtype))
    exactly, _ = run(states, draft, logits.to(dtype).float())
    assert torch.equal(verdict.token_BM, exactly.token_BM)
