"""Writing results: complete or not at all, never over what is there unless told so; and saying something meanwhile. It
knows nothing about what."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.errors import CapacityError, UsageError


def say(sentence: str) -> None:
    """A line for people, at once; results alone go to stdout."""
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()


@contextmanager
def new_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A file to write under a temporary name beside `path`, which it takes when the block ends without an exception.

    Raises UsageError at once when `path` exists and `force` is not set, or cannot be written.
    """
    path = _prepare(path, force)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is not a file; name another output file")
    with _errors_of(path):
        temporary = _temporary(path)
        temporary.open("x").close()
        try:
            yield temporary
            _refuse_existing(path, force)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A directory to fill under a temporary name beside `path`, which it takes when the block ends without error.

    With `force` it takes the place of the directory that is there. Raises UsageError as `new_file` does.
    """
    path = _prepare(path, force)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is not a directory; name another output directory")
    if any(place.resolve().is_relative_to(path) for place in (Path.cwd(), Path.home())):
        raise UsageError(f"{path}: the working or home directory lies in it and it will not be replaced; name another")
    with _errors_of(path):
        temporary = _temporary(path)
        temporary.mkdir()
        try:
            yield temporary
            _refuse_existing(path, force)
            _exchange(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write a whole text file, or leave everything as it was."""
    with new_file(path, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, force: bool = False) -> None:
    """Write `value` as strict JSON (see `to_json`), or leave everything as it was."""
    write_text(path, to_json(value) + "\n", force=force)


def to_json(value: Any, indent: int | None = 2) -> str:
    """Strict JSON, which every reader takes. A NaN or an infinity is a bug of ours: ValueError naming where it is."""
    for where, number in _floats(value, "$"):
        if not math.isfinite(number):
            raise ValueError(f"{where} is {number}, which JSON cannot say")
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def _floats(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _floats(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _floats(inner, f"{where}[{index}]")


def _prepare(path: Path, force: bool) -> Path:
    """The place itself when `path` is a link to it, refused early: before hours of work, not after."""
    with _errors_of(path):
        path = path.expanduser().resolve()
        _refuse_existing(path, force)
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _refuse_existing(path: Path, force: bool) -> None:
    if not force and path.exists():
        raise UsageError(f"{path}: exists; name another output or pass --force to replace it")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _exchange(new: Path, path: Path) -> None:
    """Put `new` where `path` is; a directory that was there goes only after that has worked."""
    if not path.exists():
        new.rename(path)
        return
    old = _temporary(path)
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """An OSError about `path` or its temporary neighbour, in one sentence; what else the block meets is not ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"{path}: no disk space left to write it") from error
        if error.filename is None or not _concerns(Path(os.fsdecode(error.filename)), path):
            raise
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def _concerns(file: Path, path: Path) -> bool:
    """Whether `file` is `path`, a directory it is in, or a temporary place for it or inside that."""
    return file in (path, *path.parents) or any(part.startswith(f".{path.name}.") for part in file.parts)
