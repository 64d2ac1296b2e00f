"""Every command on a pair whose draft is an MTP layer: the one inside the target, and one in a directory of its own."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_mtp
import torch
import yaml
from conftest import Run
from fixtures import Make
from serving import Launcher

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.drafts.head import HeadDrafter

HELLO = "256,104,101,108,108,111"
TEXTS = ("abcabc", "the cat the", "12 21 12")
GATES = "compatible: {}\ngreedy_exact: {prompts: 2}\ndistribution: {samples: 200}\ndraft_cache: {}\n"


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def target(make: Make, family: str) -> Path:
    return make(tiny_mtp.mtp, of=small(make, family, torch.float64))


@pytest.fixture(scope="module")
def alone(make: Make, family: str) -> Path:
    return make(tiny_mtp.mtp, of=small(make, family, torch.float64), alone="sglang")


def small(make: Make, family: str, dtype: torch.dtype) -> Path:
    if family == "llama":
        return make(tiny.llama, seed=1, num_hidden_layers=1, dtype=dtype)
    return make(tiny.deepseek, seed=1, num_hidden_layers=1, first_k_dense_replace=0, dtype=dtype)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def answer(run: Run, *arguments: Any) -> dict[str, Any]:
    done = run("generate", "--token-ids", HELLO, "--max-tokens", 30, "--ignore-eos", *arguments, "--json")
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


def policy(path: Path, k: int, at_k0: str, of: Path) -> Path:
    digest = tensors_sha(Checkpoint(of))
    path.write_text(
        "schema: specctl.policy/1\ntarget: {digest: null}\naccept: {method: exact}\n"
        f"draft: {{kind: mtp, digest: {digest}}}\nat_k0: {at_k0}\n"
        f"k: [{{batch: [1, null], context: [1, 12], k: {k}}}, {{batch: [1, null], context: [13, null], k: 2}}]\n"
    )
    return path


def test_generate(run: Run, target: Path, alone: Path) -> None:
    expected = answer(run, "--target", target)["results"][0]["token_ids"]
    for draft in ("mtp", alone):
        for k in (0, 1, 3):
            report = answer(run, "--target", target, "--draft", draft, "--k", k)
            assert report["results"][0]["token_ids"] == expected
            assert bool(report["speculation"]["num_drafts"]) == bool(k)
    report = answer(run, "--target", target, "--draft", "mtp")
    assert report["effective"]["draft_length"] == 1
    assert report["speculation"]["num_accepted_tokens"] > 0


@pytest.mark.parametrize(("at_k0", "drafts"), [("follow", True), ("detach", False)])
def test_a_policy_says_what_happens_at_k_0(
    run: Run, target: Path, alone: Path, tmp_path: Path, at_k0: str, drafts: bool
) -> None:
    file = policy(tmp_path / "policy.yaml", 0, at_k0, of=target)
    report = answer(run, "--target", target, "--draft", "mtp", "--policy", file)
    assert bool(report["speculation"]["num_drafts"]) == drafts
    other = policy(tmp_path / "other.yaml", 0, at_k0, of=alone)
    done = run("generate", "--target", target, "--draft", "mtp", "--policy", other, "--token-ids", HELLO)
    assert done.code == 2
    assert "was made for a draft with tensors_sha" in done.err


def test_bench(run: Run, target: Path, alone: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    flags = ["--repeats", 1, "--max-tokens", 6, "--dtype", "float64", "--ignore-eos", "--anatomy", "--sweep-k", "1,2"]
    drafts = ["--draft", "mtp", "--draft", alone, "--baseline", "transformers"]
    done = run("bench", "--target", target, *drafts, "--prompts", prompts, "--output", output, *flags)
    assert done.code == 0, done.err
    assert "transformers does not assist with mtp" in done.err
    report = json.loads(output.read_text())
    measured = [c for c in report["comparisons"] if c["against"] == "plain"]
    assert [c["run"] for c in measured] == ["mtp k=1", "mtp k=2", "model k=1", "model k=2"]
    assert all(c["identical"] and min(c["c"], c["v"], c["u"]) > 0 for c in measured)
    assert measured[0]["u"] != measured[1]["u"]  # two rows and three


def test_profile_and_tune(run: Run, target: Path, prompts: Path, tmp_path: Path) -> None:
    found, chosen = tmp_path / "P.yaml", tmp_path / "Y.yaml"
    grid = ["--batches", "1,2", "--contexts", "20", "--repeats", 3]
    done = run("profile", "--target", target, "--draft", "mtp", "--output", found, *grid)
    assert done.code == 0, done.err
    profile = yaml.safe_load(found.read_text())
    assert profile["drafter"]["kind"] == "mtp"
    assert {(cell["batch"], cell["q"]) for cell in profile["draft_follow"]} == {
        (batch, q) for batch in (1, 2) for q in range(1, 10)
    }
    pair = ["--target", target, "--draft", "mtp", "--prompts", prompts, "--max-tokens", 6, "--k-max", 3]
    done = run("tune", "--profile", found, *pair, "--output", chosen)
    assert done.code == 0, done.err
    policy = yaml.safe_load(chosen.read_text())
    assert policy["draft"]["kind"] == "mtp"
    assert policy["at_k0"] in ("follow", "detach")
    report = answer(run, "--target", target, "--draft", "mtp", "--policy", chosen)
    assert report["effective"]["policy"] == str(chosen)


def test_validate(run: Run, target: Path, alone: Path, prompts: Path, tmp_path: Path) -> None:
    gates = tmp_path / "gates.yaml"
    gates.write_text(GATES)
    for draft in ("mtp", alone):
        for sampling in ([], ["--temperature", 1, "--batch", 2]):
            flags = ["--gates", gates, "--max-tokens", 8, "--k", 2, *sampling]
            done = run("validate", "--target", target, "--draft", draft, "--prompts", prompts, *flags)
            assert done.code == 0, done.out + done.err


def test_validate_finds_a_broken_cache(
    run: Run, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafted hidden states stay where the target's should have come: nothing but acceptance falls."""
    right = HeadDrafter.catch_up

    def wrong(self: HeadDrafter, rows: Any, hidden: Any, carry: Any) -> None:
        engines_own = len(carry.fed_LD) > 1
        if engines_own and hidden is not None and len(rows.token_T) == 3 * rows.num_sequences:
            hidden.final_TD[1::3] = 0.5
        right(self, rows, hidden, carry)

    monkeypatch.setattr(HeadDrafter, "catch_up", wrong)
    gates = tmp_path / "gates.yaml"
    gates.write_text("draft_cache: {}\ngreedy_exact: {}\n")
    flags = ["--gates", gates, "--max-tokens", 8, "--k", 2]
    done = run("validate", "--target", target, "--draft", "mtp", "--prompts", prompts, *flags)
    assert done.code == 1
    assert "draft_cache" in done.err
    assert "greedy_exact (fail)" not in done.err


