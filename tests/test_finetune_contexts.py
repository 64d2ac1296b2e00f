"""Acceptance in validation by the number of tokens that stand before a block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from conftest import Run
from decoding import llama_draft
from finetuning import jsonl, lines, recipe

from specctl.engine.sequence import Sequence
from specctl.finetune.blocks import Block, Blocks
from specctl.finetune.validation import Validator
from specctl.options import ModelOptions
from specctl.pair import open_target
from specctl.sampling.params import SamplingParams
from specctl.schemas.recipe import Validation

SHORT, LONG = (0, 1, 2, 3), (4, 5, 6, 7)  # two rounds of tokens, each certain


def test_a_draft_that_is_right_in_long_texts_only(make: Callable[..., Path]) -> None:
    def table(rows: dict[int, int]) -> Path:
        found = {last: {following: 1.0} for last, following in rows.items()}
        return make(tiny.table, rows=found, vocab=16, tokenizer=False, max_position_embeddings=512)

    right = {token: ring[(at + 1) % 4] for ring in (SHORT, LONG) for at, token in enumerate(ring)}
    target = open_target(str(table(right)), ModelOptions(dtype="float64"))
    drafter = llama_draft(table(right | dict.fromkeys(SHORT, 9)))
    settings = Validation(k=3, max_tokens=9)
    work = ((SHORT[0],), (LONG[0],) * 300, (LONG[0],) * 200)
    for measured in Validator(target, work, settings, seed=0).measure(drafter):
        short, long = measured.as_dict()["by_context"]
        # The first token is no block's. In the short text 8 blocks bring a token each; in the others two blocks four.
        assert short == {
            "context": [0, 255],
            "num_drafts": 10,
            "accepted_per_position": [0.2, 0.2, 0.2],
            "mean_acceptance_length": pytest.approx(1.6),
        }
        assert long["context"] == [256, 1023]
        assert (long["num_drafts"], long["mean_acceptance_length"]) == (2, 4.0)
        (_, line), *rows = measured.rows
        assert line.startswith(f"mean acceptance length {measured.length:.3f}")
        assert rows == [
            ("  after 0 to 255 tokens", "1.600 over 10 blocks"),
            ("  after 256 to 1023 tokens", "4.000 over 2 blocks"),
        ]


def test_ranges_have_no_gaps_and_no_end() -> None:
    params = SamplingParams()
    text = Sequence(0, 0, params, params.acceptance, [1], 0)
    starts = (1, 255, 256, 1023, 1024, 4096, 16384, 65535, 65536, 10**6)
    found = Blocks([Block(text, start, 3, 2) for start in starts]).by_context()
    ranges = [bucket.context for bucket in found]
    assert ranges == [(0, 255), (256, 1023), (1024, 4095), (4096, 16383), (16384, 65535), (65536, None)]
    assert [bucket.counters.num_drafts for bucket in found] == [2, 2, 1, 1, 2, 2]
    assert found[-1].words == "after 65536 tokens and more"


@pytest.mark.parametrize("kind", ["llama", "mtp"])
def test_a_run_tells_it(run: Run, make: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    target = make(tiny.llama, seed=11, tie_word_embeddings=False, max_position_embeddings=512)
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ("1?", "2" * 300)]
    data = {"held_out": str(jsonl(tmp_path / "held_out.jsonl", asked)), "held_out_fraction": None}
    found = recipe(tmp_path / "r.json", kind, data=data, epochs=None, max_steps=1)
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "o")
    assert ran.code == 0, ran.err
    assert ran.out.count("after 0 to 255 tokens") == ran.out.count("after 256 to 1023 tokens") == 2
    validations = [line for line in lines(tmp_path / "o.run" / "metrics.jsonl") if "validation" in line]
    assert [line["step"] for line in validations] == [0, 1]
    for measured in (each for line in validations for each in line["validation"]):
        parts = measured["by_context"]
        assert [part["context"] for part in parts] == [[0, 255], [256, 1023]]
        total = sum(part["num_drafts"] for part in parts)
        mean = sum(part["num_drafts"] * part["mean_acceptance_length"] for part in parts) / total
        assert mean == pytest.approx(measured["mean_acceptance_length"])
    facts = json.loads((tmp_path / "o" / "specctl.json").read_text())
    assert all("by_context" not in each for each in facts["acceptance"])
