"""`specctl convert-mtp`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specctl.cli.options import force_option, json_option
from specctl.cli.show import pairs, size
from specctl.errors import UsageError


@dataclass(frozen=True)
class Asked:
    """The command line. given: the options that were written, whatever their value."""

    source: str
    output: Path | None
    attach_to: str | None
    in_place: bool
    strip: bool
    plan: bool
    force: bool
    given: frozenset[str]
    layout: dict[str, Any]

    def refuse(self, option: str, why: str) -> None:
        if option in self.given:
            raise UsageError(f"--{option.replace('_', '-')}: {why}; leave it out")


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
    help="FP8 weights and scales bit for bit as they are; all in bfloat16; or in FP8 blocks. Attached to a target that "
    "has no such FP8, what would be kept becomes bfloat16.",
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
@click.option(
    "--attach-to",
    metavar="TARGET",
    help="Write a whole checkpoint to OUT: TARGET with the layer of SRC in the place of its own, its weights linked.",
)
@click.option(
    "--in-place", is_flag=True, help="Change the directory TARGET itself: wholly or, when killed, not at all."
)
@click.option("--strip", is_flag=True, help="Take MTP layers out of the target SRC (with --in-place).")
@click.option("--plan", is_flag=True, help="Only tell which files are read, written and removed, and their bytes.")
@force_option
@json_option
def command(
    source: str,
    output: Path | None,
    attach_to: str | None,
    in_place: bool,
    strip: bool,
    plan: bool,
    force: bool,
    as_json: bool,
    **layout: Any,
) -> None:
    """Take the MTP layer out of the DeepSeek checkpoint SRC (V3, R1, V3.1) and write it to the new directory OUT; or
    attach it to a target that has lost it, or strip a target of it.

    SRC is a directory, whole or with only the shards that hold the layer beside the index, or a hub id
    (org/name[@revision]), of which only these shards are fetched. What was written is read back by the rules of its
    reader; what that would drop, leave unfilled or misread is an error and nothing is written.
    """
    from specctl.output import to_json

    ctx, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    given = frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is not default)
    asked = Asked(source, output, attach_to, in_place, strip, plan, force, given, layout)
    found = _strip(asked) if strip else _attach(asked, attach_to) if attach_to is not None else _convert(asked)
    click.echo(to_json(found) if as_json else pairs(_plan_rows(found) if plan else _rows(found)))


def _convert(asked: Asked) -> dict[str, Any]:
    from specctl.convert_mtp.command import convert, show_plan
    from specctl.convert_mtp.convert import Wishes

    asked.refuse("in_place", "only --attach-to and --strip change a directory in place")
    wishes = Wishes(asked.source, **asked.layout)
    if asked.plan:
        _refuse_output(asked)
        return show_plan(wishes)
    return convert(wishes, _output(asked), force=asked.force)


def _attach(asked: Asked, target: str) -> dict[str, Any]:
    from specctl.convert_mtp.command import attach_in_place, attach_to, show_attach_plan

    asked.refuse("to", "what is attached has the target's own layout")
    asked.refuse("target", "the layer is compared with the target of --attach-to")
    options = {key: asked.layout[key] for key in ("dtype", "shared")}
    if asked.plan:
        _refuse_output(asked)
        return show_attach_plan(asked.source, target, options)
    if asked.in_place:
        _refuse_output(asked)
        return attach_in_place(asked.source, Path(target), options)
    return attach_to(asked.source, target, _output(asked), options, force=asked.force)


def _strip(asked: Asked) -> dict[str, Any]:
    from specctl.convert_mtp.command import show_strip_plan, strip_in_place

    for option in ("attach_to", "target", "to", "dtype", "shared"):
        asked.refuse(option, "--strip only takes layers out")
    _refuse_output(asked)
    if not asked.in_place and not asked.plan:
        raise UsageError("--strip changes the directory SRC itself: pass --in-place too, or --plan")
    path = Path(asked.source).expanduser()
    return show_strip_plan(path) if asked.plan else strip_in_place(path)


def _refuse_output(asked: Asked) -> None:
    what = "--plan writes nothing" if asked.plan else "--in-place writes no other directory"
    if asked.output is not None or asked.force:
        raise UsageError(f"{what}: leave OUT and --force out")


def _output(asked: Asked) -> Path:
    if asked.output is None:
        more = ", --in-place" if asked.attach_to is not None else ""
        raise UsageError(f"no OUT given: expected a directory to write{more}, or --plan")
    return asked.output


def _plan_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("source", found["source"])] if "source" in found else []
    rows += [("target", found["target"])] if "target" in found else []
    rows.append(("MTP layers", f"{_numbers(found['layers']) or 'none'}: {found['tensors']} tensors"))
    if "files" in found:
        files = found["files"]
        rows[-1] = (rows[-1][0], f"{rows[-1][1]}, {_bytes(found['bytes_of_layers'])}")
        rows.append(("files", f"{len(files)} of {found['of_files']}, {_bytes(found['bytes_in_files'])}"))
        rows += [("", f"{f['file']}  {_bytes(f['bytes'])}  {'here' if f['here'] else 'to fetch'}") for f in files]
        rows.append(("to fetch", _bytes(found["bytes_to_fetch"])))
    rows += _target_rows(found)
    least, most = found["bytes_to_write"]
    rows.append(("to write", _bytes(most) if least == most else f"{_bytes(least)} to {_bytes(most)}"))
    return rows + [("note", notice) for notice in found.get("notices", ())]


def _rows(done: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("written", done["output"])]
    if "bytes" not in done:
        taken = f"{_numbers(done['layers']) or 'none'}: {done['tensors']} tensors taken out"
        return [*rows, ("MTP layers", taken), *_target_rows(done), ("seconds", f"{done['seconds']:.1f}")]
    rows.append(("MTP layers", f"{_numbers(done['layers'])}: {done['tensors']} tensors, {_bytes(done['bytes'])}"))
    if "to" in done:
        rows.append(("layout", f"{done['to']}, dtype {done['dtype']}; its reader takes all of it"))
    else:
        taking = ", ".join(name for name, faults in done["readers"].items() if not faults)
        rows.append(("layout", f"the target's, dtype {done['dtype']}; taken whole by {taking}"))
        rows += _target_rows(done)
    for copy in done["copies"]:
        state = {"absent": "not in the source", "unknown": "not compared"}.get(copy["state"], copy["state"])
        rows.append((copy["name"], f"{state}, {'written' if copy['kept'] else 'left out'}"))
    return [*rows, ("seconds", f"{done['seconds']:.1f}")]


def _target_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What becomes of a target's files."""
    if "target_files" not in found:
        return []
    files = found["target_files"]
    kept = files["kept"]
    rows = [("target's files", f"{len(kept)} stay, {_bytes(sum(file['bytes'] for file in kept))}")]
    rows += [("", f"{file['was']} becomes {file['file']}") for file in kept if file["was"] != file["file"]]
    for file in files["written"]:
        rows.append(("", f"{file['file']}  {_bytes(file['bytes'])}  {'anew' if file['rewritten'] else 'new'}"))
    return rows + [("", f"{name}  removed") for name in files["removed"]]


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


def _bytes(number: int) -> str:
    return f"{number} bytes ({size(number)})" if number >= 1024 else f"{number} bytes"
