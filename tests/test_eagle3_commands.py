"""Every command on a pair whose draft is an EAGLE-3 head with a vocabulary of its own."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_eagle3
import torch
from conftest import Run
from fixtures import Make
from serving import Launcher
from tiny_eagle3 import IDS

HELLO = "256,104,101,108,108,111"


def test_commands(run: Run, make: Make, tmp_path: Path) -> None:
    of = make(tiny_eagle3.target, dtype=torch.float64)
    head = make(tiny_eagle3.head, of=of, ids=IDS)
    flags = ["--target", of, "--token-ids", HELLO, "--max-tokens", 20, "--ignore-eos", "--json"]
    plain = json.loads(run("generate", *flags).out)
    done = run("generate", *flags, "--draft", head)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["results"][0]["token_ids"] == plain["results"][0]["token_ids"]
    assert report["effective"]["draft_length"] == 3
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabc", "the cat the")))
    gates = tmp_path / "gates.yaml"
    gates.write_text("compatible: {}\ngreedy_exact: {prompts: 2}\ndistribution: {samples: 200}\ndraft_cache: {}\n")
    more = ["--draft", head, "--prompts", prompts, "--max-tokens", 8]
    done = run("validate", "--target", of, *more, "--gates", gates)
    assert done.code == 0, done.out + done.err
    report_file = tmp_path / "report.json"
    done = run("bench", "--target", of, *more, "--output", report_file, "--repeats", 1, "--dtype", "float64")
    assert done.code == 0, done.err
    found = json.loads(report_file.read_text())
    assert all(each["identical"] for each in found["comparisons"])
    profile = tmp_path / "P.yaml"
    grid = ["--batches", "1", "--contexts", "16", "--repeats", 3]
    done = run("profile", "--target", of, "--draft", head, "--output", profile, *grid)
    assert done.code == 0, done.err
    pair = ["--target", of, "--draft", head, "--prompts", prompts, "--max-tokens", 6, "--k-max", 3]
    done = run("tune", "--profile", profile, *pair, "--output", tmp_path / "Y.yaml")
    assert done.code == 0, done.err


def test_serve(launcher: Launcher, make: Make, tmp_path: Path) -> None:
    """Proven before the port opens."""
    of = make(tiny_eagle3.target, dtype=torch.float64)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabc", "the cat the")))
    head = make(tiny_eagle3.head, of=of, ids=IDS, layout="speculators")
    flags = ["--draft", head, "--k", 2, "--dtype", "float64", "--verify", prompts, "--max-tokens", 6]
    with launcher.serve(of, *flags) as server, server.client() as client:
        answer = client.completions.create(model=server.model, prompt="abcabc", max_tokens=12)
        assert answer.choices[0].text
    assert "the text is the same" in server.log
