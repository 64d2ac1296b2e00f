"""`export` as a command: decided, written, read again as the engine reads it, and only then given its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specctl.convert_mtp.files import check_disk
from specctl.convert_mtp.places import locked, sweep
from specctl.errors import CheckpointError, SpecctlError, UsageError
from specctl.export import eagle3, llama, mtp
from specctl.export.job import RUN, Job, Proof, write_facts
from specctl.export.run_md import check_commands, commands, render
from specctl.export.source import Engine, open_source
from specctl.output import new_directory
from specctl.shard_writer import write_synced

KINDS = {"llama": llama.plan, "mtp": mtp.plan, "eagle3": eagle3.plan}


def prepare(draft: str, to: Engine, target: str | None) -> Job:
    """Decide everything. Raises UsageError for what the layout cannot say, CheckpointError and IncompatiblePair for
    drafts and targets that are not right."""
    source = open_source(draft, target)
    job: Job = KINDS[source.kind](source, to)
    return job


def export(draft: str, output: Path, to: Engine, target: str | None, *, force: bool) -> dict[str, Any]:
    """Export, and tell what was done. Notices go to stderr."""
    if output.exists() and not force:
        raise UsageError(f"{output}: exists; name another output or pass --force to replace it")
    job = prepare(draft, to, target)
    check_commands(job, output)
    for notice in job.notices:
        sys.stderr.write(f"Note: {notice}\n")
    sys.stderr.flush()
    check_disk(output.parent, job.num_bytes, "the tensors to write")
    sweep(output)
    with new_directory(output, force=force) as directory, locked(directory):
        job.write(directory, lambda num_bytes: None)
        proof = _proven(job, directory, output)
        job.companions(directory)
        write_facts(job, directory)
        write_synced(directory / RUN, render(job, output, proof))
    said = job.source.named_target
    return {
        "draft": draft,
        "kind": job.source.kind,
        "to": to,
        "output": str(output),
        "target": None if said is None else said.name,
        "tensors": len(job.entries),
        "bytes": job.num_bytes,
        "k": job.k,
        "commands": commands(job, output),
        "checked": {"rows": proof.rows, "largest_difference": proof.difference},
        "notices": list(job.notices),
    }


def _proven(job: Job, directory: Path, output: Path) -> Proof:
    """Raises CheckpointError, of the output as it would have been called."""
    try:
        return job.prove(directory)
    except SpecctlError as error:
        said = str(error).replace(str(directory), str(output))
        raise CheckpointError(f"{said}; so {job.to} would not get the draft, and nothing is written") from None
