"""REPORT.json and TRACE.json as checked files: what can have been measured is read, what cannot is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import UsageError
from specctl.schemas.report import read_report
from specctl.schemas.trace import read_trace

Change = Callable[[dict[str, Any]], object]

PROVENANCE = {
    "specctl": "1",
    "torch": None,
    "transformers": None,
    "device": "cpu",
    "threads": 1,
    "command": "specctl bench",
    "date": "2026-01-01T00:00:00+00:00",
}
SPECULATION = {
    "num_drafts": 4,
    "num_draft_tokens": 7,
    "num_accepted_tokens": 4,
    "drafted_per_position": [4, 3],
    "accepted_per_position": [3, 1],
    "acceptance_rate": 4 / 7,
    "mean_acceptance_length": 2.0,
    "counts_bonus": True,
    "emitted_tokens": 8,
    "accept": "exact",
    "lossy": False,
}
RUN = {
    "batch": 1,
    "tokens": 8,
    "seconds": [1.0, 1.2],
    "tok_s": 7.3,
    "ttft_ms": {"p50": 10.0, "p95": 12},
    "tpot_ms": None,
}
COMPARISON = {
    "run": "ngram k=2",
    "against": "plain",
    "speedup": 1.2,
    "ci95": [1.1, 1.3],
    "c": 0,
    "v": 1.25,
    "u": 0.0,
    "implied": 1.6,
    "efficiency": 0.75,
    "identical": True,
    "near_ties": [{"prompt": "7", "position": 3, "gap": 1e-5}],
}
REPORT = {
    "schema": "specctl.report/1",
    "provenance": PROVENANCE,
    "work": {"prompts_sha": "ab", "n": 2, "max_tokens": 4, "temperature": 0, "seed": None},
    "runs": [
        {"name": "plain", "k": 0, "speculation": None, **RUN},
        {"name": "ngram k=2", "k": 2, "speculation": SPECULATION, **RUN},
    ],
    "comparisons": [COMPARISON],
}
TRACE = {
    "schema": "specctl.trace/1",
    "provenance": PROVENANCE,
    "k": 2,
    "temperature": 0.0,
    "classes": [
        {
            "class": "all",
            "context": 20.5,
            "num_drafts": 3,
            "drafted_per_position": [3, 2],
            "accepted_per_position": [2, 1],
            "requests": [{"histogram": [1, 1, 0]}, {"histogram": [0, 0, 1]}],
            "confidence": [[0.5], [0.9, 1.0], [0.25, 0.5]],
            "rank": [[2], [1, 4], [1, 1]],
        }
    ],
}


def test_a_report_is_read(tmp_path: Path) -> None:
    report = read_report(written(tmp_path, REPORT))
    assert report.model_dump(by_alias=True) == REPORT
    assert report.run("ngram k=2").speculation is not None


def test_a_trace_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TRACE))
    assert trace.model_dump(by_alias=True, exclude_unset=True) == TRACE
    assert trace.classes[0].class_ == "all"


def test_a_trace_may_tell_more(tmp_path: Path) -> None:
    """Whose it is, what its drafts had to reach, the fate of each draft, and the steps without one."""
    more = copy.deepcopy(TRACE) | {
        "target": {"name": "t", "digest": "ab"},
        "draft": {"kind": "llama", "digest": "cd", "max_k": None},
        "accept": "exact",
        "min_confidence": 0.25,
    }
    more["classes"][0] |= {"accepted": [0, 1, 2]}
    more["classes"][0]["requests"] = [{"histogram": [1, 1, 0], "steps": 4}, {"histogram": [0, 0, 1], "steps": 1}]
    assert read_trace(written(tmp_path, more)).model_dump(by_alias=True) == more


def _speculation(**changes: Any) -> Change:
    return lambda report: report["runs"][1]["speculation"].update(changes)


def _run(**changes: Any) -> Change:
    return lambda report: report["runs"][1].update(changes)


def _comparison(**changes: Any) -> Change:
    return lambda report: report["comparisons"][0].update(changes)


def _class(**changes: Any) -> Change:
    return lambda trace: trace["classes"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda report: report.update(schema="specctl.report/2"), "schema"),
        (lambda report: report.update(extra=1), "extra"),
        (lambda report: report.pop("provenance"), "provenance"),
        (lambda report: report.update(provenance=None), "provenance"),
        (lambda report: report.update(runs=[]), "runs"),
        (lambda report: report["work"].update(n=0), "work.n"),
        (lambda report: report["work"].update(temperature=-1.0), "work.temperature"),
        (_run(name="plain"), "two runs"),
        (_run(tok_s=float("nan")), "tok_s"),
        (_run(tok_s=0.0), "tok_s"),
        (_run(seconds=[]), "seconds"),
        (_run(seconds=[1.0, -1.0]), "seconds"),
        (_run(tokens=0), "tokens"),
        (_run(k=-1), "runs.1.k"),
        (_run(k="2"), "runs.1.k"),
        (_run(ttft_ms={"p50": 3.0, "p95": 2.0}), "p95"),
        (_speculation(acceptance_rate=1.5), "acceptance_rate"),
        (_speculation(acceptance_rate=0.5), "acceptance_rate"),
        (_speculation(acceptance_rate=None), "acceptance_rate"),
        (_speculation(mean_acceptance_length=0.9), "mean_acceptance_length"),
        (_speculation(mean_acceptance_length=2.1), "mean_acceptance_length"),
        (_speculation(num_accepted_tokens=8), "num_accepted_tokens"),
        (_speculation(num_accepted_tokens=3), "accepted_per_position"),
        (_speculation(num_draft_tokens=8), "drafted_per_position"),
        (_speculation(accepted_per_position=[1, 3]), "accepted_per_position rises"),
        (_speculation(drafted_per_position=[3, 4]), "drafted_per_position rises"),
        (_speculation(drafted_per_position=[4, 0]), "accepted_per_position"),
        (_speculation(accepted_per_position=[4]), "positions"),
        (_speculation(num_drafts=5), "num_drafts"),
        (_speculation(counts_bonus=False), "counts_bonus"),
        (_comparison(against="fast"), "fast"),
        (_comparison(run="fast"), "fast"),
        (_comparison(speedup=0.0), "speedup"),
        (_comparison(ci95=[1.3, 1.1]), "ci95"),
        (_comparison(ci95=[1.1]), "ci95"),
        (_comparison(efficiency=0.9), "efficiency"),
        (_comparison(near_ties=[{"prompt": "7", "position": -1, "gap": 0.0}]), "position"),
    ],
)
def test_what_no_report_can_say(tmp_path: Path, change: Change, named: str) -> None:
    report = copy.deepcopy(REPORT)
    change(report)
    path = written(tmp_path, report)
    with pytest.raises(UsageError) as error:
        read_report(path)
    assert named in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda trace: trace.update(schema="specctl.report/1"), "schema"),
        (lambda trace: trace.update(k=0), ": k is 0"),
        (lambda trace: trace.update(k=1), "positions, k is 1"),
        (lambda trace: trace.update(classes=[]), "classes"),
        (_class(num_drafts=2), "num_drafts"),
        (_class(accepted_per_position=[1, 2]), "rises"),
        (_class(accepted_per_position=[3, 1]), "differ at position 1"),
        (_class(requests=[{"histogram": [1, 1]}, {"histogram": [0, 0]}]), "histogram"),
        (_class(requests=[{"histogram": [1, 1, 0]}]), "num_drafts"),
        (_class(confidence=[[0.5], [0.9, 1.0]]), "confidence"),
        (_class(confidence=[[0.5], [0.9], [0.25, 0.5]]), "confidence"),
        (_class(confidence=[[0.5], [0.9, 1.1], [0.25, 0.5]]), "confidence"),
        (_class(rank=[[0], [1, 4], [1, 1]]), "rank.0.0"),
        (_class(context=-1.0), "context"),
    ],
)
def test_what_no_trace_can_say(tmp_path: Path, change: Change, named: str) -> None:
    trace = copy.deepcopy(TRACE)
    change(trace)
    with pytest.raises(UsageError) as error:
        read_trace(written(tmp_path, trace))
    assert named in str(error.value)


def test_a_draft_without_probabilities_has_no_confidence(tmp_path: Path) -> None:
    trace = copy.deepcopy(TRACE)
    trace["classes"][0]["confidence"] = []
    assert read_trace(written(tmp_path, trace)).classes[0].confidence == []


def written(directory: Path, value: Any) -> Path:
    path = directory / "file.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
