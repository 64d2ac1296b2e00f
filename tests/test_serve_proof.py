"""--verify: what is measured before the port opens, where it is shown, and what comes of a speed-up that is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Run
from fixtures import Make
from serving import Launcher, scrape

from specctl.options import DecodingOptions, ModelOptions
from specctl.schemas.report import Comparison, NearTie
from specctl.serve.proof import problem_of
from specctl.serve.server import ServeOptions, open_serving

FOUND = re.compile(r"measured speed-up (\d+\.\d\d) \(95 % (\d+\.\d\d) to (\d+\.\d\d)\) on 2 prompts")


@pytest.fixture
def target(make: Make) -> Path:
    return make(tiny.table, rows=tiny.chain("xABCDEFGH"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}\n')
    return file


def test_the_speed_up_is_printed_and_exposed(launcher: Launcher, target: Path, prompts: Path) -> None:
    with launcher.serve(target, "--draft", target, "--verify", prompts, "--min-speedup", 0.001) as server:
        *said, serving = server.log.splitlines()
        assert serving.startswith("serving ")
        (found,) = (match for line in said if (match := FOUND.search(line)))
        assert "the text is the same" in found.string
        status, models = server.ask("GET", "/v1/models")
        assert status == 200
        proof = models["data"][0]["measured_speedup"]
        assert [f"{value:.2f}" for value in (proof["speedup"], *proof["ci95"])] == list(found.groups())
        assert (proof["same_text"], proof["prompts"], proof["batch"]) == (True, 2, 1)
        metrics = server.metrics()
        assert metrics["specctl:measured_speedup"] == proof["speedup"]
        assert metrics["specctl:speculation_enabled"] == 1
        # What was measured is not what was served.
        assert metrics["specctl:generation_tokens_total"] == 0
        assert server.complete("x", max_tokens=20)["usage"]["speculation"]["acceptance_rate"] == 1


def test_a_speed_up_that_is_not_reached_is_a_failed_gate(run: Run, target: Path, prompts: Path) -> None:
    arguments = ["--draft", target, "--verify", prompts, "--min-speedup", 1000]
    ran = run("serve", "--target", target, "--port", 0, *arguments)
    *said, error = ran.err.splitlines()
    assert ran.code == 1
    assert error.startswith("Error: --verify: --min-speedup 1000 is not reached; measured speed-up ")
    assert all(line.startswith("verify: ") for line in said)


def test_or_the_server_is_plain(target: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from specctl.prompts import read_prompts

    asked = read_prompts(str(prompts))
    serving = open_serving(
        str(target),
        ModelOptions(),
        DecodingOptions(drafts=("ngram",), batch=4),
        ServeOptions(verify=asked, min_speedup=1000, fallback_plain=True),
    )
    assert capsys.readouterr().err.splitlines()[-1] == "verify: --min-speedup 1000 is not reached; serving plain"
    engine, metrics = serving.worker.engine, scrape(serving.worker.metrics.render().decode())
    assert engine.drafter is None
    assert (metrics["specctl:speculation_enabled"], serving.facts["draft"]) == (0, None)
    measured: Any = serving.facts["measured_speedup"]
    assert metrics["specctl:measured_speedup"] == measured["speedup"] < 1000


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"prompt": "x", "max_tokens": 300}', ["prompt 2", "300"]), ('{"token_ids": [999]}', ["999"])],
)
def test_prompts_that_cannot_be_answered(run: Run, target: Path, tmp_path: Path, line: str, words: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n' + line + "\n")
    ran = run("serve", "--target", target, "--draft", "ngram", "--port", 0, "--verify", file)
    error = ran.err.splitlines()[-1]
    assert ran.code == 2
    assert error.startswith("Error: --verify: ")
    assert all(word in error for word in words)


def compared(speedup: float, identical: bool | None, *near_ties: NearTie) -> Comparison:
    costs: dict[str, Any] = dict.fromkeys(("c", "v", "u", "implied", "efficiency"))
    return Comparison(
        run="ngram k=3",
        against="plain",
        speedup=speedup,
        ci95=[speedup / 2, speedup * 2],
        identical=identical,
        near_ties=list(near_ties),
        **costs,
    )


def test_what_speaks_against_speculation() -> None:
    assert problem_of(compared(0.5, True), None) is None
    assert problem_of(compared(1.2, True), 1.2) is None
    assert problem_of(compared(1.1, True), 1.2) == "--min-speedup 1.2 is not reached"
    # Texts that need not be the same, as of sampling without a common noise.
    assert problem_of(compared(1.3, None), 1.2) is None
    tie, change = NearTie(prompt="7", position=3, gap=1e-5), NearTie(prompt="8", position=5, gap=0.2)
    assert problem_of(compared(1.3, True, tie), 1.2) is None
    # Other texts outweigh any speed-up; differences come with the widest gap first.
    problem = problem_of(compared(9.0, False, change, tie), 1.2)
    assert problem == "the text of prompt 8 changes at token 5 of the answer"


def test_a_proof_without_a_draft_is_none(run: Run, target: Path, tmp_path: Path) -> None:
    """The first token of an answer is never drafted, so nothing is."""
    prompts = tmp_path / "short.jsonl"
    prompts.write_text('{"prompt": "x", "max_tokens": 1}\n')
    arguments = ["--draft", target, "--verify", prompts, "--min-speedup", 0.001]
    ran = run("serve", "--target", target, "--port", 0, *arguments)
    assert ran.code == 1
    assert "nothing was drafted on these prompts, so nothing is proven" in ran.err
