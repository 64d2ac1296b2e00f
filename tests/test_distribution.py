"""The tokens an engine emits follow the target's table: about 200,000 of them over the ways to sample and to draft.

Cells are (token before, token), and the same apart for each place in an emitted block. What must hold is above 1e-6;
three mistakes that no greedy test can see are planted, and each must come out below 1e-12.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import families
import pytest
import tiny_eagle3
import tiny_mtp
import torch
from decoding import ALPHA, FAULT, all_back, chi_square, eagle3_draft, engine, model, mtp_draft
from fixtures import Make
from torch import Tensor

from specctl import attention
from specctl.attention.latent import LatentRows
from specctl.drafts import Dense, Draft, Drafter
from specctl.drafts.llama import LlamaDrafter
from specctl.drafts.ngram import NgramDrafter
from specctl.engine import verify as verify_module
from specctl.engine.engine import Engine
from specctl.engine.scheduler import DraftLength
from specctl.kv.batch import Batch
from specctl.sampling.batch import Drawn, SamplingBatch
from specctl.sampling.params import Accept, SamplingParams

V, START = 6, 5
VALUE = 2  # the width of a value in a DeepSeek table
IDS = (0, 1, 3, START)  # of a reduced vocabulary
TARGET = {
    0: [0.50, 0.30, 0.15, 0.05, 0.00],
    1: [0.05, 0.05, 0.10, 0.20, 0.60],
    2: [0.30, 0.25, 0.00, 0.20, 0.25],
    3: [0.90, 0.04, 0.03, 0.02, 0.01],
    4: [0.10, 0.20, 0.30, 0.40, 0.00],
    START: [0.30, 0.10, 0.25, 0.15, 0.20],
}
GOOD = {last: [0.8 * p + 0.2 * 0.2 for p in row] for last, row in TARGET.items()}
BAD = {last: row[::-1] for last, row in TARGET.items()}  # likely where the target is not, certain of what it rules out
SEQUENCES, LENGTH = 200, 100  # 20,000 tokens a scenario
Rows = dict[int, list[float]]
Counts = Counter[tuple[int, int, int]]


@dataclass(frozen=True)
class Scenario:
    """temperature, top_k, top_p and min_p of the requests; rows of the draft; how its proposals are made; the target's
    family."""

    draft: str
    sampling: dict[str, Any]
    rows: Rows
    family: str = "llama"
    k: int = 3

    def params(self, request: int) -> SamplingParams:
        seed = request if self.sampling.get("seeded") else None
        filters = {key: value for key, value in self.sampling.items() if key != "seeded"}
        return SamplingParams(max_tokens=LENGTH, **{"temperature": 1.0, **filters}, seed=seed)


SCENARIOS = {
    "exact": Scenario("sampled", {}, GOOD),
    "exact, bad draft": Scenario("sampled", {}, BAD),
    "exact, cool, top-k": Scenario("sampled", {"temperature": 0.7, "top_k": 3}, GOOD),
    "exact, cool, top-p": Scenario("sampled", {"temperature": 0.7, "top_p": 0.8}, GOOD),
    "exact, min-p": Scenario("sampled", {"min_p": 0.15}, GOOD),
    "exact, argmax draft": Scenario("argmax", {}, GOOD),
    "exact, ngram": Scenario("ngram", {}, GOOD),
    "exact, confidence stop": Scenario("confident", {}, GOOD),
    "exact, mtp": Scenario("mtp", {}, GOOD),
    "exact, bad mtp": Scenario("mtp", {}, BAD),
    "exact, reduced mtp": Scenario("reduced mtp", {}, GOOD),
    "exact, mtp of V3": Scenario("mtp", {}, GOOD, "deepseek_v3"),
    "exact, bad mtp of V2-Lite": Scenario("mtp", {}, BAD, "deepseek_v2"),
    "exact, reduced mtp of V3": Scenario("reduced mtp", {}, GOOD, "deepseek_v3"),
    "exact, eagle3": Scenario("eagle3", {}, GOOD),
    "exact, reduced eagle3": Scenario("reduced eagle3", {}, GOOD),
    "exact, bad reduced eagle3, cool, top-k": Scenario("reduced eagle3", {"temperature": 0.7, "top_k": 3}, BAD),
    "coupled": Scenario("sampled", {"seeded": True}, GOOD),
    "coupled, mtp": Scenario("mtp", {"seeded": True}, GOOD),
    "coupled, mtp of V2-Lite": Scenario("mtp", {"seeded": True}, GOOD, "deepseek_v2"),
    "coupled, bad mtp of V3": Scenario("mtp", {"seeded": True}, BAD, "deepseek_v3"),
    "coupled, reduced mtp": Scenario("reduced mtp", {"seeded": True}, GOOD),
    "coupled, reduced eagle3": Scenario("reduced eagle3", {"seeded": True}, GOOD),
    "coupled, bad draft, cool, top-k": Scenario("sampled", {"temperature": 0.7, "top_k": 3, "seeded": True}, BAD),
    "coupled, ngram": Scenario("ngram", {"seeded": True}, GOOD),
}


class NoAttention:
    """A table's attention adds nothing: its output projection is zero. Left out, a pass takes a fifth of the time."""

    def plan(self, batch: Batch) -> None:
        pass

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        return torch.zeros_like(q_TNH)

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        return rows.q_TNH.new_zeros(*rows.q_TNH.shape[:2], VALUE)


