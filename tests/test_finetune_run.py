"""`specctl finetune`, trained: what it writes, that it learns, and that no interruption shows in what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
import torch
from conftest import Run
from finetuning import assert_same, interrupt_after, jsonl, lines, recipe, rows
from safetensors.torch import load_file
from training import furthest


@pytest.fixture
def target(make: Callable[..., Path]) -> Path:
    return make(tiny.llama, seed=11)


def test_output_is_a_plain_directory_that_everybody_loads(
    run: Run, make: Callable[..., Path], tmp_path: Path, target: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "draft"
    ran = run("finetune", recipe(tmp_path / "r.json"), "--target", target, "--output", out, "--json")
    assert ran.code == 0, ran.err
    assert {file.name for file in out.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "specctl.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(out).encode("hi") == [104, 105]

    facts = json.loads((out / "specctl.json").read_text())
    assert (facts["kind"], facts["target"]["name"]) == ("llama", str(target))
    assert [entry["temperature"] for entry in facts["acceptance"]] == [0.0, 1.0]
    assert all(len(entry["accepted_per_position"]) == 2 for entry in facts["acceptance"])
    assert facts["recipe"]["draft"]["width"] == 16

    value = json.loads(ran.out)
    steps = [line for line in lines(tmp_path / "draft.run" / "metrics.jsonl") if "loss" in line]
    assert value["loss"] == [line["loss"] for line in steps]
    assert len(value["lr"]) == value["steps"] == len(steps) >= 4
    left = {file.name for file in (tmp_path / "draft.run").iterdir()}
    assert left == {".lock", "done", "metrics.jsonl", "training.png"}
    assert (tmp_path / "draft.run" / "training.png").read_bytes().startswith(b"\x89PNG")

    prompts = jsonl(tmp_path / "p.jsonl", [{"prompt": "1?"}, {"prompt": "2?"}])
    drafted = run("generate", "--target", target, "--draft", out, "--prompts", prompts, "--max-tokens", "8", "--json")
    assert drafted.code == 0
    assert json.loads(drafted.out)["speculation"]["num_draft_tokens"] > 0

    again = run("finetune", recipe(tmp_path / "r.json"), "--target", target, "--output", out)
    assert again.code == 2
    assert "exists; name another output or pass --force" in again.err


def test_a_draft_learns_what_its_target_says(run: Run, make: Callable[..., Path], tmp_path: Path) -> None:
    """The target's answer is certain; the draft starts from random numbers and ends up accepted."""
    target = make(tiny.table, rows=tiny.chain("ABCDEFGH"))
    values = {
        "loss": {"ce": 1.0, "kl": 0.0, "tv": 0.0},
        "epochs": None,
        "max_steps": 40,
        "data": {"regenerate": {"max_tokens": 12, "batch": 4}},
        "draft": {"width": 32, "depth": 1},
        "validation": {"every_steps": 40, "max_tokens": 8, "k": 3},
        "checkpoint": {"every_steps": 100},
    }
    out = tmp_path / "draft"
    ran = run("finetune", recipe(tmp_path / "r.json", **values), "--target", target, "--output", out, "--json")
    assert ran.code == 0, ran.err
    for measured in json.loads(ran.out)["acceptance"]:
        # Eight tokens, the first of them from the prompt: two blocks of four.
        assert measured["mean_acceptance_length"] > 3
    before = next(line for line in lines(tmp_path / "draft.run" / "metrics.jsonl") if "validation" in line)
    assert before["step"] == 0
    assert all(measured["mean_acceptance_length"] < 1.5 for measured in before["validation"])
    stored = (tmp_path / "draft.run" / "answers.jsonl").read_text().splitlines()
    assert json.loads(stored[0]).keys() == {"digest"}
    assert {tuple(json.loads(line)[1]) for line in stored[1:]} == {(*b"BCDEFGH", tiny.END)}


