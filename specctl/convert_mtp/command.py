"""`convert-mtp` as a command: planned or done, with progress in bytes on stderr and the outcome on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from specctl.convert_mtp import attach, carry, inplace
from specctl.convert_mtp.attach import AttachWishes
from specctl.convert_mtp.convert import Wishes, prepare, write
from specctl.convert_mtp.report import attach_plan, attach_summary, plan, strip_plan, summary, target_files
from specctl.convert_mtp.source import find_source
from specctl.errors import UsageError
from specctl.hub import hub_id, locate


def show_plan(wishes: Wishes) -> dict[str, Any]:
    """What a conversion would read."""
    return plan(find_source(wishes.source), wishes)


def show_attach_plan(source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """What attaching would read, write, link and remove."""
    path = Path(target).expanduser()
    if not path.exists() and hub_id(target):
        raise UsageError(f"{target}: is no directory here; fetch it first: a plan reads the headers of all its files")
    return attach_plan(AttachWishes(source, path, **options))


def show_strip_plan(target: Path) -> dict[str, Any]:
    """What stripping would write and remove."""
    return strip_plan(*attach.prepare_strip(target))


def convert(wishes: Wishes, output: Path, *, force: bool) -> dict[str, Any]:
    """Convert, and tell what was done. Notices go to stderr."""
    begin = time.monotonic()
    _refuse_existing(output, force)
    job = prepare(wishes)
    _notify(job.notices)
    with _progress(job.num_bytes) as progress:
        write(job, output, force=force, progress=progress)
    return summary(job, str(output), time.monotonic() - begin)


def attach_to(source: str, target: str, output: Path, options: dict[str, Any], *, force: bool) -> dict[str, Any]:
    """The target with the layer of `source`, as the new directory `output`."""
    begin = time.monotonic()
    _refuse_existing(output, force)
    path = locate(target)
    carry.check_output(output, path, *(place for place in (Path(source).expanduser(),) if place.is_dir()))
    job = attach.prepare(AttachWishes(source, path, **options))
    _notify(job.notices)
    files = target_files(job.change)
    copied = carry.bytes_to_copy(carry.carried(job.change, output.expanduser().absolute()))
    with _progress(job.change.num_bytes + copied) as progress:
        carry.write_new(job.change, job.check, output, force=force, progress=progress)
    return attach_summary(job, files, str(output), time.monotonic() - begin)


def attach_in_place(source: str, target: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The same in the target's own directory."""
    begin = time.monotonic()
    with inplace.opened(target) as path:
        job = attach.prepare(AttachWishes(source, path, **options))
        files = target_files(job.change)
        _notify(job.notices)
        with _progress(job.change.num_bytes) as progress:
            inplace.carry_out(job.change, job.check, progress)
    return attach_summary(job, files, str(target), time.monotonic() - begin)


def strip_in_place(target: Path) -> dict[str, Any]:
    """The target without MTP layers."""
    begin = time.monotonic()
    with inplace.opened(target) as path:
        change, notices = attach.prepare_strip(path)
        done = strip_plan(change, notices)
        _notify(notices)
        with _progress(change.num_bytes) as progress:
            inplace.carry_out(change, lambda tensors: None, progress)
    return done | {"output": str(target), "seconds": round(time.monotonic() - begin, 3)}


def _refuse_existing(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise UsageError(f"{output}: exists; name another output or pass --force to replace it")


def _notify(notices: Iterable[str]) -> None:
    for notice in notices:
        sys.stderr.write(f"Note: {notice}\n")
    sys.stderr.flush()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar that any thread may move on."""
    lock = Lock()
    with tqdm(total=total, unit="B", unit_scale=True, desc="written", file=sys.stderr, disable=None) as bar:

        def progress(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield progress
