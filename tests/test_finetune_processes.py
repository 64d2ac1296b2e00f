"""`torchrun -m specctl finetune`: several processes take the steps of one, write once, and agree on everything."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_mtp
import torch
from conftest import Run
from finetuning import jsonl, lines, recipe
from safetensors.torch import load_file

TIMEOUT = 120


COMMAND = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
COMMAND += ["-m", "specctl", "finetune"]


def together(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in two processes, with one thread each."""
    environment, command = os.environ | {"OMP_NUM_THREADS": "1"}, [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)


def recipe_of(kind: str, path: Path, **values: Any) -> Path:
    return recipe(path, kind, **({"optimiser": {"accumulate": 3, "tokens_per_batch": 64}} | values))


@pytest.fixture
def target(make: Callable[..., Path]) -> Path:
    return make(tiny.llama, seed=11, tie_word_embeddings=False)


# Ten tokens occur as labels and one ends the texts: of seven in the vocabulary some are chosen by how often they occur.
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "eagle3": ("eagle3", {"draft": {"vocab_size": 40}, "loss": {"feature": 0.3}}),
    "mtp, few tokens": ("mtp", {"draft": {"vocab_size": 7}}),
}


@pytest.mark.parametrize("curve", CURVES)
def test_two_processes_give_the_losses_of_one(run: Run, tmp_path: Path, target: Path, curve: str) -> None:
    """Ten examples in steps of three packed rows: one process has two of them, the other one, and at the end of an
    epoch one has none."""
    kind, more = CURVES[curve]
    found = recipe_of(kind, tmp_path / "r.json", **more)
    alone = run("finetune", found, "--target", target, "--output", tmp_path / "alone", "--json")
    assert alone.code == 0, alone.err
    ran = together(found, "--target", target, "--output", tmp_path / "both", "--json")
    assert ran.returncode == 0, ran.stderr
    one, two = json.loads(alone.out), json.loads(ran.stdout)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["acceptance"] == one["acceptance"]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "both"))
    assert ours.keys() == theirs.keys()
    for table in ("d2t", "t2d"):
        assert (table in ours) == ("draft" in more)
        assert table not in ours or torch.equal(ours[table], theirs[table])
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        assert float((tensor.double() - theirs[name].double()).abs().max()) < 1e-5, name
    read = [lines(tmp_path / f"{name}.run" / "metrics.jsonl") for name in ("alone", "both")]
    assert [line.get("labels") for line in read[0]] == [line.get("labels") for line in read[1]]
    assert ran.stderr.count("data: 12 rows") == 1


