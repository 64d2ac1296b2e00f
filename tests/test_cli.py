"""The command table: quick, lazy, and every failure a sentence with the right exit code."""

from __future__ import annotations

import array
import errno
import fcntl
import importlib
import resource
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import click
import pytest
from conftest import Ran, Run

import specctl
from specctl.cli.main import COMMANDS, cli
from specctl.errors import CapacityError, CheckpointError, GateFailed, MissingDependency, SpecctlError, UsageError

NAMES = cli.list_commands(click.Context(cli))
# What takes long to import, and what help does not need.
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "matplotlib", "starlette", "yaml")


def process(*arguments: str, code: str = "") -> Ran:
    """`python -m specctl` (or Python code) in a process of its own."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "specctl"]), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], *([name] for name in NAMES)], ids=str)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from specctl.cli.main import main; code = main([*sys.argv[1:], '--help']); "
        f"print('LOADED', *sorted(set({HEAVY!r}) & sys.modules.keys())); sys.exit(code)"
    )
    ran = process(*arguments, code=code)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("Usage: specctl")
    assert ran.out.splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("arguments", [[], *([name] for name in NAMES)], ids=str)
def test_help_takes_less_than_300_ms(arguments: list[str]) -> None:
    """Of processor time, the best of several: the machine that runs the tests may be busy, and its clock with it."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process(*arguments, "--help").code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.3


def test_help_lists_what_is_there(run: Run) -> None:
    ran = run("--help")
    listed = [line.split()[0] for line in ran.out.split("Commands:")[1].splitlines() if line[:3].strip()]
    assert listed == NAMES
    assert {"inspect", "doctor"} <= set(NAMES)


def test_a_command_without_a_module_is_absent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "future", ("specctl.cli.future", "What is not built."))
    assert "future" not in run("--help").out
    assert run("future").code == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(run: Run, name: str) -> None:
    command = importlib.import_module(COMMANDS[name][0]).command
    assert COMMANDS[name][1].endswith(".")
    assert command.help, "the command has no docstring"
    assert "--debug" in run(name, "--help").out
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, f"{parameter.name} has no help"


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"specctl, version {specctl.__version__}\n")


def test_the_installed_script() -> None:
    script = Path(sys.executable).with_name("specctl")
    ran = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"specctl, version {specctl.__version__}\n")


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspct"], ["'inspct'", "Did you mean 'inspect'"]),
        (["inspect", ".", "--jsn"], ["--jsn", "Did you mean", "--json"]),
        (["inspect"], ["PATH"]),
        (["doctor", "surplus"], ["surplus"]),
        ([], ["Usage: specctl"]),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], words: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    for word in words:
        assert word in ran.err


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command `fail` that raises what is put into the list."""
    errors: list[BaseException] = []

    @click.command
    def command() -> None:
        raise errors[0]

    module = type(sys)("specctl.cli.fail")
    module.command = command  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("specctl.cli.fail", loader=None)
    monkeypatch.setitem(sys.modules, "specctl.cli.fail", module)
    monkeypatch.setitem(COMMANDS, "fail", ("specctl.cli.fail", "Fail."))
    return errors


class OutOfMemoryError(RuntimeError):
    """As torch names CUDA's."""


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (SpecctlError("x.json: wrong"), 2, "Error: x.json: wrong"),
        (UsageError("--k: wrong"), 2, "Error: --k: wrong"),
        (CheckpointError("m: wrong"), 2, "Error: m: wrong"),
        (GateFailed("speedup: 0.9"), 1, "Error: speedup: 0.9"),
        (MissingDependency("pip install x"), 3, "Error: pip install x"),
        (CapacityError("no pages"), 3, "Error: no pages"),
        (MemoryError(), 3, "Error: out of memory: no message"),
        (OutOfMemoryError("CUDA out of memory.\nand more"), 3, "Error: out of memory: CUDA out of memory."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 3, "Error: out of memory: "),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
        (click.FileError("f", "hint"), 2, "Error: Could not open file 'f': hint"),
        (ZeroDivisionError("1/0\nmore"), 2, "Internal error: ZeroDivisionError: 1/0; run again with --debug"),
        (OSError(errno.EIO, "I/O"), 2, "Internal error: OSError: [Errno 5] I/O; run again with --debug"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failure_is_a_sentence_and_a_code(
    run: Run, failing: list[BaseException], error: BaseException, code: int, sentence: str
) -> None:
    failing.append(error)
    ran = run("fail")
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(sentence)
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--debug", "fail"), ("fail", "--debug")])
def test_debug_adds_the_traceback(run: Run, failing: list[BaseException], arguments: tuple[str, str]) -> None:
    failing.append(UsageError("wrong"))
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.err.startswith("Traceback")
    assert "raise errors[0]" in ran.err
    assert ran.err.endswith("Error: wrong\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(number: signal.Signals) -> None:
    """Ctrl-C, or being told to end, while it waits for input: one word, 130, no traceback."""
    command = [sys.executable, "-m", "specctl", "generate", "--target", "somewhere", "--prompts", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(b"{")
        child.stdin.flush()
        while unread(child.stdin.fileno()):  # until it has come so far as to read
            time.sleep(0.01)
        child.send_signal(number)
        said = child.stderr.read()
    assert (child.returncode, said) == (130, b"interrupted\n")


def unread(pipe: int) -> int:
    """The bytes that are in a pipe."""
    number = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, number)
    return number[0]


def test_a_reader_that_left() -> None:
    """`specctl ... | head -0`: no traceback, and not the code of a failed gate."""
    command = [sys.executable, "-m", "specctl", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (130, b"")


def test_a_full_disk_is_an_environment_error() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "specctl", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (3, b"Error: no disk space left; free some and run again\n")


@pytest.mark.parametrize("arguments", [("--batch", "1000000000"), ("--threads", "100000")])
def test_numbers_no_machine_can_take_are_refused_before_anything_is_loaded(
    run: Run, arguments: tuple[str, str]
) -> None:
    ran = run("generate", "--target", "nowhere", "--prompt", "x", *arguments)
    assert ran.code == 2
    assert arguments[0] in ran.err
