"""What every test runs under: one thread, no hub, warnings are errors; and what the header says about this machine."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

# Before anything imports torch or transformers, here or in a process that a test starts.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")

import pytest
from fixtures import launcher, make
from hypothesis import settings

__all__ = ["launcher", "make"]

# A shell starts what runs in its background with Ctrl-C ignored, and what is started from there inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no limit on one example's time on a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("inspect", path, stdin=b"...") is the command line `specctl inspect path`, in this process."""
    from specctl.cli.main import main

    def command(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return command


def pytest_report_header() -> list[str]:
    def version(name: str) -> str:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            return f"{name} absent"

    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if Path("/proc/driver/nvidia/gpus").is_dir() else []
    packages = ("torch", "transformers", "tokenizers", "safetensors", "flashinfer-python", "vllm")
    return [", ".join(map(version, packages)), f"device: {f'{len(gpus)} NVIDIA GPU(s)' if gpus else 'CPU only'}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests recorded with record_property, which is said whether they pass or not."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{name}: {value}")
