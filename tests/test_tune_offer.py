"""specctl tune on a model of which only the config.json is there: through the command line, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, Run
from handmade import write_json, write_yaml
from shapes import DEEPSEEK_V3, LLAMA_1B, LLAMA_8B, LLAMA_70B
from tuning import TU1

from specctl.options import Offer
from specctl.roofline.grid import batches_with_edges
from specctl.roofline.offer import profile_for
from specctl.roofline.reading import as_read
from specctl.schemas.policy import read_policy
from specctl.schemas.profile import Constants, Profile, read_either, read_profile
from specctl.shipped import shipped
from specctl.tune.costs import StepCosts

TINY = LLAMA_8B | {"num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 4096}


def model(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    return directory


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Any:
    def command(config: dict[str, Any] | None, *more: object, acceptance: object = 0.8) -> Ran:
        named = [] if config is None else ["--model-config", model(tmp_path / "model", config)]
        output = ["--output", tmp_path / "Y.yaml"]
        return run("tune", "--profile", "h100-sxm", *named, "--acceptance", acceptance, *output, *more)

    return command


def offered(tmp_path: Path, config: dict[str, Any], name: str = "h100-sxm", **offer: Any) -> Profile:
    constants = read_either(shipped("profiles") / f"{name}.yaml")
    assert isinstance(constants, Constants)
    return profile_for(constants, f"{name}.yaml", Offer(str(model(tmp_path / "model", config)), **offer))


# -- through the command line ------------------------------------------------------------------------------------------


def test_a_config_is_all_it_takes(tune: Any, tmp_path: Path) -> None:
    ran = tune(LLAMA_70B, "--tp", 8, "--draft-config", model(tmp_path / "draft", LLAMA_1B), "--json")
    assert ran.code == 0, ran.err
    policy = read_policy(tmp_path / "Y.yaml")
    assert policy.draft.kind == "llama"
    assert policy.lookup(1, 1000).k > 0
    assert policy.lookup(1, 1000).k >= policy.lookup(256, 1000).k
    assert json.loads(ran.out)["policy"]["target"]["name"] == "model"
    assert "caches have room for" in ran.err


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (LLAMA_8B, ["--draft-config", "eagle3", "--engine", "sglang"]),
        (LLAMA_8B, ["--quantisation", "fp8", "--kv-dtype", "fp8", "--engine", "trtllm"]),
        (DEEPSEEK_V3, ["--tp", "16", "--ep", "16", "--draft-config", "mtp", "--engine", "sglang"]),
    ],
)
def test_every_kind_of_draft_and_engine(tune: Any, tmp_path: Path, config: dict[str, Any], flags: list[str]) -> None:
    ran = tune(config, *flags)
    assert ran.code == 0, ran.err
    assert read_policy(tmp_path / "Y.yaml").lookup(1, 1000).k > 0


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        (None, [], "h100-sxm.yaml: has constants and no cells; name whose steps to compute with --model-config"),
        (TINY, ["--tp", 3], "--tp 3: does not divide num_attention_heads 32"),
        (TINY, ["--tp", 12], "--tp 12: is no multiple of num_key_value_heads 8"),
        (TINY, ["--ep", 2, "--tp", 2], "--ep 2: "),
        (DEEPSEEK_V3, ["--tp", 16, "--ep", 3], "--ep 3: has to divide --tp 16 and the 256 experts"),
        (DEEPSEEK_V3, ["--tp", 8], "takes 84 GB of weights on each device"),
        (TINY, ["--tp", 16, "--nodes", 1], "--nodes 1: --tp 16 cannot stand in them evenly"),
        (TINY, ["--engine", "tgi"], "--engine tgi: "),
        (TINY, ["--draft-config", "mtp"], "has no num_nextn_predict_layers, so no MTP layer"),
        (DEEPSEEK_V3, ["--tp", 16, "--draft-config", "eagle3"], "has latent attention"),
        (TINY | {"model_type": "rwkv"}, [], "model_type is 'rwkv', whose passes are not known here"),
        ({k: v for k, v in TINY.items() if k != "vocab_size"}, [], "key vocab_size is missing"),
        (TINY | {"quantization_config": {"quant_method": "awq"}}, [], "quantization_config names 'awq'"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    tune: Any, tmp_path: Path, config: dict[str, Any] | None, flags: list[object], said: str
) -> None:
    ran = tune(config, *flags)
    assert ran.code == (3 if "weights on each" in said else 2), ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "Y.yaml").exists()


def test_a_device_without_eight_bits(run: Run, tmp_path: Path) -> None:
    where = model(tmp_path / "model", TINY)
    common = ["--profile", "a100-sxm", "--model-config", where, "--acceptance", 0.5, "--output", tmp_path / "Y.yaml"]
    assert "has no constants for weights in fp8" in run("tune", *common, "--quantisation", "fp8").err
    assert "has no constants for caches in fp8" in run("tune", *common, "--kv-dtype", "fp8").err
    assert run("tune", *common).code == 0


def test_a_draft_of_another_vocabulary_is_refused(tune: Any, tmp_path: Path) -> None:
    other = model(tmp_path / "draft", TINY | {"vocab_size": 5000})
    ran = tune(TINY, "--draft-config", other)
    assert ran.code == 2
    assert "vocab_size 5000 is not the target's 1024" in ran.err


def test_cells_of_a_file_are_of_its_own_model(run: Run, tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "P.yaml", TU1)
    ran = run("tune", "--profile", file, "--tp", 2, "--acceptance", 0.5, "--output", tmp_path / "Y.yaml")
    assert ran.code == 2
    assert f"--tp: {file} has measured or interpolated steps of its own model" in ran.err


def test_a_misspelt_name_is_met_with_the_nearest(run: Run, tmp_path: Path) -> None:
    ran = run("tune", "--profile", "h100-smx", "--acceptance", 0.5, "--output", tmp_path / "Y.yaml")
    assert ran.code == 2
    assert "h100-sxm" in ran.err


# -- the profile -------------------------------------------------------------------------------------------------------


def test_an_offer_is_a_profile_like_any_other(tmp_path: Path) -> None:
    """Written and read again it is the same, and as it is read it is monotone."""
    found = offered(tmp_path, LLAMA_8B, draft_config="eagle3", engine="sglang")
    file = write_yaml(tmp_path / "P.yaml", found.model_dump(mode="json", by_alias=True))
    assert read_profile(file) == found
    assert {each.source for each in found.steps} == {"roofline"}
    assert found.roofline is not None
    assert list(found.roofline.lanes) == ["sglang"]
    doubt = found.roofline.dense
    assert all(each.spread == pytest.approx(each.ms * doubt.step) for each in found.steps)
    assert found.shared_spread == doubt.shared
    costs = StepCosts(as_read(found), "P.yaml")
    assert costs.max_k == 8
    assert {each.batch for each in found.steps} == set(batches_with_edges())


def test_what_does_not_fit_has_no_cell_and_is_said(tmp_path: Path) -> None:
    found = offered(tmp_path, LLAMA_70B, tp=4)
    long = {each.batch for each in found.steps if each.context == 8192}
    short = {each.batch for each in found.steps if each.context == 512}
    assert max(long) < max(short)
    assert any("no cells where caches do not fit" in note for note in found.notes)
    wide = offered(tmp_path, LLAMA_70B, tp=8, quantisation="fp8", kv_dtype="fp8")
    assert len(wide.steps) > len(found.steps)


def test_a_draft_takes_room(tmp_path: Path) -> None:
    draft = str(model(tmp_path / "draft", LLAMA_1B))
    alone, beside = (offered(tmp_path, LLAMA_70B, tp=4, draft_config=each) for each in (None, draft))
    assert len(beside.steps) <= len(alone.steps)
    assert beside.notes[0] != alone.notes[0]


def test_drafts_follow_as_they_must(tmp_path: Path) -> None:
    """One that reads hidden states follows every step over all its rows, one that reads tokens a block over two."""
    head = offered(tmp_path, LLAMA_8B, draft_config="eagle3")
    assert {each.q for each in head.draft_follow} == set(range(1, 10))
    small = offered(tmp_path, LLAMA_8B, draft_config=str(model(tmp_path / "draft", LLAMA_1B)))
    assert {each.q for each in small.draft_follow} == {2}
    assert {each.q for each in small.draft} == {1}
    assert all(each.draft_ms for each in small.prefill)


def test_an_edge_shows_in_eight_bits(tmp_path: Path) -> None:
    """129 rows take another tile than 128 (vLLM and SGLang), which is what the grid has both sides for."""
    found = offered(tmp_path, LLAMA_70B, tp=8, quantisation="fp8", kv_dtype="fp8")
    ms = {each.place: each.ms for each in found.steps}
    gentle = ms[128, 1, 512] / ms[65, 1, 512]
    assert ms[129, 1, 512] / ms[128, 1, 512] > 1 + (gentle - 1) / 10
