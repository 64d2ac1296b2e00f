"""`specctl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specctl.cli.options import force_option, json_option
from specctl.cli.show import pairs, size


@click.command()
@click.argument("draft", metavar="DRAFT")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["vllm", "sglang", "speculators", "original"]),
    required=True,
    help="Whose layout: vLLM's or SGLang's, that of the speculators library (vllm serve OUT), or the one that EAGLE-3 "
    "was published in.",
)
@click.option(
    "--target",
    metavar="M",
    help="The model it drafts for, by directory or hub id; default: the one its specctl.json names, if it is there.",
)
@force_option
@json_option
def command(draft: str, output: Path, to: str, target: str | None, force: bool, as_json: bool) -> None:
    """Write the draft DRAFT (a model, an EAGLE-3 head in any layout, or an MTP layer by itself) to the new directory
    OUT in the layout of an engine, with the command that serves it in RUN.md.

    The result is read again by its reader's own rules: what that would drop, leave unfilled, or take for something else
    than the draft has is an error that names it, and nothing is written.
    """
    from specctl.export.command import export
    from specctl.output import to_json

    done = export(draft, output, to, target, force=force)  # type: ignore[arg-type]
    click.echo(to_json(done) if as_json else pairs(_rows(done)))


def _rows(done: dict[str, Any]) -> list[tuple[str, str]]:
    checked, difference = done["checked"], done["checked"]["largest_difference"]
    proof = "every tensor bit for bit"
    if difference is not None:
        proof += f", {checked['rows']} rows of logits within {difference:.1g}"
    rows = [
        ("written", done["output"]),
        ("draft", f"{done['kind']}, {done['tensors']} tensors, {size(done['bytes'])}"),
        ("target", done["target"] or "not known"),
        ("read again", proof),
    ]
    return rows + [(engine, command) for engine, command in done["commands"].items()]
