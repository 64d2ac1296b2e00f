"""A profile as people read it: YAML with a cell a line for the file, and a table in plain steps for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from specctl.errors import UsageError
from specctl.output import say, to_json
from specctl.schemas.base import Document
from specctl.schemas.profile import Profile, StepCell

DIGITS = 6
NOTES = """\
v: a step that verifies K tokens, c: a draft step, u: the draft's pass after a block; all in plain steps of their row.
Spread: of the plain step, one standard error."""


WHOLE_NOTES = """\
Milliseconds of a step that drafts and verifies K tokens, the draft and the engine in it, and of one standard error.
*: not measured; its class is in the file."""


def check_name(output: Path) -> None:
    """Before anything is measured."""
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {output}: expected a name that ends in .yaml")


def as_yaml(document: Document) -> str:
    """YAML whose lists and innermost mappings stand on one line each. Numbers keep six significant digits."""
    value = _rounded(document.model_dump(mode="json", by_alias=True))
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=2**16, allow_unicode=True)


def show(profile: Profile, text: str, notices: Iterable[str], output: Path, *, as_json: bool) -> None:
    """What came of it: notes, and where it is written, for people; the text, or as_json the profile, to stdout."""
    for notice in notices:
        say(f"note: {notice}")
    sys.stdout.write(to_json(profile.model_dump(mode="json", by_alias=True)) + "\n" if as_json else text)
    say(f"written: {output}")


def table(profile: Profile) -> str:
    """What steps cost at every batch and context, and what the engine adds."""
    if profile.whole_steps:
        return whole_table(profile)
    widest = max(cell.q for cell in profile.steps)
    rows = [["batch", "context", "plain ms", "spread", *(f"v K={q - 1}" for q in range(2, widest + 1)), "c", "u"]]
    target = {cell.place: cell for cell in profile.steps}
    draft = {(cell.batch, cell.context): cell for cell in profile.draft}
    follow = {(cell.batch, cell.context): cell for cell in profile.draft_follow}
    for batch, q, context in sorted(target):
        if q == 1:
            plain = target[batch, 1, context]
            verify = [_share(target.get((batch, n, context)), plain) for n in range(2, widest + 1)]
            passes = [_share(cells.get((batch, context)), plain) for cells in (draft, follow)]
            rows.append([str(batch), str(context), f"{plain.ms:.2f}", f"{plain.spread:.2f}", *verify, *passes])
    over = profile.overheads_ms
    said = f"engine: {over.base:.2f} ms a plain step, {over.spec:.2f} a step that drafts"
    return f"{aligned(rows)}\n\n{said}, {over.per_draft_step:.2f} more a draft step\n\n{NOTES}\n"


def whole_table(profile: Profile) -> str:
    """What steps cost where some were measured."""
    widths = sorted({cell.q for cell in profile.steps})
    cells = {cell.place: cell for cell in profile.steps}
    rows = [["batch", "context", *(f"K={q - 1}" for q in widths)]]
    for batch, context in sorted({(c.batch, c.context) for c in profile.steps if c.source == "measured"}):
        shown = [_whole(cells.get((batch, q, context))) for q in widths]
        rows.append([str(batch), str(context), *shown])
    return f"{aligned(rows)}\n\n{WHOLE_NOTES}\n"


def _whole(cell: StepCell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.ms:.2f} +- {cell.spread:.2f}" if cell.source == "measured" else f"{cell.ms:.2f}*"


def aligned(rows: list[list[str]]) -> str:
    """Columns set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _share(cell: StepCell | None, plain: StepCell) -> str:
    return "" if cell is None else f"{cell.ms / plain.ms:.2f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
