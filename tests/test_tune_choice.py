"""What specctl tune chooses, and the policy that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from handmade import cell, profile, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning import TU1, Tune, acceptance_of, costs, places, told, tuner

from specctl.schemas.policy import PolicyFile, read_policy
from specctl.schemas.profile import Profile
from specctl.tune.acceptance import constant
from specctl.tune.choice import Chooser
from specctl.tune.ranges import context_ranges, tried_batches
from specctl.tune.run import run_tune


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Tune:
    return tuner(run, tmp_path)


# -- the choice --------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.floats(1, 100), min_size=2, max_size=6),
    st.floats(0, 20),
    st.lists(st.integers(1, 50), min_size=6, max_size=6),
    st.integers(1, 9),
)
def test_the_choice_is_the_best_there_is(steps: list[float], draft: float, histogram: list[int], batch: int) -> None:
    """Without uncertainty: nothing is predicted faster, nothing as fast is shorter, and K = 0 competes."""
    chooser = Chooser(
        costs(profile({1: steps, 8: [2 * ms for ms in steps]}, {1: draft + 1e-6, 8: draft + 1e-6})),
        acceptance_of(trace([histogram[: len(steps)]])),
        len(steps) - 1,
    )
    decision = chooser.decide(batch, 100)
    speeds = {each.k: each.speedup for each in decision.candidates}
    assert speeds[0] == 1
    top = max(speeds.values())
    assert speeds[decision.chosen.k] == pytest.approx(top, rel=1e-6)
    assert all(speeds[k] < top for k in speeds if k < decision.chosen.k)


@settings(max_examples=30)
@given(st.floats(0.01, 100), st.floats(0, 1))
def test_the_choice_does_not_depend_on_the_unit_of_time(unit: float, probability: float) -> None:
    def ks(scale: float) -> list[int]:
        value = profile({1: [10 * scale, 11 * scale, 13 * scale, 17 * scale]}, {1: scale})
        return [each.chosen.k for each in [Chooser(costs(value), constant(probability, 3), 3).decide(1, 9)]]

    assert ks(1.0) == ks(unit)


def test_of_lengths_that_cannot_be_told_apart_the_smaller_is_chosen(tune: Tune) -> None:
    """A plateau: every further token is worth a little less than a percent."""
    steps = [3.5, 6.12, 9.12, 12.08, 15.0]
    exact = places(told(tune(profile({1: steps}, {1: 0.01}), 0.999, "--json")))[1]
    vague = places(told(tune(profile({1: steps}, {1: 0.01}, spread=0.1), 0.999, "--json", "--force")))[1]
    assert vague["best_k"] == exact["best_k"] == exact["k"] == 4
    assert 0 < vague["k"] < 4
    assert "cannot be told from it" in vague["reason"]
    assert vague["speedup"][0] < vague["speedup"][1] < vague["speedup"][2]
    assert exact["speedup"][0] == exact["speedup"][2]


def test_a_gain_within_the_uncertainty_is_none(tune: Tune) -> None:
    found = places(told(tune(profile({1: [10, 15]}, {1: 0.001}, spread=1.0), 0.52, "--json")))[1]
    assert (found["best_k"], found["k"]) == (1, 0)
    assert "within the uncertainty" in found["reason"]


def test_requests_that_differ_widen_the_band(tune: Tune) -> None:
    flat = profile({1: [10, 12]}, {1: 0.1})
    alike = places(told(tune(flat, trace([[5, 5]] * 12), "--json")))[1]
    unlike = places(told(tune(flat, trace([[0, 10], [10, 0]] * 6), "--json", "--force")))[1]
    widths = [place["candidates"][1]["speedup"][2] - place["candidates"][1]["speedup"][0] for place in (alike, unlike)]
    assert widths[0] < 1e-9 < 0.05 < widths[1]


def world(num_requests: int, sure: float, unsure: float) -> dict[str, Any]:
    """Drafts of two tokens, every other one sure of itself (0.9) and right with probability `sure` at each token, the
    others unsure (0.3) and right with probability `unsure`."""
    random = np.random.default_rng(0)
    histograms, confidence, accepted = [], [], []
    for _ in range(num_requests):
        fates = []
        for draft in range(40):
            chance, word = ((sure, 0.9), (unsure, 0.3))[draft % 2]
            fates.append(next((j for j in range(2) if random.random() > chance), 2))
            confidence.append([word, word])
        accepted += fates
        histograms.append([fates.count(j) for j in range(3)])
    return trace(histograms, confidence=confidence, accepted=accepted, min_confidence=0.0, temperature=1.0)


def test_a_confidence_stop_is_used_where_it_pays(tune: Tune, tmp_path: Path) -> None:
    dear = profile({1: [10, 14, 18]}, {1: 1.0})
    found = places(told(tune(dear, world(20, 0.95, 0.05), "--json")))[1]
    assert 0.3 < found["confidence"] <= 0.9
    assert found["k"] == 2
    without = max(each["speedup"][1] for each in found["candidates"])
    assert found["speedup"][1] > 1.05 * without
    # Half of the steps draft two tokens; the others take a plain pass and the draft's catching up.
    assert found["step_ms"] == pytest.approx(share(found) * (18 + 2) + (1 - share(found)) * (10 + 1), rel=1e-6)
    assert read_policy(tmp_path / "Y.yaml").lookup(1, 1).confidence == found["confidence"]


def share(place: dict[str, Any]) -> float:
    return float(place["drafted"]) / 2


def test_no_confidence_stop_where_confidence_means_nothing(tune: Tune) -> None:
    dear = profile({1: [10, 14, 18]}, {1: 1.0})
    assert places(told(tune(dear, world(20, 0.6, 0.6), "--json")))[1]["confidence"] is None
    few = places(told(tune(dear, world(4, 0.95, 0.05), "--json", "--force")))[1]
    assert few["confidence"] is None  # too few requests to choose by some and judge by others


def test_confidences_of_greedy_drafts_need_no_fates(tune: Tune) -> None:
    """At temperature 0 a token is accepted when it is the target's own choice, which its rank tells."""
    value = world(20, 0.95, 0.05) | {"temperature": 0.0}
    (entry,) = value["classes"]
    entry["rank"] = [[1] * n + [2] * (2 - n) for n in entry["accepted"]]
    entry["accepted"] = []
    assert places(told(tune(profile({1: [10, 14, 18]}, {1: 1.0}), value, "--json")))[1]["confidence"] is not None
    assert acceptance_of(value).survival() == pytest.approx(acceptance_of(world(20, 0.95, 0.05)).survival())


