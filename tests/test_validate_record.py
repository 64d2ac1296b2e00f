"""The acceptance that a draft's specctl.json records, held against what `specctl validate` measures: a draft that is
not the one that was made fails and is named, and right ones pass on whatever prompts."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Run
from finetuning import recipe
from fixtures import Make
from reports import report, speculation, write
from test_validate_pair import Validate, fails, gate, near, prompts, statuses, target, validate

from specctl.schemas.draft import Acceptance
from specctl.schemas.gates import find_gates, read_gates
from specctl.schemas.validation import Check
from specctl.validate.evidence import NoData
from specctl.validate.evidence import Run as Measured
from specctl.validate.record import Record, against_record

__all__ = ["near", "prompts", "target", "validate"]

RECORD = "acceptance_length: {}"


@pytest.fixture(scope="module")
def made(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft as finetune leaves it: a model of two layers that is right most of the time, trained by next to nothing,
    with what validation found beside it."""
    from specctl.cli.main import main

    of = make(tiny.llama, seed=1, dtype=torch.float64)
    here = tmp_path_factory.mktemp("made")
    found = recipe(
        here / "recipe.json",
        draft={"init": str(make(tiny.near, of=of, noise=0.03)), "width": None, "depth": None, "heads": None},
        epochs=None,
        max_steps=1,
        loss={"ce": 1.0, "kl": 0.0, "tv": 0.0},
        optimiser={"lr": 1e-12},
        validation={"every_steps": 1, "prompts": 2, "max_tokens": 40, "k": 3},
        data={"held_out_fraction": 0.5},
    )
    assert main(["finetune", str(found), "--target", str(of), "--output", str(here / "draft")]) == 0
    return here / "draft"


