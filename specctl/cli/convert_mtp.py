"""`specctl convert-mtp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specctl.cli.options import force_option, json_option
from specctl.cli.show import pairs, size
from specctl.errors import UsageError


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("output", metavar="[OUT]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["deepseek", "vllm", "sglang"]),
    default="deepseek",
    show_default=True,
    help="The layout: DeepSeek's own names, what vLLM loads from a directory of its own, or SGLang's NextN.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bf16", "fp8"]),
    default="keep",
    show_default=True,
    help="FP8 weights and scales bit for bit as they are; all in bfloat16; or in FP8 blocks.",
)
@click.option(
    "--shared",
    type=click.Choice(["auto", "copy", "omit"]),
    default="auto",
    show_default=True,
    help="The layer's copies of the target's embedding and head: left out where they are equal bit for bit, always "
    "written, or always left out.",
)
@click.option("--target", metavar="M", help="The model it will draft for, by directory or hub id; default: SRC itself.")
@click.option("--plan", is_flag=True, help="Only tell which files hold the layer and how many bytes they are.")
@force_option
@json_option
def command(
    source: str,
    output: Path | None,
    to: str,
    dtype: Any,
    shared: Any,
    target: str | None,
    plan: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Take the MTP layer out of the DeepSeek checkpoint SRC (V3, R1, V3.1) and write it to the new directory OUT.

    SRC is a directory, whole or with only the shards that hold the layer beside the index, or a hub id
    (org/name[@revision]), of which only these shards are fetched. What was written is read back by the rules of its
    reader; what that would drop, leave unfilled or misread is an error and nothing is written.
    """
    from specctl.convert_mtp.command import convert, show_plan
    from specctl.convert_mtp.convert import Wishes
    from specctl.output import to_json

    wishes = Wishes(source, to, dtype, shared, target)
    if plan:
        if output is not None or force:
            raise UsageError("--plan writes nothing: leave OUT and --force out")
        found = show_plan(wishes)
        click.echo(to_json(found) if as_json else pairs(_plan_rows(found)))
        return
    if output is None:
        raise UsageError("no OUT given: expected a directory to write, or --plan")
    done = convert(wishes, output, force=force)
    click.echo(to_json(done) if as_json else pairs(_rows(done)))


def _plan_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    files = found["files"]
    rows = [
        ("source", found["source"]),
        ("MTP layers", f"{_numbers(found['layers'])}: {found['tensors']} tensors, {_bytes(found['bytes_of_layers'])}"),
        ("files", f"{len(files)} of {found['of_files']}, {_bytes(found['bytes_in_files'])}"),
    ]
    rows += [("", f"{f['file']}  {_bytes(f['bytes'])}  {'here' if f['here'] else 'to fetch'}") for f in files]
    rows.append(("to fetch", _bytes(found["bytes_to_fetch"])))
    least, most = found["bytes_to_write"]
    rows.append(("to write", _bytes(most) if least == most else f"{_bytes(least)} to {_bytes(most)}"))
    return rows


def _rows(done: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("written", done["output"]),
        ("MTP layers", f"{_numbers(done['layers'])}: {done['tensors']} tensors, {_bytes(done['bytes'])}"),
        ("layout", f"{done['to']}, dtype {done['dtype']}; its reader takes all of it"),
    ]
    for copy in done["copies"]:
        state = {"absent": "not in the source", "unknown": "not compared"}.get(copy["state"], copy["state"])
        rows.append((copy["name"], f"{state}, {'written' if copy['kept'] else 'left out'}"))
    return [*rows, ("seconds", f"{done['seconds']:.1f}")]


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


def _bytes(number: int) -> str:
    return f"{number} bytes ({size(number)})" if number >= 1024 else f"{number} bytes"
