"""Directories that are being filled: locked while a run is at work, removed when it was killed."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.errors import UsageError


def sweep(output: Path) -> None:
    """Remove what killed runs for the same output have left: places that nobody holds locked."""
    path = output.expanduser().resolve()
    for place in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Nobody else's while the block runs. Raises UsageError when another run has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory}: another run of convert-mtp is at work in it; wait for it") from None
        yield
    finally:
        os.close(descriptor)


def sync(directory: Path) -> None:
    """Wait until the disk has the directory's names."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
