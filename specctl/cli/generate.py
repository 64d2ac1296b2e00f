"""`specctl generate`."""

from __future__ import annotations

from typing import Any

import click

from specctl.cli.options import (
    decoding_options,
    integers,
    json_option,
    model_options,
    number,
    prompt_options,
)
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import Prompt, read_prompts


@click.command()
@click.option("--target", required=True, metavar="MODEL", help="The model, by directory or hub id.")
@click.option("--prompt", metavar="TEXT", help="One prompt, as plain text.")
@click.option("--token-ids", type=integers(), metavar="1,2,3", help="One prompt, as token ids.")
@prompt_options
@click.option("--logprobs", type=click.IntRange(0, 20), metavar="N", help="Log-probabilities, with N alternatives.")
@click.option("--n", type=click.IntRange(min=1), default=1, metavar="N", help="Answers for each prompt.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text. May be repeated.")
@click.option(
    "--repetition-penalty", type=number(above=0), default=1.0, metavar="X", help="Above 1: avoid tokens seen so far."
)
@click.option("--presence-penalty", type=number(), default=0.0, metavar="X", help="Taken off tokens the answer has.")
@click.option(
    "--frequency-penalty", type=number(), default=0.0, metavar="X", help="Taken off for each time it has one."
)
@json_option
@decoding_options()
@model_options
def command(
    target: str,
    prompt: str | None,
    token_ids: tuple[int, ...] | None,
    prompts: str | None,
    prompt_field: str | None,
    as_json: bool,
    decoding_options: DecodingOptions,
    model_options: ModelOptions,
    **request: Any,
) -> None:
    """Generate text, streaming it to the terminal; with --json one object with ids, logprobs and counters."""
    from specctl.generate import generate

    given = [
        name for name, value in (("--prompt", prompt), ("--token-ids", token_ids), ("--prompts", prompts)) if value
    ]
    if len(given) != 1:
        raise UsageError(
            f"{' and '.join(given) or 'no prompt'} given: expected one of --prompt, --token-ids, --prompts"
        )
    if prompts is not None:
        todo = read_prompts(prompts, prompt_field)
    elif prompt_field is not None:
        raise UsageError("--prompt-field is given without --prompts, whose file it is for")
    else:
        todo = [Prompt(id="1", prompt=prompt, token_ids=token_ids or None)]
    request["stop"] = tuple(request["stop"])
    generate(target, todo, model_options, decoding_options, request, as_json=as_json)
