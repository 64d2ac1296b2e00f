"""`specctl validate`."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from specctl.cli.options import decoding_options, force_option, json_option, model_options, prompt_options
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import read_prompts

FILE = click.Path(dir_okay=False, path_type=Path)
# What has a meaning for a report, too; everything else is about running a model.
OF_REPORTS = {"results", "gates", "baseline", "junit", "markdown", "report", "force", "as_json"}


@click.command()
@click.option("--target", metavar="MODEL", help="The model, by directory or hub id.")
@prompt_options
@click.option(
    "--results",
    type=FILE,
    metavar="REPORT.json",
    help="Judge this report of bench or validate and run no model; instead of --target, --draft and --prompts.",
)
@click.option(
    "--gates",
    metavar="NAME|FILE",
    help="GATES.yaml, or the name of a shipped one: gates (the default for a pair) or gates-results.",
)
@click.option(
    "--baseline",
    type=FILE,
    metavar="REPORT.json",
    help="An earlier report that nothing may fall behind, over the one that the gates name.",
)
@click.option("--junit", type=FILE, metavar="FILE", help="Write the gates as JUnit XML, too.")
@click.option("--markdown", type=FILE, metavar="FILE", help="Write them as markdown, too.")
@click.option(
    "--report", type=FILE, metavar="FILE", help="Write everything as JSON, which --results and --baseline read."
)
@force_option
@json_option
@decoding_options()
@model_options
@click.pass_context
def command(
    context: click.Context,
    target: str | None,
    prompts: str | None,
    prompt_field: str | None,
    results: Path | None,
    gates: str | None,
    baseline: Path | None,
    junit: Path | None,
    markdown: Path | None,
    report: Path | None,
    force: bool,
    as_json: bool,
    decoding_options: DecodingOptions,
    model_options: ModelOptions,
) -> None:
    """Hold a target and its draft, or a report about them, against gates: compatible, exact, fast enough, no worse than
    before.

    Exit code 1 when a gate failed or had nothing to judge by.
    """
    from specctl.validate.command import Pair, Wishes, validate

    wishes = Wishes(gates, baseline, junit, markdown, report, force)
    if results is not None:
        _refuse_model_options(context)
        validate(results, wishes, as_json=as_json)
        return
    for flag, value in (("--target", target), ("--draft", decoding_options.draft), ("--prompts", prompts)):
        if not value:
            raise UsageError(f"{flag} is missing: expected --target, --draft and --prompts, or --results")
    assert target is not None
    assert prompts is not None
    assert decoding_options.draft is not None
    found = read_prompts(prompts, prompt_field)
    validate(Pair(target, decoding_options.draft, found, model_options, decoding_options), wishes, as_json=as_json)


def _refuse_model_options(context: click.Context) -> None:
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name not in OF_REPORTS and isinstance(parameter, click.Option) and parameter.expose_value:
            raise UsageError(f"{parameter.opts[0]} is about running a model, and --results runs none; leave one out")
