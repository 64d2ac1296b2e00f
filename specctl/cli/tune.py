"""`specctl tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specctl.cli.options import force_option, json_option, model_options, number, offer_options, prompt_options
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import read_prompts
from specctl.tune.wishes import Wishes

INPUT = click.Path(dir_okay=False, path_type=Path)
OUTPUT = click.Path(dir_okay=False, path_type=Path)
POSITIVE = click.IntRange(min=1)


@click.command()
@click.option(
    "--profile", required=True, metavar="NAME|FILE", help="PROFILE.yaml of `specctl profile`, or a shipped one."
)
@click.option(
    "--acceptance",
    metavar="FILE|NUMBER",
    help="TRACE.json of `specctl bench --trace`, its REPORT.json, the text of /metrics of vLLM, SGLang or `specctl "
    "serve`, answers with their metrics (JSONL), a table of survival or mean lengths by K (CSV, JSON), or the "
    "probability that a token is accepted, the same everywhere.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="KEY=VALUE",
    help="The part of that file that counts, like class=code, run=NAME, or a column of a table. May be repeated.",
)
@click.option("--extrapolate", is_flag=True, help="Go beyond the K that acceptance was seen at, and mark it.")
@click.option("--target", metavar="MODEL", help="Without --acceptance: the model to measure it with.")
@click.option("--draft", metavar="DRAFT|ngram|mtp", help="Without --acceptance: what drafts.")
@prompt_options
@click.option("--max-tokens", type=POSITIVE, metavar="N", help="Longest answer measured; default 128.")
@click.option("--temperature", type=number(least=0), metavar="T", help="Of what is measured; default 0.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Seed of what is measured.")
@click.option("--k-max", type=POSITIVE, metavar="N", help="Longest draft; default: all that profile and trace know.")
@click.option(
    "--mix",
    type=INPUT,
    metavar="FILE",
    help="What is served: tokens or seconds by batch (CSV, JSON), or a log of requests (JSONL: arrival in seconds, "
    "input_tokens, output_tokens).",
)
@click.option("--arrival-rate", type=number(above=0), metavar="R", help="Requests a second, in place of --mix.")
@click.option("--input-tokens", type=POSITIVE, metavar="N", help="Of a prompt: charges prefill and the first token.")
@click.option("--output-tokens", type=POSITIVE, metavar="N", help="Of an answer.")
@click.option(
    "--max-tpot-ms", type=number(above=0), metavar="MS", help="Limit for a token, prefill of others included."
)
@click.option("--max-ttft-ms", type=number(above=0), metavar="MS", help="Limit for the first token of a lone request.")
@click.option(
    "--quality-budget",
    metavar="KL|kl=X,score=X",
    help="Allow lossy acceptance as far as its measured divergence, in nats a token, and what it costs a task's score "
    "stay within this with their intervals. Without it acceptance is lossless.",
)
@click.option("--divergence", type=INPUT, metavar="FILE", help="What --save-divergence wrote; default: it is measured.")
@click.option(
    "--scores", type=INPUT, metavar="FILE", help='Of your task, item by item: {"exact": [...], "typical": [...]}.'
)
@click.option("--save-divergence", type=OUTPUT, metavar="FILE", help="Keep what was measured for --quality-budget.")
@click.option(
    "--what-if",
    metavar="CHANGES",
    help="Also answer for a world that differs: acceptance=+10%, draft=-20%, overhead=+50% or tp=4, by commas.",
)
@click.option("--output", type=OUTPUT, metavar="POLICY.yaml", help="The policy. Needed unless --what-if is asked.")
@click.option(
    "--report", "reports", multiple=True, type=OUTPUT, metavar="FILE", help="A report, .html or .md. May be repeated."
)
@click.option(
    "--engine-config",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the policy for vLLM, SGLang and TensorRT-LLM, and what they cannot say of it.",
)
@click.option("--draft-model", metavar="NAME", help="In --engine-config: what the engines shall load as the draft.")
@click.option("--data-parallel", type=POSITIVE, metavar="N", help="In --engine-config: one K, for N engines in step.")
@offer_options
@force_option
@json_option
@model_options
def command(
    target: str | None,
    draft: str | None,
    prompts: str | None,
    prompt_field: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    as_json: bool,
    model_options: ModelOptions,
    **more: Any,
) -> None:
    """Choose how many tokens to draft, for every batch and context: what makes decoding fastest, 0 allowed, the fewest
    where the prediction cannot tell them apart, and a confidence stop where it pays. Speed is all that is tuned, and
    acceptance stays lossless unless --quality-budget says otherwise. The policy is for the --policy of generate, bench
    and serve. Nothing is run and no GPU is needed, unless acceptance is measured.
    """
    from specctl.tune.command import Measuring, tune

    wishes = Wishes(**more)
    needed: dict[str, object] = {"--target": target, "--draft": draft, "--prompts": prompts}
    options: dict[str, object] = {
        "--max-tokens": max_tokens,
        "--temperature": temperature,
        "--seed": seed,
        "--prompt-field": prompt_field,
    }
    if wishes.acceptance is not None:
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
