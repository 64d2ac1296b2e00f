"""specctl tune: with every number of profile and trace known, so is what a step costs and brings. Cases TU1, TU3, TU5
and their kind go through the command line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from handmade import cell, profile, trace
from hypothesis import given
from hypothesis import strategies as st
from tuning import TU1, Tune, acceptance_of, by_k, costs, places, told, tuner

from specctl.schemas.policy import read_policy
from specctl.tune.acceptance import constant

FLAT = profile({1: [10.0] * 9}, {1: 0.0001})


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Tune:
    return tuner(run, tmp_path)


# -- the cases ---------------------------------------------------------------------------------------------------------


def test_tu1_the_number_that_counts_is_speed_not_acceptance(tune: Tune, tmp_path: Path) -> None:
    found = places(told(tune(TU1, 0.85, "--k-max", 4, "--json")))
    assert (found[1]["k"], found[32]["k"]) == (4, 0)
    assert found[1]["tok_s"] == pytest.approx(250.58, abs=0.01)
    assert by_k(found[1])[0]["tok_s"] == pytest.approx(100)
    alone = {k: each["tok_s"] for k, each in by_k(found[32]).items()}
    assert (alone[0], alone[1], alone[4]) == pytest.approx((71.43, 66.07, 55.35), abs=0.01)
    assert all(each["speedup"][2] < 1 for k, each in by_k(found[32]).items() if k)
    assert "do not speculate" in found[32]["reason"]
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.lookup(1, 900).k, policy.lookup(32, 900).k) == (4, 0)


@pytest.mark.parametrize(("acceptance", "right"), [(0, 0), (0.0, 0), (1, 8), ("1.0", 8)])
def test_tu1_the_ends_of_acceptance(tune: Tune, acceptance: object, right: int) -> None:
    assert places(told(tune(FLAT, acceptance, "--json")))[1]["k"] == right


@pytest.mark.parametrize("kind", [{0.0: 1.0}, {0.8: 4.3289}, {1.0: 9.0}])
def test_tu3_tokens_a_step(tune: Tune, kind: dict[float, float]) -> None:
    ((probability, tokens),) = kind.items()
    found = by_k(places(told(tune(FLAT, probability, "--k-max", 8, "--json")))[1])
    assert found[8]["tokens_per_step"] == pytest.approx(tokens, abs=1e-3)
    assert found[8]["accepted"] == pytest.approx(tokens - 1, abs=1e-3)
    assert found[8]["acceptance_rate"] == pytest.approx((tokens - 1) / 8, abs=1e-4)
    assert (found[0]["tokens_per_step"], found[0]["acceptance_rate"]) == (1, None)
    assert found[8]["survival"] == pytest.approx([probability**k for k in range(1, 9)])


@pytest.mark.parametrize("given", ["nan", "inf", "-0.1", "1.0001", "0,8", "-1e-9"])
def test_tu3_what_is_no_probability(tune: Tune, tmp_path: Path, given: str) -> None:
    ran = tune(FLAT, given)
    assert ran.code == 2
    assert given in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "Y.yaml").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"draft_lenght": 4}, "draft_lenght is unknown; did you mean draft"),
        ({"steps": [cell(8, 1, -1.0), cell(8, 2, 2.0)]}, "steps.0.ms is -1.0"),
        ({"steps": [cell(8, 1, 5.0), cell(8, 1, 6.0)]}, "steps lists batch 8, q 1, context 1024 twice: 5 and 6 ms"),
        ({"steps": [cell(8, 2, 5.0)]}, "steps has no q 1 for batch 8, context 1024"),
        ({"steps": [cell(8, 1, 5.0)]}, "no q above 1"),
        ({"draft": [cell(8, 1, 1.0) | {"ms": "0,75"}]}, "draft.0.ms is '0,75'"),
    ],
)
def test_tu5_a_wrong_profile_is_named(tune: Tune, change: dict[str, Any], said: str) -> None:
    ran = tune(TU1 | change, 0.8)
    assert ran.code == 2
    assert said in ran.err
    assert "P.yaml" in ran.err
    assert "Traceback" not in ran.err


def test_tu5_flags_that_are_misspelt_are_named(tune: Tune) -> None:
    ran = tune(TU1, 0.8, "--k-mx", 4)
    assert ran.code == 2
    assert "--k-max" in ran.err


def test_tu5_the_longest_length_is_what_the_draft_has(tune: Tune) -> None:
    """A head of one trained depth: K is 1 without being told, which is told; more is refused."""
    one = TU1 | {"drafter": {"kind": "mtp", "digest": None, "max_k": 1}}
    value = told(tune(one, 0.9, "--json"))
    assert value["effective"]["k_max"] == 1
    assert max(by_k(places(value)[1])) == 1
    ran = tune(one, 0.9, "--k-max", 2, "--force")
    assert ran.code == 2
    assert "--k-max 2: the draft knows nothing beyond K = 1" in ran.err


# -- what a step costs and brings --------------------------------------------------------------------------------------


def test_every_part_of_a_step_is_charged(tune: Tune) -> None:
    """Ten for plain, 12, 14, 16 for verification; a draft step 2 (and 0.25 of the engine's), the pass after a block 3;
    the engine takes 1 for a plain step and 1.5 for one that drafts."""
    value = profile(
        {1: [10, 12, 14, 16]},
        {1: 2.0},
        draft_follow=[cell(1, 2, 3.0)],
        overheads_ms={"base": 1.0, "spec": 1.5, "per_draft_step": 0.25},
    )
    found = by_k(places(told(tune(value, 0.5, "--json")))[1])
    assert [found[k]["step_ms"] for k in range(4)] == pytest.approx(
        [11, 12 + 1.5 + 3.25, 14 + 1.5 + 3.25 + 2.25, 16 + 1.5 + 3.25 + 2 * 2.25]
    )
    assert found[2]["speedup"][1] == pytest.approx(1.75 * 11 / 21)
    assert (places(told(tune(value, 0.5, "--json", "--force")))[1]["c"], found[1]["v"]) == pytest.approx((0.2, 1.2))


def test_a_draft_that_must_follow_costs_something_at_k_0(tune: Tune, tmp_path: Path) -> None:
    """Its q = 1 follow pass is charged when nothing is drafted, and the block's pass is a draft step. At batch 2 blocks
    pay, so that the draft is not given up at batch 1."""
    follow = [cell(1, 1, 1.0), cell(2, 1, 1.0)]
    value = profile({1: [10, 30], 2: [10, 11]}, {1: 2.0, 2: 0.5}, draft_follow=follow)
    ran = tune(value, 0.5, "--json")
    found = by_k(places(told(ran))[1])
    assert (found[0]["step_ms"], found[1]["step_ms"]) == pytest.approx((11, 32))
    assert found[0]["speedup"][1] == pytest.approx(10 / 11)  # plain decoding without it would be faster still
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.at_k0, [each.k for each in policy.k]) == ("follow", [0, 1])
    assert "at K = 0 the draft follows every step, which is 10% of a plain step at batch 1" in ran.err


def test_a_draft_that_never_pays_is_given_up(tune: Tune, tmp_path: Path) -> None:
    """Even where a block is better than following for nothing."""
    value = profile({1: [10, 10]}, {1: 2.0}, draft_follow=[cell(1, 1, 6.0), cell(1, 2, 6.0)])
    ran = tune(value, 0.5, "--json")
    place = places(told(ran))[1]
    assert (place["k"], by_k(place)[0]["step_ms"], by_k(place)[1]["step_ms"]) == (0, 10, 16)
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.at_k0, [each.k for each in policy.k]) == ("detach", [0])
    assert "no block pays anywhere, so the draft is given up" in ran.err
    assert tune(profile({1: [10, 30]}, {1: 2.0}), 0.5, "--force").code == 0
    assert read_policy(tmp_path / "Y.yaml").at_k0 == "follow"  # one that lags costs nothing at K = 0


def test_a_draft_follows_a_block_by_as_many_rows_as_it_has(tune: Tune) -> None:
    """Blocks of one, two and three tokens; with a stop they are shorter, and so is what follows them."""
    follow = [cell(1, q, float(q)) for q in range(1, 5)]
    value = profile({1: [10, 10, 10, 10]}, {1: 1.0}, draft_follow=follow)
    found = by_k(places(told(tune(value, 0.9, "--json")))[1])
    assert [found[k]["step_ms"] for k in range(4)] == pytest.approx([11, 12, 14, 16])
    times = costs(value).at(1, 1024, 3, 0)
    assert [float(times.drafting_S(3, longest)[0]) for longest in range(4)] == pytest.approx([11, 13, 15, 16])


def test_between_cells_costs_are_linear_and_beyond_them_constant() -> None:
    value = profile({1: [10, 20], 4: [16, 40]})
    value["steps"] += [cell(4, 1, 26.0, 2048), cell(4, 2, 50.0, 2048)]
    at = costs(value).at
    assert at(1, 1024, 1, 0).target_SQ.tolist() == [[10, 20]]
    assert at(2, 1024, 1, 0).target_SQ.tolist() == [[12, pytest.approx(80 / 3)]]
    assert at(4, 1536, 1, 0).target_SQ.tolist() == [[21, 45]]
    assert at(9, 9999, 1, 0).target_SQ.tolist() == [[26, 50]]
    assert at(4, 1, 1, 0).target_SQ.tolist() == [[16, 40]]


def test_rows_that_were_not_profiled_lie_between_their_neighbours() -> None:
    value = profile({1: [10]})
    value["steps"] += [cell(1, 2, 11.0), cell(1, 5, 14.0)]
    assert costs(value).at(1, 1024, 4, 0).target_SQ.tolist() == [[10, 11, 12, 13, 14]]


def test_steps_without_a_proposal_are_plain_steps(tune: Tune) -> None:
    """Forty steps of one sequence: twenty without a proposal, twenty drafts that bring two tokens each. A step brings
    1.5 tokens and costs a plain and a verifying pass, half and half."""
    looked_up = profile({1: [10, 12], 2: [12, 20]}, drafter={"kind": "ngram", "digest": None, "max_k": None})
    found = places(told(tune(looked_up, trace([[0, 20]], steps=[40]), "--json")))
    assert by_k(found[1])[1]["tokens_per_step"] == pytest.approx(1.5)
    assert by_k(found[1])[1]["step_ms"] == pytest.approx(11)
    # Of two sequences a step has none to verify in a quarter of all cases.
    assert by_k(found[2])[1]["step_ms"] == pytest.approx(0.25 * 12 + 0.75 * 20)


def test_a_shorter_draft_needs_more_steps_for_the_same_text(tune: Tune) -> None:
    """Ten drafts of four, all accepted, and fifty tokens that came without: a hundred tokens in sixty steps. Drafting
    two at a time, the fifty drafted tokens take 50 / 3 steps, and the other fifty still fifty."""
    looked_up = profile({1: [10] * 5}, drafter={"kind": "ngram", "digest": None, "max_k": None})
    found = by_k(places(told(tune(looked_up, trace([[0, 0, 0, 0, 10]], steps=[60]), "--json")))[1])
    assert found[4]["tokens_per_step"] == pytest.approx(100 / 60)
    assert found[2]["tokens_per_step"] == pytest.approx(100 / (50 + 50 / 3))
    assert found[4]["drafted"] == pytest.approx(10 * 4 / 60)


def test_a_trace_that_does_not_count_its_steps_says_so(tune: Tune) -> None:
    looked_up = profile({1: [10, 12]}, drafter={"kind": "ngram", "digest": None, "max_k": None})
    ran = tune(looked_up, trace([[5, 5]], draft={"kind": "ngram", "digest": None, "max_k": None}))
    assert ran.code == 0
    assert "does not tell in how many steps nothing was proposed" in ran.err


# -- survival ----------------------------------------------------------------------------------------------------------


def test_survival_is_by_position_not_a_power_of_the_first(tune: Tune) -> None:
    """0.8, then hardly anything: i.i.d. would go on drafting."""
    steep = profile({1: [10.0 + 0.5 * q for q in range(6)]}, {1: 0.5})
    drop = trace([[20, 70, 10, 0, 0, 0]])
    found = places(told(tune(steep, drop, "--json")))[1]
    assert found["candidates"][5]["survival"] == pytest.approx([0.8, 0.1, 0, 0, 0])
    assert found["k"] == 1
    assert places(told(tune(steep, 0.8, "--json", "--force")))[1]["k"] == 5


def test_survival_counts_only_drafts_that_could_get_there() -> None:
    """Two of a hundred drafts met the end of the context after one token, as one of a request can."""
    found = acceptance_of(trace([[15, 15, 20]] * 2, drafted=[100, 98]))
    assert found.survival() == pytest.approx([0.7, 40 / 98])
    # Said to be without a stop, however many are short: a policy may have asked for less.
    many = acceptance_of(trace([[30, 50, 20]], drafted=[100, 40], min_confidence=0.0))
    assert many.survival() == pytest.approx([0.7, 0.5])


def test_a_trace_with_a_stop_and_no_confidences_is_refused(tune: Tune, tmp_path: Path) -> None:
    for more in ({}, {"min_confidence": 0.4}):
        ran = tune(TU1, trace([[30, 50, 20]], drafted=[100, 40], **more))
        assert ran.code == 2
        assert "60 of 100 drafts were stopped early" in ran.err
        assert "T.json" in ran.err
        assert not (tmp_path / "Y.yaml").exists()


def test_a_trace_with_a_stop_tells_about_that_stop_alone(tune: Tune, tmp_path: Path) -> None:
    """Drafts that went on are those that were sure, so nothing is said about drafting without the stop."""
    stopped = trace(
        [[10, 10, 20]],
        drafted=[40, 20],
        confidence=[[0.6]] * 20 + [[0.9, 0.9]] * 20,
        accepted=[0] * 10 + [1] * 10 + [2] * 20,
        min_confidence=0.5,
    )
    value = told(tune(profile({1: [10, 11, 12]}, {1: 0.5}), stopped, "--json"))
    place = places(value)[1]
    assert {each["confidence"] for each in place["candidates"] if each["k"]} == {0.5}
    two = by_k(place)[2]
    assert two["tokens_per_step"] == pytest.approx(1 + 30 / 40 + 20 / 40)
    assert two["drafted"] == pytest.approx(1.5)
    assert read_policy(tmp_path / "Y.yaml").lookup(1, 9).confidence == 0.5
    assert any("only that stop and stricter ones" in notice for notice in value["notices"])


def test_lossy_acceptance_is_no_source(tune: Tune) -> None:
    ran = tune(TU1, trace([[1, 9]], accept="typical"))
    assert ran.code == 2
    assert "lossy" in ran.err


def test_the_rule_of_a_policy_is_lossless(tune: Tune, tmp_path: Path) -> None:
    for accept, method in (("exact", "exact"), ("coupled", "coupled")):
        told(tune(TU1, trace([[1, 9]], accept=accept), "--json", "--force"))
        assert read_policy(tmp_path / "Y.yaml").accept.method == method


def test_a_trace_without_drafts_tells_nothing(tune: Tune) -> None:
    ran = tune(TU1, trace([[0, 0]]))
    assert ran.code == 2
    assert "no draft in it" in ran.err


@given(st.lists(st.lists(st.integers(0, 50), min_size=5, max_size=5), min_size=1, max_size=6))
def test_survival_and_tokens_are_possible_whatever_was_seen(histograms: list[list[int]]) -> None:
    if not any(map(sum, histograms)):
        return
    found = acceptance_of(trace(histograms))
    survival = found.survival()
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival) <= 1e-12).all()
    weights = np.ones((1, found.num_requests))
    tokens = [float(found.outlook(found.stops[0], k, weights).tokens_S[0]) for k in range(1, 5)]
    assert all(1 - 1e-9 <= t <= k + 1 + 1e-9 for k, t in enumerate(tokens, start=1))
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(tokens))
    assert tokens == pytest.approx([1 + survival[:k].sum() for k in range(1, 5)])


@given(st.floats(0, 1), st.integers(1, 8))
def test_a_constant_is_a_geometric_series(probability: float, k: int) -> None:
    found = constant(probability, 8)
    outlook = found.outlook(found.stops[0], k, np.ones((1, 1)))
    expected = k + 1 if probability == 1 else (1 - probability ** (k + 1)) / (1 - probability)
    assert float(outlook.tokens_S[0]) == pytest.approx(expected)
