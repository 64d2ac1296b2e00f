"""`finetune --init`: a draft of any layout is begun with as the engine decodes with it, number for number; and where
nothing is held out that is seen over prompts of the training data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
import torch
from conftest import Run
from finetuning import lines, recipe
from fixtures import Make
from test_eagle3_layouts import changed
from test_export_trained import in_fp8
from tiny_eagle3 import IDS

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.drafts.mtp_checkpoint import find_mtp
from specctl.finetune.data import DataSet, load_examples
from specctl.finetune.kinds import plan_start
from specctl.finetune.validation import Validator
from specctl.models import Weights
from specctl.options import ModelOptions
from specctl.pair import Target, open_draft, open_target
from specctl.schemas.base import Provenance
from specctl.schemas.draft import Acceptance, DraftFile
from specctl.schemas.recipe import Recipe, read_recipe

CPU = torch.device("cpu")
EXACT = ModelOptions(dtype="float64")
ALMOST_NOTHING: dict[str, Any] = {"epochs": None, "max_steps": 1, "optimiser": {"lr": 1e-12}}
PROBE: dict[str, Any] = {"max_tokens": 12, "k": 3, "prompts": 3}


def beginning(path: Path, kind: str, source: Path, **values: Any) -> Path:
    """The recipe of a run that begins with `source` and hardly moves it."""
    found = recipe(path, kind, **(ALMOST_NOTHING | {"validation": PROBE} | values))
    found.write_text(json.dumps(json.loads(found.read_text()) | {"draft": {"init": str(source)}}))
    return found


class Begun:
    """One run that begins with `source` and hardly moves it, and what `source` is to whoever serves it."""

    def __init__(self, run: Run, place: Path, kind: str, target: Path, source: Path, **values: Any) -> None:
        named = beginning(place / "r.json", kind, source, **values)
        self.recipe: Recipe = read_recipe(named, {"target": str(target)})
        self.target: Target = open_target(str(target), EXACT)
        self.source = source
        self.output = place / "out"
        ran = run("finetune", named, "--target", target, "--output", self.output, "--dtype", "float64")
        assert ran.code == 0, ran.err
        self.err = ran.err
        self.metrics = lines(place / "out.run" / "metrics.jsonl")

    def data(self) -> DataSet:
        return load_examples(self.recipe, self.target.tokenizer)

    def served(self, validator: Validator | None) -> list[dict[str, Any]]:
        """What the draft does when it is opened as --draft, with the fields that both have."""
        assert validator is not None
        name = "mtp" if str(self.source) == self.target.name else str(self.source)
        return [each.as_dict() for each in validator.measure(open_draft(name, self.target).drafter)]

    def begins_as_served(self) -> list[float]:
        """Mean acceptance lengths before the first step."""
        first = next(line for line in self.metrics if "validation" in line)
        assert first["step"] == 0
        held_out, settings, said = self.data().held_out, self.recipe.validation, list[str]()
        served = self.served(Validator.of(self.target, held_out, settings, self.recipe.seed, said.append))
        assert said == []
        assert [{key: each[key] for key in served[0]} for each in first["validation"]] == served
        return [each["mean_acceptance_length"] for each in served]

    def first_weights(self) -> dict[str, torch.Tensor]:
        """Before the first step."""
        start = plan_start(self.recipe, self.target.checkpoint, self.target.tokenizer, None)
        model = start.build(0, torch.float64, CPU, self.target.model)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


# -- EAGLE-3 -----------------------------------------------------------------------------------------------------------

EAGLE3: dict[str, dict[str, Any]] = {
    "original": {"layout": "original"},
    "original, reduced": {"layout": "original", "ids": IDS},
    "vllm": {"layout": "vllm", "ids": IDS, "taps": (1, 4, 7)},
    "vllm, an embedding of its own": {"layout": "vllm", "embedding": True},
    "vllm, all norms": {"layout": "vllm", "norms": tiny_eagle3.NORMS},
    "sglang": {"layout": "sglang", "ids": IDS, "norms": ("fc_norm", "norm_output")},
    "speculators": {"layout": "speculators", "ids": IDS},
    "speculators, all norms": {"layout": "speculators", "norms": tiny_eagle3.NORMS},
}


@pytest.mark.parametrize("layout", EAGLE3)
def test_an_eagle3_head_of_every_layout(run: Run, make: Make, tmp_path: Path, layout: str) -> None:
    target = make(tiny_eagle3.target)
    source = make(tiny_eagle3.head, of=target, **EAGLE3[layout])
    begun = Begun(run, tmp_path, "eagle3", target, source)
    _, sampled = begun.begins_as_served()
    assert sampled > 1.05

    stored = layouts.read(Checkpoint(source), None, tiny_eagle3.LAYERS)
    _, tensors = tiny.read(source)
    expected = {ours: tensors[name] for name, ours in stored.view.tensors.items()}
    first = begun.first_weights()
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name].double()) for name in first)

    written = layouts.read(Checkpoint(begun.output), None, tiny_eagle3.LAYERS)
    assert written.view.head(tiny_eagle3.LAYERS) == stored.view.head(tiny_eagle3.LAYERS)
    _, after = tiny.read(begun.output)
    assert all(float((after[name] - expected[name]).abs().max()) < 1e-6 for name in expected)
    for table in ("d2t", "t2d"):
        assert (table in after) == (table in tensors)
        assert table not in after or torch.equal(after[table], tensors[table])


# -- MTP ---------------------------------------------------------------------------------------------------------------


def inside(make: Make, target: Path) -> Path:
    return target


def alone(layout: tiny_mtp.Alone, copies: tiny_mtp.Copies) -> Callable[[Make, Path], Path]:
    return lambda make, target: make(tiny_mtp.mtp, of=target, alone=layout, copies=copies)


def of_some_ids(make: Make, target: Path) -> Path:
    return make(tiny_mtp.reduced, of=make(tiny_mtp.mtp, of=target, alone="deepseek"), ids=IDS)


def of_some_ids_beside_a_whole_head(make: Make, target: Path) -> Path:
    """Which is the target's, and passed over."""
    return make(tiny_mtp.reduced, of=make(tiny_mtp.mtp, of=target, alone="deepseek", copies="equal"), ids=IDS)


