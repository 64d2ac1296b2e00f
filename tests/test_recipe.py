"""RECIPE.yaml: a file, flags over it, --set over both; and every mistake named with its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run

from specctl.errors import UsageError
from specctl.schemas.recipe import Recipe, read_recipe

FLAGS = {"kind": "llama", "target": "t", "data.train": "data.jsonl"}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_make_a_recipe() -> None:
    recipe = read_recipe(None, FLAGS)
    assert (recipe.kind, recipe.target, recipe.data.sources) == ("llama", "t", ["data.jsonl"])
    assert recipe.num_epochs == 1
    assert recipe.tokens_per_batch == 2048


def test_what_goes_over_what(tmp_path: Path) -> None:
    """The file, then flags that are given, then --set in turn."""
    path = written(
        tmp_path / "recipe.yaml",
        "schema: specctl.recipe/1\nkind: llama\ntarget: file\nseed: 3\ndata:\n  train: [a.jsonl, b.parquet]\n"
        "  max_length: 100\noptimiser: {lr: 2e-4}\ndraft:\n",
    )
    recipe = read_recipe(path, {"target": "flag", "seed": None, "data.max_length": 50}, ["data.max_length=60"])
    assert (recipe.target, recipe.seed, recipe.data.max_length) == ("flag", 3, 60)
    assert recipe.data.sources == ["a.jsonl", "b.parquet"]
    assert recipe.optimiser.lr == 2e-4, "YAML 1.1 takes 2e-4 for a string, and nobody else does"
    recipe = read_recipe(path, {}, ["draft.layers=[0, 3]", "optimiser.lr=1e-3", "optimiser.lr=3e-3", "seed=4"])
    assert (recipe.draft.layers, recipe.optimiser.lr, recipe.seed) == ([0, 3], 3e-3, 4)
    assert read_recipe(path, {}, ["data.regenerate={}"]).data.regenerate is not None
    recipe = read_recipe(path, {}, ["data.regenerate.temperature=1", "draft.init=null"])
    assert recipe.data.regenerate is not None
    assert recipe.data.regenerate.temperature == 1.0


def test_when_training_ends() -> None:
    assert read_recipe(None, FLAGS, ["max_steps=5"]).num_epochs is None
    assert read_recipe(None, FLAGS, ["max_steps=5", "epochs=2"]).num_epochs == 2


def test_room_of_a_packed_row() -> None:
    assert read_recipe(None, FLAGS, ["data.max_length=4096"]).tokens_per_batch == 4096
    assert read_recipe(None, FLAGS, ["data.max_length=4096", "optimiser.tokens_per_batch=512"]).tokens_per_batch == 512


def test_a_recipe_says_all_of_itself() -> None:
    """What it is written as makes the same recipe again."""
    recipe = read_recipe(None, FLAGS, ["draft.width=32", "draft.depth=1", "loss.tv=1", "data.regenerate={}"])
    assert Recipe.model_validate(recipe.model_dump(mode="json", by_alias=True)) == recipe


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optimiser.lrr=1", "key optimiser.lrr is unknown; did you mean lr?"),
        ("optimizer.lr=1", "key optimizer is unknown; did you mean optimiser?"),
        ("optimiser.lr=0,75", "optimiser.lr is '0,75': input should be a valid number"),
        ("optimiser.lr=0", "optimiser.lr is 0: input should be greater than 0"),
        ("optimiser.lr=.nan", "optimiser.lr is nan: input should be a finite number"),
        ("optimiser.accumulate=1.5", "optimiser.accumulate is 1.5: input should be a valid integer"),
        ("optimiser.betas=[0.9]", "optimiser.betas is [0.9]: list should have at least 2 items"),
        ("seed=-1", "seed is -1"),
        ("seed=true", "seed is True: input should be a valid integer"),
        ("kind=medusa", "kind is 'medusa': input should be 'llama'"),
        ("data.on_long=cut", "data.on_long is 'cut'"),
        ("data.held_out_fraction=1", "data.held_out_fraction is 1: input should be less than 1"),
        ("data.train=[]", "data.train"),
        ("loss.ce=0", "ce, kl, tv and feature are all 0; at least one has to be above"),
        ("draft.width=8", "has width; a draft from scratch needs both width and depth"),
        ("draft={init: m, layers: [0]}", "has init and layers; a draft starts from one of"),
        ("draft={layers: [0], width: 8, depth: 1}", "has layers and width"),
        ("data.train.x=3", "--set data.train.x=3: train is 'data.jsonl', which has no key x"),
        ("seed", "--set seed: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("data..train=3", "expected key=value"),
        ("draft.layers=[0", "--set draft.layers=[0: the value cannot be parsed"),
    ],
)
def test_mistakes(setting: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(None, FLAGS, [setting])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected keys and values, found nothing"),
        ("kind: llama\n", "key target is missing"),
        ("kind: llama\ntarget: t\n", "key data is missing"),
        ("kind: llama\ntarget: t\ndata: x\n", "data is 'x'"),
        ("schema: specctl.recipe/9\nkind: llama\ntarget: t\ndata: {train: x}\n", "schema is 'specctl.recipe/9'"),
        ("kind: [\n", "cannot be parsed"),
    ],
    ids=["empty", "target", "data", "no mapping", "schema", "yaml"],
)
def test_mistakes_of_a_file(run: Run, tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path / "recipe.yaml", text)
    ran = run("finetune", path, "--dry-run")
    assert ran.code == 2
    assert "recipe.yaml: " in ran.err
    assert said in ran.err


def test_flags_alone_that_leave_something_out(run: Run) -> None:
    ran = run("finetune", "--target", "t", "--data", "x.jsonl", "--dry-run")
    assert (ran.code, "the recipe of these flags: key kind is missing" in ran.err) == (2, True)
    assert run("finetune", "--kind", "medusa").code == 2, "a kind that is not built is no choice"