def test_serve(launcher: Launcher, target: Path, prompts: Path) -> None:
    """Proven before the port opens, and then for several at once what it is for one."""
    flags = ["--draft", "mtp", "--k", 2, "--batch", 4, "--dtype", "float64", "--verify", prompts, "--max-tokens", 6]
    with launcher.serve(target, *flags) as server, server.client() as client:

        def ask(number: int) -> str:
            words = client.completions.create(model=server.model, prompt=TEXTS[number % 3], max_tokens=12)
            return words.choices[0].text

        alone = [ask(number) for number in range(3)]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(12))) == alone * 4
    assert "the text is the same" in server.log


def test_a_pair_that_does_not_fit_fails_its_gate(run: Run, make: Make, prompts: Path, tmp_path: Path) -> None:
    base = make(tiny.llama, seed=1, num_hidden_layers=1, dtype=torch.float64)
    wide = make(tiny.llama, seed=1, num_hidden_layers=1, hidden_size=48, head_dim=8, dtype=torch.float64)
    gates = tmp_path / "gates.yaml"
    gates.write_text("compatible: {}\n")
    for draft, said in (
        ("mtp", "num_nextn_predict_layers is 0 or absent"),
        (make(tiny_mtp.mtp, of=wide, alone="deepseek"), "tensor model.layers.1.enorm.weight has shape [48]"),
    ):
        done = run("validate", "--target", base, "--draft", draft, "--prompts", prompts, "--gates", gates)
        assert done.code == 1, done.err
        assert said in done.out


@pytest.fixture(scope="module")
def stored(make: Make, family: str) -> tuple[Path, Path]:
    """Target and layer, in numbers that checkpoints of either family come in."""
    base = small(make, family, torch.float32)
    return make(tiny_mtp.mtp, of=base), make(tiny_mtp.mtp, of=base, alone="sglang")


def test_inspect(run: Run, family: str, stored: tuple[Path, Path]) -> None:
    target, alone = stored
    ran = run("inspect", target, "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["servable"]
    mtp = found["mtp"]
    assert (mtp["family"], mtp["role"], mtp["claimed"], mtp["found"]) == (family, "target with MTP", 1, [1])
    assert (mtp["dialect"], mtp["convertible"]) == ("deepseek", family == "deepseek_v3")
    assert mtp["layers"][0]["copies"] == {"embed_tokens.weight": "absent", "shared_head.head.weight": "absent"}
    assert "can be served; its MTP layer is whole" in run("inspect", target).out
    ran = run("inspect", alone, "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert (found["servable"], found["model"]) == (False, None)
    assert (found["mtp"]["role"], found["mtp"]["found"], found["mtp"]["dialect"]) == ("MTP head", [0], "sglang")


def test_inspect_of_a_layer_that_is_not_right(run: Run, stored: tuple[Path, Path], tmp_path: Path) -> None:
    target, alone = stored
    for number, (of, name, said) in enumerate(
        [
            (target, "model.layers.1.hnorm.weight", "hnorm.weight is missing"),
            (alone, "model.layers.0.shared_head.norm.weight", "shared_head.norm.weight is missing"),
        ]
    ):
        config, tensors = tiny.read(of)
        del tensors[name]
        ran = run("inspect", tiny.write(tmp_path / str(number), config, tensors))
        assert ran.code == 2
        assert said in ran.out
    config, tensors = tiny.read(target)
    lost = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    ran = run("inspect", tiny.write(tmp_path / "lost", config, lost))
    assert ran.code == 2
    assert "config.json claims 1 MTP layer, and no tensor of any is there" in ran.out
    ran = run("inspect", tiny.write(tmp_path / "unclaimed", config | {"num_nextn_predict_layers": 0}, tensors))
    assert ran.code == 2
    assert "layer 1 is an MTP layer, but num_nextn_predict_layers is 0 or absent" in ran.out