@pytest.fixture(autouse=True)
def _quick_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "choose", lambda *arguments: NoAttention())


class ArgmaxDrafter(LlamaDrafter):
    """Proposes the draft's likeliest token whatever the request's temperature. honest: and says so."""

    honest = True

    def draft(self, batch: Batch, carry: Any, k: list[int], sampling: SamplingBatch) -> Draft:
        greedy = [replace(s, params=replace(s.params, temperature=0.0)) for s in sampling.states]
        block = super().draft(batch, carry, k, SamplingBatch(greedy))
        if self.honest:
            return block
        q = torch.tensor([[*GOOD[last], 0.0] for last in range(V)], dtype=torch.float64)
        before = torch.stack([torch.tensor([s.output[-1] for s in sampling.states]), *block.token_BK.T[:-1]], dim=1)
        return Draft(block.token_BK, block.length, Dense(q[before]))


def table(make: Make, rows: Rows, family: str = "llama") -> Any:
    full = {last: dict(enumerate(row)) for last, row in rows.items()}
    return families.table(make, family, full, vocab=V, max_position_embeddings=128)


def with_mtp(make: Make, rows: Rows, family: str) -> Any:
    """The target with an MTP layer that says what the rows say."""
    return make(tiny_mtp.table, of=table(make, TARGET, family), draft=table(make, rows, family))


def drafter(make: Make, scenario: Scenario) -> Drafter:
    if scenario.draft == "mtp":
        return mtp_draft(with_mtp(make, scenario.rows, scenario.family))
    target = table(make, TARGET, scenario.family)
    if scenario.draft == "reduced mtp":
        alone = make(tiny_mtp.table, of=target)
        return mtp_draft(make(tiny_mtp.reduced, of=alone, ids=IDS), target)
    if scenario.draft.endswith("eagle3"):
        ids = IDS if scenario.draft.startswith("reduced") else None
        head = make(tiny_eagle3.table, of=target, draft=table(make, scenario.rows), ids=ids)
        return eagle3_draft(head, target)
    draft = model(table(make, scenario.rows))
    kinds: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "argmax": lambda: ArgmaxDrafter(draft, V),
        "sampled": lambda: LlamaDrafter(draft, V),
        "confident": lambda: LlamaDrafter(draft, V),
    }
    return kinds[scenario.draft]()


def build(make: Make, scenario: Scenario, seed: int = 1) -> Engine:
    stop = 0.35 if scenario.draft == "confident" else None
    target = table(make, TARGET, scenario.family)
    if scenario.draft == "mtp":
        target = with_mtp(make, scenario.rows, scenario.family)
    return engine(
        model(target),
        drafter(make, scenario),
        lambda batch, context: DraftLength(scenario.k, stop),
        pages=SEQUENCES * 8,
        max_sequences=SEQUENCES,
        chunk=SEQUENCES,
        seed=seed,
        check_pages=False,
    )


def sample(e: Engine, scenario: Scenario, sequences: int = SEQUENCES, first: int = 0) -> Counts:
    """How often each (place in the block, token before, token) was emitted. first: of the seeds of seeded requests."""
    last = {e.add([START], scenario.params(first + request)): START for request in range(sequences)}
    counts: Counts = Counter()
    while e.has_work:
        for output in e.step():
            for place, token in enumerate(output.token_ids):
                counts[place, last[output.request_id], token] += 1
                last[output.request_id] = token
    assert all_back(e)
    return counts


