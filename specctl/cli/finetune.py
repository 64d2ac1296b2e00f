"""`specctl finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specctl.cli.options import force_option, json_option, model_options
from specctl.cli.show import pairs
from specctl.errors import UsageError
from specctl.options import ModelOptions

_FILE = click.Path(dir_okay=False, path_type=Path)
# The flags that are keys of the recipe; those over the recipe's own values.
_KEYS = {
    "kind": "kind",
    "target": "target",
    "data": "data.train",
    "output": "output",
    "init": "draft.init",
    "draft_vocab_size": "draft.vocab_size",
    "max_steps": "max_steps",
    "max_length": "data.max_length",
    "seed": "seed",
}


@click.command()
@click.argument("recipe", metavar="[RECIPE.yaml]", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the recipe, like optimiser.lr=3e-4."
)
@click.option(
    "--kind",
    type=click.Choice(["llama", "mtp", "eagle3"]),
    help="What is trained: a small model of the Llama family, or a head that reads what the target leaves.",
)
@click.option("--target", metavar="MODEL", help="The model to draft for, by directory or hub id.")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE|HUB[:split]",
    help="Conversations or texts: a jsonl, json or parquet file, or a hub data set. May be repeated.",
)
@click.option("--output", metavar="DIR", help="Where the draft goes, a Hugging Face directory; beside it DIR.run.")
@click.option("--init", metavar="MODEL", help="Start from this model, which has the target's tokenizer, or this head.")
@click.option(
    "--draft-vocab-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a head: the tokens it can say, the N most frequent; default: all of the target's.",
)
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Optimiser steps; default: one epoch.")
@click.option("--max-length", type=click.IntRange(min=2), metavar="N", help="Longest example, in tokens.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Seed of the run.")
@click.option("--plan", is_flag=True, help="Train nothing: tell steps, tokens, memory, disk and time.")
@click.option(
    "--show-mask", type=click.IntRange(min=1), metavar="N", help="Train nothing: show N examples and what is trained."
)
@click.option("--dry-run", is_flag=True, help="Train nothing: read the data and tell what is in it.")
@click.option("--dump", type=_FILE, metavar="FILE", help="With --dry-run: JSONL of id, ids and labels (-100: none).")
@click.option("--report", type=_FILE, metavar="FILE", help="JSON of rows, skips, losses and learning rates.")
@click.option("--resume", is_flag=True, help="Go on with a run that was interrupted.")
@force_option
@json_option
@model_options
def command(
    recipe: Path | None,
    settings: tuple[str, ...],
    data: tuple[str, ...],
    plan: bool,
    show_mask: int | None,
    dry_run: bool,
    dump: Path | None,
    report: Path | None,
    resume: bool,
    force: bool,
    as_json: bool,
    model_options: ModelOptions,
    **flags: Any,
) -> None:
    """Train a small draft for a target, by a recipe or by --kind, --target, --data and --output.

    A flag goes over the recipe's key, --set over both. Rows are OpenAI messages, ShareGPT conversations, prompt and
    completion, or text; the target's chat template writes them, and only what the assistant says is trained.

    Interrupted (exit code 130), the run is saved, and --resume goes on as if nothing had happened.
    """
    if as_json and show_mask is not None:
        raise UsageError("--show-mask is for people and --json for machines; give one of them (--dump has the labels)")
    from specctl.finetune.command import NOTHING, Look, Outputs, finetune
    from specctl.finetune.options import RunOptions
    from specctl.output import to_json
    from specctl.schemas.recipe import read_recipe

    given = flags | {"data": (data[0] if len(data) == 1 else list(data)) if data else None}
    read = read_recipe(recipe, {key: given[flag] for flag, key in _KEYS.items()}, settings)
    done = finetune(
        read, Look(plan, show_mask, dry_run), Outputs(dump, report), RunOptions(model_options, resume, force)
    )
    if done is NOTHING:
        return
    if as_json:
        click.echo(to_json(done.value))
        return
    for text in (done.text, pairs(done.rows)):
        if text:
            click.echo(text, color=True if done.text else None)
