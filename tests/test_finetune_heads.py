"""`specctl finetune --kind mtp | eagle3`: what it writes, that it learns and is served as it was trained, and that no
interruption shows, whether the target's states are computed, kept or harvested."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
import torch
from conftest import Run
from finetuning import assert_same, interrupt_after, jsonl, lines, recipe, rows
from safetensors.torch import load_file, save_file

from specctl.finetune.plots import make_figure

KINDS = ("mtp", "eagle3")


@pytest.fixture
def target(make: Callable[..., Path]) -> Path:
    return make(tiny.llama, seed=11, tie_word_embeddings=False)


def finetune(run: Run, *arguments: object) -> dict[str, Any]:
    ran = run("finetune", *arguments, "--json")
    assert ran.code == 0, ran.err
    value: dict[str, Any] = json.loads(ran.out)
    return value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 40])
def test_what_it_writes_is_opened_and_changes_nothing_said(
    run: Run, tmp_path: Path, target: Path, kind: str, size: int | None
) -> None:
    out = tmp_path / "draft"
    flags = [] if size is None else ["--draft-vocab-size", size]
    finetune(run, recipe(tmp_path / "r.json", kind), "--target", target, "--output", out, *flags)
    facts = json.loads((out / "specctl.json").read_text())
    assert facts["kind"] == kind
    assert facts["head"]["reads"] == ("final" if kind == "mtp" else "taps")
    assert facts["recipe"]["loss"]["steps"] == 2
    assert [each["temperature"] for each in facts["acceptance"]] == [0.0, 1.0]
    tensors = load_file(out / "model.safetensors")
    assert ("d2t" in tensors) == (size is not None)
    if size is not None:
        ids = tensors["d2t"] + torch.arange(size)
        assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
        assert {*b"BCDFGHJKL", tiny.END} <= set(ids.tolist())  # an answer's first token is not drafted
        assert facts["head"]["vocabulary"]["size"] == size

    prompts = jsonl(tmp_path / "p.jsonl", [{"prompt": "1?"}, {"prompt": "2?"}])
    asked = ["generate", "--target", target, "--prompts", prompts, "--max-tokens", 12, "--json", "--dtype", "float64"]
    plain, drafted = json.loads(run(*asked).out), json.loads(run(*asked, "--draft", out).out)
    assert drafted["speculation"]["num_draft_tokens"] > 0
    texts = [[each["text"] for each in value["results"]] for value in (plain, drafted)]
    assert texts[0] == texts[1]


def certain(steps: int) -> dict[str, Any]:
    """Of a run for a target whose every answer is the same."""
    return {
        "loss": {"ce": 1.0, "kl": 0.0, "tv": 0.0},
        "epochs": None,
        "max_steps": steps,
        "data": {"regenerate": {"max_tokens": 12, "batch": 4}},
        "validation": {"every_steps": steps, "max_tokens": 8, "k": 3},
        "checkpoint": {"every_steps": 1000},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_what_its_target_says_and_is_served_as_trained(
    run: Run, make: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """The target's answer is certain given the token before; a head that is right says so from its first row on."""
    target = make(tiny.table, rows=tiny.chain("ABCDEFGH"))
    values = certain(60 if kind == "mtp" else 200)
    out = tmp_path / "draft"
    done = finetune(run, recipe(tmp_path / "r.json", kind, **values), "--target", target, "--output", out)
    assert [m["mean_acceptance_length"] > 2.9 for m in done["acceptance"]] == [True, True], done["acceptance"]
    validated = [line for line in lines(tmp_path / "draft.run" / "metrics.jsonl") if "validation" in line]
    assert [line["step"] for line in validated] == [0, 60 if kind == "mtp" else 200]
    greedy = validated[-1]["validation"][0]
    assert greedy["found_in_training"] == pytest.approx(greedy["accepted_per_position"])
    last = [line for line in lines(tmp_path / "draft.run" / "metrics.jsonl") if "loss" in line][-1]
    assert len(last["accuracy"]) == 2
    assert min(last["accuracy"]) > 0.95


