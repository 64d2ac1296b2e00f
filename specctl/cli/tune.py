"""`specctl tune`."""

from __future__ import annotations

from pathlib import Path

import click

from specctl.cli.options import force_option, json_option, model_options, number, prompt_options
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import read_prompts


@click.command()
@click.option(
    "--profile", required=True, metavar="NAME|FILE", help="PROFILE.yaml of `specctl profile`, or a shipped one."
)
@click.option(
    "--acceptance",
    metavar="FILE|NUMBER",
    help="TRACE.json of `specctl bench --trace`, or the probability that a token is accepted, the same everywhere.",
)
@click.option("--target", metavar="MODEL", help="Without --acceptance: the model to measure it with.")
@click.option("--draft", metavar="DRAFT|ngram|mtp", help="Without --acceptance: what drafts.")
@prompt_options
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer measured; default 128.")
@click.option("--temperature", type=number(least=0), metavar="T", help="Of what is measured; default 0.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Seed of what is measured.")
@click.option(
    "--k-max", type=click.IntRange(min=1), metavar="N", help="Longest draft; default: all that profile and trace know."
)
@click.option(
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="POLICY.yaml",
    help="The policy.",
)
@force_option
@json_option
@model_options
def command(
    profile: str,
    acceptance: str | None,
    target: str | None,
    draft: str | None,
    prompts: str | None,
    prompt_field: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    k_max: int | None,
    output: Path,
    force: bool,
    as_json: bool,
    model_options: ModelOptions,
) -> None:
    """Choose how many tokens to draft, for every batch and context: what makes decoding fastest, 0 allowed, the fewest
    where the prediction cannot tell them apart, and a confidence stop where it pays. Speed is all that is tuned; no
    lossy acceptance is ever chosen. The policy is for the --policy of generate, bench and serve.
    """
    from specctl.tune.command import Measuring, Wishes, tune

    needed: dict[str, object] = {"--target": target, "--draft": draft, "--prompts": prompts}
    options: dict[str, object] = {
        "--max-tokens": max_tokens,
        "--temperature": temperature,
        "--seed": seed,
        "--prompt-field": prompt_field,
    }
    wishes = Wishes(profile, output, acceptance, k_max, force)
    if acceptance is not None:
        _refuse(needed | options, model_options)
        tune(wishes, None, as_json=as_json)
        return
    if target is None or draft is None or prompts is None:
        missing = ", ".join(flag for flag, value in needed.items() if value is None)
        raise UsageError(f"no --acceptance is given, so it is measured, and {missing} is missing for that")
    decoding = DecodingOptions((draft,), max_tokens=max_tokens or 128, temperature=temperature or 0.0, seed=seed)
    measuring = Measuring(target, read_prompts(prompts, prompt_field), model_options, decoding)
    tune(wishes, measuring, as_json=as_json)


def _refuse(given: dict[str, object], model: ModelOptions) -> None:
    """Nothing is run, so nothing can be said about how."""
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"--acceptance and {flag} are both given: acceptance is read or measured; leave one out")
    if model != ModelOptions():
        raise UsageError("--acceptance is given, so no model is run; leave out --dtype, --device and their like")
