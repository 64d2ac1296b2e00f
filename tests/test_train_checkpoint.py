"""Checkpoints: a run that goes on from one is the run that never stopped, and half a checkpoint is none."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor
from training import draft, examples, furthest, small, trainer, weights

from specctl.checkpoint import Checkpoint
from specctl.errors import CapacityError, CheckpointError
from specctl.models import load as load_served
from specctl.train import checkpoint
from specctl.train.checkpoint import Progress
from specctl.train.feed import Cursor
from specctl.train.loop import Trainer
from specctl.train.optimiser import Schedule

STEPS = 9  # of 4 an epoch


def start(path: Path, **more: Any) -> Trainer:
    schedule = Schedule(1e-2, STEPS, "wsd", 2)
    return trainer(draft(path, torch.float32), examples(14, seed=3), schedule=schedule, accumulate=1, room=40, **more)


def save(directory: Path, work: Trainer, keep: int = 2, **more: Any) -> Path:
    progress = Progress(work.step, work.cursor.epoch, work.cursor.index, **more)
    return checkpoint.save(directory, work.model, {"model_type": "llama"}, work.optimiser, progress, keep, {"seed": 0})


def resume(path: Path, work: Trainer) -> None:
    progress = checkpoint.load(path, work.model, work.optimiser)
    work.step, work.cursor = progress.step, Cursor(progress.epoch, progress.index)


def state(work: Trainer) -> dict[str, Tensor]:
    return weights(work.model) | {name: tensor.clone() for name, tensor in work.optimiser.state()}


def test_going_on_is_never_having_stopped_at_any_step(make: Callable[..., Path], tmp_path: Path) -> None:
    """To the last bit: weights, moments, losses, rates, the order of the data across epochs, and torch's random
    numbers."""
    path = make(small, seed=4)
    whole = start(path)
    torch.manual_seed(1)
    expected = []
    for step in range(STEPS):
        save(tmp_path / str(step), whole)
        expected.append(whole.run_step())
        torch.rand(3)
    assert whole.cursor.epoch == 2
    drawn = torch.rand(4)
    for step in range(STEPS):
        torch.manual_seed(99)
        work = start(path)
        work.run_step()  # whatever the process did before leaves no trace
        found = checkpoint.latest(tmp_path / str(step))
        assert found is not None
        resume(found, work)
        steps = []
        while work.step < STEPS:
            steps.append(work.run_step())
            torch.rand(3)
        assert steps == expected[step:]
        assert furthest(state(work), state(whole)) == 0
        assert torch.equal(torch.rand(4), drawn)


def test_what_is_written_and_what_stays(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(tiny.llama, seed=4, tie_word_embeddings=True)
    work = start(path)
    place = tmp_path / "checkpoints"
    for _ in range(3):
        work.run_step()
        save(place, work, keep=2)
    assert sorted(each.name for each in place.iterdir()) == ["step-00000002", "step-00000003"]
    assert [each.step for each in checkpoint.all_progress(place)] == [2, 3]
    again = save(place, replace(work), keep=2)  # the same step once more does not take the place of what is complete
    assert again.name == "step-00000003.1"
    assert checkpoint.latest(place) == again
    assert sorted(load_file(again / "model" / "model.safetensors")) == sorted(weights(work.model))
    moments = sorted(load_file(next((again / "optimiser").glob("*.safetensors"))))
    assert [name for name in moments if name.startswith("exp_avg_sq.")] == [
        f"exp_avg_sq.{name}" for name in sorted(weights(work.model))
    ]


def test_half_a_checkpoint_is_none(make: Callable[..., Path], tmp_path: Path) -> None:
    work = start(make(small, seed=4))
    whole = save(tmp_path, work)
    left = tmp_path / ".step-00000005.abcd1234.partial"
    (left / "model").mkdir(parents=True)
    assert checkpoint.latest(tmp_path) == whole
    work.run_step()
    save(tmp_path, work)
    assert not left.exists()


def test_a_failure_on_the_way_leaves_what_was_there(make: Callable[..., Path], tmp_path: Path) -> None:
    work = start(make(small, seed=4))
    whole = save(tmp_path, work)

    class Full(Mapping[str, Any]):
        """The last thing that is written."""

        def __getitem__(self, key: str) -> Any:
            raise KeyError(key)

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            raise OSError(errno.ENOSPC, "No space left on device")

    progress = Progress(step=7)
    with pytest.raises(CapacityError, match=r"step-00000007: no disk space left for a checkpoint; .* --resume"):
        checkpoint.save(tmp_path, work.model, {}, work.optimiser, progress, 1, Full())
    assert [each.name for each in tmp_path.iterdir()] == [whole.name]


def test_another_runs_checkpoint_is_refused_by_name(make: Callable[..., Path], tmp_path: Path) -> None:
    work = start(make(small, seed=4))
    found = save(tmp_path, work)
    wider = start(make(small, seed=4, intermediate_size=32))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.gate_proj\.weight is .*\[24, 16\]"):
        resume(found, wider)
    (found / "state.json").write_text(json.dumps({"progress": {"steps": 3}}))
    with pytest.raises(CheckpointError, match=r"state\.json: is not of this version"):
        resume(found, work)


def test_weights_in_another_dtype_are_a_model_to_serve(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(tiny.llama, seed=4, tie_word_embeddings=True)
    work = start(path)
    config = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"}
    checkpoint.save_model(tmp_path / "out", dict(work.model.named_parameters()), config, torch.bfloat16)
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    load_served(Checkpoint(tmp_path / "out"), torch.float32, torch.device("cpu"))
