"""`specctl`: the table of commands, and how an error becomes a sentence and an exit code.

Exit codes: 0 done, 1 a gate failed, 2 bad usage, config or input, 3 environment, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

import specctl
from specctl.errors import SpecctlError

# A command is a module with a click command called `command`; a line here is all it takes to add one. The words are
# what `specctl --help` shows, kept here so that it need not load the commands.
COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("specctl.cli.quickstart", "Measure speculation on a small model and show what it gains."),
    "inspect": ("specctl.cli.inspect", "Tell what a model directory holds and what keeps it from being served."),
    "finetune": ("specctl.cli.finetune", "Train a small draft on a target's data or on the target's own answers."),
    "convert-mtp": (
        "specctl.cli.convert_mtp",
        "Take the MTP layer out of a DeepSeek checkpoint, for any reader, or put it into one.",
    ),
    "export": ("specctl.cli.export", "Write a draft in an engine's layout, proven to be the same draft to it."),
    "doctor": ("specctl.cli.doctor", "Tell what is installed here, which devices work and what is missing for what."),
    "generate": ("specctl.cli.generate", "Generate text for prompts, plainly or with a draft."),
    "bench": ("specctl.cli.bench", "Measure plain against speculative decoding on the same prompts."),
    "profile": ("specctl.cli.profile", "Measure what steps cost on this machine, for tune."),
    "tune": ("specctl.cli.tune", "Choose the draft length for every batch and context, as a policy."),
    "validate": ("specctl.cli.validate", "Hold a pair, or a report about it, against gates; exit code 1 if one fails."),
    "serve": ("specctl.cli.serve", "Serve a target, with or without a draft, over an OpenAI-compatible API."),
}

USAGE, ENVIRONMENT, INTERRUPTED = 2, 3, 130


@dataclass
class State:
    """What `main` needs to know of the command line when it has failed."""

    debug: bool = False


class CommandTable(click.Group):
    """A group that imports a command only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        command.name = cmd_name
        if not any(parameter.name == "debug" for parameter in command.params):
            command.params.append(_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self.commands = dict.fromkeys(
            self.list_commands(ctx), click.Command(None)
        )  # what a misspelt name may have meant
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def _debug_option() -> click.Option:
    def switch_on(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(State).debug = True

    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=switch_on,
        help="Show where in the program an error came from.",
    )


@click.command(cls=CommandTable, params=[_debug_option()])
@click.version_option(specctl.__version__, prog_name="specctl")
def cli() -> None:
    """From a fine-tuned target model to speculative decoding that is proven to pay and to change nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and return its exit code; errors are said on stderr."""
    state = State()
    if arguments is None:  # a process of its own: being told to end is Ctrl-C, and leaves as little behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with cli.make_context("specctl", list(sys.argv[1:] if arguments is None else arguments), obj=state) as ctx:
            cli.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except click.ClickException as error:
        error.show()
        return USAGE
    except BrokenPipeError:  # whoever read the output has left
        _drop_output()
        return INTERRUPTED
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED, state)
    except SpecctlError as error:
        return _fail(f"Error: {error}", error.exit_code, state)
    except Exception as error:  # noqa: BLE001 - the last place where an error of any kind can become a sentence
        if _is_memory(error):
            return _fail(f"Error: out of memory: {_one_line(error)}", ENVIRONMENT, state)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _drop_output()  # which may be what is full
            where = f"{error.filename}: " if error.filename else ""
            return _fail(f"Error: {where}no disk space left; free some and run again", ENVIRONMENT, state)
        what = f"Internal error: {type(error).__name__}: {_one_line(error)}"
        return _fail(what if state.debug else f"{what}; run again with --debug and report it", USAGE, state)
    return 0


def _fail(sentence: str, exit_code: int, state: State) -> int:
    if state.debug:
        traceback.print_exc()
    click.echo(sentence, err=True)
    return exit_code


def _drop_output() -> None:
    """Let what is still to be written go nowhere: Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_memory(error: Exception) -> bool:
    """Python's own, CUDA's (torch.OutOfMemoryError) and the CPU allocator's, which is a plain RuntimeError."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def _one_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