# -- the policy --------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 5000), min_size=1, max_size=3, unique=True),
    st.integers(0, 2**32 - 1),
)
def test_a_policy_says_everywhere_what_was_decided_there_or_what_is_as_good(
    batches: list[int], contexts: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    steps = [
        cell(b, q, float(ms), c)
        for b in batches
        for c in contexts
        for q, ms in enumerate(np.cumsum(random.uniform(0.1, 6, 5)) + 5, start=1)
    ]
    value = profile({1: [1]}) | {"steps": steps}
    tuning = run_tune(Profile.model_validate(value), "P.yaml", 0.7, "0.7")
    chooser = Chooser(costs(value), constant(0.7, 4), 4)
    assert isinstance(tuning.policy, PolicyFile)  # its ranges follow each other from 1 without gaps
    for batch in (*batches, 1, max(batches) + 5):
        for context in contexts:
            decision = chooser.decide(min(batch, max(batches)), context)
            said = tuning.policy.lookup(batch, context).k
            if decision.chosen.k == 0:
                assert said == 0
            assert decision.candidates[said].speedup >= 0.99 * decision.chosen.speedup


def test_contexts_meet_at_their_geometric_mean() -> None:
    assert [(r.low, r.high) for r in context_ranges([512, 2048])] == [(1, 1024), (1025, None)]
    assert [(r.low, r.high) for r in context_ranges([1, 2, 3])] == [(1, 1), (2, 2), (3, None)]
    assert [(r.low, r.high) for r in context_ranges([7])] == [(1, None)]


def test_beyond_many_batches_those_of_the_profile_are_decided_for() -> None:
    assert tried_batches([1, 4]) == [1, 2, 3, 4]
    assert tried_batches([1, 512, 300])[255:] == [256, 300, 512]


def test_the_policy_follows_load_and_context(tune: Tune, tmp_path: Path) -> None:
    """Drafting pays alone, and in company only when contexts are long: there the cache is what a step reads."""
    value = profile({1: [10, 10.1, 10.2], 8: [12, 20, 28]}, {1: 0.5, 8: 0.5}, context=100)
    value["steps"] += [cell(b, q, 100.0 + q, 10000) for b in (1, 8) for q in (1, 2, 3)]
    told(tune(value, 0.6, "--json"))
    policy = read_policy(tmp_path / "Y.yaml")
    assert [policy.lookup(b, c).k for b, c in ((1, 100), (8, 100), (1, 10**5), (8, 10**5))] == [2, 0, 2, 2]
    assert policy.lookup(8, 1000).k == 0
    assert policy.lookup(8, 1001).k == 2


def test_where_caches_do_not_fit_nothing_is_decided(tune: Tune, tmp_path: Path) -> None:
    """At the long context only one text fits, so what steps of eight would be there splits no range."""
    value = profile({1: [10, 10.1, 10.2], 8: [12, 12.5, 13]}, {1: 0.5, 8: 0.5}, context=100)
    value["steps"] += [cell(1, q, 100.0 * q, 10000) for q in (1, 2, 3)]
    told(tune(value, 0.6, "--json"))
    policy = read_policy(tmp_path / "Y.yaml")
    assert [policy.lookup(1, c).k for c in (100, 10000)] == [2, 0]
    assert policy.lookup(8, 100).k == 2
    assert [each.batch for each in policy.k] == [[1, None]] * 2


def test_the_table_tells_why(tune: Tune) -> None:
    ran = tune(TU1, trace([[15, 15, 20, 50]]))
    assert ran.code == 0
    lines = ran.out.splitlines()
    header = next(line for line in lines if "survival" in line)
    assert header.split()[:5] == ["K", "survival", "tokens", "drafting", "v"]
    chosen = [line for line in lines if line.startswith(">")]
    assert [line.split()[1] for line in chosen] == ["3", "0"]
    assert chosen[0].split()[2:4] == ["0.500", "3.05"]
    assert "c 0.10" in ran.out
    assert "batches above 32 get what is best at 32" in ran.err


def test_an_answer_that_depends_on_nothing_but_its_input(tune: Tune) -> None:
    value = trace([[5, 3, 2], [1, 1, 9], [4, 4, 4]])
    first, second = (told(tune(TU1, value, "--json", "--force")) for _ in range(2))
    assert first["places"] == second["places"]
    assert first["policy"]["k"] == second["policy"]["k"]
