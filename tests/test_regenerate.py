"""Answers by the target: the same however often it was interrupted, and made anew for anything else they depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from decoding import greedy

from specctl.errors import CapacityError
from specctl.finetune.data import Request
from specctl.finetune.regenerate import Regenerator
from specctl.options import ModelOptions
from specctl.pair import open_target
from specctl.schemas.recipe import Regenerate


def requests(count: int) -> list[Request]:
    return [Request(f"{n}.1", tuple(range(65, 68 + n))) for n in range(count)]


@pytest.fixture
def regenerator(make: Callable[..., Path], tmp_path: Path) -> Regenerator:
    target = open_target(str(make(tiny.llama, seed=13)), ModelOptions(dtype="float64", max_model_len=24))
    settings = Regenerate(temperature=1.0, max_tokens=5, batch=2)
    return Regenerator(target, settings, tmp_path / "run" / "answers.jsonl", "target", 3, lambda sentence: None)


def test_answers_are_the_targets(make: Callable[..., Path], regenerator: Regenerator) -> None:
    plain = replace(regenerator, settings=Regenerate(temperature=0.0, max_tokens=5, batch=2))
    asked = requests(3)
    answers = plain(asked)
    for request in asked:
        expected = greedy(make(tiny.llama, seed=13), request.ids, 5)
        end = expected.index(tiny.END) + 1 if tiny.END in expected else 5
        assert list(answers[request.id]) == expected[:end]


def test_an_interrupted_one_goes_on_to_the_same_answers(regenerator: Regenerator) -> None:
    asked = requests(11)  # groups of eight
    whole = regenerator(asked)
    assert {id: len(ids) for id, ids in whole.items() if len(ids) < 5 and tiny.END not in ids} == {}
    lines = regenerator.file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12
    for kept in (1, 5, 9, 10):
        regenerator.file.write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        assert regenerator(asked) == whole
    assert len(set(map(tuple, whole.values()))) > 5


def test_what_is_kept_is_not_computed_again(regenerator: Regenerator) -> None:
    asked = requests(3)
    regenerator(asked)
    lines = regenerator.file.read_text().splitlines()
    invented = [json.dumps([json.loads(line)[0], [1, 2]]) for line in lines[1:]]
    regenerator.file.write_text("\n".join([lines[0], *invented, ""]))
    assert set(map(tuple, regenerator(asked).values())) == {(1, 2)}
    for other in (
        replace(regenerator, identity="another"),
        replace(regenerator, seed=4),
        replace(regenerator, settings=Regenerate(temperature=0.5, max_tokens=5, batch=2)),
    ):
        assert (1, 2) not in set(map(tuple, other(asked).values()))


def test_a_prompt_without_room_has_an_empty_answer(regenerator: Regenerator) -> None:
    long = Request("long", tuple(range(65, 89)))
    nearly = Request("nearly", tuple(range(65, 87)))
    answers = regenerator([long, *requests(1), nearly])
    assert answers["long"] == []
    assert 1 <= len(answers["nearly"]) <= 2
    assert answers["0.1"]


def test_kv_memory_bounds_the_cache(make: Callable[..., Path], regenerator: Regenerator) -> None:
    """With room for one text at a time the answers are the same, with none for a whole one there are none."""
    asked = requests(3)
    expected = regenerator(asked)
    for memory, fits in ((3.5e-5, True), (1e-6, False)):
        options = replace(regenerator.target.options, kv_memory=memory)
        bounded = replace(regenerator, target=replace(regenerator.target, options=options), seed=3)
        bounded.file.unlink()
        if fits:
            assert bounded(asked) == expected
        else:
            with pytest.raises(CapacityError, match=r"--kv-memory: 1e-06 GiB hold 0 tokens of KV cache"):
                bounded(asked)
