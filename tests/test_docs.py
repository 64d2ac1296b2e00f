"""The written pages: what they name exists, and the page of commands is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specctl.cli import reference

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("profiles/*.md"), *ROOT.glob("templates/*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")}
    named = set(re.findall(r"`((?:specctl|tests|docs|benchmarks|profiles|templates)/[\w/.]*)`", text))
    missing = {link for link in links if not (page.parent / link).exists()}
    assert missing | {path for path in named if not (ROOT / path).exists() and "NAME" not in path} == set()


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {name for page in PAGES for name in re.findall(r"^(?:.*`)?make (\w+)", page.read_text(), re.MULTILINE)}
    assert {"setup", "quickstart", "test", "check", "docs", "bench"} <= targets
    assert used <= targets


def test_every_module_has_a_floor_in_the_design() -> None:
    """Only files at the top of the package: those that the import contract places."""
    floors = (ROOT / "docs" / "design.md").read_text().split("## Floors")[1].split("## ")[0]
    for module in (ROOT / "specctl").iterdir():
        if not module.name.startswith("_") and (module.suffix == ".py" or (module / "__init__.py").is_file()):
            assert re.search(rf"`{module.stem}/?`", floors), f"{module.stem} is not in the table"


def test_the_page_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not depend on the terminal, and --check tells a page that is out of date."""
    monkeypatch.setenv("COLUMNS", "40")
    narrow = reference.render()
    monkeypatch.setenv("COLUMNS", "200")
    assert reference.render() == narrow
    assert "## specctl inspect" in narrow
    page = tmp_path / "cli.md"
    for arguments, code in (([str(page)], 0), (["--check", str(page)], 0)):
        assert _write(arguments) == code
    page.write_text(page.read_text() + "more\n")
    assert _write(["--check", str(page)]) == 1


def _write(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        reference.write(arguments)
    return int(ended.value.code or 0)
