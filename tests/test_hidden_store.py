"""The target's states on the disk: what they are, that they are found again, and that those of others are refused; and
what is kept while the target answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny
import torch
from decoding import engine, greedy_params, model
from torch import Tensor
from training import examples

from specctl.errors import UsageError
from specctl.finetune.harvest import Harvester
from specctl.models import CausalLM, Hidden
from specctl.train.examples import Example
from specctl.train.hidden import HiddenStates, Reads
from specctl.train.hidden_store import Format, Identity, Shards, StoredStates, bytes_needed

EVERY, LABELS = Reads((0, 2), every_row=True), Reads()


@pytest.fixture
def target(make: Callable[..., Path]) -> CausalLM:
    return model(make(tiny.llama, seed=3, tie_word_embeddings=False), torch.float32)


def shards(path: Path, reads: Reads, name: str = "target", format: Format = "target") -> Shards:
    return Shards(path, Identity.of(name, torch.float32, format, reads))


def stored(
    target: CausalLM, data: Sequence[Example], path: Path, reads: Reads = EVERY, format: Format = "target"
) -> StoredStates:
    return StoredStates(HiddenStates(target, data, reads), shards(path, reads, format=format), torch.float32)


def same(one: Hidden, other: Hidden) -> bool:
    pairs = [(one.final_TD, other.final_TD)]
    if one.taps_ATD is not None and other.taps_ATD is not None:
        pairs.append((one.taps_ATD, other.taps_ATD))
    assert (one.taps_ATD is None) == (other.taps_ATD is None)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("reads", [EVERY, LABELS], ids=["every", "labels"])
def test_what_is_kept_is_what_is_computed(target: CausalLM, tmp_path: Path, reads: Reads) -> None:
    data = examples(6, seed=2)
    computed, kept = HiddenStates(target, data, reads), stored(target, data, tmp_path, reads)
    kept.fill(lambda: None)
    for indices in ([4, 1, 3], [0], [5, 2]):
        expected = computed.hidden(indices)
        assert len(expected.final_TD) == sum(len(data[index].ids) for index in indices)
        assert same(kept.hidden(indices), expected)
    if not reads.every_row:
        read = computed.hidden(list(range(6))).final_TD.any(-1)
        assert int(read.sum()) == sum(example.num_labels for example in data)


def test_whoever_finds_it_does_not_compute_it(target: CausalLM, make: Callable[..., Path], tmp_path: Path) -> None:
    data = examples(6, seed=2)
    kept = stored(target, data, tmp_path)
    kept.fill(lambda: None)
    other = model(make(tiny.llama, seed=4, tie_word_embeddings=False), torch.float32)
    again = stored(other, data, tmp_path)
    assert again.missing == []
    again.fill(lambda: None)
    assert same(again.hidden([1, 3, 4]), kept.hidden([1, 3, 4]))


def test_what_was_computed_stays_when_it_is_interrupted(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.train.hidden_store.SHARD", 3000)
    data, done = examples(9, seed=2), [0]

    def stop() -> None:
        done[0] += 1
        if done[0] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored(target, data, tmp_path).fill(stop)
    again = stored(target, data, tmp_path)
    assert len(again.missing) == 4
    assert again.shards.data is None
    (tmp_path / ".states-00009.safetensors.partial").write_bytes(b"half")
    again.fill(lambda: None)
    assert again.missing == []
    assert len(list(tmp_path.glob("states-*.safetensors"))) > 1
    assert same(again.hidden(list(range(9))), HiddenStates(target, data, EVERY).hidden(list(range(9))))


@pytest.mark.parametrize(("format", "near"), [("bfloat16", 2**-8), ("float8", 2**-3)])
def test_narrow_formats_are_near_and_small(target: CausalLM, tmp_path: Path, format: Format, near: float) -> None:
    data = examples(6, seed=2)
    kept = stored(target, data, tmp_path, format=format)
    kept.fill(lambda: None)
    found, expected = kept.hidden(list(range(6))), HiddenStates(target, data, EVERY).hidden(list(range(6)))
    assert found.taps_ATD is not None
    assert expected.taps_ATD is not None
    for ours, theirs in ((found.final_TD, expected.final_TD), (found.taps_ATD, expected.taps_ATD)):
        largest = theirs.abs().amax(-1, keepdim=True).clamp(min=1e-6)
        assert 0 < float(((ours - theirs).abs() / largest).max()) < near
    size = bytes_needed(data, EVERY, target.config.hidden_size, torch.float32, format)
    written = sum(file.stat().st_size for file in tmp_path.glob("states-*"))
    assert size < written < size + 1000 * len(data)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("another", "target", EVERY), "target is target, this run needs another"),
        (("target", "bfloat16", EVERY), "format is target, this run needs bfloat16"),
        (("target", "target", Reads((0, 1), every_row=True)), r"taps is \[0, 2\], this run needs \[0, 1\]"),
        (("target", "target", LABELS), "taps is"),
    ],
)
def test_a_store_of_something_else_is_refused(
    target: CausalLM, tmp_path: Path, other: tuple[str, Format, Reads], said: str
) -> None:
    stored(target, examples(3), tmp_path).fill(lambda: None)
    name, format, reads = other
    with pytest.raises(UsageError, match=said):
        shards(tmp_path, reads, name, format)


def test_a_store_of_other_data_is_refused_and_one_that_is_none(target: CausalLM, tmp_path: Path) -> None:
    stored(target, examples(3), tmp_path / "a").fill(lambda: None)
    with pytest.raises(UsageError, match="holds the states of other data"):
        stored(target, examples(4), tmp_path / "a").fill(lambda: None)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no store of hidden states"):
        stored(target, examples(3), tmp_path / "b")
    (tmp_path / "a" / "hidden.json").write_text(json.dumps({"schema": "else"}))
    with pytest.raises(UsageError, match="is not of this version"):
        stored(target, examples(3), tmp_path / "a")


def test_a_file_that_was_cut_off_is_named(target: CausalLM, tmp_path: Path) -> None:
    stored(target, examples(3), tmp_path).fill(lambda: None)
    (file,) = tmp_path.glob("states-*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"states-00001\.safetensors: cannot be read"):
        stored(target, examples(3), tmp_path)


# -- while the target answers ------------------------------------------------------------------------------------------


def near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) < 1e-11


def test_what_is_harvested_is_what_would_be_computed(make: Callable[..., Path]) -> None:
    """Texts of different lengths, chunks of prompts, a preemption, lanes that are used again."""
    target = model(make(tiny.llama, seed=3, tie_word_embeddings=False))
    harvester = Harvester((0, 2))
    e = engine(target, harvester, 0, max_sequences=3, chunk=5, pages=7, max_length=60)
    prompts = [list(text.encode()) for text in ("a", "bcd efg", "a longer prompt than that", "x y", "another one")]
    choices = [e.choices(e.add(prompt, greedy_params(20)))[0] for prompt in prompts]
    while e.has_work:
        e.step()
    assert e.stats.preemptions > 0
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = [*prompt, *choice.output]
        found = harvester.take(ids)
        assert found is not None
        assert found.taps_ATD is not None
        example = Example.of("x", ids, [(1, len(ids))])
        expected = HiddenStates(target, [example], Reads((0, 2), every_row=True)).example(0)
        assert expected.taps_ATD is not None
        assert near(found.final_TD, expected.final_TD)
        assert near(found.taps_ATD, expected.taps_ATD)
        assert harvester.take(ids) is None
