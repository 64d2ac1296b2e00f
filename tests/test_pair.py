"""Opening a target and a draft: what fits is run, what does not is refused by name, and memory is divided."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from fixtures import Make

from specctl.errors import CapacityError, CheckpointError, IncompatiblePair
from specctl.kv.cache import KVCache
from specctl.options import ModelOptions
from specctl.pair import GIB, build_engine, constant, open_draft, open_target
from specctl.sampling.params import SamplingParams

IDS = [256, *b"hello"]


def greedy(engine_of: Path, draft: Path | str | None, k: int = 3) -> list[int]:
    target = open_target(str(engine_of), ModelOptions(dtype="float64"))
    opened = None if draft is None else open_draft(str(draft), target)
    engine = build_engine(target, opened, constant(k))
    ((choice,),) = engine.run([(IDS, SamplingParams(max_tokens=20, ignore_eos=True))])
    return choice.output


def without_tokenizer(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    for file in to.glob("token*"):
        file.unlink()
    return to


def test_a_padded_vocabulary_works_and_its_padding_is_never_proposed(make: Make) -> None:
    target = make(tiny.llama, seed=1)
    padded = make(tiny.padded, of=target)
    opened = open_draft(str(padded), open_target(str(target), ModelOptions()))
    assert opened.drafter.new_carry(1).shape[1] <= 264  # type: ignore[attr-defined]
    assert greedy(target, padded) == greedy(target, None)


def test_swapped_tokens_are_refused_naming_the_first(make: Make, tmp_path: Path) -> None:
    target = make(tiny.llama, seed=1)
    swapped = tmp_path / "swapped"
    shutil.copytree(target, swapped)
    tiny.byte_tokenizer(swapped, swap=(97, 98))
    with pytest.raises(IncompatiblePair, match="token 97 "):
        open_draft(str(swapped), open_target(str(target), ModelOptions()))


def test_another_eos_is_told_and_the_targets_used(make: Make, tmp_path: Path) -> None:
    target = make(tiny.llama, seed=1)
    other = tmp_path / "other"
    shutil.copytree(target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": 257}))
    opened = open_draft(str(other), open_target(str(target), ModelOptions()))
    assert any("[257]" in notice and "[259]" in notice for notice in opened.notices)


def test_without_tokenizers_only_equal_sizes_pass(make: Make, tmp_path: Path) -> None:
    target = without_tokenizer(make(tiny.llama, seed=1), tmp_path / "t")
    opened = open_target(str(target), ModelOptions())
    assert opened.tokenizer is None
    same = open_draft(str(without_tokenizer(make(tiny.llama, seed=2), tmp_path / "d")), opened)
    assert "no tokenizer to compare" in same.notices[0]
    padded = without_tokenizer(make(tiny.padded, of=make(tiny.llama, seed=1)), tmp_path / "p")
    with pytest.raises(IncompatiblePair, match="vocabulary of 272"):
        open_draft(str(padded), opened)


def test_what_is_no_draft_is_refused(make: Make, tmp_path: Path) -> None:
    opened = open_target(str(make(tiny.llama, seed=1)), ModelOptions())
    strange = tmp_path / "strange"
    shutil.copytree(make(tiny.llama, seed=1), strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(CheckpointError, match="'bert' is no draft"):
        open_draft(str(strange), opened)


def test_memory_is_divided_between_both_and_cuts_the_context_or_says_no(make: Make) -> None:
    path = make(tiny.llama, seed=1)
    target = open_target(str(path), ModelOptions())
    draft = open_draft(str(path), target)
    layers = target.model.kv_layers("target") + draft.drafter.kv_layers
    page = KVCache.bytes_per_page(layers)
    for pages in (2, 5):
        said: list[str] = []
        tight = open_target(str(path), ModelOptions(kv_memory=pages * page / GIB))
        engine = build_engine(tight, open_draft(str(path), tight), constant(3), announce=said.append)
        held = sum(t.numel() * t.itemsize for tensors in engine.cache._tensors for t in tensors)
        assert held == pages * page
        assert engine.options.max_length == min(target.max_length, (pages - 1) * 16)
        assert bool(said) == (engine.options.max_length < target.max_length)
    fixed = open_target(str(path), ModelOptions(kv_memory=2 * page / GIB, max_model_len=32))
    with pytest.raises(CapacityError, match="one text may have 32"):
        build_engine(fixed, open_draft(str(path), fixed), constant(3))


def test_dtype_auto_is_float32_on_a_cpu_for_16_bit_weights(make: Make) -> None:
    path = make(tiny.llama, seed=1, dtype=torch.bfloat16)
    assert open_target(str(path), ModelOptions(device="cpu")).dtype == torch.float32
    assert open_target(str(path), ModelOptions(device="cpu", dtype="bfloat16")).dtype == torch.bfloat16
