"""What specctl quickstart makes of a report: which draft and length it goes on with, and how honest it is about it."""

from __future__ import annotations

from typing import Any

from specctl.quickstart.verdict import COLUMNS, judge, table
from specctl.schemas.report import Report


def _report(
    speedups: dict[int, tuple[float, float, float]],
    identical: bool | None = True,
    drafts: dict[int, tuple[float, float, float]] | None = None,
) -> Report:
    """Speed-up with its interval by K, of ngram and of a trained draft; 100 answers' tokens of which every second was
    drafted and accepted."""
    drafts = drafts or {}

    def run(name: str, k: int, tok_s: float) -> dict[str, Any]:
        counters = {
            "num_drafts": 20,
            "num_draft_tokens": 20 * k,
            "num_accepted_tokens": 10 * k,
            "drafted_per_position": [20] * k,
            "accepted_per_position": [10] * k,
            "acceptance_rate": 0.5,
            "mean_acceptance_length": 1 + k / 2,
            "counts_bonus": True,
            "emitted_tokens": 100,
            "accept": "exact",
            "lossy": False,
        }
        return {
            "name": name,
            "k": k,
            "batch": 1,
            "tokens": 100,
            "seconds": [100 / tok_s],
            "tok_s": tok_s,
            "ttft_ms": None,
            "tpot_ms": None,
            "speculation": counters if k else None,
        }

    def comparison(name: str, against: str, speedup: tuple[float, float, float], v: float | None) -> dict[str, Any]:
        return {
            "run": name,
            "against": against,
            "speedup": speedup[0],
            "ci95": list(speedup[1:]),
            "c": None if v is None else 0.1 * name.startswith("draft"),
            "v": v,
            "u": None if v is None else 0.2 * name.startswith("draft"),
            "implied": None,
            "efficiency": None,
            "identical": identical if v is not None else True,
            "near_ties": [],
        }

    provenance = dict.fromkeys(("specctl", "torch", "transformers", "device", "command", "date"), "x")
    value = {
        "schema": "specctl.report/1",
        "provenance": {**provenance, "threads": 2},
        "work": {"prompts_sha": "x", "n": 10, "max_tokens": 10, "temperature": 0.0, "seed": None},
        "runs": [
            run("plain", 0, 10.0),
            *(run(f"ngram k={k}", k, 10 * value[0]) for k, value in speedups.items()),
            *(run(f"draft k={k}", k, 10 * value[0]) for k, value in drafts.items()),
            run("transformers", 0, 5.0),
        ],
        "comparisons": [
            *(comparison(f"ngram k={k}", "plain", value, 1.25) for k, value in speedups.items()),
            *(comparison(f"draft k={k}", "plain", value, 1.25) for k, value in drafts.items()),
            comparison("plain", "transformers", (2.0, 1.6, 2.5), None),
        ],
    }
    return Report.model_validate(value)


def test_verdict_takes_the_fastest_that_surely_pays() -> None:
    report = _report({1: (1.2, 1.1, 1.3), 3: (1.4, 1.2, 1.6), 5: (1.5, 0.99, 2.0)})
    verdict = judge(report, "Name")
    assert (verdict.run, verdict.label, verdict.k) == ("ngram k=3", "ngram", 3)
    assert (verdict.speedup, verdict.ci95) == (1.4, (1.2, 1.6))
    assert "K = 3 makes Name 1.40 times as fast (95 %: 1.20 to 1.60)" in verdict.headline
    assert [row.cells[0] for row in table(report, verdict.run) if row.best] == ["ngram k=3"]


def test_verdict_is_honest_when_nothing_pays() -> None:
    verdict = judge(_report({1: (0.9, 0.8, 0.95), 3: (0.7, 0.6, 0.8)}), "Name")
    assert (verdict.run, verdict.pays, verdict.speedup) == (None, False, 0.9)
    assert "Nothing pays" in verdict.headline
    # 90 tokens besides each answer's first, 10 of them accepted: 80 steps, 20 of them with a draft, at 1.25.
    (because,) = verdict.because
    assert "in 25% of the steps" in because
    assert "50% of the drafted tokens" in because
    assert "v = 1.25" in because
    assert "1.12 / 1.25 = 0.90" in because
    assert "too expensive" in because


def test_verdict_does_not_take_chance_for_a_gain() -> None:
    report = _report({1: (1.3, 1.0, 1.6)})
    verdict = judge(report, "Name")
    assert verdict.run is None
    assert "may be chance" in verdict.headline


def test_verdict_names_the_draft_that_pays_and_says_why_the_other_does_not() -> None:
    report = _report({3: (1.2, 1.1, 1.3)}, drafts={3: (0.8, 0.7, 0.9)})
    verdict = judge(report, "Name")
    assert (verdict.run, verdict.label) == ("ngram k=3", "ngram")
    lookup, learned = verdict.because
    assert lookup.startswith("Prompt lookup, K = 3: a draft was found")
    assert learned.startswith("The trained draft, K = 3: 50% of the drafted tokens")
    assert "2 times c = 0.10" in learned
    assert "u = 0.20" in learned
    other = judge(_report({3: (1.2, 1.1, 1.3)}, drafts={2: (1.5, 1.3, 1.7)}), "Name")
    assert (other.run, other.k) == ("draft k=2", 2)
    assert "The trained draft with K = 2 makes Name 1.50 times as fast" in other.headline


def test_a_run_that_never_drafted_does_not_pay() -> None:
    report = _report({3: (1.2, 1.1, 1.3)})
    value = report.model_dump(by_alias=True)
    nothing = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "drafted_per_position": [0, 0, 0]}
    nothing |= {"accepted_per_position": [0, 0, 0], "acceptance_rate": None, "mean_acceptance_length": None}
    for run in value["runs"]:
        if run["speculation"] is not None:
            run["speculation"] |= nothing
    report = Report.model_validate(value)
    verdict = judge(report, "Name")
    assert verdict.run is None
    assert "nothing was ever proposed" in verdict.because[0]


def test_verdict_on_other_texts() -> None:
    verdict = judge(_report({1: (1.3, 1.2, 1.6)}, identical=False), "Name")
    assert verdict.run is None
    assert "NOT the target's own" in verdict.text
    assert "cannot be judged" in judge(_report({1: (1.3, 1.2, 1.6)}, identical=None), "Name").text


def test_table_is_over_plain_decoding() -> None:
    table_of = table(_report({1: (1.2, 1.1, 1.3)}), "ngram k=1")
    rows = {row.cells[0]: dict(zip(COLUMNS, row.cells, strict=True)) for row in table_of}
    assert rows["plain"]["speed-up"] == "1"
    assert (rows["ngram k=1"]["speed-up"], rows["ngram k=1"]["95 %"]) == ("1.20", "1.10 - 1.30")
    assert (rows["ngram k=1"]["accepted"], rows["ngram k=1"]["length"]) == ("50%", "1.50")
    assert (rows["transformers"]["speed-up"], rows["transformers"]["95 %"]) == ("0.50", "0.40 - 0.62")
    assert {row["same text"] for row in rows.values()} == {"the same"}
