"""profiles/ and templates/ are found from a checkout and from an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import specctl
from specctl.shipped import shipped

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built as pip would build it."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (file,) = directory.glob("*.whl")
    return file


def files(kind: str) -> set[str]:
    return {str(file.relative_to(ROOT)) for file in (ROOT / kind).rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["profiles", "templates"])
def test_checkout(kind: str) -> None:
    assert shipped(kind).samefile(ROOT / kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["profiles", "templates"])
def test_wheel(wheel: Path, tmp_path: Path, kind: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    held = {str(file.relative_to(tmp_path / "specctl")) for file in (tmp_path / "specctl" / kind).rglob("*")}
    assert files(kind) == held
    code = f"from specctl.shipped import shipped; print(shipped({kind!r}))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == tmp_path / "specctl" / kind


def test_wheel_holds_the_package_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {f"specctl/{file.relative_to(ROOT / 'specctl')}" for file in (ROOT / "specctl").rglob("*.py")} <= set(names)
    assert f"specctl-{specctl.__version__}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "shared/"))]
