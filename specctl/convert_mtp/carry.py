"""What stays of a target's directory, brought into a new one: weights as hard links, the rest as copies.

A link costs no room and no time, and weights are never written into. Small files people do edit, so they are copied.
Across file systems, and where links are not allowed, weights are copied too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specctl.convert_mtp.change import Change
from specctl.convert_mtp.files import check_disk
from specctl.convert_mtp.places import locked, sweep
from specctl.errors import UsageError
from specctl.output import new_directory
from specctl.shards import TensorInfo

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PIECE = 1 << 24


@dataclass(frozen=True)
class Carried:
    """One file. source: with links resolved. name: in the new directory."""

    source: Path
    name: str
    is_linked: bool


def write_new(
    change: Change,
    check: Callable[[dict[str, TensorInfo]], object],
    output: Path,
    *,
    force: bool,
    progress: Callable[[int], object],
) -> None:
    """The changed target as a new directory, or nothing."""
    files = carried(change, output)
    check_disk(output.parent, change.num_bytes + bytes_to_copy(files), "the files to write")
    sweep(output)
    with new_directory(output, force=force) as directory, locked(directory):
        bring(files, directory, progress)
        change.write(directory, progress)
        check(change.verify(lambda name: directory / name))


def check_output(output: Path, *sources: Path) -> None:
    """Raises UsageError when the output would lie in what it is made from, or the other way round."""
    place = output.expanduser().resolve()
    for source in (source.resolve() for source in sources):
        if place.is_relative_to(source) or source.is_relative_to(place):
            raise UsageError(f"{output}: is, holds or lies in {source}, which is read; name another place")


def bytes_to_copy(files: list[Carried]) -> int:
    return sum(file.source.stat().st_size for file in files if not file.is_linked)


def carried(change: Change, output: Path) -> list[Carried]:
    """The files that stay, all but hidden ones; weights linked where `output` is on the same file system."""
    path = change.target.path
    device = _existing(output).stat().st_dev
    found = [Carried((path / old).resolve(), new, True) for new, old in change.kept.items()]
    names = {*change.replaced, *change.kept, *change.kept.values()}
    for file in _files(path):
        name = str(file.relative_to(path))
        if name not in names:
            found.append(Carried(file.resolve(), name, file.suffix in WEIGHTS))
    return [Carried(c.source, c.name, c.is_linked and c.source.stat().st_dev == device) for c in found]


def bring(files: list[Carried], directory: Path, progress: Callable[[int], object]) -> None:
    """Link or copy them into `directory`. `progress` is told the bytes copied."""
    for file in files:
        new = directory / file.name
        new.parent.mkdir(parents=True, exist_ok=True)
        if file.is_linked:
            try:
                os.link(file.source, new)
                continue
            except OSError:  # not allowed here, or too many links
                new.unlink(missing_ok=True)
        _copy(file.source, new, progress)


def mirror(path: Path, directory: Path, leave: set[str], kept: dict[str, str]) -> None:
    """Link all of `path` into `directory`, hidden files and directories inside too. leave: names at the top that are
    not brought over; kept: new names to old ones at the top. Raises OSError where that cannot be done."""
    for new, old in kept.items():
        os.link(path / old, directory / new, follow_symlinks=False)
    for entry in os.scandir(path):
        if entry.name not in leave and entry.name not in kept.values():
            _mirror_entry(entry, directory / entry.name)
    shutil.copystat(path, directory)


def _mirror_entry(entry: os.DirEntry[str], new: Path) -> None:
    if not entry.is_dir(follow_symlinks=False):
        os.link(entry.path, new, follow_symlinks=False)
        return
    new.mkdir()
    for inner in os.scandir(entry.path):
        _mirror_entry(inner, new / inner.name)
    shutil.copystat(entry.path, new)


def _copy(source: Path, new: Path, progress: Callable[[int], object]) -> None:
    with source.open("rb") as reader, new.open("xb") as writer:
        while piece := reader.read(PIECE):
            writer.write(piece)
            progress(len(piece))
        writer.flush()
        os.fsync(writer.fileno())
    shutil.copymode(source, new)


def _files(path: Path) -> Iterator[Path]:
    """Files of a directory and of those in it; hidden ones and directories behind links are not for readers."""
    for place, directories, names in os.walk(path):
        directories[:] = sorted(d for d in directories if not d.startswith("."))
        for name in sorted(names):
            file = Path(place, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
