"""`convert-mtp` as a command: planned or done, with progress in bytes on stderr and the outcome on stdout."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from specctl.convert_mtp.convert import Wishes, prepare, write
from specctl.convert_mtp.report import plan, summary
from specctl.convert_mtp.source import find_source
from specctl.errors import UsageError


def show_plan(wishes: Wishes) -> dict[str, Any]:
    """What a conversion would read."""
    return plan(find_source(wishes.source), wishes)


def convert(wishes: Wishes, output: Path, *, force: bool) -> dict[str, Any]:
    """Convert, and tell what was done. Notices go to stderr."""
    begin = time.monotonic()
    if output.exists() and not force:
        raise UsageError(f"{output}: exists; name another output or pass --force to replace it")
    job = prepare(wishes)
    for notice in job.notices:
        sys.stderr.write(f"Note: {notice}\n")
    sys.stderr.flush()
    lock = Lock()
    with tqdm(total=job.num_bytes, unit="B", unit_scale=True, desc="written", file=sys.stderr, disable=None) as bar:

        def progress(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        write(job, output, force=force, progress=progress)
    return summary(job, str(output), time.monotonic() - begin)
