"""What the tests of `export` share: the command done, and the command refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import Run


def export(run: Run, draft: Path, out: Path, to: str, *more: Any) -> dict[str, Any]:
    """What was done."""
    done = run("export", draft, out, "--to", to, *more, "--json")
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


def refused(run: Run, draft: Path, out: Path, to: str, *more: Any) -> str:
    """What was said; nothing is left behind."""
    done = run("export", draft, out, "--to", to, *more)
    assert done.code == 2, done.out
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}.*"))
    return done.err
