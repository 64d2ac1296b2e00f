"""What specctl quickstart makes of a report: which draft length it goes on with, and whether it is honest about it."""

from __future__ import annotations

from typing import Any

from specctl.options import ModelOptions
from specctl.quickstart.run import _commands
from specctl.quickstart.verdict import COLUMNS, judge, table
from specctl.schemas.report import Report


def _report(speedups: dict[int, tuple[float, float, float]], identical: bool | None = True) -> Report:
    """Speed-up with its interval by K; 100 answers' tokens of which every second was drafted and accepted."""

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
            "speculation": counters if name.startswith("ngram") else None,
        }

    def comparison(name: str, against: str, speedup: tuple[float, float, float], v: float | None) -> dict[str, Any]:
        return {
            "run": name,
            "against": against,
            "speedup": speedup[0],
            "ci95": list(speedup[1:]),
            "c": None if v is None else 0.0,
            "v": v,
            "u": None if v is None else 0.0,
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
            run("transformers", 0, 5.0),
        ],
        "comparisons": [
            *(comparison(f"ngram k={k}", "plain", value, 1.25) for k, value in speedups.items()),
            comparison("plain", "transformers", (2.0, 1.6, 2.5), None),
        ],
    }
    return Report.model_validate(value)


def test_verdict_takes_the_fastest_that_surely_pays() -> None:
    report = _report({1: (1.2, 1.1, 1.3), 3: (1.4, 1.2, 1.6), 5: (1.5, 0.99, 2.0)})
    verdict = judge(report, "Name")
    assert (verdict.k, verdict.speedup, verdict.ci95) == (3, 1.4, (1.2, 1.6))
    assert "K = 3 makes Name 1.40 times as fast (95 %: 1.20 to 1.60)" in verdict.headline
    assert [row.cells[0] for row in table(report, verdict.k) if row.best] == ["ngram k=3"]


def test_verdict_is_honest_when_nothing_pays() -> None:
    verdict = judge(_report({1: (0.9, 0.8, 0.95), 3: (0.7, 0.6, 0.8)}), "Name")
    assert (verdict.k, verdict.speedup) == (0, 0.9)
    assert "does not pay" in verdict.headline
    # 90 tokens besides each answer's first, 10 of them accepted: 80 steps, 20 of them with a draft, at 1.25.
    assert "in 25% of the steps" in verdict.because
    assert "50% of the drafted tokens" in verdict.because
    assert "v = 1.25" in verdict.because
    assert "1.12 / 1.25 = 0.90" in verdict.because
    assert "too expensive" in verdict.because


def test_verdict_does_not_take_chance_for_a_gain() -> None:
    report = _report({1: (1.3, 1.0, 1.6)})
    verdict = judge(report, "Name")
    assert verdict.k == 0
    assert "may be chance" in verdict.headline
    assert [row.cells[0] for row in table(report, verdict.k) if row.best] == ["plain"]


def test_verdict_on_other_texts() -> None:
    verdict = judge(_report({1: (1.3, 1.2, 1.6)}, identical=False), "Name")
    assert verdict.k == 0
    assert "NOT the target's own" in verdict.text
    assert "cannot be judged" in judge(_report({1: (1.3, 1.2, 1.6)}, identical=None), "Name").text


def test_table_is_over_plain_decoding() -> None:
    rows = {row.cells[0]: dict(zip(COLUMNS, row.cells, strict=True)) for row in table(_report({1: (1.2, 1.1, 1.3)}), 1)}
    assert rows["plain"]["speed-up"] == "1"
    assert (rows["ngram k=1"]["speed-up"], rows["ngram k=1"]["95 %"]) == ("1.20", "1.10 - 1.30")
    assert (rows["ngram k=1"]["accepted"], rows["ngram k=1"]["length"]) == ("50%", "1.50")
    assert (rows["transformers"]["speed-up"], rows["transformers"]["95 %"]) == ("0.50", "0.40 - 0.62")
    assert {row["same text"] for row in rows.values()} == {"the same"}


def test_lines_to_go_on_with() -> None:
    commands = _commands("some model", 3, ModelOptions(dtype="bfloat16", max_model_len=512))
    assert commands.serve == (
        "specctl serve --target 'some model' --draft ngram --k 3 --dtype bfloat16 --max-model-len 512"
    )
    assert _commands("m", 0, ModelOptions()).serve == "specctl serve --target m"
    assert "--sweep-k 1,2,3,5" in commands.bench
