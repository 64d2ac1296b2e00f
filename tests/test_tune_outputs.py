"""What specctl tune writes besides the policy: files for other engines, reports, and answers to what-if."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Run
from handmade import cell, profile, trace, write_json, write_yaml
from shapes import LLAMA_1B, LLAMA_8B
from tuning import TU1, Tune, told, tuner

from specctl.schemas.policy import read_policy
from specctl.schemas.profile import Profile
from specctl.tune.plots import parts
from specctl.tune.run import run_tune

PNG = b"\x89PNG\r\n\x1a\n"

# Three tokens alone, one in company, none in a crowd.
FALLING = profile({1: [10, 10.1, 10.2, 10.3], 8: [12, 13.5, 18, 24], 32: [14, 30, 45, 60]}, {1: 0.1, 8: 0.5, 32: 2.0})
EAGLE = {"kind": "eagle3", "digest": None, "max_k": None}


@pytest.fixture
def tune(run: Run, tmp_path: Path) -> Tune:
    return tuner(run, tmp_path)


def engines(tune: Tune, tmp_path: Path, kind: str | None, *more: object, steps: Any = FALLING) -> tuple[Path, Any]:
    out = tmp_path / f"engines-{kind}-{len(more)}"
    drafter = {"kind": kind, "digest": None, "max_k": None}
    value = steps | {"drafter": drafter}
    return out, told(tune(value, 0.7, "--json", "--force", "--engine-config", out, *more))


# -- engines -----------------------------------------------------------------------------------------------------------


def test_vllm_gets_a_table(tune: Tune, tmp_path: Path) -> None:
    out, value = engines(tune, tmp_path, "eagle3", "--draft-model", "org/head")
    config = json.loads((out / "vllm-speculative-config.json").read_text())
    table = config.pop("num_speculative_tokens_per_batch_size")
    assert config == {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}
    policy = read_policy(tmp_path / "Y.yaml")
    assert table[0][0] == 1
    assert [low for low, _, _ in table[1:]] == [high + 1 for _, high, _ in table[:-1]]
    assert table[-1][1:] == [32, 0]
    for batch in range(1, 33):
        (k,) = (k for low, high, k in table if low <= batch <= high)
        assert k == policy.lookup(batch, 1024).k
    notes = value["engines"]["vLLM"]["notes"]
    assert any("piecewise" in note for note in notes)
    assert any("keeps the draft's cache in step" in note for note in notes)
    assert "vLLM" in (out / "NOTES.md").read_text()


@pytest.mark.parametrize("kind", ["llama", "mtp", "ngram"])
def test_vllm_calls_its_methods_by_name(tune: Tune, tmp_path: Path, kind: str) -> None:
    out, value = engines(tune, tmp_path, kind)
    config = json.loads((out / "vllm-speculative-config.json").read_text())
    assert config["method"] == {"llama": "draft_model", "mtp": "mtp", "ngram": "ngram"}[kind]
    asked = any(note.startswith("model: add") for note in value["engines"]["vLLM"]["notes"])
    assert asked == (kind == "llama")


def test_vllm_takes_what_is_written() -> None:
    """The rules of its own reader, as far as they concern a table: from 1, rising, without overlap."""
    from specctl.tune.outputs.schedule import Schedule, Tier
    from specctl.tune.outputs.vllm import vllm

    tiers = (Tier(1, 1, 0), Tier(2, 7, 3), Tier(8, None, 1))
    made = Schedule(tiers, 1, 4, "mtp", None, 1, 0.0, 1.0, 1.0, ())
    (text,) = vllm(made).files.values()
    assert json.loads(text)["num_speculative_tokens_per_batch_size"] == [[1, 1, 0], [2, 7, 3], [8, 8, 1]]


def test_data_parallel_engines_get_one_k(tune: Tune, tmp_path: Path) -> None:
    out, value = engines(tune, tmp_path, "eagle3", "--data-parallel", 4)
    config = json.loads((out / "vllm-speculative-config.json").read_text())
    assert "num_speculative_tokens_per_batch_size" not in config
    ways = {way["name"]: way["gain"] for way in value["ways"]}
    k = config["num_speculative_tokens"]
    assert ways[f"fixed K = {k}"] >= 0.995 * max(ways[f"fixed K = {each}"] for each in range(4))
    assert any("vLLM drops a table of K there" in note for note in value["engines"]["vLLM"]["notes"])
    assert not (out / "sglang-adaptive.json").exists()
    assert f"--speculative-num-steps {k} " in (out / "sglang-flags.txt").read_text()


def test_sglang_gets_slots_for_eagle_and_one_k_otherwise(tune: Tune, tmp_path: Path) -> None:
    out, _ = engines(tune, tmp_path, "eagle3")
    slots = json.loads((out / "sglang-adaptive.json").read_text())
    policy = read_policy(tmp_path / "Y.yaml")
    for batch in range(1, 33):
        key = max(int(low) for low in slots if int(low) <= batch)
        assert slots[str(key)] == {"candidate_steps": [policy.lookup(batch, 1024).k]}
    flags = (out / "sglang-flags.txt").read_text()
    assert "--speculative-algorithm EAGLE3 " in flags
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 " in flags
    assert "--speculative-adaptive --speculative-adaptive-config sglang-adaptive.json" in flags
    out, value = engines(tune, tmp_path, "llama")
    flags = (out / "sglang-flags.txt").read_text()
    steps = int(re.search(r"num-steps (\d+)", flags)[1])  # type: ignore[index]
    assert f"STANDALONE --speculative-num-steps {steps} " in flags
    assert flags.endswith(f"--speculative-num-draft-tokens {steps + 1}\n")
    assert any("K does not follow the batch of STANDALONE" in n for n in value["engines"]["SGLang"]["notes"])


def test_tensorrt_gets_one_k_and_a_bound(tune: Tune, tmp_path: Path) -> None:
    out, value = engines(tune, tmp_path, "eagle3")
    (config,) = yaml.safe_load((out / "tensorrt-llm.yaml").read_text()).values()
    policy = read_policy(tmp_path / "Y.yaml")
    assert config["decoding_type"] == "Eagle3"
    assert config["max_concurrency"] == policy.k[-1].batch[0] - 1
    assert any("draft_len_schedule" in note for note in value["engines"]["TensorRT-LLM"]["notes"])
    out, _ = engines(tune, tmp_path, "mtp")
    (config,) = yaml.safe_load((out / "tensorrt-llm.yaml").read_text()).values()
    assert config["num_nextn_predict_layers"] == config["max_draft_len"]


def test_where_nothing_pays_engines_get_no_file(tune: Tune, tmp_path: Path) -> None:
    out, value = engines(tune, tmp_path, "eagle3", steps=profile({1: [10, 30]}, {1: 1.0}))
    assert [path.name for path in out.iterdir()] == ["NOTES.md"]
    assert all("does not pay" in engine["notes"][0] for engine in value["engines"].values())


def test_what_an_engine_cannot_say_is_said(tune: Tune, tmp_path: Path) -> None:
    """Contexts that want other lengths, in a table that has none."""
    value = profile({1: [10, 10.1, 10.2], 8: [12, 20, 28]}, {1: 0.5, 8: 0.5}, context=100)
    value["steps"] += [cell(b, q, 100.0 + q, 10000) for b in (1, 8) for q in (1, 2, 3)]
    _, found = engines(tune, tmp_path, "eagle3", steps=value)
    assert any("no contexts in its" in note for note in found["engines"]["vLLM"]["notes"])


# -- reports -----------------------------------------------------------------------------------------------------------


def test_the_report_is_one_page_with_its_pictures(tune: Tune, tmp_path: Path) -> None:
    page, plain = tmp_path / "R.html", tmp_path / "R.md"
    ran = tune(FALLING, trace([[3, 2, 2, 3], [1, 1, 1, 7]] * 8), "--report", page, "--report", plain)
    assert ran.code == 0, ran.err
    html, text = page.read_text(), plain.read_text()
    pictures = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", html)]
    assert len(pictures) == 4  # one context: no map of batch and context
    assert all(data.startswith(PNG) for data in pictures)
    for address in re.findall(r"(?:src|href)=\"([^\"]{0,12})", html):
        assert address.startswith("data:image/")
    policy = read_policy(tmp_path / "Y.yaml")
    for part in (html, text):
        assert "Draft lengths for m on an abacus" in part
        assert "Where every number comes from" in part
        assert "T.json: 160 drafts in 16 requests" in part
        assert "15 measured" in part  # cells by source
        assert "i.i.d. formula" in part
        assert "specctl tune" in part or "command" in part
    assert f"| 1 - {policy.k[0].batch[1]} | all | 3 |" in text


WHOLE = profile({1: [10, 16, 18, 20], 8: [12, 36, 48, 60]}, whole_steps=True)


def test_a_step_timed_from_outside_is_not_taken_for_the_targets_pass(tune: Tune, tmp_path: Path) -> None:
    """Of the 20 ms of K = 3 alone 10 are a plain step's and 10 more are the draft's, the engine's and wider passes'."""
    ran = tune(WHOLE, 0.9, "--json", "--report", tmp_path / "R.html")
    places = told(ran)["places"]
    assert [place["k"] for place in places] == [3, 0]
    assert {(place["c"], place["u"]) for place in places} == {(None, None)}
    assert {each["v"] for place in places for each in place["candidates"]} == {None}
    assert "as wholes: how much longer one with a draft takes is known" in (tmp_path / "R.html").read_text()
    shown = tune(WHOLE, 0.9, "--force")
    assert "plain step 10.00 ms, steps are whole (no c, v, u)" in shown.out


@pytest.mark.parametrize(
    ("value", "alone", "named"),
    [
        (WHOLE, [10, 10], ["as long as a plain step", "longer, for drafting and checking"]),
        (profile({1: [10, 11, 12, 13]}, {1: 2.0}), [13, 6, 0], ["target's pass", "draft's passes", "engine"]),
    ],
)
def test_where_the_time_goes(value: dict[str, Any], alone: list[float], named: list[str]) -> None:
    tuning = run_tune(Profile.model_validate(value), "P", 0.9, "0.9")
    decision = tuning.decisions[0]
    tokens = 1 + 0.9 + 0.81 + 0.729
    found = parts(decision, 3, tuning.of.whole_steps)
    assert list(found) == named
    assert list(found.values()) == pytest.approx([ms / tokens for ms in alone])
    assert next(iter(parts(decision, 0, tuning.of.whole_steps).values())) == pytest.approx(10)


def test_a_map_is_drawn_where_there_are_contexts(tune: Tune, tmp_path: Path) -> None:
    value = profile({1: [10, 10.1, 10.2], 8: [12, 20, 28]}, {1: 0.5, 8: 0.5}, context=100)
    value["steps"] += [cell(b, q, 100.0 + q, 10000) for b in (1, 8) for q in (1, 2, 3)]
    assert tune(value, 0.6, "--report", tmp_path / "R.html").code == 0
    assert (tmp_path / "R.html").read_text().count("data:image/png") == 5


def test_a_report_that_advises_against(tune: Tune, tmp_path: Path) -> None:
    assert tune(profile({1: [10, 30]}, {1: 2.0}), 0.5, "--report", tmp_path / "R.md").code == 0
    text = (tmp_path / "R.md").read_text()
    assert "Do not speculate" in text
    assert "1.00 x" in text


def test_nothing_is_replaced_and_nothing_half_written(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "R.html").write_text("mine")
    assert tune(FALLING, 0.7, "--report", tmp_path / "R.html").code == 2
    assert (tmp_path / "R.html").read_text() == "mine"
    assert not (tmp_path / "Y.yaml").exists()
    assert tune(FALLING, 0.7, "--report", tmp_path / "Y.yaml").code == 2
    assert tune(FALLING, 0.7, "--report", tmp_path / "Z.md", "--report", tmp_path / "Z.md").code == 2


# -- what if -----------------------------------------------------------------------------------------------------------


def test_what_if_acceptance_were_higher(run: Run, tune: Tune, tmp_path: Path) -> None:
    value = told(tune(FALLING, 0.6, "--json", "--what-if", "acceptance=+20%"))
    then = {place["batch"]: place for place in value["what_if"]["places"]}
    other = told(tune(FALLING, 0.72, "--json", "--force"))
    for place in other["places"]:
        assert then[place["batch"]]["then"]["k"] == place["k"]
        assert then[place["batch"]]["then"]["speedup"][1] == pytest.approx(place["speedup"][1])
        assert then[place["batch"]]["now"]["speedup"][1] <= place["speedup"][1] + 1e-9
    assert value["policy"]["k"] != value["what_if"]["policy"]["k"]


def test_what_if_the_draft_were_faster_or_the_engine_slower(tune: Tune) -> None:
    base = profile({1: [10, 12, 14]}, {1: 2.0}, overheads_ms={"base": 1.0, "spec": 1.0, "per_draft_step": 0.5})
    value = told(tune(base, 0.5, "--json", "--what-if", "draft=-50%,overhead=+100%"))
    (place,) = value["what_if"]["places"]
    assert (place["now"]["k"], place["then"]["k"]) == (1, 1)
    assert place["now"]["tpot_ms"] == pytest.approx((12 + 1 + 2 + 0.5) / 1.5)
    assert place["then"]["tpot_ms"] == pytest.approx((12 + 2 + 1 + 1) / 1.5)


def test_what_if_answers_without_a_policy(run: Run, tune: Tune, tmp_path: Path) -> None:
    tune(TU1, 0.8)
    before = sorted(tmp_path.iterdir())
    ran = run("tune", "--profile", tmp_path / "P.yaml", "--acceptance", 0.8, "--what-if", "acceptance=-50%")
    assert ran.code == 0, ran.err
    assert "what if acceptance=-50%" in ran.out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acceptance=10%", "cannot read 'acceptance=10%'"),
        ("acceptance=+10", "cannot read"),
        ("acceptanc=+10%", "cannot read"),
        ("tp=0", "cannot read"),
        ("draft=-100%", "cannot read"),
        ("draft=+1%,draft=+2%", "names draft twice"),
        ("tp=4", "P.yaml has steps of its own, taken at tp 1; another tp is known only where steps are computed"),
    ],
)
def test_a_what_if_that_cannot_be_answered(tune: Tune, text: str, said: str) -> None:
    ran = tune(TU1, 0.8, "--what-if", text)
    assert ran.code == 2
    assert said in ran.err


def test_no_policy_and_no_question(run: Run, tune: Tune, tmp_path: Path) -> None:
    tune(TU1, 0.8)
    ran = run("tune", "--profile", tmp_path / "P.yaml", "--acceptance", 0.8)
    assert ran.code == 2
    assert "--output is missing" in ran.err


def test_no_model_library_is_loaded(tune: Tune, tmp_path: Path) -> None:
    tune(TU1, trace([[1, 9]]))
    program = (
        "import sys; from specctl.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules and 9))"
    )
    files = ("--profile", tmp_path / "P.yaml", "--acceptance", tmp_path / "T.json", "--output", tmp_path / "Z.yaml")
    more = ("--report", tmp_path / "Z.html", "--engine-config", tmp_path / "E")
    ran = subprocess.run(
        [sys.executable, "-c", program, "tune", *map(str, (*files, *more))], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


PRODUCT = {"bandwidth": 0.8, "flops": 0.7, "start_us": 4.0, "tile": 64, "norm": 2.5}
ATTENTION = {"bandwidth": 0.8, "flops": 0.5, "start_us": 10.0}
CONSTANTS = {
    "schema": "specctl.roofline/1",
    "hardware": "a wheel",
    "sources": [{"numbers": "all", "what": "made up"}],
    "roofline": {
        "peaks": {"memory_gb": 24.0, "memory_gbps": 3000.0, "bf16_tflops": 900.0, "link_gbps": 400.0},
        "lanes": {
            "vllm": {
                "version": "1",
                "scheduling": "mixed",
                "chunk": 8192,
                "products": {"bf16": PRODUCT},
                "attention": {"bf16": ATTENTION},
                "latent": ATTENTION,
                "experts": PRODUCT,
                "all_reduce": [
                    {"devices": 2, "start_us": 4.0, "small_gbps": 100.0, "switch_us": 5.0, "gbps": 200.0},
                ],
                "across_us": 0.0,
                "elementwise": {"calls": 3, "start_us": 3.0, "bandwidth": 0.8},
                "overheads_ms": {"base": 0.5, "spec": 1.0, "per_draft_step": 0.2, "tree": None},
            }
        },
        "memory_share": 0.9,
        "reserve_gb": 1.0,
        "dense": {"step": 0.1, "shared": 0.09},
        "experts": {"step": 0.2, "shared": 0.1},
    },
}


def test_what_if_there_were_more_devices(run: Run, tmp_path: Path) -> None:
    """Computed steps can be computed for another tp; and the draft takes room that caches could have."""
    file = write_yaml(tmp_path / "C.yaml", CONSTANTS)
    for name, config in (("target", LLAMA_8B), ("draft", LLAMA_1B)):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", config)
    models = ("--model-config", tmp_path / "target", "--draft-config", tmp_path / "draft")
    common = ("tune", "--profile", file, *models, "--acceptance", 0.7)
    ran = run(*common, "--what-if", "tp=2", "--json", "--engine-config", tmp_path / "E")
    value = told(ran)
    places = value["what_if"]["places"]
    assert all(place["then"]["tpot_ms"] < place["now"]["tpot_ms"] for place in places)
    two = told(run(*common, "--tp", 2, "--json", "--output", tmp_path / "Y.yaml"))
    there = {(place["batch"], place["context"]): place["k"] for place in two["places"]}
    assert all(there[place["batch"], place["context"]] == place["then"]["k"] for place in places)
    (notice,) = (notice for notice in value["notices"] if "weights and caches are charged" in notice)
    few, many = map(int, re.search(r"is (\d+) in place of (\d+)", notice).groups())  # type: ignore[union-attr]
    assert few < many
    assert json.loads((tmp_path / "E" / "vllm-speculative-config.json").read_text())["model"] == str(tmp_path / "draft")
    refused = run(*common, "--what-if", "tp=3")
    assert refused.code == 2
    assert "--tp 3: does not divide" in refused.err