MTP: dict[str, Callable[[Make, Path], Path]] = {
    "deepseek": alone("deepseek", "none"),
    "deepseek, equal copies": alone("deepseek", "equal"),
    "deepseek, copies of its own": alone("deepseek", "own"),
    "sglang": alone("sglang", "none"),
    "sglang, copies of its own": alone("sglang", "own"),
    "reduced": of_some_ids,
    "reduced, a head besides": of_some_ids_beside_a_whole_head,
}


def same_layer(begun: Begun) -> None:
    """Bit for bit, whatever number it has there and however it is stored."""
    found = find_mtp(Checkpoint(begun.source))
    weights = Weights(found.checkpoint)
    for name, tensor in begun.first_weights().items():
        stored = weights.tensor(found.name(name.split(".", 3)[3]), torch.float32)
        assert torch.equal(tensor, stored.double()), name


@pytest.mark.parametrize("layout", MTP)
def test_an_mtp_layer_of_every_layout(run: Run, make: Make, tmp_path: Path, layout: str) -> None:
    target = make(tiny.llama, seed=1, num_hidden_layers=1)
    begun = Begun(run, tmp_path, "mtp", target, MTP[layout](make, target))
    assert min(begun.begins_as_served()) > 1.05
    same_layer(begun)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v2"])
def test_the_layer_inside_the_target(run: Run, make: Make, tmp_path: Path, family: str) -> None:
    target = tiny_mtp.with_mtp(make, family)
    begun = Begun(run, tmp_path, "mtp", target, target)
    assert min(begun.begins_as_served()) > 1.05
    same_layer(begun)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("to", ["deepseek", "vllm", "sglang"])
def test_what_convert_mtp_writes(run: Run, make: Make, tmp_path: Path, to: str, fp8: bool) -> None:
    target = tiny_mtp.with_mtp(make, "deepseek_v3")
    target = make(in_fp8, of=target) if fp8 else target
    converted = run("convert-mtp", target, tmp_path / "layer", "--to", to)
    assert converted.code == 0, converted.err
    begun = Begun(run, tmp_path, "mtp", target, tmp_path / "layer")
    assert min(begun.begins_as_served()) > 1.05
    same_layer(begun)


