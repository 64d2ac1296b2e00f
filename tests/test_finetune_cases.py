"""Training through the command line where data and steps meet: what the report says of them, and what they leave."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Run
from fixtures import Make

Train = Callable[..., dict[str, Any]]

ROW = 24  # tokens of a one-turn conversation, three of them trained
EXACT = ("--dtype", "float64")
LINEAR = ("optimiser.schedule=linear", "optimiser.lr=1e-3", "optimiser.warmup_steps=1")


def talks(path: Path, count: int) -> Path:
    """One-turn conversations of one length."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n:02d}"}, {"role": "assistant", "content": f"{99 - n:02d}"}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train(run: Run, make: Make, tmp_path: Path) -> Train:
    """The report of a run, and with it "weights" and "err"."""

    def command(data: Path, *flags: object, settings: Sequence[str] = ()) -> dict[str, Any]:
        output, report = tmp_path / "draft", tmp_path / "report.json"
        target = make(tiny.llama, seed=1)
        named = [
            "--kind",
            "llama",
            "--target",
            target,
            "--data",
            data,
            "--output",
            output,
            "--report",
            report,
            "--force",
        ]
        ran = run("finetune", *named, *flags, *(part for each in settings for part in ("--set", each)))
        assert ran.code == 0, ran.err
        return json.loads(report.read_text()) | {"weights": tiny.read(output)[1], "err": ran.err}

    return command


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_the_schedule_counts_optimiser_steps(train: Train, tmp_path: Path) -> None:
    """However many packed rows one takes: the same steps, the same rates, the same weights."""
    data = talks(tmp_path / "data.jsonl", 16)
    runs = [
        train(
            data, *EXACT, settings=[*LINEAR, f"optimiser.tokens_per_batch={rows * ROW}", f"optimiser.accumulate={more}"]
        )
        for rows, more in ((4, 1), (2, 2), (1, 4))
    ]
    for run in runs:
        assert len(run["lr"]) == len(run["loss"]) == 4
        assert run["lr"] == runs[0]["lr"]
        assert distance(run["weights"], runs[0]["weights"]) < 1e-6
        assert run["label_tokens"] == 48
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(run["loss"], runs[0]["loss"], strict=True))
    lr = runs[0]["lr"]
    assert lr[0] == 1e-3
    assert all(later <= earlier for earlier, later in pairwise(lr))
    assert lr[3] < lr[2] < 1e-3, "four steps are all there are, so the rate comes down within them"


def test_the_last_window_that_is_not_full(train: Train, tmp_path: Path) -> None:
    """It is a step of its own, and its loss is the mean over its own labels: three rows of one are one row of three."""
    data = talks(tmp_path / "data.jsonl", 15)
    small = train(data, *EXACT, settings=[*LINEAR, f"optimiser.tokens_per_batch={ROW}", "optimiser.accumulate=4"])
    large = train(data, *EXACT, settings=[*LINEAR, f"optimiser.tokens_per_batch={4 * ROW}"])
    assert len(small["lr"]) == 4
    assert small["lr"] == large["lr"]
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-12)
    assert distance(small["weights"], large["weights"]) < 1e-6


def test_a_row_that_is_cut_off_whole_teaches_nothing(run: Run, train: Train, tmp_path: Path) -> None:
    """It is skipped and counted; what is left trains as if it had been alone. A set of such rows is an error."""
    long = {"messages": [{"role": "user", "content": "u" * 200}, {"role": "assistant", "content": "ok"}]}
    short = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
    files = {"A": [long], "B": [long, short], "C": [short]}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = train(tmp_path / "B.jsonl", "--max-length", 64, "--max-steps", 1)
    alone = train(tmp_path / "C.jsonl", "--max-length", 64, "--max-steps", 1)
    assert (both["rows"], both["kept"], len(both["skips"])) == (2, 1, 1)
    assert both["loss"] == alone["loss"]
    assert both["loss"][0] > 0
    assert distance(both["weights"], alone["weights"]) == 0
    ran = run(
        *("finetune", "--kind", "llama", "--target", tmp_path / "draft", "--data", tmp_path / "A.jsonl"),
        *("--output", tmp_path / "other", "--max-length", 64, "--max-steps", 1),
    )
    assert ran.code == 2
    assert "0 trainable tokens in the first 64 (data.max_length)" in ran.err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("count", "steps"), [(5, 3), (4, 2), (1, 1)])
def test_rows_that_do_not_fill_the_last_step_are_trained(train: Train, tmp_path: Path, count: int, steps: int) -> None:
    found = train(talks(tmp_path / "data.jsonl", count), settings=[f"optimiser.tokens_per_batch={2 * ROW}"])
    assert len(found["loss"]) == steps
    assert found["label_tokens"] == 3 * count


def test_a_recipe_and_flags_over_it(run: Run, make: Make, tmp_path: Path) -> None:
    data = talks(tmp_path / "data.jsonl", 4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"schema: specctl.recipe/1\nkind: llama\ntarget: {make(tiny.llama, seed=1)}\noutput: {tmp_path / 'draft'}\n"
        f"max_steps: 5\ndata: {{train: {data}}}\ndraft: {{width: 16, depth: 1}}\noptimiser: {{lr: 1e-3}}\n"
    )
    report = tmp_path / "report.json"
    ran = run("finetune", recipe, "--max-steps", 3, "--set", "draft.heads=2", "--report", report)
    assert ran.code == 0, ran.err
    assert len(json.loads(report.read_text())["loss"]) == 3
    config = tiny.read(tmp_path / "draft")[0]
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (16, 1, 2)


def test_answers_by_the_target(run: Run, make: Make, tmp_path: Path) -> None:
    """One for every answer of the data and for every question without one, each in the target's own tokens up to its
    end of turn; a prompt that leaves no room for an answer is skipped."""
    target = make(tiny.table, rows=tiny.chain("xABCDEFGH"))
    user, assistant = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
    rows = [
        {"prompt": "hi"},
        {"messages": [user, assistant, user, assistant]},
        {"messages": [user, assistant, user]},
        {"prompt": "u" * 80},
        {"messages": []},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = tmp_path / "report.json"
    ran = run(
        *("finetune", "--kind", "llama", "--target", target, "--data", data, "--output", tmp_path / "draft"),
        *("--report", report, "--max-steps", 1, "--max-length", 64, "--set", "data.regenerate.max_tokens=20"),
        *("--set", "draft.width=8", "--set", "draft.depth=1"),
    )
    assert ran.code == 0, ran.err
    found = json.loads(report.read_text())
    assert (found["rows"], found["kept"], found["label_tokens"]) == (5, 3, 5 * len("ABCDEFGH.")), ran.err
    assert [skip["line"] for skip in found["skips"]] == [4, 5]
    assert found["skips"][0]["reason"] == "has a prompt that fills data.max_length 64"
    answers = (tmp_path / "draft.run" / "answers.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)[1] for line in answers] == [[*b"ABCDEFGH", tiny.END]] * 5
