"""Whose numbers tune puts together, and the whole way: a pair measured, tuned, and run under its policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import Run
from fixtures import Make
from handmade import trace, write_json, write_yaml
from tuning import TU1, Tune, of_pair, told, tuner

from specctl.schemas.policy import read_policy


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Tune:
    return tuner(run, tmp_path)


# -- whose numbers they are --------------------------------------------------------------------------------------------

LLAMA = {"kind": "llama", "digest": "d" * 64, "max_k": None}
TARGET = {"name": "t", "digest": "a" * 64}


def test_a_policy_is_bound_to_the_pair(tune: Tune, tmp_path: Path) -> None:
    of = {"drafter": LLAMA, "model": {"name": "t", "digest": "a" * 64}}
    told(tune(TU1 | of, trace([[1, 9]], target=TARGET, draft=LLAMA), "--json"))
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.target.digest, policy.draft.digest, policy.draft.kind) == ("a" * 64, "d" * 64, "llama")
    # What only the trace knows is enough, and so is what only the profile knows.
    for profile_of, trace_of in (({}, {"target": TARGET, "draft": LLAMA}), (of, {})):
        told(tune(TU1 | profile_of, trace([[1, 9]], **trace_of), "--json", "--force"))
        policy = read_policy(tmp_path / "Y.yaml")
        assert (policy.target.digest, policy.draft.digest, policy.draft.kind) == ("a" * 64, "d" * 64, "llama")


def test_an_unbound_policy_says_so(tune: Tune, tmp_path: Path) -> None:
    ran = tune(TU1, 0.9)
    assert "the draft is not known by its digest; the policy is bound to none" in ran.err
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.target.digest, policy.draft.kind, policy.draft.digest) == (None, None, None)


@pytest.mark.parametrize(
    ("of_profile", "of_trace", "said"),
    [
        (
            {"drafter": LLAMA},
            {"draft": LLAMA | {"digest": "e" * 64}},
            "is the profile of a draft with tensors_sha dddddd",
        ),
        ({"model": {"digest": "b" * 64}}, {"target": TARGET}, "is the profile of a target with tensors_sha bbbbbb"),
        ({"drafter": LLAMA}, {"draft": LLAMA | {"kind": "ngram", "digest": None}}, "acceptance is of kind ngram"),
        ({"draft": []}, {"draft": LLAMA}, "has no draft steps"),
    ],
)
def test_numbers_of_two_pairs_are_not_put_together(
    tune: Tune, of_profile: dict[str, Any], of_trace: dict[str, Any], said: str
) -> None:
    ran = tune(TU1 | of_profile, trace([[1, 9]], **of_trace))
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--profile", "h101"), "--profile h101: is no file and no shipped profile"),
        (("--acceptance", "none.json"), "none.json: cannot be read"),
        (("--k-max", "5"), "--k-max 5: P.yaml knows nothing beyond K = 4"),
        (("--output", "Y.json"), "ends in .yaml"),
        (("--target", "m"), "--acceptance and --target are both given"),
        (("--temperature", "1"), "--acceptance and --temperature are both given"),
        (("--threads", "1"), "no model is run"),
    ],
)
def test_what_tune_cannot_do_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_yaml(tmp_path / "P.yaml", TU1)
    flags = {"--profile": "P.yaml", "--acceptance": "0.8", "--output": "Y.yaml"} | {arguments[0]: arguments[1]}
    ran = run("tune", *(part for pair in flags.items() for part in pair))
    assert ran.code == 2
    assert said in ran.err
    assert not (tmp_path / "Y.yaml").exists()


def test_without_acceptance_it_must_be_possible_to_measure_it(run: Run, tmp_path: Path) -> None:
    ran = run(
        "tune", "--profile", write_yaml(tmp_path / "P.yaml", TU1), "--output", tmp_path / "Y.yaml", "--target", "m"
    )
    assert ran.code == 2
    assert "--draft, --prompts is missing" in ran.err


def test_a_policy_is_not_replaced(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "Y.yaml").write_text("mine")
    assert tune(TU1, 0.8).code == 2
    assert (tmp_path / "Y.yaml").read_text() == "mine"


# -- the whole way -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(make: Make) -> Path:
    return make(tiny.llama, seed=1)


@pytest.fixture
def near(make: Make, model: Path) -> Path:
    return make(tiny.near, of=model)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ("abcabcabc hello", "the cat the cat", "12 21 12 21", "one two one two")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_acceptance_is_measured_here(run: Run, model: Path, near: Path, prompts: Path, tmp_path: Path) -> None:
    """The same survival as a trace of bench on the same prompts, and a policy that the same pair takes."""
    file = write_yaml(tmp_path / "P.yaml", of_pair(model, near))
    pair = ("--target", model, "--draft", near, "--prompts", prompts, "--max-tokens", 16)
    measured = run("tune", "--profile", file, *pair, "--output", tmp_path / "Y.yaml", "--json")
    assert measured.code == 0, measured.err
    traced = run(
        "bench", *pair, "--k", 4, "--repeats", 1, "--output", tmp_path / "R.json", "--trace", tmp_path / "T.json"
    )
    assert traced.code == 0, traced.err
    again = run(
        "tune", "--profile", file, "--acceptance", tmp_path / "T.json", "--output", tmp_path / "Z.yaml", "--json"
    )
    first, second = (told(ran)["places"][0]["candidates"][4] for ran in (measured, again))
    assert first["survival"] == second["survival"]
    assert first["tokens_per_step"] == pytest.approx(second["tokens_per_step"])
    # Of another draft than the profile's: refused, and before anything is measured.
    file = write_yaml(tmp_path / "Q.yaml", of_pair(model, model))
    refused = run("tune", "--profile", file, *pair, "--output", tmp_path / "Q2.yaml")
    assert (refused.code, "tracing" in refused.err) == (2, False)
    assert "is the profile of a draft with tensors_sha" in refused.err
    policy = read_policy(tmp_path / "Y.yaml")
    assert policy.max_k > 0
    taken = run("generate", "--target", model, "--draft", near, "--prompt", "abc", "--policy", tmp_path / "Y.yaml")
    assert taken.code == 0, taken.err
    assert "bound to no" not in taken.err


def test_bench_and_serve_take_the_policy(
    run: Run, model: Path, near: Path, prompts: Path, tmp_path: Path, make: Make
) -> None:
    write_yaml(tmp_path / "P.yaml", of_pair(model, near))
    tuned = run("tune", "--profile", tmp_path / "P.yaml", "--acceptance", 0.9, "--output", tmp_path / "Y.yaml")
    assert tuned.code == 0, tuned.err
    pair = ("--target", model, "--draft", near, "--policy", tmp_path / "Y.yaml")
    ran = run("bench", *pair, "--prompts", prompts, "--max-tokens", 8, "--repeats", 1, "--output", tmp_path / "R.json")
    assert ran.code == 0, ran.err
    other = make(tiny.near, of=model, seed=8)
    for command in (("generate", "--prompt", "abc"), ("serve", "--port", 0)):
        refused = run(*command, "--target", model, "--draft", other, "--policy", tmp_path / "Y.yaml")
        assert refused.code == 2
        assert "was made for a draft with tensors_sha" in refused.err


def test_a_trace_of_a_policy_tells_the_stop_it_was_taken_under(
    run: Run, model: Path, near: Path, prompts: Path, tmp_path: Path
) -> None:
    """bench writes what tune must know: the stop, the fate of each draft, the steps without one."""
    policy = {"schema": "specctl.policy/1", "target": {}, "draft": {"kind": "llama"}, "accept": {"method": "exact"}}
    policy["k"] = [{"batch": [1, None], "context": [1, None], "k": 4, "confidence": 0.5}]
    (tmp_path / "C.yaml").write_text(yaml.safe_dump(policy))
    pair = ("--target", model, "--draft", near, "--prompts", prompts, "--max-tokens", 32, "--repeats", 1)
    ran = run(
        "bench", *pair, "--policy", tmp_path / "C.yaml", "--output", tmp_path / "R.json", "--trace", tmp_path / "T.json"
    )
    assert ran.code == 0, ran.err
    value = json.loads((tmp_path / "T.json").read_text())
    assert (value["min_confidence"], value["accept"], value["draft"]["kind"]) == (0.5, "exact", "llama")
    (entry,) = value["classes"]
    assert min(min(each) for each in entry["confidence"]) >= 0.5
    assert [len(each) for each in entry["confidence"]] != [4] * entry["num_drafts"]
    assert sum(request["steps"] for request in entry["requests"]) > entry["num_drafts"]
    file = write_yaml(tmp_path / "P.yaml", of_pair(model, near))
    found = told(
        run("tune", "--profile", file, "--acceptance", tmp_path / "T.json", "--output", tmp_path / "Y.yaml", "--json")
    )
    assert {each["confidence"] for each in found["places"][0]["candidates"][1:]} == {0.5}
    entry["confidence"] = []
    write_json(tmp_path / "U.json", value)
    assert (
        run("tune", "--profile", file, "--acceptance", tmp_path / "U.json", "--output", tmp_path / "Z.yaml").code == 2
    )


def test_steps_without_a_proposal_are_counted(run: Run, make: Make, tmp_path: Path) -> None:
    """A model that says abcd for ever: lookup proposes nothing until something has come twice, then always."""
    rows = {ord(last): {ord(following): 0.75, ord("x"): 0.25} for last, following in ("ab", "bc", "cd", "da")}
    circle = make(tiny.table, rows=rows, dtype=torch.float64)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    pair = ("--target", circle, "--draft", "ngram", "--prompts", tmp_path / "prompts.jsonl", "--max-tokens", 20)
    ran = run("bench", *pair, "--repeats", 1, "--output", tmp_path / "R.json", "--trace", tmp_path / "T.json", "--k", 3)
    assert ran.code == 0, ran.err
    (entry,) = json.loads((tmp_path / "T.json").read_text())["classes"]
    (request,) = entry["requests"]
    # Prefill gives c. Then da in turn until "ab" has come again (three plain steps), then blocks of four tokens.
    assert request["steps"] - sum(request["histogram"]) == 3
    assert math.ceil((20 - 1 - 3) / 4) == sum(request["histogram"])
