"""What specctl tune makes of counters: those that servers show, and those of a report of bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from handmade import PROVENANCE
from tuning import Ask, asker, told


@pytest.fixture
def ask(run: Run, tmp_path: Path) -> Ask:
    return asker(run, tmp_path)


VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 600.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 400.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1660.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 710.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 530.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 420.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""
SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.44
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.48
"""


def test_the_counters_of_vllm(ask: Ask) -> None:
    value = told(ask(VLLM))
    assert value["survival"] == pytest.approx([0.71, 0.53, 0.42])
    assert value["survival_ci95"][0][0] == pytest.approx(0.71 - 0.028, abs=0.006)
    assert any("binomial" in notice for notice in value["notices"])


LOOKUP = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 273.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 794.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 558.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 205.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 182.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 171.0
"""
STEPS = """\
vllm:generation_tokens_total{engine="0",model_name="m"} 960.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 31.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 31.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 9.0
"""


def test_what_a_lookup_of_vllm_proposes_is_shorter_at_times(ask: Ask) -> None:
    """Counters of a real one. At least 260.5 drafts had two tokens and 248 had three, so that full ones could bring
    1 + 205/273 + 182/260.5 + 171/248 = 3.139 tokens at most."""
    value = told(ask(LOOKUP))
    assert value["survival"] == pytest.approx([205 / 273, 182 / 273, 171 / 273], abs=1e-4)
    assert any("2.91 tokens on average" in notice and "up to 3.14" in notice for notice in value["notices"])
    assert not any("had no draft" in notice for notice in value["notices"])


def test_blocks_of_unknown_lengths_are_taken_only_where_they_leave_little_open(ask: Ask) -> None:
    """K = 3 and K = 1 in turn: four in five of the half with three tokens were accepted whole, two in five of all."""
    few = LOOKUP.replace("794.0", "546.0").replace("558.0", "423.0").replace("182.0", "109.0").replace("171.0", "109.0")
    ran = ask(few)
    assert ran.code == 2
    assert "2.00 tokens on average" in ran.err
    given = json.loads(ran.err[ran.err.index("{") : ran.err.index("}") + 1])
    assert told(ask(given))["survival"] == pytest.approx([0.751, 0.399, 0.399])


def test_steps_in_which_a_lookup_of_vllm_found_nothing_are_steps(ask: Ask) -> None:
    """960 - 31 - 273 - 558 = 98 steps gave one token each, beside 273 that gave 3.044."""
    value = told(ask(LOOKUP + STEPS))
    assert any("26% of steps had no draft" in notice for notice in value["notices"])
    found, drafts_only = (each["places"][0]["candidates"][3] for each in (value, told(ask(LOOKUP))))
    assert drafts_only["tokens_per_step"] == pytest.approx(1 + 558 / 273, abs=1e-3)
    assert found["tokens_per_step"] == pytest.approx((273 + 558 + 98) / (273 + 98), abs=1e-3)
    assert found["speedup"][1] < drafts_only["speedup"][1]
    other = STEPS.replace('engine="0"', 'engine="1"')
    assert told(ask(LOOKUP + other, "--only", "engine=0"))["places"][0]["candidates"][3] == drafts_only


def test_our_own_counters_know_how_many_could_get_there(ask: Ask) -> None:
    ours = VLLM.replace("vllm:", "specctl:") + "\n".join(
        f'specctl:spec_decode_num_draft_tokens_per_pos_total{{position="{k}"}} {count}'
        for k, count in enumerate((1000, 1000, 840))
    )
    assert told(ask(ours + "\n"))["survival"] == pytest.approx([0.71, 0.53, 0.5])


def test_a_mean_length_is_all_that_sglang_tells(ask: Ask) -> None:
    """A rate of 0.48 and a length of 2.44 are of K = 3; 1 + 0.7 + 0.49 + 0.343 is 2.533, so a little less than 0.7."""
    value = told(ask(SGLANG))
    assert value["effective"]["iid"] is True
    assert value["effective"]["k_max"] == 3
    assert 1 + sum(value["survival"]) == pytest.approx(2.44, abs=1e-3)
    assert any("i.i.d." in notice for notice in value["notices"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('position="0"} 710', 'position="0"} 1710'), "1710 drafts were accepted up to position 1"),
        (('position="1"} 530', 'position="1"} 730'), "730 drafts were accepted up to position 2 and 710"),
        (('position="2"', 'position="3"'), "positions [0, 1, 3]"),
        (
            ('tokens_total{engine="0",model_name="m"} 3000', 'tokens_total{engine="0",model_name="m"} 2000'),
            "2.00 tokens on average",
        ),
        (("} 1660.0", "} 1400.0"), "its positions add up to 1660"),
        (('engine="1",model_name="m"', 'engine="1",model_name="n"'), "several models (m, n)"),
        (("_per_pos", "_per_place"), "has neither"),
        (("} 600.0", "} six"), "is no Prometheus text"),
        (("drafts_total{", "draughts_total{"), "spec_decode_num_drafts is missing"),
    ],
)
def test_counters_that_cannot_be_are_refused(ask: Ask, change: tuple[str, str], said: str) -> None:
    assert change[0] in VLLM
    ran = ask(VLLM.replace(*change))
    assert ran.code == 2
    assert said in ran.err


def test_sglang_without_a_k_tells_nothing(ask: Ask) -> None:
    ran = ask("\n".join(SGLANG.splitlines()[:2]) + "\n")
    assert ran.code == 2
    assert "nothing tells of which K" in ran.err


def speculation(k: int, accepted: list[int], drafts: int = 100, accept: str = "exact") -> dict[str, Any]:
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafts * k,
        "num_accepted_tokens": sum(accepted),
        "drafted_per_position": [drafts] * k,
        "accepted_per_position": accepted,
        "acceptance_rate": sum(accepted) / drafts / k,
        "mean_acceptance_length": 1 + sum(accepted) / drafts,
        "counts_bonus": True,
        "emitted_tokens": drafts + sum(accepted),
        "accept": accept,
        "lossy": accept == "typical",
    }


def report(*runs: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
    def one(name: str, k: int, counts: dict[str, Any] | None) -> dict[str, Any]:
        times = {"ttft_ms": None, "tpot_ms": None}
        return {
            "name": name,
            "k": k,
            "batch": 1,
            "tokens": 9,
            "seconds": [1.0],
            "tok_s": 9.0,
            "speculation": counts,
        } | times

    work = {"prompts_sha": "0", "n": 1, "max_tokens": 9, "temperature": 0.7, "seed": None}
    named = [one("plain", 0, None), *(one(*run) for run in runs)]
    return {"schema": "specctl.report/1", "provenance": PROVENANCE, "work": work, "runs": named, "comparisons": []}


def test_a_report_of_bench(ask: Ask) -> None:
    """The longest run tells; the others are held against it."""
    two = report(("d k=1", 1, speculation(1, [82])), ("d k=3", 3, speculation(3, [80, 50, 40])))
    value = told(ask(two, name="R.json"))
    assert value["survival"] == pytest.approx([0.8, 0.5, 0.4])
    assert value["effective"]["temperature"] == 0.7
    assert any("K = 1 1.82 (1.80)" in notice for notice in value["notices"])
    assert told(ask(two, "--only", "run=d k=1", name="R.json"))["survival"] == [0.82]


def test_a_report_that_leaves_a_choice_or_is_lossy(ask: Ask) -> None:
    two = report(("d k=1", 1, speculation(1, [82])), ("e k=1", 1, speculation(1, [50])))
    ran = ask(two, name="R.json")
    assert ran.code == 2
    assert "several drafts (d, e); name one: --only draft=NAME" in ran.err
    assert told(ask(two, "--only", "draft=e", name="R.json"))["survival"] == [0.5]
    lossy = ask(report(("d k=1", 1, speculation(1, [82], accept="typical"))), name="R.json")
    assert lossy.code == 2
    assert "lossy" in lossy.err
    empty = ask(report(), name="R.json")
    assert "no run with drafts" in empty.err
