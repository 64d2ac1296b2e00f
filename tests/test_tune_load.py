"""specctl tune under a load: the batches it meets, what prompts cost, limits, and the ways it is held against."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from handmade import profile, trace, write_json, write_yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning import Tune, places, told, tuner

from specctl.schemas.policy import read_policy
from specctl.tune.load import Tempo, play, steady
from specctl.tune.mix import Arrival, Log

# 10 ms a step and one more for each text beyond the first; checking is free up to batch 8, then dear.
STEPS = {
    b: [10.0 + b - 1 + (0.1 * b * q if b > 8 else 0.1) * (q > 1) for q in range(1, 6)] for b in (1, 2, 4, 8, 16, 32)
}
PREFILL = [{"tokens": 100, "target_ms": 20.0, "draft_ms": 2.0}, {"tokens": 1000, "target_ms": 200.0, "draft_ms": 20.0}]
BUSY = profile(STEPS, dict.fromkeys(STEPS, 0.2), prefill=PREFILL)
LENGTHS = ("--input-tokens", 100, "--output-tokens", 50)


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Tune:
    return tuner(run, tmp_path)


# -- the batch that a load leads to ------------------------------------------------------------------------------------


def tempo(tpot: Callable[[int], float], prompt: float = 0.0, most: int = 64) -> Tempo:
    return Tempo(np.array([tpot(b) for b in range(1, most + 1)]), lambda tokens: prompt * tokens)


def test_a_rate_has_a_fixed_point() -> None:
    """Ten requests a second of 100 tokens at a flat 10 ms stay a second each: ten at a time."""
    flat = steady(tempo(lambda b: 10.0), 10.0, 1, 100)
    assert (flat.batch, flat.saturated) == (pytest.approx(10, rel=1e-4), False)
    assert flat.most == pytest.approx(64.0)
    assert flat.request_ms(100) == pytest.approx(990)
    # 5 + b milliseconds a token: b = 5 requests/s x 100 x (5 + b) / 1000, so b = 5.
    rising = steady(tempo(lambda b: 5.0 + b), 5.0, 1, 100)
    assert rising.batch == pytest.approx(5, rel=1e-3)
    # A prompt of 10 ms, ten of them a second, leaves 0.9 of the time.
    prompts = steady(tempo(lambda b: 10.0, 10.0), 10.0, 1, 100)
    assert prompts.batch == pytest.approx(10.1 / 0.9, rel=1e-3)
    assert prompts.tpot_ms == pytest.approx(10 / 0.9)


@settings(max_examples=60)
@given(st.floats(0.1, 100), st.floats(0.5, 20), st.floats(0, 2), st.floats(0, 5), st.integers(1, 400))
def test_what_settles_satisfies_its_own_equation(
    rate: float, base: float, slope: float, prompt: float, tokens: int
) -> None:
    of = tempo(lambda b: base + slope * b, prompt)
    found = steady(of, rate, 1, tokens)
    if found.saturated:
        assert rate >= 0.99 * found.most or found.batch == of.most
        return
    assert rate < found.most
    free = 1 - rate / 1000 * prompt
    expected = rate / 1000 * (prompt + tokens * of.tpot(max(1.0, found.batch))) / free
    assert found.batch == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_more_than_can_be_served_is_saturated(tune: Tune) -> None:
    """At batch 32 a plain step takes 41 ms, so 780 tokens a second, less what prompts take."""
    value = told(tune(BUSY, 0.8, "--json", "--arrival-rate", 40, *LENGTHS))
    plain = value["load"]["plain"]
    assert plain["saturated"]
    assert plain["most"] == pytest.approx(1000 / (50 * 41 / 32 + 20), rel=1e-6)
    assert any("saturated without a draft" in notice for notice in value["notices"])


def test_faster_decoding_lowers_the_batch(tune: Tune) -> None:
    value = told(tune(BUSY, 0.8, "--json", "--arrival-rate", 8, *LENGTHS))
    plain, policy = value["load"]["plain"], value["load"]["policy"]
    assert policy["batch"] < plain["batch"]
    assert policy["tpot_ms"] < plain["tpot_ms"]
    assert policy["ttft_ms"] > plain["ttft_ms"]  # the draft's own pass over the prompt
    way = {each["name"]: each for each in value["ways"]}
    assert way["best in the data"]["gain"] >= way["this policy"]["gain"] > 1


def test_a_log_is_played_through() -> None:
    """Two requests side by side at 10 ms a token alone and 20 together: the first has 5 of its 10 tokens when the
    second comes, both go on at 20 ms, the first ends after 150 ms, the second has 5 left and ends alone at 200."""
    log = Log((Arrival(0.0, 1, 10), Arrival(0.05, 1, 10)))
    found = play(tempo(lambda b: 10.0 * b), log)
    assert found.seconds == pytest.approx(0.2)
    assert found.tokens == {1: pytest.approx(0.5), 2: pytest.approx(0.5)}
    assert found.tpot_ms == pytest.approx(15)
    assert found.queued == 0
    one = play(Tempo(np.array([10.0]), lambda tokens: 5.0), log)  # only one runs at a time
    assert one.seconds == pytest.approx(0.21)
    assert one.tokens == {1: 1.0}
    assert one.ttft_ms == pytest.approx((5 + (110 - 50)) / 2)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 50), st.integers(1, 60)), min_size=1, max_size=30))
def test_playing_a_log_loses_no_token(requests: list[tuple[float, int, int]]) -> None:
    log = Log(tuple(Arrival(*each) for each in sorted(requests)))
    found = play(tempo(lambda b: 5.0 + b, 0.1, most=8), log)
    assert sum(found.tokens.values()) == pytest.approx(1)
    assert max(found.tokens) <= 8
    assert found.seconds * 1000 >= max(each.at * 1000 + each.output_tokens * 6 for each in log.arrivals) - 1e-6
    assert found.tpot_ms >= 6 - 1e-9


# -- mixes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.csv", "batch,tokens\n1,30\n16,70\n"),
        ("m.json", '{"tokens": {"1": 30, "16": 70}}'),
        # Seconds times batch over 10 and 25 ms: 30 and 70.
        ("m.csv", "batch,seconds\n1,300\n16,109.375\n"),
    ],
)
def test_a_histogram_weighs_the_batches(tune: Tune, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    value = told(tune(BUSY, 0.8, "--json", "--mix", tmp_path / name))
    found = places(value)
    plain = {b: found[b]["plain_step_ms"] / b for b in (1, 16)}
    policy = read_policy(tmp_path / "Y.yaml")
    speed = {b: found[b]["candidates"][policy.lookup(b, 1024).k]["speedup"][1] for b in (1, 16)}
    before = 0.3 * plain[1] + 0.7 * plain[16]
    after = 0.3 * plain[1] / speed[1] + 0.7 * plain[16] / speed[16]
    way = {each["name"]: each for each in value["ways"]}
    assert way["this policy"]["gain"] == pytest.approx(before / after)
    assert way["this policy"]["ks"] == [policy.lookup(b, 1024).k for b in (1, 16)]


def test_a_log_of_requests_leads_to_its_batches(tune: Tune, tmp_path: Path) -> None:
    lines = [{"arrival": 0.1 * i, "input_tokens": 100, "output_tokens": 50} for i in range(60)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    value = told(tune(BUSY, 0.8, "--json", "--mix", tmp_path / "log.jsonl"))
    assert value["effective"]["input_tokens"] == 100
    plain, policy = value["load"]["plain"], value["load"]["policy"]
    mean = {name: sum(int(b) * s for b, s in value["load"][name]["tokens"].items()) for name in ("plain", "policy")}
    assert mean["policy"] < mean["plain"]
    assert policy["seconds"] <= plain["seconds"]
    assert "the log leads to" in value["served"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch,tokens\n0,3\n", "batch is '0'"),
        ("batch,tokens\n1,3\n1,4\n", "lists batch 1 twice"),
        ("batch,tokens\n1,-3\n", "tokens at batch 1 is '-3'"),
        ("batch,tokens\n1,0\n", "no tokens at any batch"),
        ("size,tokens\n1,3\n", "has columns size, tokens; expected"),
        ('{"tokens": {"1": 3}, "second": {}}', "key second is unknown"),
        ('{"words": {"1": 3}}', "expected one of tokens and seconds"),
        ('{"arrival": 1, "input_tokens": 3}', "line 1: has no output_tokens"),
        ('{"arrival": 1, "input_tokens": 3, "output_tokens": 0}', "no tokens in or out"),
        ('{"arrival": 1, "input_tokens": 3, "output_tokens": 1}\nx', "line 2 cannot be parsed"),
        ("", "is empty"),
    ],
)
def test_a_mix_that_cannot_be_is_named(tune: Tune, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m").write_text(text)
    ran = tune(BUSY, 0.8, "--mix", tmp_path / "m")
    assert (ran.code, "Internal" in ran.err) == (2, False)
    assert said in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--arrival-rate", 3), "--arrival-rate needs --input-tokens and --output-tokens"),
        (("--input-tokens", 3), "belong together"),
        (("--arrival-rate", 3, "--mix", "m", *LENGTHS), "--mix and --arrival-rate are both given"),
        (("--mix", "nowhere.csv"), "cannot be read"),
        (("--max-ttft-ms", 3), "--max-ttft-ms needs --input-tokens"),
        (("--divergence", "f"), "--divergence is given without --quality-budget"),
        (("--data-parallel", 2), "--data-parallel is given without --engine-config"),
        (("--extrapolate",), "a number holds for every position"),
        (("--only", "class=x"), "there is nothing to choose by"),
        (("--report", "r.pdf"), "ends in .html or .md"),
    ],
)
def test_wishes_that_do_not_go_together(tune: Tune, flags: tuple[object, ...], said: str) -> None:
    ran = tune(BUSY, 0.8, *flags)
    assert (ran.code, "Internal" in ran.err) == (2, False)
    assert said in ran.err


def test_a_profile_without_prefill_cannot_tell_what_prompts_cost(tune: Tune) -> None:
    ran = tune(BUSY | {"prefill": []}, 0.8, *LENGTHS)
    assert ran.code == 2
    assert "P.yaml: has no prefill" in ran.err


# -- prompts and limits ------------------------------------------------------------------------------------------------


def test_the_draft_reads_the_prompt_too(tune: Tune) -> None:
    value = told(tune(BUSY, 0.8, "--json", "--input-tokens", 550, "--output-tokens", 10))
    assert value["prefill"] == {"plain_ms": pytest.approx(110), "draft_ms": pytest.approx(121)}
    long = told(tune(BUSY, 0.8, "--json", "--force", "--input-tokens", 3000, "--output-tokens", 10))
    assert long["prefill"]["plain_ms"] == pytest.approx(600)  # in pieces


def test_a_limit_for_a_token_is_kept_up_to_a_batch(tune: Tune) -> None:
    """At batch 8 a plain token takes 17 ms, at batch 2 it takes 11. Speculation keeps to 12 ms for longer."""
    value = told(tune(BUSY, 0.8, "--json", "--max-tpot-ms", 12))
    (kept,) = value["kept"]
    assert kept["plain"] == 3
    assert kept["policy"] > 8
    assert any(f"kept up to batch {kept['policy']}, without a draft up to 3" in notice for notice in value["notices"])
    # With prompts of 100 tokens a token waits for those of the others: 20 ms x batch / 50 tokens.
    shared = told(tune(BUSY, 0.8, "--json", "--force", "--max-tpot-ms", 12, *LENGTHS))
    assert shared["kept"][0]["plain"] == 2


def test_a_limit_that_nothing_meets_is_told(tune: Tune, tmp_path: Path) -> None:
    ran = tune(BUSY, 0.8, "--max-tpot-ms", 1)
    assert ran.code == 1
    assert "--max-tpot-ms 1: nothing meets it, the fastest at batch 1" in ran.err
    assert not (tmp_path / "Y.yaml").exists()
    first = tune(BUSY, 0.8, "--max-ttft-ms", 5, *LENGTHS)
    assert first.code == 1
    assert "--max-ttft-ms 5: nothing meets it, a prompt of 100 tokens takes 20.0 ms" in first.err


def test_a_limit_for_the_first_token_can_rule_out_the_draft(tune: Tune, tmp_path: Path) -> None:
    """20 ms without a draft, 22 with one."""
    told(tune(BUSY, 0.8, "--json", "--max-ttft-ms", 22.5, *LENGTHS))
    assert read_policy(tmp_path / "Y.yaml").max_k > 0
    value = told(tune(BUSY, 0.8, "--json", "--force", "--max-ttft-ms", 21, *LENGTHS))
    assert read_policy(tmp_path / "Y.yaml").max_k == 0
    assert any("kept without a draft only" in notice for notice in value["notices"])
    assert "does not keep to the limit" in value["places"][0]["reason"]


def test_a_limit_goes_before_the_shorter_of_two_that_look_alike(tune: Tune) -> None:
    """A gain of a third is within the uncertainty here; where only speculation keeps to the limit it is used."""
    vague = profile({1: [10, 15]}, {1: 0.001}, spread=1.0)
    assert places(told(tune(vague, 0.52, "--json")))[1]["k"] == 0
    limited = places(told(tune(vague, 0.52, "--json", "--force", "--max-tpot-ms", 9.95)))[1]
    assert limited["k"] == 1
    assert "K = 0 does not keep to the limit" in limited["reason"]


# -- ways --------------------------------------------------------------------------------------------------------------


def test_the_ways_of_choosing_are_held_against_each_other(tune: Tune) -> None:
    """0.8, then hardly anything: the i.i.d. formula drafts on for nothing, and pays for it."""
    steep = profile({1: [10.0 + 0.5 * q for q in range(6)]}, {1: 0.5})
    value = told(tune(steep, trace([[20, 70, 10, 0, 0, 0]]), "--json"))
    ways = {way["name"]: way for way in value["ways"]}
    assert ways["i.i.d. formula"]["ks"] == [5]
    assert ways["this policy"]["ks"] == ways["best in the data"]["ks"] == [1]
    assert ways["i.i.d. formula"]["gain"] == ways["fixed K = 5"]["gain"] < ways["this policy"]["gain"]
    assert ways["i.i.d. formula"]["loss"] > 0.1
    assert ways["fixed K = 0"]["gain"] == 1
    ran = tune(steep, trace([[20, 70, 10, 0, 0, 0]]), "--force")
    assert any(line.strip().startswith("i.i.d. formula") for line in ran.out.splitlines())


def test_how_much_depends_on_acceptance(tune: Tune) -> None:
    value = told(tune(BUSY, 0.6, "--json"))["sensitivity"]
    assert [each["change"] for each in value["changes"]] == [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3]
    alone = [each["speedups"][0] for each in value["changes"]]
    assert alone == sorted(alone)
    rate = 0.6 * 1.1
    k = value["changes"][4]["ks"][0]
    assert alone[4] == pytest.approx(sum(rate**n for n in range(k + 1)) * 10 / (10.1 + 0.2 * k))


def test_what_a_further_slot_has_to_bring(tune: Tune) -> None:
    """K = 1 takes 12 ms and brings 1.5 tokens; the second token costs 3 more, so 0.375 of a token."""
    found = places(told(tune(profile({1: [10, 11, 13, 15]}, {1: 1.0}), 0.5, "--json")))[1]
    assert (found["k"], found["next_pays_from"]) == (1, pytest.approx(1.5 / 12 * 3))


def test_a_full_grid_is_read_from_one_table(run: Run, tmp_path: Path) -> None:
    """256 batches at four contexts, eight lengths and noise: every place has its decision."""
    batches, contexts = (1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 2048, 8192, 32768)
    value = profile({1: [1.0]})
    value["steps"] = [
        {"batch": b, "q": q, "context": c, "ms": 8 + 0.01 * b * q + b * c * 1e-5, "spread": 0.1, "source": "roofline"}
        for b in batches
        for c in contexts
        for q in range(1, 10)
    ]
    file = write_yaml(tmp_path / "P.yaml", value)
    seen = write_json(tmp_path / "T.json", trace([[3, 2, 2, 1, 1, 1, 1, 1, 4], [8, 2, 1, 1, 0, 0, 0, 0, 1]] * 20))
    ran = run("tune", "--profile", file, "--acceptance", seen, "--output", tmp_path / "Y.yaml", "--json")
    found = told(ran)
    assert len(found["places"]) == 36
    policy = read_policy(tmp_path / "Y.yaml")
    assert all(policy.lookup(b, c).k > 0 for b in (1, 8) for c in contexts)
