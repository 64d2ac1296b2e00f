"""What `convert-mtp` says: the plan, from an index and headers, and what was written."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from specctl.checkpoint import read_json
from specctl.convert_mtp.attach import (
    Attachment,
    AttachWishes,
    attached_config,
    change_notices,
    check_fit,
    written_dtype,
)
from specctl.convert_mtp.change import Change, plan_change
from specctl.convert_mtp.convert import LOST, Job, Wishes
from specctl.convert_mtp.files import find_files
from specctl.convert_mtp.fit import check_target
from specctl.convert_mtp.inventory import check_names, has_fp8, stored_fp8
from specctl.convert_mtp.source import Source, find_source
from specctl.convert_mtp.target import open_target
from specctl.dialects import MTP
from specctl.errors import CheckpointError
from specctl.heads.mtp import Expected, scale_of
from specctl.heads.quantisation import Fp8Config
from specctl.shard_writer import Entry
from specctl.shards import TensorInfo


def plan(source: Source, wishes: Wishes) -> dict[str, Any]:
    """Which files hold the MTP layer, how many bytes they are and how many will be written. Of the hub, nothing is
    fetched but config and index.

    Raises CheckpointError when names and configs alone show that the layer is not whole or its reader cannot take it,
    IncompatiblePair for a target of other sizes.
    """
    files = source.files
    _check(source, wishes)
    needed = source.needed
    names = sorted(file.name for file in files.path.glob("*.safetensors")) if needed is None else needed
    shards = [{"file": name, "bytes": files.size(name), "here": files.is_here(name)} for name in names]
    least, most = _bytes_to_write(source, wishes)
    return {
        "source": files.name,
        "layers": [layer.number for layer in source.layers],
        "tensors": sum(len(layer.names) for layer in source.layers),
        "files": shards,
        "of_files": len(shards) if files.index is None else len(set(files.index.values())),
        "bytes_in_files": sum(shard["bytes"] for shard in shards),
        "bytes_to_fetch": sum(shard["bytes"] for shard in shards if not shard["here"]),
        "bytes_of_layers": _bytes(source, "keep", stored_fp8(source), with_copies=True),
        "bytes_to_write": [least, most],
    }


def attach_plan(wishes: AttachWishes) -> dict[str, Any]:
    """The same for attaching, and what becomes of the target's files. Of a donor on the hub, no shard is fetched.

    Raises as `plan` does, and IncompatiblePair for a donor that does not fit.
    """
    target, source = open_target(wishes.target), find_source(wishes.source)
    _check(source, Wishes(wishes.source))
    notices = check_fit(source, target)
    dtype, why = written_dtype(wishes.dtype, source, target)
    found = plan(source, Wishes(wishes.source, dtype=dtype, shared=wishes.shared))
    first = target.mtp.num_layers
    layers = tuple(range(first, first + source.mtp.count))
    is_fp8 = dtype == "fp8" or (dtype == "keep" and has_fp8(source))
    config, changes = attached_config(target, layers, is_fp8, source.mtp)
    change = plan_change(target, config, (_STANDS_FOR_ALL,))
    files = target_files(change)
    files["written"] = [row for row in files["written"] if row["rewritten"]]
    rewritten = sum(row["bytes"] for row in files["written"])
    return found | {
        "target": str(wishes.target),
        "layers": list(layers),
        "dtype": dtype,
        "target_files": files,
        "bytes_to_write": [number + rewritten for number in found["bytes_to_write"]],
        "notices": [*notices, *why, *changes, *change_notices(change)],
    }


# A plan knows how many bytes the layer's own shards will have, not how they are divided.
_STANDS_FOR_ALL = Entry("", TensorInfo(torch.uint8, (1,)), lambda: ())


def strip_plan(change: Change, notices: tuple[str, ...]) -> dict[str, Any]:
    """What stripping will do."""
    return {
        "target": str(change.target.path),
        "layers": change.target.stale_layers,
        "tensors": sum(map(len, change.target.stale.values())),
        "target_files": target_files(change),
        "bytes_to_write": [change.num_bytes, change.num_bytes],
        "notices": list(notices),
    }


def target_files(change: Change) -> dict[str, Any]:
    """What becomes of the target's weight files, asked before it is done."""
    return {
        "kept": [
            {"file": new, "was": old, "bytes": (change.target.path / old).stat().st_size}
            for new, old in change.kept.items()
        ],
        "written": [
            {"file": name, "bytes": sum(e.info.num_bytes for e in entries), "rewritten": name in change.rewritten}
            for name, entries in change.shards.items()
        ],
        "removed": list(change.removed),
    }


