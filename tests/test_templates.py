"""Every file in templates/ is what it says: gates and recipes load, CI jobs run on a tiny pair, the card is filled."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click
import jinja2
import pytest
import tiny
import torch
import yaml
from conftest import Run
from fixtures import Make
from reports import report, write

from specctl.cli.main import CommandTable, cli
from specctl.schemas.gates import GATES, find_gates, read_gates
from specctl.schemas.recipe import read_recipe
from specctl.shipped import shipped

TEMPLATES = shipped("templates")
JOBS = ("github-actions.yml", "gitlab-ci.yml")


def test_every_file_is_named_on_the_page_and_tested_here() -> None:
    page = (TEMPLATES / "README.md").read_text()
    named = set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))
    found = {path.name for path in TEMPLATES.iterdir()} - {"README.md"}
    assert named == found
    recipes = {path.name for path in TEMPLATES.glob("finetune-*.yaml")}
    assert found == recipes | {"gates.yaml", "gates-results.yaml", "model-card.md", *JOBS}


# -- gates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gates", "gates-results"])
def test_gates_load_as_they_are_and_with_all_they_offer(tmp_path: Path, name: str) -> None:
    path = find_gates(name)
    assert path == TEMPLATES / f"{name}.yaml"
    assert len(read_gates(path).names) >= 3
    everything = tmp_path / "all.yaml"
    everything.write_text(re.sub(rf"^# ({'|'.join(GATES)}): ", r"\1: ", path.read_text(), flags=re.MULTILINE))
    names = read_gates(everything).names
    model = ["compatible", "distribution", "draft_cache"]
    assert names == (list(GATES) if name == "gates" else [gate for gate in GATES if gate not in model])


def test_gates_for_a_report_need_no_model(run: Run, tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", report())
    assert run("validate", "--results", good, "--gates", "gates-results").code == 0


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("finetune-*.yaml")), ids=lambda path: path.stem)
def test_recipes_load(path: Path) -> None:
    recipe, name = read_recipe(path, {}), path.stem.removeprefix("finetune-")
    assert f"specctl finetune {path.name}" in path.read_text()
    if name in ("mtp", "eagle3"):
        assert recipe.kind == name
        return
    starts = {"checkpoint": recipe.draft.init, "layers": recipe.draft.layers, "scratch": recipe.draft.width}
    assert starts.pop(name)
    assert not any(starts.values())


def test_defaults_that_a_recipe_tells_are_the_defaults() -> None:
    """`key: value  # default` in the one that explains itself."""
    bare = read_recipe(None, {"kind": "llama", "target": "t", "data.train": "d"})
    section, told = "", 0
    for line in (TEMPLATES / "finetune-checkpoint.yaml").read_text().splitlines():
        section = found[1] if (found := re.match(r"(\w+):", line)) else section
        if found := re.match(r"  (\w+): \S+ +# ([\w.-]+)(:.*)?$", line):
            default = getattr(getattr(bare, section), found[1])
            said = yaml.safe_load(found[2])
            assert (None if said == "none" else float(said) if isinstance(default, float) else said) == default, line
            told += 1
    assert told >= 9


# -- jobs --------------------------------------------------------------------------------------------------------------


def job(name: str) -> dict[str, Any]:
    value = yaml.safe_load((TEMPLATES / name).read_text())
    return value["jobs"]["validate"] if "jobs" in value else value["validate-draft"]


def variables(name: str) -> dict[str, str]:
    return job(name)["env" if name.startswith("github") else "variables"]


def commands(name: str) -> list[str]:
    """The commands of a job that are not about setting a machine up."""
    found = job(name)
    lines = [step["run"] for step in found["steps"] if "run" in step] if "steps" in found else found["script"]
    return [line for line in lines if "pip install" not in line]


@pytest.fixture(scope="module")
def workplace(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as the templates expect it, and `specctl` on its PATH."""
    here = tmp_path_factory.mktemp("repository")
    target = make(tiny.llama, seed=1, dtype=torch.float64, num_hidden_layers=1)
    shutil.copytree(target, here / "target")
    shutil.copytree(make(tiny.near, of=target), here / "draft")
    (here / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "max_tokens": 6}) + "\n" for text in "ab"))
    gates = (TEMPLATES / "gates.yaml").read_text().replace("samples: 2000", "samples: 200")
    (here / "gates.yaml").write_text(gates)
    (here / "bin").mkdir()
    shim = here / "bin" / "specctl"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m specctl "$@"\n')
    shim.chmod(0o755)
    return here


