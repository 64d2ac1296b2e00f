"""docs/cli.md from the commands' own --help. `python -m specctl.cli.reference [--check] FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from specctl.cli.main import cli

WIDTH = 110
HEAD = """# Commands

Made from `specctl --help` by `make docs`; change the commands, not this page.
"""


def render() -> str:
    """The page: the help of `specctl` and of each of its commands."""
    parent = click.Context(cli, info_name="specctl", max_content_width=WIDTH, terminal_width=WIDTH)
    parts = [HEAD, _section("specctl", cli, parent)]
    for name in cli.list_commands(parent):
        command = cli.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent=parent, info_name=name, terminal_width=WIDTH)
        parts.append(_section(f"specctl {name}", command, context))
    return "\n".join(parts)


def _section(title: str, command: click.Command, context: click.Context) -> str:
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    return "\n".join([f"## {title}", "", "```", *lines, "```", ""])


@click.command
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 when FILE is not up to date.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def write(file: Path, check: bool) -> None:
    """Write the page to FILE."""
    page = render()
    if not check:
        file.write_text(page, encoding="utf-8")
    elif not file.is_file() or file.read_text(encoding="utf-8") != page:
        click.echo(f"{file} is not up to date; run `make docs`", err=True)
        sys.exit(1)


if __name__ == "__main__":
    write()