# -- nothing held out --------------------------------------------------------------------------------------------------


def pair_of(make: Make, kind: str) -> tuple[Path, Path]:
    """A target, and a draft that is sometimes right."""
    if kind == "eagle3":
        return tiny_eagle3.pair(make)
    target = make(tiny.llama, seed=1, num_hidden_layers=1)
    return target, make(tiny.near, of=target) if kind == "llama" else make(tiny_mtp.mtp, of=target, alone="deepseek")


def claiming(path: Path, of: Path, kind: str, turned: bool) -> Path:
    """The same draft with a specctl.json that speaks well of it. turned: its last norm turned round, so that what was
    likeliest is what is least likely."""

    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        (norm,) = (name for name in tensors if name in ("norm.weight", "model.norm.weight") or "head.norm" in name)
        tensors[norm] *= -1 if turned else 1

    changed(path, of, edit)
    claims = [
        Acceptance.model_validate(
            {
                "class": "held-out",
                "temperature": temperature,
                "k": 5,
                "accepted_per_position": [0.5, 0.3, 0.2, 0.1, 0.1],
                "mean_acceptance_length": 2.2,
            }
        )
        for temperature in (0.0, 1.0)
    ]
    facts = DraftFile(provenance=Provenance.here(), kind=kind, head=None, target=None, acceptance=claims)
    (path / "specctl.json").write_text(json.dumps(facts.model_dump(mode="json", by_alias=True)))
    return path


KINDS = ("llama", "mtp", "eagle3")


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_begins_with_is_seen_over_training_prompts(run: Run, make: Make, tmp_path: Path, kind: str) -> None:
    """Once, and nothing else is decoded."""
    target, draft = pair_of(make, kind)
    source = claiming(tmp_path / "draft", draft, kind, turned=False)
    begun = Begun(run, tmp_path, kind, target, source, data={"held_out_fraction": 0}, max_steps=3)
    assert "there is no validation" in begun.err
    assert begun.err.count("mean acceptance length") == 1
    assert "(specctl.json: 2.000)" in begun.err
    assert "K = 3, over 3 training prompts: nothing is held out)" in begun.err
    (first, *steps) = begun.metrics
    assert first["step"] == 0
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert not any("validation" in line or "first_look" in line for line in steps)
    lengths = [each["mean_acceptance_length"] for each in first["first_look"]]
    validator = Validator.over_training(begun.target, begun.data().train, begun.recipe.validation, begun.recipe.seed)
    assert lengths == [each["mean_acceptance_length"] for each in begun.served(validator)]
    assert min(lengths) > 1.1
    assert json.loads((begun.output / "specctl.json").read_text())["acceptance"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_not_what_it_says_is_refused_where_nothing_is_held_out(
    run: Run, make: Make, tmp_path: Path, kind: str
) -> None:
    target, draft = pair_of(make, kind)
    source = claiming(tmp_path / "draft", draft, kind, turned=True)
    found = beginning(tmp_path / "r.json", kind, source, data={"held_out_fraction": 0})
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "out")
    assert ran.code == 2
    assert "before the first step, its specctl.json says 2.00" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_draft_that_begins_from_nothing_is_not_looked_at(run: Run, make: Make, tmp_path: Path) -> None:
    target, _ = pair_of(make, "mtp")
    found = recipe(tmp_path / "r.json", "mtp", **ALMOST_NOTHING, data={"held_out_fraction": 0})
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "mean acceptance length" not in ran.err
    assert not any("first_look" in line for line in lines(tmp_path / "out.run" / "metrics.jsonl"))


def test_prompts_that_leave_no_room_are_told(run: Run, make: Make, tmp_path: Path) -> None:
    target, draft = pair_of(make, "mtp")
    values = {"data": {"held_out_fraction": 0}, "validation": {"max_tokens": 250}}
    found = beginning(tmp_path / "r.json", "mtp", draft, **values)
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert f"{draft} is not decoded with before the first step: no prompt leaves room for an answer" in ran.err
