"""`specctl profile`."""

from __future__ import annotations

from pathlib import Path

import click

from specctl.cli.options import force_option, integers, json_option, model_options
from specctl.options import ModelOptions


@click.command()
@click.option("--target", required=True, metavar="MODEL", help="The model, by directory or hub id.")
@click.option(
    "--draft",
    metavar="DRAFT|ngram|mtp",
    help="What drafts, as in bench; ngram has no passes to time. Without it only the target's steps are measured.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PROFILE.yaml",
    help="The profile.",
)
@click.option(
    "--batches", type=integers(1), default="1,2,4,8", show_default=True, metavar="1,2,4,8", help="Sequences of a step."
)
@click.option(
    "--contexts",
    type=integers(1),
    metavar="512,2048",
    help="Tokens before a step. Default: 512 and 2048 as far as the model goes, else half of what it holds.",
)
@click.option(
    "--repeats", type=click.IntRange(min=3), default=15, show_default=True, metavar="N", help="Rounds of all passes."
)
@force_option
@json_option
@model_options
def command(
    target: str,
    draft: str | None,
    output: Path,
    batches: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    repeats: int,
    force: bool,
    as_json: bool,
    model_options: ModelOptions,
) -> None:
    """Measure what plain steps, verification of 1 to 8 tokens, draft steps, prefill and the engine itself cost here,
    over batches and contexts, for `specctl tune`. Every pass takes its turn, round after round; medians are kept.

    Use the machine for nothing else meanwhile.
    """
    from specctl.profile.command import Wishes, profile

    wishes = Wishes(output, batches, contexts, repeats, force)
    profile(target, draft, model_options, wishes, as_json=as_json)
