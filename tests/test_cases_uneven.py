"""Data that a batch does not divide: elsewhere the rest was dropped, or a small run trained nothing and was content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from conftest import Run
from fixtures import Make


@pytest.mark.parametrize(("samples", "steps"), [(5, 3), (4, 2), (1, 1)])
def test_every_sample_is_trained_once(run: Run, make: Make, tmp_path: Path, samples: int, steps: int) -> None:
    """One sample fills a packed row and two rows a step; the last step takes what is left."""
    target = make(tiny.llama, seed=1)
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    data.write_text("".join(json.dumps({"id": f"s{i}", "messages": turns}) + "\n" for i in range(samples)))
    wishes = {"draft.layers": "[0]", "optimiser.tokens_per_batch": 32, "optimiser.accumulate": 2}
    settings = [part for key, value in wishes.items() for part in ("--set", f"{key}={value}")]
    output = ["--output", tmp_path / "draft", "--report", report, "--threads", 1]
    ran = run("finetune", "--kind", "llama", "--target", target, "--data", data, *settings, *output)
    assert ran.code == 0, ran.err
    found = json.loads(report.read_text())
    assert (found["rows"], found["kept"], found["skips"]) == (samples, samples, [])
    assert found["label_tokens"] == 3 * samples
    assert len(found["loss"]) == steps
    assert (tmp_path / "draft" / "config.json").exists()


def test_nothing_to_train_on_is_an_error(run: Run, make: Make, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    target = make(tiny.llama, seed=1)
    arguments = ["--target", target, "--data", data, "--set", "draft.layers=[0]", "--output", tmp_path / "draft"]
    ran = run("finetune", "--kind", "llama", *arguments)
    assert ran.code == 2
    assert not (tmp_path / "draft").exists()
