"""`profile --target` as a command: models opened, PROFILE.yaml written, a table of it shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specctl.options import ModelOptions
from specctl.output import new_file, say
from specctl.pair import open_draft, open_target
from specctl.profile.base import Base
from specctl.profile.grid import CONTEXTS, choose_grid
from specctl.profile.merge import merge
from specctl.profile.places import usual_batches
from specctl.profile.render import as_yaml, check_name, show, table
from specctl.profile.run import identity, measure

BATCHES = (1, 2, 4, 8)
REPEATS = 15


@dataclass(frozen=True)
class Wishes:
    """What is profiled and how often. batches, contexts None: the usual ones, as far as the model goes and as `base`,
    which the cells go into, has them. same_model: as that of `base`, whatever it is called."""

    output: Path
    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    repeats: int | None = None
    force: bool = False
    base: Base | None = None
    same_model: bool = False


def profile(target_name: str, draft_name: str | None, model: ModelOptions, wishes: Wishes, *, as_json: bool) -> None:
    """Measure and write. The table (or with as_json the profile) goes to stdout, all else to stderr."""
    check_name(wishes.output)
    base = wishes.base
    with new_file(wishes.output, force=wishes.force) as file:
        target = open_target(target_name, model)
        draft = None if draft_name is None else open_draft(draft_name, target)
        for notice in [] if draft is None else draft.notices:
            say(f"note: {notice}")
        batches = wishes.batches or usual_batches(base, BATCHES)
        usual = CONTEXTS if base is None else tuple(base.contexts)
        grid = choose_grid(target, draft, batches, wishes.contexts, usual)
        if base is not None:
            places = [(batch, context) for batch in grid.batches for context in grid.contexts]
            base.check(identity(target, draft), wishes.same_model, places)
        found = measure(target, draft, grid, wishes.repeats or REPEATS, say)
        notices: list[str] = []
        if base is not None:
            found, notices = merge(base.profile, base.where, found, wishes.same_model)
        file.write_text(as_yaml(found), encoding="utf-8")
    show(found, table(found), notices, wishes.output, as_json=as_json)
