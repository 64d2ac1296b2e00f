"""What specctl tune reads acceptance from, and what it refuses to read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from handmade import profile, trace, write_yaml
from hypothesis import given
from hypothesis import strategies as st
from tuning import Ask, asker, told

from specctl.tune.acceptance import of_survival
from specctl.tune.rates import Conditional, Survival, falling, geometric_rate, of_lengths


@pytest.fixture
def ask(run: Run, tmp_path: Path) -> Ask:
    return asker(run, tmp_path)


# -- rates -------------------------------------------------------------------------------------------------------------


def test_cumulative_and_conditional_rates_are_two_things() -> None:
    survival = Survival.checked([0.8, 0.4, 0.2], "x")
    assert survival.conditional() == Conditional((0.8, 0.5, 0.5))
    assert survival.conditional().survival().values == pytest.approx(survival.values)
    assert survival.length == pytest.approx(2.4)
    assert type(survival) is not type(survival.conditional())
    assert survival.conditional().scaled(0.5).values == pytest.approx((1, 0.75, 0.75))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.lists(st.floats(0.1, 10), min_size=8, max_size=8))
def test_the_projection_falls_and_keeps_the_mean(values: list[float], weights: list[float]) -> None:
    weights = weights[: len(values)]
    found = falling(values, weights)
    assert all(b <= a + 1e-12 for a, b in pairwise(found))
    assert np.dot(found, weights) == pytest.approx(np.dot(values, weights))
    if all(b <= a for a, b in pairwise(values)):
        assert found == pytest.approx(values)


@given(st.floats(0, 1), st.integers(1, 8))
def test_a_mean_length_has_one_rate(rate: float, k: int) -> None:
    length = sum(rate**n for n in range(k + 1))
    assert sum(geometric_rate(length, k, "x") ** n for n in range(k + 1)) == pytest.approx(length, abs=1e-6)


# -- tables ------------------------------------------------------------------------------------------------------------

GOLDEN = """\
# mean tokens a step, of separate runs
model,method,thinking,K1,K2,K3,K4
kimi,eagle3,on,1.83,2.43,2.88,3.24
deep,mtp,on,1.79,2.27,2.49,2.54
deep,mtp,off,1.92,2.61,2.55,3.00
"""


def test_lengths_of_separate_runs_become_survival(ask: Ask) -> None:
    value = told(ask(GOLDEN, "--only", "model=kimi"))
    assert value["survival"] == pytest.approx([0.83, 0.60, 0.45, 0.36])
    assert value["effective"]["iid"] is False
    assert any("nothing had to be projected" in notice for notice in value["notices"])
    assert any("their own noise is not counted" in notice for notice in value["notices"])


def test_lengths_that_fall_are_projected_and_how_far_is_told(ask: Ask) -> None:
    """0.92, 0.69, -0.06, 0.45: the last two share 0.195, so that K = 3 moves from 2.55 to 2.805."""
    value = told(ask(GOLDEN, "--only", "model=deep", "--only", "thinking=off"))
    assert value["survival"] == pytest.approx([0.92, 0.69, 0.195, 0.195])
    assert any("K = 3 moved by 0.255" in notice for notice in value["notices"])


def test_lengths_that_were_not_run_lie_between() -> None:
    found = of_lengths({1: 1.8, 3: 2.6, 5: 2.8}, {}, "x")
    assert found.survival.values == pytest.approx((0.8, 0.4, 0.4, 0.1, 0.1))
    assert (found.moved, found.between) == (pytest.approx(0), (2, 4))
    many = of_lengths({1: 1.5, 2: 2.2}, {1: 10, 2: 1000}, "x")  # 0.5, then 0.7: what is known better moves less
    few = of_lengths({1: 1.5, 2: 2.2}, {1: 1000, 2: 10}, "x")
    assert abs(many.survival.length - 2.2) <= abs(few.survival.length - 2.2) + 1e-9


@pytest.mark.parametrize(
    "table",
    [
        "k,survival,drafts\n1,0.8,200\n2,0.5,200\n",
        "S1,S2,drafts\n0.8,0.5,200\n",
        "k,conditional,drafts\n1,0.8,200\n2,0.625,200\n",
        "C1,C2,drafts\n0.8,0.625,200\n",
        {"survival": [0.8, 0.5], "drafts": 200},
        {"survival": {"1": 0.8, "2": 0.5}, "drafts": 200},
        [{"k": 1, "survival": 0.8, "drafts": 200}, {"k": 2, "survival": 0.5, "drafts": 200}],
        {"conditional": [0.8, 0.625], "drafts": 200},
    ],
)
def test_a_table_in_any_of_its_forms(ask: Ask, table: object) -> None:
    value = told(ask(table))
    assert value["survival"] == pytest.approx([0.8, 0.5])
    low, high = value["survival_ci95"]
    half = 1.96 * (0.8 * 0.2 / 200) ** 0.5
    assert (low[0], high[0]) == (pytest.approx(0.8 - half, abs=0.015), pytest.approx(0.8 + half, abs=0.015))
    assert low[1] < 0.5 < high[1]
    assert value["effective"]["k_max"] == 2


def test_a_table_by_context_tunes_each_context_by_its_own(run: Run, tmp_path: Path) -> None:
    value = profile({1: [10, 10.5, 11, 11.5]}, {1: 0.5}, context=256)
    value["steps"] += [each | {"context": 8192} for each in value["steps"]]
    file = write_yaml(tmp_path / "P.yaml", value)
    (tmp_path / "A.csv").write_text("context,S1,S2,S3\n256,0.9,0.8,0.7\n8192,0.3,0.05,0.01\n")
    ran = run("tune", "--profile", file, "--acceptance", tmp_path / "A.csv", "--output", tmp_path / "Y.yaml", "--json")
    found = {place["context"]: place for place in told(ran)["places"]}
    assert (found[256]["k"], found[8192]["k"]) == (3, 1)
    assert found[8192]["candidates"][1]["survival"] == [0.3]


@pytest.mark.parametrize(
    ("given", "flags", "said"),
    [
        ("k,survival\n1,0.5\n2,0.6\n", (), "survival rises at position 2, from 0.5 to 0.6"),
        ("k,survival\n1,1.2\n", (), "survival at position 1 is 1.2"),
        ("k,conditional\n1,0.5\n2,1.01\n", (), "conditional at position 2 is 1.01"),
        ("k,survival\n1,0.8\n3,0.2\n", (), "positions [1, 3]"),
        ("k,survival\n1,0.8\n1,0.7\n", (), "lists k 1 twice"),
        ("k,survival\n1,nan\n", (), "survival is 'nan'"),
        ('k,survival\n1,"0,75"\n', (), "survival is '0,75'"),
        ("k,length\n2,3.2\n", (), "K = 2 cannot bring 3.2"),
        ("a,b\n1,2\n", (), "expected k and one of survival, conditional, length"),
        ("k,survival,class\n1,0.5,x\n1,0.6,y\n", (), "rows of several class (x, y); name one: --only class=VALUE"),
        ("k,survival,class\n1,0.5,x\n", ("--only", "class=z"), "no row with class=z"),
        ("k,survival\n1,0.5\n", ("--only", "clas=z"), "has no clas"),
        ("k,survival\n1,0.5\n", ("--only", "class"), "expected KEY=VALUE"),
        ("k,survival,drafts\n1,0.5,0\n", (), "drafts is 0"),
        ({"survival": [0.5], "length": [1.5]}, (), "survival and length"),
        ({"hello": 1}, (), "keys hello"),
        ({"schema": "specctl.policy/1"}, (), "its schema is 'specctl.policy/1'"),
        ("", (), "is empty"),
        ("{", (), "cannot be parsed"),
    ],
)
def test_a_table_that_cannot_be_is_refused_and_named(ask: Ask, given: object, flags: Any, said: str) -> None:
    ran = ask(given, *flags)
    assert (ran.code, "Traceback" in ran.err, "Internal" in ran.err) == (2, False, False)
    assert said in ran.err


# -- answers -----------------------------------------------------------------------------------------------------------


def body(histogram: list[int], **more: Any) -> dict[str, Any]:
    drafts, accepted = sum(histogram), sum(j * n for j, n in enumerate(histogram))
    counts = {"acceptance_histogram": histogram, "mean_acceptance_length": 1 + accepted / max(1, drafts)}
    return {"choices": [], "metrics": {"speculative_decoding": counts | {"num_spec_tokens": 3} | more}}


def test_answers_of_vllm_keep_requests_apart(ask: Ask) -> None:
    lines = "\n".join(json.dumps(body([2, 3, 1, 4]) if i % 2 else body([8, 1, 1, 0])) for i in range(20))
    value = told(ask(lines, name="A.jsonl"))
    assert value["survival"] == pytest.approx([0.5, 0.3, 0.2])
    apart = value["survival_ci95"][1][0] - value["survival_ci95"][0][0]
    alike = told(ask("\n".join([json.dumps(body([5, 2, 1, 2]))] * 20), name="A.jsonl"))
    assert apart > 0.1 > alike["survival_ci95"][1][0] - alike["survival_ci95"][0][0]


def test_answers_of_sglang(ask: Ask) -> None:
    meta = {"text": "x", "meta_info": {"spec_correct_drafts_histogram": [5, 2, 3], "spec_accept_length": 1.8}}
    assert told(ask([meta, meta], name="A.json"))["survival"] == pytest.approx([0.5, 0.3])


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ([body([1, 2], num_spec_tokens=3), body([1, 2], num_spec_tokens=4)], "of up to 3, 4 tokens"),
        ([body([1, 2, 3, 4, 5])], "counts 4 accepted tokens, num_spec_tokens is 3"),
        ([body([1, 2, 3, 4], mean_acceptance_length=3.9)], "so it does not count accepted tokens"),
        ([body([1, -2, 3, 4])], "expected how many drafts"),
        ([body([0, 0, 0, 0])], "no answer in it tells of a draft"),
    ],
)
def test_answers_that_cannot_be(ask: Ask, bodies: list[Any], said: str) -> None:
    ran = ask(bodies, name="A.json")
    assert ran.code == 2
    assert said in ran.err


# -- traces, and beyond what was seen ----------------------------------------------------------------------------------


def classes(**of: list[list[int]]) -> dict[str, Any]:
    parts = {name: trace(histograms) for name, histograms in of.items()}
    whole = next(iter(parts.values()))
    entries = [part["classes"][0] | {"class": name} for name, part in parts.items()]
    return whole | {"classes": entries}


def test_classes_are_told_apart_and_can_be_chosen(ask: Ask) -> None:
    value = classes(code=[[1, 1, 8]] * 10, prose=[[8, 2, 0]] * 10)
    both = told(ask(value, name="T.json"))
    kinds = {kind["name"]: kind for kind in both["kinds"]}
    assert kinds["code"]["survival"] == pytest.approx([0.9, 0.8])
    assert kinds["prose"]["survival"] == pytest.approx([0.2, 0.0])
    assert both["survival"] == pytest.approx([0.55, 0.4])
    assert (kinds["code"]["ks"], kinds["prose"]["ks"]) == ([2], [1])
    one = told(ask(value, "--only", "class=prose", name="T.json"))
    assert one["survival"] == pytest.approx([0.2, 0.0])
    ran = ask(value, "--only", "class=verse", name="T.json")
    assert ran.code == 2
    assert "no class 'verse' (classes: code, prose)" in ran.err


def test_beyond_what_was_seen_survival_goes_on_only_when_asked(ask: Ask, tmp_path: Path) -> None:
    given = {"survival": [0.9, 0.81], "drafts": 10**6}
    assert told(ask(given))["effective"]["k_max"] == 2
    refused = ask(given, "--k-max", 4)
    assert refused.code == 2
    assert "knows nothing beyond K = 2; --extrapolate" in refused.err
    value = told(ask(given, "--extrapolate", "--k-max", 5))
    place = value["places"][0]
    assert place["candidates"][5]["survival"] == pytest.approx([0.9**k for k in range(1, 6)])
    assert [each["extrapolated"] for each in place["candidates"]] == [False, False, False, True, True, True]
    assert (value["effective"]["observed_k"], place["k"]) == (2, 5)
    assert any("lengths above 2 rest on extrapolated survival" in notice for notice in value["notices"])
    page = tmp_path / "R.md"
    shown = ask(given, "--extrapolate", "--report", page)
    assert shown.code == 0
    assert "| 5* |" in page.read_text()


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6), st.integers(50, 5000))
def test_counted_drafts_and_their_survival_are_the_same(rates: list[float], drafts: int) -> None:
    survival = Conditional(tuple(rates)).survival()
    found = of_survival(survival, tuple([float(drafts)] * len(rates)), "x")
    assert found.survival() == pytest.approx(survival.values)
    low, high = found.interval(200) or (None, None)
    assert (low <= np.array(survival.values) + 1e-9).all()
    assert (high >= np.array(survival.values) - 1e-9).all()
    more = found.scaled(0.1)
    assert more.survival() == pytest.approx(survival.conditional().scaled(0.1).survival().values)
    assert found.extended(8).survival()[: len(rates)] == pytest.approx(survival.values)
    assert found.extended(8).survival() == pytest.approx(survival.extended(8).values)