def recorded(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((path / "specctl.json").read_text())["acceptance"]
    return found


def test_a_draft_as_it_was_made_passes(validate: Validate, made: Path, tmp_path: Path) -> None:
    assert [each["mean_acceptance_length"] > 1.5 for each in recorded(made)] == [True, True]
    for flags in ([], ["--k", 1], ["--k", 6], ["--temperature", 1], ["--temperature", 0.7, "--accept", "coupled"]):
        ran = validate(RECORD, "--draft", made, *flags)
        assert ran.code == 0, (flags, ran.out)
        assert f"{made / 'specctl.json'} records" in ran.out
        assert "expected at least half of that" in ran.out
    (check,) = gate(tmp_path, "acceptance_length")["checks"]
    assert check["measured"] > check["limit"] > 1


@pytest.mark.parametrize("flags", [[], ["--k", 1], ["--temperature", 1], ["--batch", 3]])
def test_its_layers_in_another_order_fail_and_are_named(
    validate: Validate, made: Path, tmp_path: Path, flags: list[object]
) -> None:
    swapped = tiny.few_layers(tmp_path / "swapped", of=made, layers=[1, 0])
    ran = validate("greedy_exact: {}\n" + RECORD, "--draft", swapped, *flags)
    words = ("specctl.json records", "held-out", "at least half of that", "weights are those that were trained")
    fails(ran, "acceptance_length", *words)
    assert statuses(tmp_path) == {"greedy_exact": "pass", "acceptance_length": "fail"}


def test_the_shipped_gates_tell_the_two_apart(validate: Validate, made: Path, tmp_path: Path) -> None:
    """But for the time they take, and for what is a tie in float32."""
    shipped = find_gates("gates").read_text().replace("samples: 2000", "samples: 200").replace(", max_gap: 0.001", "")
    swapped = tiny.few_layers(tmp_path / "swapped", of=made, layers=[1, 0])
    fails(validate(shipped, "--draft", swapped), "acceptance_length", "specctl.json records")
    assert [name for name, status in statuses(tmp_path).items() if status != "pass"] == ["acceptance_length"]
    ran = validate(shipped, "--draft", made)
    assert ran.code == 0, ran.out
    assert len(statuses(tmp_path)) == 5


def test_a_draft_without_a_record_is_told_what_it_does(validate: Validate, near: Path, tmp_path: Path) -> None:
    for draft in (near, "ngram"):
        ran = validate(RECORD, "--draft", draft, "--max-tokens", 30)
        assert ran.code == 0, ran.out
        assert "held against nothing" in ran.out
    ran = validate(RECORD, "--draft", near, "--k", 0)
    assert ran.code == 1
    assert statuses(tmp_path) == {"acceptance_length": "no-data"}


def test_a_limit_of_ones_own_goes_before_it(validate: Validate, made: Path, tmp_path: Path) -> None:
    swapped = tiny.few_layers(tmp_path / "swapped", of=made, layers=[1, 0])
    assert validate("acceptance_length: {min: 1}", "--draft", swapped).code == 0
    fails(validate("acceptance_length: {min: 3.9}", "--draft", made), "acceptance_length", "expected at least 3.9")


def test_a_record_that_cannot_be(validate: Validate, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "draft"
    shutil.copytree(made, path)
    value = json.loads((path / "specctl.json").read_text())
    value["acceptance"][0]["accepted_per_position"] = [1.5, 0.2]
    (path / "specctl.json").write_text(json.dumps(value))
    ran = validate(RECORD, "--draft", path)
    assert ran.code == 1
    assert "accepted_per_position is [1.5, 0.2], expected shares of one" in ran.out
    assert statuses(tmp_path) == {"acceptance_length": "no-data"}


def test_no_more_prompts_are_decoded_than_for_the_text(validate: Validate, made: Path, tmp_path: Path) -> None:
    for gates, count in (("greedy_exact: {prompts: 2}\n", 2), ("greedy_exact: {}\n", 5), ("", 5)):
        assert validate(gates + RECORD, "--draft", made).code == 0
        assert json.loads((tmp_path / "report.json").read_text())["work"]["n"] == count
    assert validate("greedy_exact: {prompts: 2}\nacceptance_rate: {min: 0}\n" + RECORD, "--draft", made).code == 0
    assert json.loads((tmp_path / "report.json").read_text())["work"]["n"] == 5


def test_a_report_has_no_draft_to_ask(run: Run, tmp_path: Path) -> None:
    results, gates = write(tmp_path / "results.json", report()), tmp_path / "gates.yaml"
    gates.write_text(RECORD)
    ran = run("validate", "--results", results, "--gates", gates)
    assert ran.code == 2
    assert "the gate acceptance_length without min holds a draft against its specctl.json" in ran.err
    assert "give it min" in ran.err


def test_the_shipped_gates_have_it() -> None:
    found = read_gates(find_gates("gates")).acceptance_length
    assert found is not None
    assert found.min is None


# The judgement


def claim(rates: list[float], temperature: float = 0.0) -> Acceptance:
    values = {"class": "held-out", "temperature": temperature, "k": len(rates), "accepted_per_position": rates}
    return Acceptance.model_validate(values | {"mean_acceptance_length": 1 + sum(rates)})


def judged(accepted: list[int], drafts: int, *claims: Acceptance, **work: Any) -> Check:
    values = {"name": "draft", "k": len(accepted), "speculation": speculation(accepted, drafts)}
    if "accept" in work:
        values["speculation"]["accept"] = work.pop("accept")
    return against_record(Record("specctl.json", claims), Measured(values, {"temperature": 0.0} | work))


@pytest.mark.parametrize(
    ("accepted", "drafts", "status"),
    [
        ([160, 120, 80], 200, "pass"),  # as recorded
        ([100, 55, 30], 200, "pass"),  # 0.925 of 1.8
        ([90, 50, 30], 200, "pass"),  # 0.85: chance explains it
        ([60, 30, 10], 200, "fail"),  # 0.5
        ([0, 0, 0], 200, "fail"),
        ([0, 0, 0], 4, "pass"),  # too few to tell
        ([0, 0, 0], 12, "fail"),
        ([90], 200, "pass"),  # at K = 1, half of 0.8
        ([40], 200, "fail"),
        ([100, 55, 30, 20, 9, 2], 200, "pass"),  # at a longer one, over what both have
        ([30, 15, 8, 8, 8, 8], 200, "fail"),
    ],
)
def test_half_of_what_was_accepted_is_asked_for(accepted: list[int], drafts: int, status: str) -> None:
    assert judged(accepted, drafts, claim([0.8, 0.6, 0.4])).status == status


def test_the_nearest_measurement_is_the_one(make: Make) -> None:
    both = claim([0.8, 0.6]), claim([0.4, 0.1], temperature=1.0)
    assert judged([60, 20], 200, *both).status == "fail"
    assert judged([60, 20], 200, *both, temperature=1.0).status == "pass"
    assert judged([60, 20], 200, *both, temperature=0.7).status == "pass", "the lowest where none is at it"
    assert "held-out, T = 1, K = 2" in judged([60, 20], 200, *both, temperature=0.7).says


def test_shared_noise_accepts_less() -> None:
    """0.5 by exact acceptance may be no more than a third by shared noise, at every position anew."""
    sampled = claim([0.5, 0.25, 0.125], temperature=1.0)
    found = judged([100, 33, 11], 300, sampled, temperature=1.0, accept="coupled")
    assert found.status == "pass"
    assert found.limit == pytest.approx(1 + (1 / 3 + 1 / 9 + 1 / 27) / 2)
    assert judged([100, 33, 11], 300, sampled, temperature=1.0).limit == pytest.approx(1 + 0.875 / 2)
    assert judged([100, 33, 11], 300, claim([0.5, 0.25, 0.125]), accept="coupled").limit == pytest.approx(1.4375)


def test_positions_that_few_drafts_had_are_left_out() -> None:
    """Of a policy: most blocks were of one token."""
    values = speculation([150, 10], 200)
    values |= {"num_draft_tokens": 220, "drafted_per_position": [200, 20], "num_accepted_tokens": 160}
    values |= {"acceptance_rate": 160 / 220, "mean_acceptance_length": 1.8}
    run = Measured({"name": "draft", "k": None, "speculation": values}, {"temperature": 0.0})
    found = against_record(Record("specctl.json", (claim([0.8, 0.6]),)), run)
    assert found.status == "pass"
    assert "at the first 1 positions" in found.says
    broken = {**values, "accepted_per_position": None}
    run = Measured({"name": "draft", "k": None, "speculation": broken}, {"temperature": 0.0})
    with pytest.raises(NoData, match="at each position is missing"):
        against_record(Record("specctl.json", (claim([0.8]),)), run)


def simulated(rng: random.Random, rates: list[float], drafts: int) -> list[int]:
    counts = [0] * len(rates)
    for _ in range(drafts):
        before = 1.0
        for position, rate in enumerate(rates):
            if rng.random() >= rate / before:
                break
            counts[position] += 1
            before = rate
    return counts


def test_chance_alone_accuses_nobody() -> None:
    """Drafts that accept two thirds of what is recorded, over few blocks and many; and those that accept a tenth."""
    rng = random.Random(3)
    rates = [0.6, 0.4, 0.2]
    for drafts in (3, 10, 30, 100, 1000):
        fine = [judged(simulated(rng, [0.4, 0.27, 0.13], drafts), drafts, claim(rates)).status for _ in range(200)]
        assert fine.count("fail") <= 4, drafts
    poor = [judged(simulated(rng, [0.06, 0.01, 0.001], 100), 100, claim(rates)).status for _ in range(200)]
    assert poor.count("fail") == 200
