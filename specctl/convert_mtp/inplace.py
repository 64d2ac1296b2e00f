"""A change carried out in the target's own directory: at every moment it is the old one or the new one.

Where the system can, a directory is made beside the target's, with links to all that stays and with the new files, and
the two exchange their names in one step. Where it cannot (another kind of file system, a mount, no right to write
beside it, a shell that works inside), the new files are put into a hidden directory inside, then a journal says what
takes whose place, then that is done, file by file. A run that finds such a journal finishes it; without a journal what
is in the hidden directory is removed. In both ways files are replaced, never written into: other links to them stay as
they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.checkpoint import read_json
from specctl.convert_mtp.carry import mirror
from specctl.convert_mtp.change import CONFIG, Change
from specctl.convert_mtp.files import JOURNAL, STAGING, check_disk
from specctl.convert_mtp.places import locked, sweep, sync
from specctl.errors import CapacityError, CheckpointError, UsageError
from specctl.shard_writer import write_synced
from specctl.shards import TensorInfo

_AT_FDCWD, _EXCHANGE = -100, 2

Check = Callable[[dict[str, TensorInfo]], object]
Progress = Callable[[int], object]


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The directory itself, for this run alone, after what a killed run has left was finished or taken back."""
    directory = path.expanduser().resolve()
    if not directory.is_dir():
        raise CheckpointError(f"{path}: no such directory; expected the directory of a DeepSeek target")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written; write to a new directory OUT instead")
    with locked(directory):
        sweep(directory)
        with _errors_of(directory):
            finish(directory)
        yield directory


def carry_out(change: Change, check: Check, progress: Progress) -> None:
    """Write, verify and put in place. Raises CheckpointError, with the directory as it was, when what was written is
    not what a reader takes."""
    path = change.target.path
    check_disk(path, change.num_bytes, "the tensors to write")
    with _errors_of(path):
        if not (_can_exchange(path) and _by_exchange(change, check, progress)):
            _by_journal(change, check, progress)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"{path}: no disk space left to write it") from error
        raise UsageError(f"{path}: cannot be changed: {error.strerror or error}") from error


def finish(path: Path) -> None:
    """Do what the journal in a directory says, or remove what was meant for it when there is none."""
    staging = path / STAGING
    if not staging.is_dir() or staging.is_symlink():
        return
    if (staging / JOURNAL).exists():
        _apply(path, staging, read_json(staging / JOURNAL))
        (staging / JOURNAL).unlink()
    shutil.rmtree(staging)


# -- by exchanging two directories ------------------------------------------------------------------------------------


def _can_exchange(path: Path) -> bool:
    """Whether `path` can change its name with a neighbour, and nobody we know of has it open as a place."""
    pair = [_neighbour(path) for _ in range(2)]
    try:
        if os.path.ismount(path) or Path.cwd().resolve().is_relative_to(path):
            return False
        for place in pair:
            place.mkdir()
        return exchange(*pair)
    except OSError:
        return False
    finally:
        for place in pair:
            with contextlib.suppress(OSError):
                place.rmdir()


def _by_exchange(change: Change, check: Check, progress: Progress) -> bool:
    """False when something in the directory cannot be linked, or its name not exchanged; then it is as it was."""
    path = change.target.path
    new = _neighbour(path)
    new.mkdir()
    try:
        with locked(new):
            try:
                mirror(path, new, change.replaced | {STAGING}, change.kept)
                os.chown(new, path.stat().st_uid, path.stat().st_gid)
            except OSError:
                return False
            change.write(new, progress)
            _keep_modes(change, new)
            check(change.verify(lambda name: new / name))
            sync(new)
            done = exchange(new, path)
            sync(path.parent)
            return done
    finally:
        shutil.rmtree(new, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Let two directories exchange their names at one moment. False where the system does not do that."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _EXCHANGE) == 0)


def _neighbour(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


# -- by a journal -----------------------------------------------------------------------------------------------------


def _by_journal(change: Change, check: Check, progress: Progress) -> None:
    path = change.target.path
    staging = path / STAGING
    staging.mkdir()
    try:
        change.write(staging, progress)
        _keep_modes(change, staging)
        check(change.verify(lambda name: _present(change, name)))
        journal = {"install": change.written, "move": change.moved, "remove": list(change.removed)}
        write_synced(staging / f"{JOURNAL}.new", json.dumps(journal))
        sync(staging)
        (staging / f"{JOURNAL}.new").rename(staging / JOURNAL)
        sync(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finish(path)


def _present(change: Change, name: str) -> Path:
    """Where a file of the result is before it is put in place."""
    path = change.target.path
    return path / STAGING / name if name in change.written else path / change.kept[name]


def _apply(path: Path, staging: Path, journal: dict[str, object]) -> None:
    """Each step may have been done before."""
    install, move, remove = (journal.get(key) for key in ("install", "move", "remove"))
    if not isinstance(install, list) or not isinstance(move, dict) or not isinstance(remove, list):
        raise CheckpointError(f"{staging / JOURNAL}: is no journal of convert-mtp; remove {staging} by hand")
    names = [*install, *move, *move.values(), *remove]
    if wrong := [name for name in names if not _is_neighbour(name)]:
        raise CheckpointError(
            f"{staging / JOURNAL}: {str(wrong[0])[:80]!r} is no file beside it; remove {staging} by hand"
        )
    for old, new in move.items():
        if not (path / new).exists():
            _name_too(path / old, path / new)
    for name in install:
        if (staging / name).exists():
            (staging / name).replace(path / name)
    for name in (*move, *remove):
        (path / name).unlink(missing_ok=True)
    sync(path)


def _is_neighbour(name: object) -> bool:
    """Whether this is a plain file name, which cannot lead out of a directory."""
    return isinstance(name, str) and name not in ("", "..", STAGING) and Path(name).name == name


def _name_too(old: Path, new: Path) -> None:
    """Give a file another name, and leave it the old one as long as possible."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        old.rename(new)


def _keep_modes(change: Change, directory: Path) -> None:
    """New files get the mode of those they replace, or of config.json, and its owner."""
    path = change.target.path
    owner = (path / CONFIG).stat()
    for name in change.written:
        old = path / name if (path / name).exists() else path / CONFIG
        shutil.copymode(old, directory / name)
        with contextlib.suppress(OSError):
            os.chown(directory / name, owner.st_uid, owner.st_gid)
