"""Workspace: OUTPUT.run, the directory beside the output that a run keeps what it needs in, and what it has measured.

answers.jsonl   metrics.jsonl   training.png   and, while the run lasts, checkpoints/  best/  hidden/
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.output import to_json
from specctl.train.checkpoint import latest

DONE, LOCK = "done", ".lock"


class Workspace:
    """Of one output. begin() makes it ready for a run, and nobody else can have it meanwhile."""

    def __init__(self, output: Path) -> None:
        self.output = output.expanduser().resolve()
        self.path = self.output.with_name(f"{self.output.name}.run")
        self.checkpoints, self.best = self.path / "checkpoints", self.path / "best"
        self.hidden, self.picture = self.path / "hidden", self.path / "training.png"
        self.answers, self.metrics = self.path / "answers.jsonl", self.path / "metrics.jsonl"

    @contextmanager
    def begin(self, *, resume: bool, force: bool) -> Iterator[None]:
        """Hold the directory for a run: a new one, or with `resume` the one that was not finished.

        Raises UsageError when there is an output already, an unfinished run where a new one should begin, none where
        one should go on, or another process in it.
        """
        if self.output.exists() and not force:
            raise UsageError(f"{self.output}: exists; name another output or pass --force to replace it")
        begun = self.path.is_dir() and not (self.path / DONE).exists()
        if resume and not begun:
            raise UsageError(f"--resume: {self.path} holds no unfinished run; begin one without --resume")
        if begun and not resume and not force and latest(self.checkpoints) is not None:
            raise UsageError(
                f"{self.path}: holds an unfinished run; go on with it by --resume, or pass --force to begin anew"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if not resume:
                self._clear()
            try:
                yield
            finally:
                if [file.name for file in self.path.iterdir()] == [LOCK]:  # nothing had come of it
                    shutil.rmtree(self.path)

    def finish(self) -> None:
        """Drop what only an unfinished run needs."""
        (self.path / DONE).touch()
        for directory in (self.checkpoints, self.best, self.hidden):
            shutil.rmtree(directory, ignore_errors=True)

    def _clear(self) -> None:
        """Answers stay: they say themselves what they are of."""
        for directory in (self.checkpoints, self.best, self.hidden):
            shutil.rmtree(directory, ignore_errors=True)
        for file in (self.metrics, self.picture, self.path / DONE):
            file.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.path}: another process trains there; wait for it, or name another output"
                ) from None
            yield


class Metrics:
    """metrics.jsonl: a line for every step and for every validation."""

    def __init__(self, file: Path, length: int) -> None:
        """length: in bytes, of what there is to go on from; what was written after that is cut off."""
        file.touch()
        if file.stat().st_size < length:
            raise UsageError(f"{file}: is shorter than the checkpoint says; begin anew without --resume")
        os.truncate(file, length)
        self._file = file

    def add(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(to_json(dict(line), indent=None) + "\n")

    @property
    def length(self) -> int:
        return self._file.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]