def test_a_head_that_is_served_otherwise_than_trained_is_named(
    run: Run, make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: in the engine each row holds the token of the row before."""
    from specctl.drafts.head import HeadDrafter

    right = HeadDrafter.catch_up

    def wrong(self: HeadDrafter, rows: Any, hidden: Any, carry: Any) -> None:
        right(self, replace(rows, token_T=rows.token_T.roll(1)), hidden, carry)

    target = make(tiny.table, rows=tiny.chain("ABCDEFGH"))
    found = recipe(tmp_path / "r.json", "mtp", **certain(60))
    monkeypatch.setattr(HeadDrafter, "catch_up", wrong)
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "o")
    assert ran.code == 0, ran.err
    said = "what is served is not what is trained, from token 1 on"
    assert said in ran.err
    assert said in " ".join(ran.out.split())
    read = lines(tmp_path / "o.run" / "metrics.jsonl")
    last = [line["validation"] for line in read if "validation" in line][-1]
    assert [each.get("parted_from") for each in last] == [1, None]
    assert last[0]["found_in_training"][0] > last[0]["found_in_decoding"][0]
    *_, tokens = make_figure(read).axes
    assert "they part from token 1 on" in labels_of(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_in_training_stands_beside_decoded_acceptance(
    run: Run, tmp_path: Path, target: Path, kind: str
) -> None:
    """Token by token: on the terminal while it trains and when it is done, and in the picture."""
    found = recipe(tmp_path / "r.json", kind)
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "o")
    assert ran.code == 0, ran.err
    read = lines(tmp_path / "o.run" / "metrics.jsonl")
    validated = [(line["step"], line["validation"][0]) for line in read if "validation" in line]
    trained = {line["step"]: line["accuracy"] for line in read if "loss" in line}
    assert len(validated) > 2
    for step, greedy in validated:
        decoded, known = (spelt(greedy[key]) for key in ("found_in_decoding", "found_in_training"))
        batch = f"; each by itself in the last batch: {spelt(trained[step])}" if step else ""
        said = f"step {step}: right up to token 1, 2: {decoded} decoded, {known} by training's own pass{batch}\n"
        assert said in ran.err
        assert greedy["parted_from"] is None
    assert "right up to token 1, 2" in ran.out
    assert "they part" not in ran.out

    *_, acceptance, tokens = make_figure(read).axes
    assert "Acceptance on held-out prompts" in acceptance.get_title("left")
    assert labels_of(tokens) == ["token 1", "token 2"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in tokens.get_lines()]
    for slot in range(2):
        for key in ("found_in_decoding", "found_in_training"):
            assert ([step for step, _ in validated], [greedy[key][slot] for _, greedy in validated]) in drawn
        assert (list(trained), [each[slot] for each in trained.values()]) in drawn


def spelt(shares: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


def labels_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_run_without_a_chain_has_no_such_panel(run: Run, tmp_path: Path, target: Path) -> None:
    assert run("finetune", recipe(tmp_path / "r.json"), "--target", target, "--output", tmp_path / "o").code == 0
    titles = [axes.get_title("left") for axes in make_figure(lines(tmp_path / "o.run" / "metrics.jsonl")).axes]
    assert titles == ["Losses", "Learning rate", "Acceptance on held-out prompts, bonus counted"]


# -- interruptions -----------------------------------------------------------------------------------------------------

STATES: dict[str, dict[str, Any]] = {
    "computed": {"hidden": {"keep": False}},
    "kept": {"hidden": {"keep": True, "format": "float8"}},
    "harvested": {"hidden": {"keep": True}, "data": {"regenerate": {"max_tokens": 8, "batch": 4}}},
}


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_gone_on_with(run: Run, tmp_path: Path, target: Path, kind: str, states: str) -> None:
    found = recipe(tmp_path / "r.json", kind, **STATES[states], draft={"vocab_size": 40})
    expected = tmp_path / "whole"
    finetune(run, found, "--target", target, "--output", expected)
    arguments = ["finetune", found, "--target", target, "--output", tmp_path / "out"]
    metrics = tmp_path / "out.run" / "metrics.jsonl"
    for round, count in enumerate((1, 4)):
        thread = interrupt_after(metrics, count)
        ran = run(*arguments, *(["--resume"] if round else []))
        thread.join()
        assert ran.code == 130, ran.err
        assert (tmp_path / "out.run" / "hidden").exists() == (states != "computed")
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran.err
    assert_same(tmp_path / "out", expected)


@pytest.mark.parametrize("kind", KINDS)
def test_early_stop_by_acceptance(run: Run, tmp_path: Path, target: Path, kind: str) -> None:
    """Nothing is learnt at a rate of nothing, so no validation is better than the first."""
    values = {"optimiser": {"lr": 1e-12}, "validation": {"every_steps": 1, "patience": 2}}
    found = recipe(tmp_path / "r.json", kind, **values)
    assert finetune(run, found, "--target", target, "--output", tmp_path / "o")["steps"] == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_passes_in_bfloat16_and_steps_that_are_run_again(
    run: Run, make: Callable[..., Path], tmp_path: Path, kind: str, family: str
) -> None:
    """Run again, a step is what it was; in bfloat16 nearly, with weights in float32 all the same."""
    target = make(tiny.deepseek if family == "deepseek_v3" else tiny.llama, seed=1)
    again: dict[str, Any] = {"checkpointing": True}
    losses, weights = {}, {}
    for name, more in {"plain": {}, "again": again, "short": again | {"autocast": "bfloat16"}}.items():
        values = {"data": {"held_out_fraction": 0}, "optimiser": more, "epochs": None, "max_steps": 4}
        found = recipe(tmp_path / "r.json", kind, **values)
        losses[name] = finetune(run, found, "--target", target, "--output", tmp_path / name)["loss"]
        weights[name] = load_file(tmp_path / name / "model.safetensors")
    assert losses["again"] == losses["plain"]
    assert all(torch.equal(weights["again"][part], tensor) for part, tensor in weights["plain"].items())
    assert losses["short"] == pytest.approx(losses["plain"], rel=0.03)
    assert losses["short"] != losses["plain"]
    assert all(tensor.dtype != torch.bfloat16 for tensor in weights["short"].values())


def test_harvested_states_are_those_that_would_be_computed(run: Run, tmp_path: Path, target: Path) -> None:
    """With exact formats the two runs learn the same, up to the order of sums."""
    losses = []
    for name, keep in (("harvested", True), ("computed", False)):
        values = STATES["harvested"] | {"hidden": {"keep": keep}}
        found = recipe(tmp_path / f"{name}.json", "eagle3", **values)
        done = finetune(run, found, "--target", target, "--output", tmp_path / name, "--dtype", "float64")
        losses.append(done["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_a_store_is_found_again_by_another_run_and_refused_for_other_data(
    run: Run, tmp_path: Path, target: Path
) -> None:
    found = recipe(tmp_path / "r.json", "eagle3", hidden={"directory": str(tmp_path / "states")})
    first = finetune(run, found, "--target", target, "--output", tmp_path / "a")
    assert (tmp_path / "states" / "hidden.json").exists()
    again = run("finetune", found, "--target", target, "--output", tmp_path / "b", "--json")
    assert "holds the target's states of 10 examples already" in again.err
    assert json.loads(again.out)["loss"] == first["loss"]
    other = run(
        "finetune", found, "--target", target, "--output", tmp_path / "c", "--set", "data.held_out_fraction=0.4"
    )
    assert other.code == 2
    assert "holds the states of other data" in other.err
    taps = run("finetune", found, "--target", target, "--output", tmp_path / "c", "--set", "draft.taps=[0]")
    assert taps.code == 2
    assert "taps is [0, 1], this run needs [0]" in taps.err


# -- data, vocabulary, starts ------------------------------------------------------------------------------------------


def test_the_first_token_of_an_answer_is_the_targets_own(run: Run, tmp_path: Path, target: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", rows(1))
    labels = {}
    for kind in ("llama", *KINDS):
        dump = tmp_path / f"{kind}.jsonl"
        flags = ["--kind", kind, "--target", target, "--data", data, "--dry-run", "--dump", dump]
        assert run("finetune", *flags).code == 0
        (example,) = (json.loads(line) for line in dump.read_text().splitlines())
        labels[kind] = [label for label in example["labels"] if label >= 0]
    assert labels["llama"] == [*b"ABCD", tiny.END]
    assert labels["mtp"] == labels["eagle3"] == labels["llama"][1:]


def test_a_vocabulary_of_any_size_is_chosen_anew(run: Run, tmp_path: Path, target: Path) -> None:
    ids = {}
    for number, size in enumerate((4, 32, 4)):
        out = tmp_path / str(number)
        found = recipe(tmp_path / "r.json", "eagle3", max_steps=1, epochs=None)
        finetune(run, found, "--target", target, "--output", out, "--draft-vocab-size", size)
        d2t = load_file(out / "model.safetensors")["d2t"]
        ids[number] = (d2t + torch.arange(len(d2t))).tolist()
        assert len(set(ids[number])) == size
        assert tiny.END in ids[number]
    assert ids[0] == ids[2]


@pytest.mark.parametrize("size", ["0", "-1", "4.5", "300"])
def test_a_vocabulary_that_cannot_be_is_refused(run: Run, tmp_path: Path, target: Path, size: str) -> None:
    data = jsonl(tmp_path / "d.jsonl", rows(2))
    flags = ["--kind", "eagle3", "--target", target, "--data", data, "--output", tmp_path / "o"]
    ran = run("finetune", *flags, "--draft-vocab-size", size)
    assert ran.code == 2
    assert "draft-vocab-size" in ran.err or "draft.vocab_size" in ran.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("llama", ["--draft-vocab-size", "40"], "draft.vocab_size means nothing for a draft of kind llama"),
        ("llama", ["--set", "loss.steps=2"], "loss.steps means nothing for a draft of kind llama"),
        ("mtp", ["--set", "draft.width=16"], "draft.width means nothing for a draft of kind mtp"),
        ("mtp", ["--set", "draft.layers=[0, 1]"], "an MTP draft has one"),
        ("llama", ["--set", "loss.feature=1"], "loss.feature means nothing for a draft of kind llama"),
        ("eagle3", ["--set", "loss.feature=-1"], "loss.feature is -1"),
        ("eagle3", ["--set", "draft.taps=[1, 0]"], "expected rising numbers"),
        ("eagle3", ["--set", "draft.taps=[0, 3]"], "draft.taps names tap 3, expected at most 2"),
        ("eagle3", ["--set", "draft.tie=true"], "draft.tie means nothing for a draft of kind eagle3"),
        ("eagle3", ["--set", "hidden={keep: false, format: float8}"], "keep is false"),
    ],
)
def test_what_means_nothing_is_refused(
    run: Run, tmp_path: Path, target: Path, kind: str, more: list[str], said: str
) -> None:
    data = jsonl(tmp_path / "d.jsonl", rows(2))
    ran = run("finetune", "--kind", kind, "--target", target, "--data", data, "--output", tmp_path / "o", *more)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_begins_where_another_ended(run: Run, tmp_path: Path, target: Path, kind: str) -> None:
    values = {"data": {"regenerate": {"max_tokens": 8}}, "epochs": 6, "draft": {"vocab_size": 40}}
    done = finetune(run, recipe(tmp_path / "a.json", kind, **values), "--target", target, "--output", tmp_path / "a")
    more = values | {"draft": {"init": str(tmp_path / "a")}, "epochs": None, "max_steps": 1}
    found = recipe(tmp_path / "b.json", kind, **more, optimiser={"lr": 1e-12})
    finetune(run, found, "--target", target, "--output", tmp_path / "b")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(float((one[name].double() - other[name].double()).abs().max()) < 1e-6 for name in one)
    validated = next(line for line in lines(tmp_path / "b.run" / "metrics.jsonl") if "validation" in line)
    assert validated["step"] == 0
    lengths = [each["mean_acceptance_length"] for each in validated["validation"]]
    assert lengths == pytest.approx([each["mean_acceptance_length"] for each in done["acceptance"]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_not_read_as_it_was_trained_is_refused(
    run: Run, tmp_path: Path, target: Path, kind: str
) -> None:
    """Its last norm turned round, so that what was likeliest is what is least likely."""
    values = {"data": {"regenerate": {"max_tokens": 8}}, "epochs": 6}
    finetune(run, recipe(tmp_path / "a.json", kind, **values), "--target", target, "--output", tmp_path / "a")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    (norm,) = (name for name in weights if name == "norm.weight" or name.endswith("shared_head.norm.weight"))
    save_file(weights | {norm: -weights[norm]}, tmp_path / "a" / "model.safetensors")
    facts = json.loads((tmp_path / "a" / "specctl.json").read_text())
    for each in facts["acceptance"]:  # at another length than is decoded now: what counts is what both have
        each |= {"k": 5, "accepted_per_position": [0.9, 0.8, 0.7, 0.6, 0.5], "mean_acceptance_length": 4.5}
    (tmp_path / "a" / "specctl.json").write_text(json.dumps(facts))
    more = values | {"draft": {"init": str(tmp_path / "a")}, "epochs": None, "max_steps": 1}
    found = recipe(tmp_path / "b.json", kind, **more, validation={"temperatures": [0.0], "k": 2})
    ran = run("finetune", found, "--target", target, "--output", tmp_path / "c")
    assert ran.code == 2
    assert "its specctl.json says 2.70" in ran.err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_can_be_pulled_to_those_they_stand_for(run: Run, tmp_path: Path, target: Path, kind: str) -> None:
    """By nothing else, from kept states: the distance falls, and the rest is told all the same."""
    found = recipe(
        tmp_path / "r.json",
        kind,
        loss={"ce": 0, "kl": 0, "tv": 0, "feature": 1.0},
        hidden={"keep": True},
        data={"held_out_fraction": 0},
        epochs=None,
        max_steps=24,
    )
    done = finetune(run, found, "--target", target, "--output", tmp_path / "o")
    read = lines(tmp_path / "o.run" / "metrics.jsonl")
    assert done["loss"][-1] < 0.7 * done["loss"][0]
    assert [line["ce"] > 0 for line in read] == [True] * 24
    for line, loss in zip(read, done["loss"], strict=True):
        assert line["kl"] == line["tv"] == 0
        assert line["feature"] > 0
        assert line["loss"] == loss


def test_hidden_states_of_another_width_cannot(
    run: Run, make: Callable[..., Path], tmp_path: Path, target: Path
) -> None:
    narrow = make(tiny.llama, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    config, tensors = tiny.read(make(tiny_eagle3.head, of=narrow, taps=(0, 1), embedding=True, target_hidden_size=32))
    tensors["fc.weight"] = torch.zeros(16, 2 * 32)
    head = tiny.write(tmp_path / "head", config, tensors, tokenizer=False)
    data = jsonl(tmp_path / "d.jsonl", rows(4))
    flags = ["--kind", "eagle3", "--target", target, "--init", head, "--data", data, "--max-length", 64]
    flags += ["--output", tmp_path / "o", "--max-steps", 1]
    refused = run("finetune", *flags, "--set", "loss.feature=0.1")
    assert refused.code == 2
    assert f"those of {head} have 16 numbers and those of {target} 32" in refused.err
    assert run("finetune", *flags).code == 0


def test_a_layer_of_the_target_is_where_an_mtp_layer_may_begin(run: Run, tmp_path: Path, target: Path) -> None:
    found = recipe(tmp_path / "r.json", "mtp", epochs=None, max_steps=1, draft={"layers": [1]})
    out = tmp_path / "o"
    finetune(run, found, "--target", target, "--output", out, "--set", "optimiser.lr=1e-12")
    ours, theirs = load_file(out / "model.safetensors"), load_file(target / "model.safetensors")
    for part in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.allclose(ours[f"model.layers.2.{part}"], theirs[f"model.layers.1.{part}"], atol=1e-6)


def test_the_mtp_layer_of_a_deepseek_model_is_trained_further(
    run: Run, make: Callable[..., Path], tmp_path: Path
) -> None:
    target = tiny_mtp.with_mtp(make, "deepseek_v3")
    found = recipe(
        tmp_path / "r.json",
        "mtp",
        data={"regenerate": {"max_tokens": 8}, "max_length": 40},
        draft={"init": str(target)},
        optimiser={"lr": 3e-3},
        epochs=3,
    )
    done = finetune(run, found, "--target", target, "--output", tmp_path / "o")
    assert done["loss"][-1] < done["loss"][0]
    inspected = run("inspect", tmp_path / "o", "--json")
    assert inspected.code == 0, inspected.out + inspected.err


def test_plan_tells_what_states_take(run: Run, tmp_path: Path, target: Path) -> None:
    found = recipe(tmp_path / "r.json", "eagle3", hidden={"keep": True, "format": "bfloat16"})
    flags = ["--target", target, "--output", tmp_path / "o", "--plan", "--draft-vocab-size", 40]
    plan = finetune(run, found, *flags)["plan"]
    width, taps = 32, 2
    tokens = plan["tokens"] // plan["epochs"]
    assert plan["disk"]["hidden states"] == (tokens - 10) * (1 + taps) * width * 2
    assert plan["memory"]["optimiser"] == 2 * plan["memory"]["gradients"]
    assert plan["memory"]["target"] > 0