@pytest.mark.parametrize("kind", ["llama", "mtp", "eagle3"])
@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_a_target_stored_in_float64(run: Run, make: Callable[..., Path], tmp_path: Path, kind: str, loss: str) -> None:
    """It runs in that, and the draft is trained in float32."""
    target = make(tiny.llama, seed=11, dtype=torch.float64)
    values = {"loss": {"ce": 0, "kl": 0, "tv": 0} | {loss: 1.0}, "epochs": None, "max_steps": 2}
    found = recipe(tmp_path / "r.json", kind, **values)
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "o", "--json")
    assert ran.code == 0, ran.err
    assert min(json.loads(ran.out)["loss"]) > 0


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Recipe, target and output of a run that was not interrupted."""
    from specctl.cli.main import main

    place = tmp_path_factory.mktemp("whole")
    target = tiny.llama(place / "target", seed=11)
    found = recipe(place / "r.json")
    assert main(["finetune", str(found), "--target", str(target), "--output", str(place / "out")]) == 0
    return found, target, place / "out"


def test_interrupted_again_and_again(run: Run, tmp_path: Path, whole: tuple[Path, Path, Path]) -> None:
    found, target, expected = whole
    arguments = ["finetune", found, "--target", target, "--output", tmp_path / "out"]
    metrics = tmp_path / "out.run" / "metrics.jsonl"
    for round, count in enumerate((1, 3, 5)):
        thread = interrupt_after(metrics, count)
        ran = run(*arguments, *(["--resume"] if round else []))
        thread.join()
        assert ran.code == 130, ran.err
        assert "go on with --resume" in ran.err
        assert not (tmp_path / "out").exists()
    refused = run(*arguments)
    assert refused.code == 2
    assert "holds an unfinished run; go on with it by --resume" in refused.err
    changed = run(*arguments, "--resume", "--set", "optimiser.lr=2e-2")
    assert changed.code == 2
    assert "--resume: optimiser.lr differs: 0.02 now, 0.01 before" in changed.err
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran.err
    assert "going on after step" in ran.err
    assert_same(tmp_path / "out", expected)
    assert run(*arguments, "--resume", "--force").code == 2  # there is nothing left to go on with


def killed_while_writing(arguments: list[str], checkpoints: Path) -> Iterator[str]:
    """Starts the command and kills it when it is in the middle of a checkpoint; the names that were there then."""
    process = subprocess.Popen([sys.executable, "-m", "specctl", *arguments], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            names = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else []
            if any(name.startswith(".") for name in names) and any(name.startswith("step") for name in names):
                process.kill()
                yield from names
                break
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()


def test_killed_in_the_middle_of_a_checkpoint(run: Run, tmp_path: Path, whole: tuple[Path, Path, Path]) -> None:
    found, target, expected = whole
    arguments = ["finetune", str(found), "--target", str(target), "--output", str(tmp_path / "out")]
    arguments += ["--set", "checkpoint.every_steps=1"]
    names = list(killed_while_writing(arguments, tmp_path / "out.run" / "checkpoints"))
    assert any(name.endswith(".partial") for name in names), "the run was over before it was caught writing"
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran.err
    assert "going on after step" in ran.err
    assert_same(tmp_path / "out", expected)


# -- starts ------------------------------------------------------------------------------------------------------------


def no_steps_worth(run: Run, tmp_path: Path, target: Path, *more: object) -> dict[str, torch.Tensor]:
    """The weights after one step that hardly moves."""
    found = jsonl(tmp_path / "d.jsonl", rows(2))
    out = tmp_path / "out"
    arguments = ["finetune", "--kind", "llama", "--target", target, "--data", found, "--output", out, "--force"]
    ran = run(*arguments, "--max-steps", "1", "--set", "optimiser.lr=1e-12", *more)
    assert ran.code == 0, ran.err
    return load_file(out / "model.safetensors")


def test_starts(run: Run, make: Callable[..., Path], tmp_path: Path) -> None:
    target = make(tiny.llama, seed=11, num_hidden_layers=4)
    few = tiny.few_layers(tmp_path / "few", of=target, layers=[3, 1])
    expected = load_file(few / "model.safetensors")
    for more in (["--set", "draft.layers=[3, 1]"], ["--init", few]):
        found = no_steps_worth(run, tmp_path, target, *more)
        assert furthest(found, expected) < 1e-9
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
    tied = no_steps_worth(run, tmp_path, target, "--init", few, "--set", "draft.tie=true")
    assert "lm_head.weight" not in tied
    one, other = (
        no_steps_worth(run, tmp_path, target, "--set", "draft={width: 24, depth: 2}", "--seed", seed) for seed in (1, 2)
    )
    assert one["model.layers.1.mlp.up_proj.weight"].shape == (48, 24)
    assert furthest(one, other) > 0.01
    quarter = no_steps_worth(run, tmp_path, target)
    assert sum("input_layernorm" in name for name in quarter) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "draft.layers=[0, 2]"], "draft.layers names layer 2"),
        (["--set", "draft={width: 15, depth: 1}"], "draft.width is 15, expected an even number"),
        (["--set", "draft={width: 16, depth: 1, heads: 3}"], "draft.heads 3 do not divide draft.width 16"),
        (["--init", "SWAPPED"], "token 97 is"),
        (["--set", "optimiser.tokens_per_batch=8"], "optimiser.tokens_per_batch is 8 and example"),
    ],
)
def test_what_cannot_be_is_refused(
    run: Run, make: Callable[..., Path], tmp_path: Path, target: Path, more: list[str], said: str
) -> None:
    if "SWAPPED" in more:
        swapped = tiny.llama(tmp_path / "swapped", seed=1, tokenizer=False)
        more = ["--init", str(tiny.byte_tokenizer(swapped, swap=(97, 98)))]
    found = jsonl(tmp_path / "d.jsonl", rows(2))
    ran = run("finetune", "--kind", "llama", "--target", target, "--data", found, "--output", tmp_path / "o", *more)
    assert ran.code == 2
    assert said in ran.err
    assert not (tmp_path / "o").exists()
    assert not (tmp_path / "o.run").exists()


def test_plan_tells_what_a_run_takes_and_refuses_what_does_not_fit(
    run: Run, make: Callable[..., Path], tmp_path: Path, target: Path
) -> None:
    found = recipe(tmp_path / "r.json")
    arguments = ["finetune", found, "--target", target, "--output", tmp_path / "out", "--plan"]
    plan = json.loads(run(*arguments, "--json").out)["plan"]
    assert plan["epochs"] == 2
    assert plan["steps"] > 2
    assert plan["memory"]["optimiser"] == 2 * plan["memory"]["weights"] == 8 * plan["parameters"]
    assert {"checkpoints", "output", "best weights", "hidden states"} == plan["disk"].keys()
    assert plan["memory_free"] > 0
    asked = json.loads(run(*arguments, "--json", "--set", "data.regenerate={max_tokens: 9}").out)["plan"]
    # Ten prompts of 21 tokens whose answers are still to be made, two epochs.
    assert (asked["labels"], asked["tokens"]) == (180, 600)
    assert "answers" in asked["seconds"]
    huge = run(*arguments, "--set", "draft={width: 65536, depth: 200}")
    assert huge.code == 3
    assert "of memory (optimiser: " in huge.err
    assert not (tmp_path / "out.run").exists()


def test_what_does_not_fit_is_refused_before_the_target_answers(run: Run, tmp_path: Path, target: Path) -> None:
    found = recipe(tmp_path / "r.json", data={"regenerate": {"max_tokens": 9}})
    arguments = ["finetune", found, "--target", target, "--output", tmp_path / "out"]
    huge = run(*arguments, "--set", "draft={width: 65536, depth: 200}")
    assert huge.code == 3
    assert "of memory (optimiser: " in huge.err
    assert "answers" not in huge.err
    assert not list(tmp_path.rglob("answers.jsonl"))


def test_early_stop_by_acceptance(run: Run, tmp_path: Path, target: Path) -> None:
    """Nothing is learnt at a rate of nothing, so no validation is better than the first."""
    values = {"optimiser": {"lr": 1e-12}, "validation": {"every_steps": 1, "patience": 2}}
    out = tmp_path / "out"
    ran = run("finetune", recipe(tmp_path / "r.json", **values), "--target", target, "--output", out, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["steps"] == 2