def run_job(name: str, workplace: Path, **settings: str) -> list[int]:
    shutil.rmtree(workplace / "validation", ignore_errors=True)
    environment = {**os.environ, **variables(name), **settings, "GITHUB_STEP_SUMMARY": str(workplace / "summary")}
    environment |= {"PATH": f"{workplace / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(TEMPLATES.parent)}
    environment = {key: str(value) for key, value in environment.items()}
    ran = [
        subprocess.run(["bash", "-e", "-c", line], cwd=workplace, env=environment, capture_output=True, check=False)
        for line in commands(name)
    ]
    return [each.returncode for each in ran]


def test_jobs_pass_a_good_pair_and_fail_a_bad_one(workplace: Path) -> None:
    """The first by GitHub's commands, the second by GitLab's, which are the same but for what shows the summary."""
    validate = [commands(name)[0].split() for name in JOBS]
    assert validate[0] == validate[1]
    assert set(run_job("github-actions.yml", workplace)) == {0}
    suite = ElementTree.parse(workplace / "validation" / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "0", "0")
    assert "5 of 5 gates passed" in (workplace / "validation" / "summary.md").read_text()
    assert "5 of 5 gates passed" in (workplace / "summary").read_text()
    write(workplace / "baseline.json", report())
    (workplace / "strict.yaml").write_text("acceptance_rate: {min: 1}\n")
    assert run_job("gitlab-ci.yml", workplace, GATES="strict.yaml", BASELINE="baseline.json") == [1]
    suite = ElementTree.parse(workplace / "validation" / "junit.xml").getroot()
    assert {case.get("name") for case in suite.iter("testcase")} == {"acceptance_rate", "regression"}
    assert "not comparable: work.prompts_sha" in (workplace / "validation" / "junit.xml").read_text()


def test_the_summary_of_a_job_is_shown(workplace: Path) -> None:
    """Whatever became of it, and also when it wrote nothing."""
    shutil.rmtree(workplace / "validation", ignore_errors=True)
    *_, show = commands("github-actions.yml")
    environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(workplace / "shown")}
    assert subprocess.run(["bash", "-e", "-c", show], cwd=workplace, env=environment, check=False).returncode == 0
    (workplace / "validation").mkdir()
    (workplace / "validation" / "summary.md").write_text("found")
    subprocess.run(["bash", "-e", "-c", show], cwd=workplace, env=environment, check=True)
    assert (workplace / "shown").read_text() == "found"


@pytest.mark.parametrize("name", JOBS)
def test_a_job_keeps_what_it_writes(name: str) -> None:
    found, text = job(name), " ".join(commands(name))
    written = set(re.findall(r"--(?:junit|markdown|report) (\S+)", text))
    assert {Path(path).parent.name for path in written} == {"validation"}
    if "artifacts" in found:
        assert found["artifacts"]["when"] == "always"
        assert found["artifacts"]["reports"]["junit"] in written
    else:
        upload = found["steps"][-1]
        assert (upload["if"], upload["with"]["path"]) == ("always()", "validation")


# -- the card ----------------------------------------------------------------------------------------------------------


def test_the_model_card_can_be_filled() -> None:
    source = (TEMPLATES / "model-card.md").read_text()
    names = set(re.findall(r"\{\{ (\w+) \}\}", source))
    card = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source)
    filled = card.render({name: f"org/{name}" for name in names})
    assert "{{" not in filled
    front = yaml.safe_load(filled.split("---")[1])
    assert front["base_model"] == "org/target"
    assert "speculative-decoding" in front["tags"]


@pytest.mark.parametrize("name", ["model-card.md", "gates.yaml", "gates-results.yaml", *JOBS])
def test_commands_and_flags_that_a_template_names_are_there(name: str) -> None:
    assert isinstance(cli, CommandTable)
    context = click.Context(cli)
    lines = re.sub(r"\s*\n +", " ", (TEMPLATES / name).read_text()).splitlines()
    seen = 0
    for line in lines:
        if found := re.search(r"specctl ([a-z][\w-]+)(?= --| \{|`)(.*)", line):
            command = cli.get_command(context, found[1])
            assert command is not None, line
            flags = {flag for parameter in command.params for flag in parameter.opts}
            assert set(re.findall(r"--[a-z][\w-]+", found[2])) <= flags, line
            seen += 1
    assert seen
