"""`finetune` as a command: its data shown, dumped, planned with, or trained on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.dist import joined, leads
from specctl.errors import CheckpointError, UsageError
from specctl.finetune.data import DataSet, load_examples
from specctl.finetune.options import RunOptions
from specctl.finetune.report import report, write_dump, write_report
from specctl.finetune.show import legend, show, wants_colours
from specctl.hub import locate
from specctl.output import new_file, say
from specctl.pair import has_tokenizer
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Look:
    """What to do in place of training: plan it, show this many examples, read the data. Nothing of it: train."""

    plan: bool = False
    show_mask: int | None = None
    dry_run: bool = False

    def __bool__(self) -> bool:
        return self.plan or self.show_mask is not None or self.dry_run


@dataclass(frozen=True)
class Outputs:
    """Files besides the draft."""

    dump: Path | None = None
    report: Path | None = None


@dataclass(frozen=True)
class Done:
    """value: for machines. rows: for people, two columns; text: what comes before them."""

    value: dict[str, Any]
    rows: Sequence[tuple[str, str]] = field(default_factory=list)
    text: str = ""


NOTHING = Done({})
"""What a process has to say that is not the leading one."""


def finetune(recipe: Recipe, look: Look, outputs: Outputs, options: RunOptions) -> Done:
    """Do what is asked; notices go to stderr. Raises SpecctlError as its parts do."""
    if look and options.resume:
        raise UsageError("--resume goes on with training; leave --plan, --show-mask and --dry-run out")
    if outputs.dump is not None and not look.dry_run:
        raise UsageError("--dump goes with --dry-run, which trains nothing")
    if not leads():
        outputs = Outputs()
    with ExitStack() as files:
        # Whatever cannot be written is refused now and not after the work.
        dump, written = (
            None if path is None else files.enter_context(new_file(path, force=options.force))
            for path in (outputs.dump, outputs.report)
        )
        if not look:
            return _train(recipe, options, written)
        tokenizer = _tokenizer(recipe)
        data = load_examples(recipe, tokenizer, say=say)
        done = _look(recipe, look, options, data, tokenizer)
        if dump is not None:
            write_dump(dump, data)
        if written is not None:
            write_report(written, report(data))
    return done


def _train(recipe: Recipe, options: RunOptions, written: Path | None) -> Done:
    from specctl.finetune.run import run

    with joined() as world:
        result = run(recipe, options, say, world)
    if result is None:
        return NOTHING
    value = report(result.data, result.losses, result.lrs)
    if written is not None:
        write_report(written, value)
    return Done(value | result.as_dict(), result.rows)


def _look(recipe: Recipe, look: Look, options: RunOptions, data: DataSet, tokenizer: Tokenizer) -> Done:
    value, rows, text = report(data), list[tuple[str, str]](), ""
    if look.show_mask is not None:
        colours = wants_colours()
        shown = [show(example, tokenizer, colours) for example in data.train[: look.show_mask]]
        text = "\n".join([legend(colours), "", *shown])
    if look.dry_run:
        rows += [
            ("rows", f"{data.rows}, {data.kept} kept, {len(data.skips)} skipped"),
            ("examples", f"{len(data.train)}, and {len(data.held_out)} prompts held out"),
            ("tokens", f"{sum(len(example.ids) for example in data.train)}, {data.label_tokens} of them trained"),
            ("digest", data.sha),
        ]
    if look.plan:
        from specctl.finetune.plan import plan

        found = plan(recipe, options, data)
        value["plan"] = found.as_dict()
        rows += found.rows
    return Done(value, rows, text)


def _tokenizer(recipe: Recipe) -> Tokenizer:
    """Of the target, whose weights need not be here."""
    path = locate(recipe.target, weights=False)
    if not has_tokenizer(path):
        raise CheckpointError(f"{recipe.target}: has no tokenizer; copy the model's tokenizer files there")
    return Tokenizer(path)
