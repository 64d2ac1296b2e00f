"""`specctl generate`, from the command line down, on tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Run
from fixtures import Make

HELLO = "256,104,101,108,108,111"
ALPHA = tiny.chain("xABCDEFGH")
LETTERS = {last: {97: 0.5, 98: 0.3, 99: 0.15, 100: 0.05} for last in (120, 97, 98, 99, 100)}


@pytest.fixture
def target(make: Make) -> Path:
    return make(tiny.llama, seed=1)


def answer(run: Run, *arguments: Any, **options: Any) -> dict[str, Any]:
    done = run("generate", *arguments, "--json", **options)
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


def test_the_text_is_the_same_for_every_draft_and_length(make: Make, run: Run, target: Path) -> None:
    asked = ("--target", target, "--token-ids", HELLO, "--max-tokens", 30, "--ignore-eos", "--dtype", "float64")
    plain = answer(run, *asked)
    expected = plain["results"][0]["token_ids"]
    assert len(set(expected)) > 8  # not an echo
    assert plain["speculation"] is None
    for draft in (make(tiny.near, of=target), target, "ngram"):
        for k in (0, 1, 3, 5):
            report = answer(run, *asked, "--draft", draft, "--k", k)
            assert report["results"][0]["token_ids"] == expected, (draft, k)
            assert report["speculation"]["accept"] == "exact"
            assert not report["speculation"]["lossy"]
    own = answer(run, *asked, "--draft", target, "--k", 3)
    assert own["speculation"]["acceptance_rate"] == 1.0


def test_streams_text_to_the_terminal_and_counters_beside_it(make: Make, run: Run) -> None:
    path = make(tiny.table, rows=ALPHA)
    done = run("generate", "--target", path, "--prompt", "x")
    assert (done.code, done.out) == (0, "ABCDEFGH\n")
    assert done.err == "9 tokens\n"
    drafted = run("generate", "--target", path, "--prompt", "x", "--draft", path, "--k", 4)
    assert drafted.out == "ABCDEFGH\n"
    assert "mean acceptance length 5.00" in drafted.err


def test_several_prompts_and_choices_are_told_apart(make: Make, run: Run, tmp_path: Path) -> None:
    path = make(tiny.table, rows=ALPHA)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "one", "prompt": "x"}\n{"token_ids": [70], "max_tokens": 1}\n{"prompt": "C"}\n')
    done = run("generate", "--target", path, "--prompts", prompts, "--batch", 2)
    assert done.out == "[one] ABCDEFGH\n[2] G\n[3] DEFGH\n"
    several = run("generate", "--target", path, "--prompt", "x", "--n", 2)
    assert several.out == "[1.0] ABCDEFGH\n[1.1] ABCDEFGH\n"
    piped = run("generate", "--target", path, "--prompts", "-", stdin=b'{"prompt": "F"}\n')
    assert piped.out == "GH\n"


def test_json_has_ids_logprobs_and_reasons(make: Make, run: Run) -> None:
    path = make(tiny.table, rows=LETTERS)
    report = answer(run, "--target", path, "--prompt", "x", "--max-tokens", 3, "--logprobs", 2, "--draft", path)
    (result,) = report["results"]
    assert result["token_ids"] == [97, 97, 97]
    assert (result["text"], result["finish_reason"]) == ("aaa", "length")
    for entry in result["logprobs"]:
        assert entry["logprob"] == pytest.approx(-0.6931, abs=1e-3)
        assert [pair[0] for pair in entry["top"]] == [97, 98]
        assert entry["top"][1][1] == pytest.approx(-1.2040, abs=1e-3)
    assert report["provenance"]["command"].startswith("specctl")


def test_stop_strings_and_penalties_are_heard(make: Make, run: Run) -> None:
    alpha = make(tiny.table, rows=ALPHA)
    assert run("generate", "--target", alpha, "--prompt", "x", "--stop", "DEF").out == "ABC\n"
    rows = {120: {97: 1.0}, 97: {97: 0.6, 98: 0.4}, 98: {97: 1.0}}
    penalised = make(tiny.table, rows=rows)
    asked = ("generate", "--target", penalised, "--prompt", "x", "--max-tokens", 11)
    assert run(*asked).out == "a" * 11 + "\n"
    plain = run(*asked, "--frequency-penalty", 0.3).out
    assert run(*asked, "--frequency-penalty", 0.3, "--draft", penalised, "--k", 4).out == plain
    assert plain.startswith("aabab")


def test_a_seed_repeats_the_run_and_lossy_says_so(make: Make, run: Run) -> None:
    path = make(tiny.table, rows=LETTERS)
    asked = ("--target", path, "--prompt", "x", "--max-tokens", 40, "--temperature", 1, "--draft", path)
    first, again = (answer(run, *asked, "--seed", 5)["results"][0]["token_ids"] for _ in range(2))
    assert first == again
    assert first != answer(run, *asked, "--seed", 6)["results"][0]["token_ids"]
    lossy = run("generate", *asked, "--accept", "typical")
    assert "accept typical is lossy" in lossy.err
    report = answer(run, *asked, "--accept", "threshold=0.2")
    assert report["speculation"]["lossy"] is True
    assert report["speculation"]["accept"] == report["results"][0]["speculation"]["accept"] == "threshold=0.2"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "expected one of --prompt, --token-ids, --prompts"),
        (("--prompt", "x", "--token-ids", "1"), 2, "--prompt and --token-ids given"),
        (("--prompt", "x", "--prompt-field", "q"), 2, "--prompt-field is given without --prompts"),
        (("--prompts", "nowhere.jsonl"), 2, "nowhere.jsonl"),
        (("--prompt", "x", "--k", "3"), 2, "--k is given but no --draft"),
        (("--prompt", "x", "--accept", "typical"), 2, "--accept is given but no --draft"),
        (("--prompt", "x", "--draft", "ngram", "--k", "17"), 2, "--k 17: ngram drafts at most 16"),
        (("--prompt", "x", "--draft", "nothing-here"), 2, "nothing-here"),
        (("--prompt", "x", "--draft", "mtp"), 2, "--draft mtp"),
        (("--prompt", "x", "--max-model-len", "100000"), 2, "--max-model-len 100000"),
        (("--token-ids", "1,999"), 2, "token id 999 is outside the vocabulary of 264"),
        (("--prompt", "x", "--kv-memory", "1e-9"), 3, "--kv-memory"),
        (("--prompt", "x", "--device", "cuda:7"), 3, "--device cuda:7"),
        (("--prompt", "x", "--accept", "threshold=2"), 2, "threshold"),
        (("--prompt", "x", "--temprature", "1"), 2, "--temperature"),
        (("--prompt", "x", "--attention", "flashinfer"), 3, "FlashInfer"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, target: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = run("generate", "--target", target, *arguments)
    assert done.code == code, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_prompts_at_the_end_of_the_context(run: Run, make: Make) -> None:
    path = make(tiny.llama, seed=1, max_position_embeddings=64)
    ids = ",".join(["104"] * 61)
    report = answer(run, "--target", path, "--token-ids", ids, "--max-tokens", 10, "--ignore-eos", "--draft", "ngram")
    assert len(report["results"][0]["token_ids"]) == 3
    assert report["results"][0]["finish_reason"] == "length"
    for length in (64, 80):
        refused = run("generate", "--target", path, "--token-ids", ",".join(["104"] * length))
        assert refused.code == 2
        assert f"the prompt has {length} tokens, the context holds 64" in refused.err
