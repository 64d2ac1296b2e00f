"""From any layout of an EAGLE-3 head to any other and back: not a bit is lost."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import tiny
import tiny_eagle3
import torch
from conftest import Run
from exporting import export
from fixtures import Make
from test_eagle3_layouts import NAMES, read
from tiny_eagle3 import IDS, LAYERS

from specctl.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize(("first", "second"), list(permutations(NAMES, 2)))
def test_round_trips_are_bit_for_bit(
    run: Run, make: Make, target: Path, tmp_path: Path, first: str, second: str, reduced: bool
) -> None:
    source = make(tiny_eagle3.head, of=target, layout="vllm", ids=IDS if reduced else None, dtype=torch.bfloat16)
    path = source
    for number, to in enumerate((first, second, "vllm")):
        report = export(run, path, tmp_path / str(number), to, "--target", target)
        assert report["checked"]["largest_difference"] == 0
        path = tmp_path / str(number)
        assert read(path).layout == to
    before, after = (tiny.read(each)[1] for each in (source, path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert read(source).view.head(LAYERS) == read(path).view.head(LAYERS)
    assert Checkpoint(path).config["dtype"] == "bfloat16"
