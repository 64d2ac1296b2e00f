"""`profile` as a command: models opened, PROFILE.yaml written, a table of it shown."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from specctl.bench.command import say
from specctl.errors import UsageError
from specctl.options import ModelOptions
from specctl.output import new_file, to_json
from specctl.pair import open_draft, open_target
from specctl.profile.grid import choose_grid
from specctl.profile.render import as_yaml, table
from specctl.profile.run import measure


@dataclass(frozen=True)
class Wishes:
    """What is profiled and how often. contexts None: as far as the model goes, see `profile.grid.choose_grid`."""

    output: Path
    batches: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] | None = None
    repeats: int = 15
    force: bool = False


def profile(target_name: str, draft_name: str | None, model: ModelOptions, wishes: Wishes, *, as_json: bool) -> None:
    """Measure and write. The table (or with as_json the profile) goes to stdout, all else to stderr."""
    if wishes.output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {wishes.output}: expected a name that ends in .yaml")
    with new_file(wishes.output, force=wishes.force) as file:
        target = open_target(target_name, model)
        draft = None if draft_name is None else open_draft(draft_name, target)
        for notice in [] if draft is None else draft.notices:
            say(f"note: {notice}")
        grid = choose_grid(target, draft, wishes.batches, wishes.contexts)
        found = measure(target, draft, grid, wishes.repeats, say)
        value = found.model_dump(mode="json", by_alias=True)
        file.write_text(as_yaml(value), encoding="utf-8")
    sys.stdout.write(to_json(value) + "\n" if as_json else table(found))
    say(f"written: {wishes.output}")
