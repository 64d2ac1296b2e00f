"""specctl validate --results: what was measured is judged, what was not never passes, and no model is run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reports
from conftest import Ran, Run
from reports import Change, changed, comparison, counters, report, speculation, write

from specctl.errors import UsageError
from specctl.schemas.gates import GATES, GatesFile, find_gates, read_gates
from specctl.validate.evidence import Evidence, NoData, read_evidence
from specctl.validate.evidence import Run as EvidenceRun
from specctl.validate.figures import acceptance_length, acceptance_rate
from specctl.validate.intervals import mean_accepted

Judge = Callable[..., Ran]


@pytest.fixture
def judge(run: Run, tmp_path: Path) -> Judge:
    """judge({...}, gates) is `specctl validate --results` on that report; without gates those of the command."""

    def command(value: Any, gates: str | None = None, *more: object) -> Ran:
        arguments: list[object] = ["--results", write(tmp_path / "results.json", value)]
        if gates is not None:
            (tmp_path / "gates.yaml").write_text(gates)
            arguments += ["--gates", tmp_path / "gates.yaml"]
        out = tmp_path / "out.json"
        ran = run("validate", *arguments, "--report", out, "--force", *more)
        if out.exists():
            assert json.loads(out.read_text(), parse_constant=_refuse)["schema"] == "specctl.validation/1"
        return ran

    return command


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def statuses(path: Path) -> dict[str, str]:
    return {gate["name"]: gate["status"] for gate in json.loads(path.read_text())["gates"]}


# -- nothing measured passes no gate -----------------------------------------------------------------------------------

THREE = "acceptance_rate: {min: 0.4}\ngreedy_exact: {max_gap: 0.001}\nlatency: {tpot_p95_ms: 50}\n"


@pytest.mark.parametrize(
    ("name", "change", "code", "gate", "said"),
    [
        ("no samples", lambda r: r["work"].update(n=0), 1, "acceptance_rate", "work.n"),
        ("a rate of NaN", counters(acceptance_rate=math.nan), 1, "acceptance_rate", "nan, which is no number"),
        ("a rate of infinity", counters(acceptance_rate=math.inf), 1, "acceptance_rate", "inf, which is no number"),
        ("a rate in words", counters(acceptance_rate="0.5"), 1, "acceptance_rate", "'0.5', which is no number"),
        ("a rate of null", counters(acceptance_rate=None), 1, "acceptance_rate", "acceptance_rate is missing"),
        ("no counters", lambda r: r["runs"][1].pop("speculation"), 1, "acceptance_rate", "no run that drafts"),
        (
            "nothing drafted",
            counters(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0),
            1,
            "acceptance_rate",
            "num_drafts is 0",
        ),
        ("no p95", lambda r: r["runs"][1]["tpot_ms"].pop("p95"), 1, "latency", "tpot_ms.p95 is missing"),
        ("no times", lambda r: r["runs"][1].update(tpot_ms=None), 1, "latency", "tpot_ms.p95 is missing"),
        (
            "no comparisons",
            lambda r: r.update(comparisons=[]),
            1,
            "greedy_exact",
            "does not compare near k=3 with plain",
        ),
        ("sampled", lambda r: r["work"].update(temperature=1.0), 1, "greedy_exact", "temperature"),
        ("not compared", lambda r: r["comparisons"][0].update(identical=None), 1, "greedy_exact", "not compared"),
        ("all good", lambda r: None, 0, "", "3 of 3 gates passed"),
    ],
)
def test_what_was_not_measured_never_passes(
    judge: Judge, tmp_path: Path, name: str, change: Change, code: int, gate: str, said: str
) -> None:
    ran = judge(changed(report(), change), THREE)
    assert (ran.code, ran.out.count("\nTraceback")) == (code, 0), ran.err
    assert said in ran.out
    found = statuses(tmp_path / "out.json")
    assert list(found) == ["greedy_exact", "acceptance_rate", "latency"]
    assert {name for name, status in found.items() if status == "no-data"} >= ({gate} if gate else set())
    if gate:
        assert "NO DATA" in ran.out
        assert f"{gate} (no data)" in ran.err


def test_a_limit_is_met_by_what_equals_it(judge: Judge) -> None:
    gates = "acceptance_rate: {min: 0.4}"
    assert judge(report([6000, 4000, 2000], 10_000), gates).code == 0
    ran = judge(report([6000, 4000, 1997], 10_000), gates)  # 0.3999
    assert ran.code == 1
    assert "0.3999 (95 % 0.3" in ran.out
    assert "expected at least 0.4" in ran.out
    assert "acceptance_rate (fail)" in ran.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ("   ", "is not JSON"),
        ("{}", "has nothing in it"),
        ("[]", "has nothing in it"),
        ("null", "has nothing in it"),
        ("{", "is not JSON"),
        ('{"runs": []}', "schema is None, expected specctl.report/1 or specctl.validation/1"),
        ('{"schema": "specctl.trace/1"}', "schema is 'specctl.trace/1'"),
        ('{"schema": ["specctl.report/1"]}', "schema is ["),
        (json.dumps({**report(), "run": 1}), "key run is unknown"),
        (json.dumps({**report(), "runs": {}}), "runs is {}, expected a list"),
        (json.dumps({**report(), "runs": [1]}), "runs.0 is 1, expected keys and values"),
        (json.dumps({**report(), "runs": [{"k": 1}]}), "runs.0.name is None, expected a name"),
        (json.dumps({**report(), "runs": [{"name": "a"}, {"name": "a"}]}), "two runs have one name"),
        (json.dumps(changed(report(), counters(rate=1))), "speculation: key rate is unknown"),
    ],
)
def test_a_file_that_is_no_report_is_refused(run: Run, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    for flags in (("--results", path, "--gates", "gates-results"), ("--results", _good(tmp_path), "--baseline", path)):
        ran = run("validate", *flags)
        assert ran.code == 2
        assert said in ran.err
        assert str(path) in ran.err


def _good(tmp_path: Path) -> Path:
    return write(tmp_path / "good.json", report())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected keys and values, found nothing"),
        ("# nothing but words\n", "found nothing"),
        ("[]", "expected keys and values"),
        ("schema: specctl.gates/1\n", "sets no gate"),
        ("acceptance_rate: {min: 0.4", "cannot be parsed"),
        ("acceptence_rate: {min: 0.4}", "key acceptence_rate is unknown; did you mean acceptance_rate?"),
        ("acceptance_rate: {min: 0.4, max: 1}", "key acceptance_rate.max is unknown"),
        ("acceptance_rate: {min: 40}", "acceptance_rate.min is 40"),
        ("acceptance_rate: {min: .nan}", "acceptance_rate.min is nan"),
        ("acceptance_rate:", "key acceptance_rate.min is missing"),
        ("acceptance_length: {min: 0.5}", "acceptance_length.min is 0.5"),
        ("latency: {}", "names no limit"),
        ("speedup: {min: 1, bound: upper}", "speedup.bound is 'upper'"),
        ("distribution: {samples: 3}", "distribution.samples is 3"),
        ("regression: {max_drop: 1.0}", "regression.max_drop is 1.0"),
        ("schema: specctl.policy/1\ncompatible: {}", "schema is 'specctl.policy/1'"),
    ],
)
def test_gates_that_cannot_be_meant_are_refused(judge: Judge, tmp_path: Path, text: str, said: str) -> None:
    ran = judge(report(), text)
    assert ran.code == 2
    assert said in ran.err
    assert str(tmp_path / "gates.yaml") in ran.err
    assert not (tmp_path / "out.json").exists()


def test_gates_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("compatible:\ngreedy_exact:\ndistribution: {alpha: 1e-6, samples: 500}\nspeedup: {min: 1}\n")
    gates = read_gates(path)
    assert gates.names == ["compatible", "greedy_exact", "distribution", "speedup"]
    assert (gates.distribution and gates.distribution.alpha, gates.speedup and gates.speedup.bound) == (1e-6, "lower")
    assert set(GATES) == set(GatesFile.model_fields) - {"schema_", "provenance"}


def test_shipped_gates_are_found_by_name(run: Run, tmp_path: Path) -> None:
    assert find_gates("gates") == find_gates("gates.yaml")
    with pytest.raises(UsageError, match="shipped: gates, gates-results"):
        find_gates("gatez")
    ran = run("validate", "--results", _good(tmp_path), "--gates", "gates-results")
    assert ran.code == 0, ran.out + ran.err


@pytest.mark.parametrize("gate", ["compatible: {}", "distribution: {}", "draft_cache: {}"])
def test_a_gate_that_needs_a_model_is_named(judge: Judge, gate: str) -> None:
    ran = judge(report(), f"acceptance_rate: {{min: 0.1}}\n{gate}")
    assert ran.code == 2
    assert f"the gate {gate.split(':')[0]} needs a model" in ran.err


def test_the_shipped_gates_of_a_pair_need_a_model(run: Run, tmp_path: Path) -> None:
    ran = run("validate", "--results", _good(tmp_path), "--gates", "gates")
    assert ran.code == 2
    assert "the gate compatible needs a model" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--target is missing"),
        (("--target", "t", "--prompts", "p"), "--draft is missing"),
        (("--target", "t", "--draft", "d"), "--prompts is missing"),
        (("--results", "GOOD"), "give --gates, --baseline or both"),
        (("--results", "GOOD", "--gates", "nowhere.yaml"), "no such file"),
        (("--results", "GOOD", "--gates", "gates-results", "--target", "t"), "--target is about running a model"),
        (("--results", "GOOD", "--gates", "gates-results", "--k", "3"), "--k is about running a model"),
        (("--results", "GOOD", "--gates", "gates-results", "--dtype", "auto"), "--dtype is about running a model"),
        (("--results", "GOOD", "--gates", "gates-results", "--prompt-field", "x"), "--prompt-field is about"),
    ],
)
def test_command_lines_that_make_no_sense(run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    ran = run("validate", *(_good(tmp_path) if argument == "GOOD" else argument for argument in arguments))
    assert ran.code == 2
    assert said in ran.err


# -- impossible figures ------------------------------------------------------------------------------------------------

ACCEPTANCE = "acceptance_rate: {min: 0.1}\nacceptance_length: {min: 1}\n"


@pytest.mark.parametrize(
    ("change", "gates", "said"),
    [
        (counters(acceptance_rate=1.7), ACCEPTANCE, "acceptance_rate is 1.7, which is impossible"),
        (counters(acceptance_rate=-0.1), ACCEPTANCE, "acceptance_rate is -0.1, which is impossible"),
        (counters(acceptance_rate=0.9), ACCEPTANCE, "the counters it is made from give 0.4"),
        (counters(mean_acceptance_length=9.0), ACCEPTANCE, "mean_acceptance_length is 9, which is impossible"),
        (counters(mean_acceptance_length=0.2), ACCEPTANCE, "which is impossible: expected 1 to 4"),
        (counters(mean_acceptance_length=3.1), ACCEPTANCE, "the counters it is made from give 2.2"),
        (counters(num_accepted_tokens=5000), ACCEPTANCE, "num_accepted_tokens is 5000, which is impossible"),
        (counters(num_draft_tokens=9000), ACCEPTANCE, "num_draft_tokens is 9000, which is impossible"),
        (counters(num_drafts=10.5), ACCEPTANCE, "num_drafts is 10.5, which is no count"),
        (counters(accepted_per_position=[400, 600, 200]), ACCEPTANCE, "accepted_per_position rises"),
        (counters(accepted_per_position=[600, 400, 100]), ACCEPTANCE, "accepted_per_position is impossible"),
        (lambda r: r["runs"][1]["ttft_ms"].update(p95=-1), "latency: {ttft_p95_ms: 50}", "ttft_ms.p95 is -1"),
        (lambda r: r["runs"][1]["ttft_ms"].update(p50=90), "latency: {ttft_p95_ms: 50}", "p50 is 90"),
        (lambda r: r["runs"][1].update(ttft_ms=3), "latency: {ttft_p95_ms: 50}", "ttft_ms is 3, expected p50 and p95"),
        (lambda r: r["comparisons"][0].update(speedup=0), "speedup: {min: 1}", "speedup is 0, which is impossible"),
        (lambda r: r["comparisons"][0].update(speedup=1e400), "speedup: {min: 1}", "speedup is inf"),
        (lambda r: r["comparisons"][0].update(ci95=[2, 1]), "speedup: {min: 1}", "ci95 is 2 to 1"),
        (lambda r: r["comparisons"][0].update(ci95=[2]), "speedup: {min: 1}", "ci95 is [2], expected two numbers"),
        (lambda r: r["comparisons"][0].update(ci95=None), "speedup: {min: 1}", "ci95 is missing"),
        (lambda r: r["comparisons"][0].update(identical="yes"), "greedy_exact: {}", "identical is 'yes'"),
        (lambda r: r["comparisons"][0].update(near_ties=None), "greedy_exact: {}", "near_ties is missing"),
    ],
)
def test_an_impossible_figure_is_no_data_and_named(judge: Judge, change: Change, gates: str, said: str) -> None:
    assert judge(report(), gates).code == 0
    ran = judge(changed(report(), change), gates)
    assert ran.code == 1
    assert said in ran.out
    assert "(no data)" in ran.err
    assert "(fail)" not in ran.err


# -- gates over figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gates", "code", "said"),
    [
        ("acceptance_length: {min: 2.2}", 0, "2.2 (95 % 2.1"),
        ("acceptance_length: {min: 2.21, k: 3}", 1, "expected at least 2.21"),
        ("acceptance_length: {min: 1, k: 5}", 1, "no run that drafts at K = 5"),
        ("latency: {ttft_p95_ms: 40, tpot_p95_ms: 30}", 0, "ttft_p95_ms of near k=3: 40, expected at most 40"),
        ("latency: {ttft_p95_ms: 39, tpot_p95_ms: 30}", 1, "ttft_p95_ms of near k=3: 40, expected at most 39"),
        ("speedup: {min: 1.35}", 0, "1.5 (95 % 1.35 - 1.65), expected the lower end at 1.35 or above"),
        ("speedup: {min: 1.4}", 1, "expected the lower end at 1.4 or above"),
        ("speedup: {min: 1.4, bound: mid}", 0, "expected at least 1.4"),
        ("speedup: {min: 1.6, bound: mid}", 1, "expected at least 1.6"),
    ],
)
def test_figures_are_held_against_limits(judge: Judge, gates: str, code: int, said: str) -> None:
    ran = judge(report(), gates)
    assert ran.code == code, ran.err
    assert said in ran.out
    assert ("->" in ran.out) == (code == 1)  # what to do


def test_every_run_that_drafts_is_judged(judge: Judge) -> None:
    value = report()
    value["runs"].append(reports.run("ngram k=2", 2, speculation([100, 50], 1000)))
    value["comparisons"].append(comparison("ngram k=2", 0.8))
    ran = judge(value, "speedup: {min: 1}")
    assert ran.code == 1
    assert "[pass] near k=3: 1.5" in ran.out
    assert "  ngram k=2: 0.8" in ran.out
    assert judge(value, "acceptance_rate: {min: 0.4, k: 3}").code == 0
    assert judge(value, "acceptance_rate: {min: 0.4}").code == 1


def test_one_bad_figure_does_not_hide_another(judge: Judge, tmp_path: Path) -> None:
    """A p95 that is too high still fails when the mean next to it is missing."""
    value = changed(report(), counters(mean_acceptance_length=None))
    value["runs"][1]["tpot_ms"]["p95"] = 80.0
    ran = judge(value, "acceptance_length: {min: 1.1}\nlatency: {tpot_p95_ms: 50}\n")
    assert ran.code == 1
    assert statuses(tmp_path / "out.json") == {"acceptance_length": "no-data", "latency": "fail"}
    assert "2 of 2 gates did not pass: acceptance_length (no data), latency (fail)" in ran.err


def ties(*gaps: float | None, identical: bool | None = True) -> Change:
    found = [{"prompt": str(i), "position": 4, "gap": gap} for i, gap in enumerate(gaps)]
    return lambda value: value["comparisons"][0].update(identical=identical, near_ties=found)


@pytest.mark.parametrize(
    ("change", "gate", "code", "said"),
    [
        (ties(), "{}", 0, "the greedy answers of 8 prompts are those of plain decoding"),
        (ties(2e-4), "{}", 0, "1 of the greedy answers of 8 prompts leave plain decoding's"),
        (ties(2e-4), "{max_gap: 0.0001}", 1, "prompt '0', token 4 of the answer, by 0.0002 in the scores"),
        (ties(2e-4, 0.5, identical=False), "{}", 1, "the farthest at prompt '1'"),
        (ties(2e-4, 0.5, identical=False), "{max_gap: 1}", 0, "by 0.5 in the scores"),
        (ties(None, identical=False), "{max_gap: 1}", 1, "one answer ends there"),
        (ties(identical=False), "{max_gap: 1}", 1, "are not those of plain decoding"),
        (ties(0.06, identical=None), "{}", 1, "16-bit numbers cannot tell a tie from a difference; give max_gap"),
        (ties(0.06, identical=None), "{max_gap: 0.1}", 0, "by 0.06 in the scores"),
    ],
)
def test_greedy_answers(judge: Judge, change: Change, gate: str, code: int, said: str) -> None:
    ran = judge(changed(report(), change), f"greedy_exact: {gate}")
    assert (ran.code, said in ran.out) == (code, True), ran.out


def test_lossy_answers_are_not_called_exact(judge: Judge) -> None:
    ran = judge(changed(report(), counters(lossy=True, accept="typical")), "greedy_exact: {}")
    assert ran.code == 1
    assert "acceptance typical is lossy" in ran.out


# -- a baseline --------------------------------------------------------------------------------------------------------


def k3(length: float, bonus: bool, **work: Any) -> reports.Report:
    """A report of 1,000 drafts with this mean acceptance length at K = 3, counted with or without the bonus token."""
    accepted = round(1000 * (length - bonus))
    per_position = [min(1000, accepted), min(1000, max(0, accepted - 1000)), max(0, accepted - 2000)]
    return changed(
        report(per_position),
        counters(mean_acceptance_length=length, counts_bonus=bonus),
        lambda value: value["work"].update(work),
    )


BASE = k3(1.9, False)


@pytest.mark.parametrize(
    ("results", "code", "said"),
    [
        (k3(2.4, True), 1, "2.4"),  # 1.4 without the bonus token
        (changed(report([1000, 900, 0, 0, 0]), lambda v: v["runs"][1].update(name="near k=5")), 1, "k is 5 here and 3"),
        (k3(1.9, False, prompts_sha="B"), 1, "not comparable: work.prompts_sha is 'B' here and 'A' in the baseline"),
        (k3(2.9, True), 0, "a change of +0.0%"),
        (changed(k3(1.9, False), counters(counts_bonus=None)), 1, "not comparable: counts_bonus is missing"),
        (changed(k3(1.9, False), counters(mean_acceptance_length=None)), 1, "mean_acceptance_length is missing"),
        (k3(1.9, False, temperature=1.0), 1, "not comparable: work.temperature"),
        (changed(k3(1.9, False), counters(accept="coupled")), 1, "not comparable: speculation.accept"),
        (changed(k3(1.9, False), lambda v: v["work"].pop("prompts_sha")), 1, "work.prompts_sha is missing here"),
        (changed(k3(1.9, False), lambda v: v["runs"][1].pop("k")), 1, "not comparable: k is missing here"),
    ],
)
def test_like_is_compared_with_like(judge: Judge, tmp_path: Path, results: Any, code: int, said: str) -> None:
    ran = judge(results, None, "--baseline", write(tmp_path / "base.json", BASE))
    assert ran.code == code, ran.out
    assert said in ran.out
    assert ran.out.startswith({0: "pass", 1: "FAIL" if "2.4" in said else "NO DATA"}[code])


def test_a_drop_of_acceptance_is_a_regression(judge: Judge, tmp_path: Path) -> None:
    base = write(tmp_path / "base.json", report([600, 400, 200]))
    assert judge(report([600, 380, 180]), None, "--baseline", base).code == 1
    assert judge(report([600, 399, 199]), None, "--baseline", base).code == 0
    assert judge(report([900, 700, 500]), None, "--baseline", base).code == 0
    ran = judge(report([600, 300, 100]), "regression: {max_drop: 0.2}", "--baseline", base)
    assert "mean_acceptance_length of near k=3: 2 (95 % 1.9" in ran.out
    assert "a change of -9.1% (95 % +/- 4.3%), allowed -20.0%" in ran.out
    assert "acceptance_rate of near k=3: 0.33333" in ran.out  # -16.7 %
    assert ran.code == 0


def test_the_gates_file_names_its_baseline(judge: Judge, run: Run, tmp_path: Path) -> None:
    write(tmp_path / "base.json", report([900, 700, 500]))
    gates = "regression: {baseline: base.json}"
    assert judge(report(), gates).code == 1
    better = write(tmp_path / "other.json", report([500, 300, 100]))
    assert judge(report(), gates, "--baseline", better).code == 0  # the command line goes before the file
    ran = judge(report(), "regression: {}")
    assert ran.code == 2
    assert "the gate regression has no baseline" in ran.err
    ran = judge(report(), "regression: {baseline: nowhere.json}")
    assert ran.code == 2
    assert "nowhere.json" in ran.err


def test_a_baseline_adds_the_gate(judge: Judge, tmp_path: Path) -> None:
    ran = judge(
        report(), "acceptance_rate: {min: 0.1}", "--baseline", write(tmp_path / "b.json", report([9, 8, 7], 10))
    )
    assert ran.code == 1
    assert statuses(tmp_path / "out.json") == {"acceptance_rate": "pass", "regression": "fail"}


TIMED = "speedup: {min: 0.1}\nlatency: {ttft_p95_ms: 1000}\nregression: {}\n"


def slower(speedup: float = 1.5, ttft: float = 40.0, seconds: Any = (1.0, 1.0), **provenance: Any) -> reports.Report:
    value = report()
    value["comparisons"] = [comparison("near k=3", speedup)]
    value["runs"][1]["ttft_ms"]["p95"] = ttft
    value["runs"][1]["seconds"] = list(seconds)
    value["provenance"].update(provenance)
    return value


@pytest.mark.parametrize(
    ("results", "code", "said"),
    [
        (slower(), 0, "speedup of near k=3: 1.5"),
        (slower(speedup=1.0), 1, "speedup of near k=3: 1 (95 % 0.9 - 1.1), in the baseline 1.5 (95 % 1.35 - 1.65)"),
        (slower(speedup=1.4), 0, "which the spread of the repeats explains"),
        (slower(ttft=60), 1, "ttft_p95_ms of near k=3: 60, in the baseline 40: a change of +50.0%, allowed +2.0%"),
        (slower(ttft=60, seconds=(1.0, 1.6)), 0, "which the spread of the repeats explains"),
        (slower(device="another"), 1, "not comparable: provenance.device is 'another' here and 'cpu' in the baseline"),
        (slower(threads=2), 1, "not comparable: provenance.threads"),
    ],
)
def test_times_are_compared_where_there_are_gates_for_them(
    judge: Judge, tmp_path: Path, results: Any, code: int, said: str
) -> None:
    base = write(tmp_path / "base.json", report())
    ran = judge(results, TIMED, "--baseline", base)
    assert ran.code == code, ran.out
    assert said in ran.out
    assert judge(results, "regression: {}", "--baseline", base).code == 0


def test_a_baseline_with_several_runs(judge: Judge, tmp_path: Path) -> None:
    value = report()
    value["runs"].append(reports.run("other k=3", 3, speculation([900, 800, 700], 1000)))
    base = write(tmp_path / "base.json", value)
    assert judge(report(), None, "--baseline", base).code == 0  # by name
    ran = judge(report(name="renamed k=3"), None, "--baseline", base)
    assert ran.code == 1
    assert "which of the baseline's runs (near k=3, other k=3) is its own is not known" in ran.out


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_a_report_can_be_judged_and_compared_again(judge: Judge, run: Run, tmp_path: Path) -> None:
    """With other gates, and NaN in it become null."""
    value = changed(report(), lambda v: v["runs"][0].update(tok_s=math.nan), counters(mean_acceptance_length=math.nan))
    assert judge(value, "acceptance_rate: {min: 0.4}").code == 0
    again = tmp_path / "out.json"
    written = json.loads(again.read_text())
    assert written["results"]["provenance"] == reports.PROVENANCE
    assert len(written["results"]["sha256"]) == 64
    (tmp_path / "g.yaml").write_text("acceptance_rate: {min: 0.5}\nacceptance_length: {min: 1}")
    ran = run("validate", "--results", again, "--gates", tmp_path / "g.yaml", "--json")
    assert ran.code == 1
    assert [gate["status"] for gate in json.loads(ran.out)["gates"]] == ["no-data", "fail"]
    (tmp_path / "g.yaml").write_text("acceptance_rate: {min: 0.4}\nlatency: {ttft_p95_ms: 900}\nregression: {}\n")
    ran = run("validate", "--results", again, "--gates", tmp_path / "g.yaml", "--baseline", again, "--json")
    found = {gate["name"]: gate for gate in json.loads(ran.out)["gates"]}
    checks = {check["figure"]: check["status"] for check in found["regression"]["checks"]}
    assert checks == {"mean_acceptance_length": "no-data", "acceptance_rate": "pass", "ttft_p95_ms": "pass"}


def test_junit_and_markdown(judge: Judge, tmp_path: Path) -> None:
    value = changed(report(name='a<b>|\x07 & "c" k=3'), lambda v: v["runs"][1].update(ttft_ms=None))
    gates = "acceptance_rate: {min: 0.9}\nlatency: {ttft_p95_ms: 1}\nspeedup: {min: 0.5}\n"
    junit, page = tmp_path / "junit.xml", tmp_path / "page.md"
    ran = judge(value, gates, "--junit", junit, "--markdown", page)
    assert ran.code == 1
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert cases == {"acceptance_rate": ["failure"], "latency": ["error"], "speedup": ["system-out"]}
    failure = next(suite.iter("failure"))
    assert failure.get("type") == "fail"
    assert "0.4 (95 %" in (failure.get("message") or "")
    assert "expected at least 0.9" in (failure.get("message") or "")
    assert "What to do: see that the draft's weights" in (failure.text or "")
    text = page.read_text()
    assert "**2 of 3 gates did not pass: acceptance_rate (fail), latency (no data)**" in text
    assert "| FAIL | acceptance_rate | a&lt;b>\\|" in text


def test_outputs_are_refused_before_and_written_once(run: Run, tmp_path: Path) -> None:
    good, there = _good(tmp_path), tmp_path / "there.xml"
    there.write_text("mine")
    ran = run("validate", "--results", good, "--gates", "gates-results", "--junit", there)
    assert ran.code == 2
    assert "--force" in ran.err
    assert there.read_text() == "mine"
    assert run("validate", "--results", good, "--gates", "gates-results", "--junit", there, "--force").code == 0
    assert there.read_text() != "mine"


def test_no_model_library_is_loaded_for_a_report(tmp_path: Path) -> None:
    code = (
        "import sys; from specctl.cli.main import main; "
        f"code = main(['validate', '--results', {str(_good(tmp_path))!r}, '--gates', 'gates-results']); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_comes_from_the_positions() -> None:
    """Against the sample itself: 4 drafts with 0, 1, 3 and 3 accepted."""
    accepted = [0, 1, 3, 3]
    interval = mean_accepted(4, [3, 2, 2])
    assert interval is not None
    mean = sum(accepted) / 4
    error = math.sqrt(sum((n - mean) ** 2 for n in accepted) / 3 / 4)
    assert interval == pytest.approx((max(0, mean - 1.959964 * error), mean + 1.959964 * error))
    assert mean_accepted(1, [1]) is None
    assert mean_accepted(5, [5]) == (1, 1)


def test_figures_need_no_more_counters_than_they_are_given() -> None:
    """Another tool's report may have the figures and no more."""
    values = {"name": "x", "k": 3, "speculation": {"acceptance_rate": 0.5, "mean_acceptance_length": 1.5}}
    run = EvidenceRun({**values, "speculation": {**values["speculation"], "counts_bonus": False}}, {})  # type: ignore[dict-item]
    assert acceptance_rate(run).value == 0.5
    assert acceptance_length(run).value == 2.5
    assert acceptance_length(run).interval is None
    with pytest.raises(NoData, match="counts_bonus"):
        acceptance_length(EvidenceRun(values, {}))


def test_evidence_is_read_from_a_file(tmp_path: Path) -> None:
    evidence, source = read_evidence(_good(tmp_path))
    assert [run.name for run in evidence.drafting()] == ["near k=3"]
    assert source.provenance is not None
    assert Evidence("nothing").runs == ()
    with pytest.raises(NoData, match="nothing has no run that drafts"):
        Evidence("nothing").drafting_or_plain()