def processed(row: list[float], p: SamplingParams) -> list[float]:
    """The table's row at the request's temperature and filters, by hand."""
    weights = [w ** (1 / p.temperature) for w in row]
    order = sorted(range(len(row)), key=lambda i: -weights[i])
    keep = order[: p.top_k] if p.top_k else order
    total, mass, nucleus = sum(weights[i] for i in keep), 0.0, []
    for i in keep:
        if mass < p.top_p * total - 1e-9:
            nucleus.append(i)
        mass += weights[i]
    floor = p.min_p * max(weights)
    kept = [w if i in nucleus and w >= floor - 1e-9 else 0.0 for i, w in enumerate(weights)]
    return [w / sum(kept) for w in kept]


def p_value(counts: Counts, p: SamplingParams) -> float:
    """Over every (token before, token) of the emitted text."""
    observed, expected, df = [], [], 0
    for last in TARGET:
        row = processed(TARGET[last], p)
        seen = [sum(n for (_, a, b), n in counts.items() if (a, b) == (last, token)) for token in range(V)]
        observed += seen
        expected += [sum(seen) * share for share in [*row, 0.0]]
        df += sum(share > 0 for share in row) - 1
    return chi_square(observed, expected, df)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_emitted_tokens_follow_the_target(make: Make, name: str) -> None:
    scenario = SCENARIOS[name]
    e = build(make, scenario)
    counts = sample(e, scenario)
    p = scenario.params(0)
    assert sum(counts.values()) == SEQUENCES * LENGTH
    assert p_value(counts, p) > ALPHA
    for place in range(scenario.k + 1):
        here = Counter({cell: n for cell, n in counts.items() if cell[0] == place})
        assert sum(here.values()) > 200, f"place {place} of a block is hardly ever reached"
        assert p_value(here, p) > ALPHA, f"place {place} of a block"
    drafts = e.stats.speculation
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_200_000_tokens_of_each_follow_the_target(make: Make, name: str) -> None:
    scenario = SCENARIOS[name]
    counts: Counts = Counter()
    for seed in range(2, 12):
        counts += sample(build(make, scenario, seed), scenario, first=seed * SEQUENCES)
    assert counts.total() == 200_000
    assert p_value(counts, scenario.params(0)) > ALPHA


def test_plain_sampling_follows_the_target(make: Make) -> None:
    e = engine(model(table(make, TARGET)), pages=SEQUENCES * 8, max_sequences=SEQUENCES)
    scenario = Scenario("none", {"temperature": 0.7, "top_p": 0.8}, GOOD)
    assert p_value(sample(e, scenario), scenario.params(0)) > ALPHA


# Mistakes that leave every greedy text as it is


def faulty(make: Make, name: str) -> float:
    scenario = SCENARIOS[name]
    return p_value(sample(build(make, scenario), scenario, SEQUENCES // 2), scenario.params(0))


def test_a_rejection_followed_by_plain_p_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_proposal_distribution", lambda draft, slot, like: torch.zeros_like(like))
    assert faulty(make, "exact, bad draft") < FAULT
    assert faulty(make, "exact, ngram") < FAULT


def test_full_q_for_an_argmax_draft_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArgmaxDrafter, "honest", False)
    assert faulty(make, "exact, argmax draft") < FAULT


def test_a_confidence_stop_on_the_sampled_token_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SamplingBatch.draw_draft

    def wrong(self: SamplingBatch, *arguments: Any) -> Drawn:
        drawn = right(self, *arguments)
        assert drawn.prob_BV is not None
        return replace(drawn, confidence_B=drawn.prob_BV.gather(1, drawn.token_B[:, None])[:, 0])

    monkeypatch.setattr(SamplingBatch, "draw_draft", wrong)
    assert faulty(make, "exact, confidence stop") < FAULT


def test_lossy_acceptance_is_found(make: Make) -> None:
    """The test can tell: threshold acceptance is biased, which is why every output marks it."""
    scenario = Scenario("sampled", {"accept": Accept("threshold", threshold=0.05)}, GOOD)
    assert p_value(sample(build(make, scenario), scenario, SEQUENCES // 2), scenario.params(0)) < FAULT