def test_experts_that_nobody_chose(run: Run, make: Callable[..., Path], tmp_path: Path) -> None:
    """Of 32 experts the router's bias leaves most alone; their weights have gradients in neither process."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 32, "num_experts_per_tok": 2}
    target = make(biased, of=make(tiny_mtp.mtp, of=make(tiny.deepseek, seed=1, **sizes)))
    more = {"draft": {"init": str(target)}, "epochs": None, "max_steps": 3, "data": {"held_out_fraction": 0}}
    packing = {"accumulate": 3, "tokens_per_batch": 64, "weight_decay": 0}  # what has no gradient stays as it is
    found = recipe_of("mtp", tmp_path / "r.json", optimiser=packing, **more)
    alone = run("finetune", found, "--target", target, "--output", tmp_path / "alone", "--json")
    assert alone.code == 0, alone.err
    ran = together(found, "--target", target, "--output", tmp_path / "both", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["loss"] == pytest.approx(json.loads(alone.out)["loss"], abs=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "both"))
    assert max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours) < 1e-5
    before = tiny.read(target)[1]
    moved = {name for name in ours if not torch.allclose(ours[name], before[name], rtol=0, atol=1e-4)}
    experts = {name.split(".experts.")[1].split(".")[0] for name in moved if ".experts." in name}
    assert experts == {"0", "1", "8", "9"}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" not in moved


def biased(path: Path, *, of: Path) -> Path:
    """The same model, whose MTP layer goes to four experts of 32 only."""
    config, tensors = tiny.read(of)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros_like(bias)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][[0, 1, 8, 9]] = 10.0
    return tiny.derive(path, of, config, tensors)


def test_states_that_one_keeps_while_it_answers_are_read_by_both(run: Run, tmp_path: Path, target: Path) -> None:
    more = {"data": {"regenerate": {"max_tokens": 12}}, "hidden": {"keep": True}, "epochs": 2}
    found = recipe_of("eagle3", tmp_path / "r.json", **more)
    alone = run("finetune", found, "--target", target, "--output", tmp_path / "alone", "--json")
    assert alone.code == 0, alone.err
    ran = together(found, "--target", target, "--output", tmp_path / "both", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["loss"] == pytest.approx(json.loads(alone.out)["loss"], abs=1e-5)


def test_processes_that_do_not_share_a_disk_are_told(tmp_path: Path, target: Path) -> None:
    """As on two nodes: what is one name to both is not one directory."""
    found = recipe_of("llama", tmp_path / "r.json")
    inner = 'exec "$0" -m specctl finetune "$1" --target "$2" --output "$3/$RANK/out"'
    command = [*COMMAND[: COMMAND.index("--standalone") + 1], "--no-python", "bash", "-c", inner]
    command += [sys.executable, *map(str, (found, target, tmp_path))]
    for rank in "01":
        (tmp_path / rank).mkdir()
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ran.returncode
    assert "on a disk that all nodes share" in ran.stderr
    assert not list(tmp_path.rglob("answers.jsonl")) + list(tmp_path.rglob("step-*"))


def test_the_plan_is_of_all_processes_of_this_machine(
    run: Run, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recipe_of("llama", tmp_path / "r.json")
    plans = []
    for size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        ran = run("finetune", found, "--target", target, "--output", tmp_path / "o", "--plan", "--json")
        assert ran.code == 0, ran.err
        plans.append(json.loads(ran.out)["plan"]["memory"])
    one, two = plans
    assert two["gradients"] == one["gradients"]
    assert two["optimiser"] == one["optimiser"]
    assert two["weights"] == 3 * one["weights"]  # each has a half, and all of them in a pass
    assert two["weights to decode with"] == one["weights"]
    assert two["activations"] == 2 * one["activations"]
    assert two["target"] == 2 * one["target"]


def test_what_two_processes_began_one_goes_on_with(run: Run, tmp_path: Path, target: Path) -> None:
    """Killed after their first checkpoint."""
    found = recipe_of("llama", tmp_path / "r.json", epochs=4)
    whole = run("finetune", found, "--target", target, "--output", tmp_path / "whole", "--json")
    arguments = [str(each) for each in (found, "--target", target, "--output", tmp_path / "out")]
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "out.run" / "checkpoints"
    while process.poll() is None and not list(checkpoints.glob("step-*")):
        time.sleep(0.01)
    workers = {
        int(pid) for file in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in file.read_text().split()
    }
    assert len(workers) == 2
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    with (tmp_path / "out.run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the killed are gone
    assert not (tmp_path / "out").exists()
    ran = run("finetune", *arguments, "--resume", "--json")
    assert ran.code == 0, ran.err
    assert "going on after step" in ran.err
    assert json.loads(ran.out)["loss"] == pytest.approx(json.loads(whole.out)["loss"], abs=1e-5)


def test_all_have_the_vocabulary_of_the_whole_data(tmp_path: Path, target: Path) -> None:
    """One row to each process, each with one letter."""
    rows = [
        {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": text}]}
        for text in ("aaaa", "bbbb")
    ]
    data = jsonl(tmp_path / "d.jsonl", rows)
    flags = ["--kind", "eagle3", "--target", target, "--data", data, "--output", tmp_path / "o"]
    more = ["--set", "optimiser={accumulate: 2, tokens_per_batch: 40}", "--max-length", 40, "--json"]
    ran = together(*flags, "--draft-vocab-size", 4, *more)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 1
    d2t = load_file(tmp_path / "o" / "model.safetensors")["d2t"]
    assert {97, 98, tiny.END} < set((d2t + torch.arange(4)).tolist())


def test_a_single_example_is_a_step_for_all(run: Run, tmp_path: Path, target: Path) -> None:
    data = jsonl(
        tmp_path / "d.jsonl",
        [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "ABCD"}]}],
    )
    flags = ["--kind", "mtp", "--target", target, "--data", data, "--output", tmp_path / "o", "--json"]
    ran = together(*flags, "--draft-vocab-size", 40)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 1
    assert all(tensor.numel() for tensor in load_file(tmp_path / "o" / "model.safetensors").values())


def test_an_error_of_one_ends_all(tmp_path: Path, target: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"messages": []}])
    ran = together("--kind", "llama", "--target", target, "--data", data, "--output", tmp_path / "o")
    assert ran.returncode != 0
    assert "no usable conversations" in ran.stderr
    assert not (tmp_path / "o").exists()


def test_rows_are_dealt_out_evenly_and_each_counts_once() -> None:
    from specctl.dist import World
    from specctl.train.sharding import dealt

    rows = [[0], [1, 2], [3], [4], [5]]
    hands = [dealt(rows, World(rank, 2)) for rank in range(2)]
    assert [len(hand) for hand in hands] == [3, 3]
    counted = [row for hand in hands for row, counts in hand if counts]
    assert sorted(counted) == sorted(rows)
    assert torch.tensor([len(hand) for hand in hands]).unique().numel() == 1
