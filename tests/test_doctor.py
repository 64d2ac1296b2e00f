"""specctl doctor: what it says is what is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from conftest import Run

import specctl
from specctl import doctor


def test_json_is_what_is_here(run: Run) -> None:
    ran = run("doctor", "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["specctl"] == specctl.__version__
    assert found["ok"] is True
    packages = {package["name"]: package for package in found["packages"]}
    assert packages["torch"]["installed"] == metadata.version("torch")
    assert {"transformers", "safetensors", "click", "starlette"} <= packages.keys()
    assert not {"pytest", "gguf", "flashinfer-python"} & packages.keys()
    assert found["cpu"]["threads"] >= 1
    assert found["devices"][0]["name"] == "cpu"
    assert [device["name"] for device in found["devices"][1:]] == [
        f"cuda:{i}" for i in range(torch.cuda.device_count())
    ]
    attention = {backend["name"]: backend["why_not"] for backend in found["attention"]}
    assert attention["torch"] is None
    assert (attention["flashinfer"] is None) == (len(found["devices"]) > 1 and _installed("flashinfer-python"))
    extras = {extra["name"]: extra for extra in found["extras"]}
    assert extras["dev"]["missing"] == []
    assert bool(extras["cuda"]["missing"]) is not _installed("flashinfer-python")


def test_text_names_remedies(run: Run) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert f"torch {metadata.version('torch')}" in ran.out
    if not _installed("flashinfer-python"):
        assert "pip install 'specctl[cuda]'" in ran.out


def test_a_machine_without_the_packages(tmp_path: Path) -> None:
    """Only what the command itself runs on is there: every other package is named with its remedy; the code is 3."""
    installed = Path(metadata.distribution("click").locate_file(""))
    for name in ("click", "packaging", "specctl"):
        for entry in {file.parts[0] for file in metadata.files(name) or () if file.parts[0] != ".."}:
            (tmp_path / entry).symlink_to(installed / entry)
    source = Path(specctl.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-S", "-m", "specctl", "doctor"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 3, ran.stderr
    assert "torch not installed" in ran.stderr
    assert "pip install 'torch>=2.9'" in ran.stderr
    assert "click not installed" not in ran.stderr
    assert "torch: no: torch is not installed" in ran.stdout


def test_every_extra_has_a_purpose() -> None:
    declared = {text.split(";")[1] for text in metadata.requires("specctl") or () if "extra ==" in text}
    named = {condition.rsplit("extra ==", 1)[1].strip(" '\"") for condition in declared}
    assert named == doctor.EXTRAS.keys()


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
