"""The report as a file: one HTML page that carries its pictures and asks nothing of a network, or markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from specctl.errors import UsageError
from specctl.tune.outputs.schedule import Engine
from specctl.tune.page import Page, Table, page
from specctl.tune.plots import pictures
from specctl.tune.run import Tuning
from specctl.tune.study import Study

TEMPLATE = Path(__file__).with_name("report.html.jinja")
FORMS = (".html", ".md")


def check_name(path: Path) -> None:
    if path.suffix not in FORMS:
        raise UsageError(f"--report {path}: expected a name that ends in {' or '.join(FORMS)}")


def text_of(path: Path, tuning: Tuning, study: Study, engines: Sequence[Engine]) -> str:
    """In the form that the file's name asks for."""
    found = page(tuning, study, engines)
    return markdown(found) if path.suffix == ".md" else html(found, pictures(tuning, study))


def html(found: Page, drawn: Sequence[tuple[str, bytes, str]]) -> str:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    embedded = [(name, f"data:image/png;base64,{base64.b64encode(png).decode()}", words) for name, png, words in drawn]
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=found, pictures=embedded) + "\n"


def markdown(found: Page) -> str:
    lines = [f"# {found.title}", "", f"**{found.headline}** {found.figure} x {found.under}.", ""]
    lines += [line for sentence in found.because for line in (sentence, "")]
    for table in found.tables:
        lines += [f"## {table.title}", "", *([table.lead, ""] if table.lead else []), *_rows(table), ""]
    sources = Table("", "", ["what", "from"], [[name, words] for name, words in found.provenance])
    lines += ["## Where every number comes from", "", *_rows(sources), ""]
    if found.notices:
        lines += ["## To know when using it", "", *(f"- {notice}" for notice in found.notices), ""]
    return "\n".join(lines)


def _rows(table: Table) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [row(table.columns), row(["---"] * len(table.columns)), *map(row, table.rows)]