def _check(source: Source, wishes: Wishes) -> None:
    for layer in source.layers:
        if faults := check_names(layer, source.mtp):
            more = f" ({len(faults)} such faults)" if len(faults) > 1 else ""
            raise CheckpointError(
                f"{source.files.name}: layer {layer.number} is not a whole MTP layer: {faults[0]}{more}"
            )
    dialect = MTP[wishes.to]
    if faults := tuple(dialect.config_faults(LOST | {k: v for k, v in source.config.items() if v is not None})):
        raise CheckpointError(f"{source.files.name}: {dialect.reader} would not read the result: {faults[0]}")
    if wishes.target is not None:
        target = find_files(wishes.target)
        check_target(source, read_json(target.path / "config.json"), str(target.path))


def _bytes_to_write(source: Source, wishes: Wishes) -> tuple[int, int]:
    """At least and at most: whether the copies are left out is known only when they are compared."""
    stored = stored_fp8(source)
    without, with_copies = (_bytes(source, wishes.dtype, stored, with_copies=c) for c in (False, True))
    return (with_copies if wishes.shared == "copy" else without), (without if wishes.shared == "omit" else with_copies)


def _bytes(source: Source, dtype: str, stored: Fp8Config | None, *, with_copies: bool) -> int:
    """The bytes of the layers by names and config: FP8 where there are scales, else bfloat16."""
    total = 0
    for layer in source.layers:
        for name, want in source.mtp.tensors().items():
            if want.role == "copy" and not (with_copies and (name in layer.names or name in source.shared)):
                continue
            fp8 = scale_of(name) in layer.names if dtype == "keep" else dtype == "fp8"
            total += _tensor_bytes(want, fp8 and want.role == "matrix", stored)
    return total


def _tensor_bytes(want: Expected, fp8: bool, stored: Fp8Config | None) -> int:
    count = math.prod(want.shape)
    if fp8:
        return count + 4 * math.prod((stored or Fp8Config.published()).block.grid(want.shape))
    return count * (4 if want.role == "bias" else 2)


def summary(job: Job, output: str, seconds: float) -> dict[str, Any]:
    """What was written."""
    return {
        "source": job.wishes.source,
        "output": output,
        "to": job.dialect.name,
        "dtype": job.wishes.dtype,
        "layers": [layer.number for layer in job.source.layers],
        "tensors": len(job.entries),
        "bytes": job.num_bytes,
        "copies": [asdict(copy) for copy in job.copies],
        "notices": list(job.notices),
        "seconds": round(seconds, 3),
    }


def attach_summary(job: Attachment, files: dict[str, Any], output: str, seconds: float) -> dict[str, Any]:
    """What was attached. files: `target_files`."""
    return {
        "source": job.wishes.source,
        "target": str(job.wishes.target),
        "output": output,
        "dtype": job.dtype,
        "layers": list(job.layers),
        "tensors": len(job.entries),
        "bytes": sum(entry.info.num_bytes for entry in job.entries),
        "bytes_written": job.change.num_bytes,
        "target_files": files,
        "copies": [asdict(copy) for copy in job.copies],
        "readers": {name: list(faults) for name, faults in job.readers.items()},
        "notices": list(job.notices),
        "seconds": round(seconds, 3),
    }
