"""--quality-budget: acceptance that changes what is said, bought only as far as somebody measured it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import Run
from fixtures import Make
from handmade import PROVENANCE, profile, trace, write_json, write_yaml
from tuning import Tune, of_pair, told, tuner

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.sampling.params import Accept
from specctl.schemas.divergence import RuleDivergence, read_divergence
from specctl.schemas.policy import read_policy
from specctl.tune.lossy import kl_per_token, score_drop
from specctl.tune.watching import said

FLAT = profile({1: [10.0, 10.1, 10.2, 10.3]}, {1: 0.5})
EXACT = trace([[6, 2, 1, 1]] * 20, temperature=1.0)


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Tune:
    return tuner(run, tmp_path)


def rule(accept: str, histogram: list[int], kl: list[float], requests: int = 20, spread: float = 0.0) -> dict[str, Any]:
    factors = 1 + spread * np.linspace(-1, 1, requests)
    each = [{"histogram": histogram, "kl": [float(f * value) for value in kl]} for f in factors]
    return {"accept": accept, "requests": each}


def divergence(*rules: dict[str, Any], temperature: float = 1.0) -> dict[str, Any]:
    return {
        "schema": "specctl.divergence/1",
        "provenance": PROVENANCE,
        "k": 3,
        "temperature": temperature,
        "rules": list(rules),
    }


MILD = rule("threshold=0.7", [3, 2, 2, 3], [0.02, 0.01, 0.01])  # 10 drafts, 25 tokens, 0.04 nats: 0.0016 a token
STRONG = rule("typical", [0, 1, 1, 8], [0.5, 0.3, 0.2])  # 10 drafts, 37 tokens, 1 nat: 0.027 a token


def ask(tune: Tune, tmp_path: Path, value: dict[str, Any], budget: object, *more: object) -> Any:
    file = write_json(tmp_path / "D.json", value)
    return tune(FLAT, EXACT, "--json", "--force", "--quality-budget", budget, "--divergence", file, *more)


def test_the_fastest_rule_within_the_budget_is_used(tune: Tune, tmp_path: Path) -> None:
    both = divergence(MILD, STRONG)
    value = told(ask(tune, tmp_path, both, 0.01))
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.accept.method, policy.accept.threshold) == ("threshold", 0.7)
    assert policy.accept.divergence_kl == pytest.approx(0.04 / 25, rel=1e-4)
    assert value["survival"] == pytest.approx([0.7, 0.5, 0.3])
    assert any("LOSSY acceptance threshold=0.7" in notice for notice in value["notices"])
    assert any("typical: moves 0.0" in notice for notice in value["notices"])
    told(ask(tune, tmp_path, both, "kl=0.1"))
    policy = read_policy(tmp_path / "Y.yaml")
    assert (policy.accept.method, policy.accept.epsilon, policy.accept.delta) == ("typical", 0.09, 0.3)
    value = told(ask(tune, tmp_path, both, 0.0001))
    assert read_policy(tmp_path / "Y.yaml").accept.method == "exact"
    assert any("no rule stays within it" in notice for notice in value["notices"])


def test_it_is_the_interval_that_has_to_stay_within(tune: Tune, tmp_path: Path) -> None:
    """The mean is 0.0016 a token either way; with requests that differ by as much, its upper end is above 0.0018 at
    K = 3, and below it at K = 2."""
    told(ask(tune, tmp_path, divergence(MILD), 0.0018))
    assert (read_policy(tmp_path / "Y.yaml").accept.method, read_policy(tmp_path / "Y.yaml").max_k) == ("threshold", 3)
    unsure = rule("threshold=0.7", [3, 2, 2, 3], [0.02, 0.01, 0.01], spread=1.0)
    told(ask(tune, tmp_path, divergence(unsure), 0.0018))
    assert (read_policy(tmp_path / "Y.yaml").accept.method, read_policy(tmp_path / "Y.yaml").max_k) == ("threshold", 2)
    one = rule("threshold=0.7", [3, 2, 2, 3], [0.02, 0.01, 0.01], requests=1)  # nothing is known of other requests
    told(ask(tune, tmp_path, divergence(one), 1.0))
    assert read_policy(tmp_path / "Y.yaml").accept.method == "exact"


def test_a_rule_may_be_within_the_budget_up_to_a_length(tune: Tune, tmp_path: Path) -> None:
    """Nothing changes in the first place and much in the second."""
    late = rule("threshold=0.5", [0, 0, 0, 10], [0.0, 3.0, 3.0])
    told(ask(tune, tmp_path, divergence(late), 0.01))
    assert read_policy(tmp_path / "Y.yaml").max_k == 1
    found = RuleDivergence.model_validate(late)
    assert [kl_per_token(found, k)[1] for k in (1, 2, 3)] == pytest.approx([0, 3 / 30, 6 / 40])


def test_a_rule_that_accepts_no_more_is_not_used(tune: Tune, tmp_path: Path) -> None:
    same = rule("threshold=0.9", [8, 1, 1, 0], [0.0, 0.0, 0.0])
    value = told(ask(tune, tmp_path, divergence(same), 0.01))
    assert read_policy(tmp_path / "Y.yaml").accept.method == "exact"
    assert any("no rule within it is faster" in notice for notice in value["notices"])


def test_a_task_has_a_say(tune: Tune, tmp_path: Path) -> None:
    """The strong rule changes four answers of a hundred; the mild one none."""
    scores = {"exact": [1] * 100, "typical": [0] * 4 + [1] * 96, "threshold=0.7": [1] * 100}
    file = write_json(tmp_path / "S.json", scores)
    told(ask(tune, tmp_path, divergence(MILD, STRONG), "kl=1,score=0.02", "--scores", file))
    assert read_policy(tmp_path / "Y.yaml").accept.method == "threshold"
    told(ask(tune, tmp_path, divergence(MILD, STRONG), "kl=1,score=0.2", "--scores", file))
    assert read_policy(tmp_path / "Y.yaml").accept.method == "typical"
    low, middle, high = score_drop(scores["exact"], scores["typical"])
    assert middle == pytest.approx(0.04)
    assert low < middle < high


@pytest.mark.parametrize(
    ("value", "budget", "more", "said"),
    [
        (divergence(MILD), "much", {}, "--quality-budget much: expected nats a token"),
        (divergence(MILD), "kl=0.1,kl=0.2", {}, "expected nats a token"),
        (divergence(MILD), "-1", {}, "from 0 up"),
        (divergence(MILD), "score=0.1", {}, "no --scores FILE"),
        (divergence(MILD, temperature=0.5), "0.1", {}, "measured at temperature 0.5, acceptance at 1"),
        (divergence(MILD, MILD), "0.1", {}, "two rules have one name"),
        (divergence(rule("exact", [1, 1, 1, 1], [0.0] * 3)), "0.1", {}, "exact is lossless"),
        (divergence(rule("typical", [1, 1], [0.0])), "0.1", {}, "4 counts and 3 divergences"),
        (divergence(MILD), "score=1", {"typical": [1]}, "key exact is missing"),
        (divergence(MILD), "score=1", {"exact": [1, 2], "typical": [1]}, "typical has 1 items and exact has 2"),
        (divergence(MILD), "score=1", {"exact": ["a"]}, "expected a number for every item"),
    ],
)
def test_what_cannot_be_is_named(
    tune: Tune, tmp_path: Path, value: Any, budget: str, more: dict[str, Any], said: str
) -> None:
    flags = ("--scores", write_json(tmp_path / "S.json", more)) if more else ()
    ran = ask(tune, tmp_path, value, budget, *flags)
    assert (ran.code, "Internal" in ran.err) == (2, False)
    assert said in ran.err


def test_without_a_measured_divergence_it_is_refused(tune: Tune, tmp_path: Path) -> None:
    ran = tune(FLAT, EXACT, "--quality-budget", 0.1)
    assert ran.code == 2
    assert "nothing tells how far lossy acceptance moves this pair" in ran.err
    assert not (tmp_path / "Y.yaml").exists()


# -- measuring it ------------------------------------------------------------------------------------------------------


def test_what_is_said_under_a_rule_is_a_distribution_that_can_be_sampled() -> None:
    """By the definition of the rule, token by token, against drawing it a hundred thousand times."""
    random = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    for text, prefix in (("threshold=0.2", 0.5), ("typical", 1.0)):
        accept = Accept.parse(text)
        entropy = -(p * np.log(p)).sum()
        least = min(accept.epsilon, accept.delta * math.exp(-entropy))
        ok = p >= least if text == "typical" else prefix * p >= 0.2
        proposed = random.choice(4, size=100_000, p=q)
        drawn = np.where(ok[proposed], proposed, random.choice(4, size=100_000, p=p))
        seen = np.bincount(drawn, minlength=4) / len(drawn)
        found = said(torch.tensor(p), torch.tensor(q), accept, prefix)
        assert found.numpy() == pytest.approx(seen, abs=0.006)
        assert float(found.sum()) == pytest.approx(1)


def test_it_is_measured_here_and_kept(run: Run, make: Make, tmp_path: Path) -> None:
    """A draft that is the target in all but noise: what it is trusted with changes little, and what was measured can be
    used again without models."""
    model = make(tiny.llama, seed=1)
    near = make(tiny.near, of=model)
    file = write_yaml(tmp_path / "P.yaml", of_pair(model, near))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc abc", "the cat", "12 21", "one")))
    pair = ("--target", model, "--draft", near, "--prompts", prompts, "--max-tokens", 12)
    flags = ("--quality-budget", 5, "--save-divergence", tmp_path / "D.json", "--output", tmp_path / "Y.yaml")
    cold = run("tune", "--profile", file, *pair, *flags)
    assert cold.code == 2
    assert "at temperature 0 a divergence is no number" in cold.err
    ran = run("tune", "--profile", file, *pair, *flags, "--temperature", 1, "--seed", 3, "--json")
    assert ran.code == 0, ran.err
    kept = read_divergence(tmp_path / "D.json")
    assert kept.draft is not None
    assert kept.draft.digest == tensors_sha(Checkpoint(near))
    totals = {rule.accept: kl_per_token(rule, kept.k)[1] for rule in kept.rules}
    accepted = {
        rule.accept: sum(j * n for request in rule.requests for j, n in enumerate(request.histogram))
        / sum(sum(request.histogram) for request in rule.requests)
        for rule in kept.rules
    }
    assert accepted["threshold=0.1"] >= accepted["threshold=0.9"]
    assert totals["threshold=0.1"] >= totals["threshold=0.9"] >= 0
    again = run(
        "tune", "--profile", file, "--acceptance", write_json(tmp_path / "T.json", EXACT), "--quality-budget", 5,
        "--divergence", tmp_path / "D.json", "--output", tmp_path / "Z.yaml",
    )  # fmt: skip
    assert again.code == 0, again.err
