"""`specctl bench`."""

from __future__ import annotations

from pathlib import Path

import click

from specctl.cli.options import decoding_options, force_option, integers, json_option, model_options, prompt_options
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import read_prompts


@click.command()
@click.option("--target", required=True, metavar="MODEL", help="The model, by directory or hub id.")
@prompt_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N prompts only.")
@click.option(
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="REPORT.json",
    help="The report; beside it REPORT.md and plots in REPORT_plots/.",
)
@click.option(
    "--baseline",
    "baselines",
    type=click.Choice(["plain", "transformers"]),
    multiple=True,
    default=("plain",),
    show_default=True,
    help="What to compare with. plain, this engine without a draft, is always measured; transformers is its generate, "
    "plain and assisted, one prompt at a time. May be repeated.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Times all is measured.")
@click.option(
    "--sweep-k", type=integers(), metavar="0,1,2,3,5", help="Draft lengths to measure, instead of the one of --k."
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="TRACE.json",
    help="Also write what became of every draft, by class of prompt.",
)
@click.option("--anatomy", is_flag=True, help="Also show where the time goes, by phase and by part of the model.")
@force_option
@json_option
@decoding_options(many_drafts=True)
@model_options
def command(
    target: str,
    prompts: str | None,
    prompt_field: str | None,
    limit: int | None,
    output: Path,
    baselines: tuple[str, ...],
    repeats: int,
    sweep_k: tuple[int, ...] | None,
    trace: Path | None,
    anatomy: bool,
    force: bool,
    as_json: bool,
    decoding_options: DecodingOptions,
    model_options: ModelOptions,
) -> None:
    """Measure plain and speculative decoding on the same prompts: every run takes its turn at every group of --batch
    prompts, again and again, and the answers are compared.

    Exit code 1 when answers differ that have to be the same.
    """
    from specctl.bench.command import Outputs, bench
    from specctl.bench.options import BenchOptions

    if prompts is None:
        raise UsageError("no prompts given: expected --prompts FILE")
    found = read_prompts(prompts, prompt_field)
    if limit is not None and limit > len(found):
        raise UsageError(f"--limit {limit}: {prompts} has only {len(found)} prompts")
    options = BenchOptions(baselines, repeats, sweep_k or (), anatomy, trace is not None)
    bench(
        target, found[:limit], model_options, decoding_options, options, Outputs(output, trace, force), as_json=as_json
    )
