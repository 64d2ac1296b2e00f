"""An MTP layer put into a target's directory, or taken out of it: decided from headers, before a byte is written.

The layer comes from a donor: the checkpoint that the target was made from, or a layer that was taken out of it. What is
there of MTP layers in the target goes. The readers' rules are asked twice, of the plan and of what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.convert_mtp.change import Change, plan_change
from specctl.convert_mtp.convert import LOST, layer_entries
from specctl.convert_mtp.fit import check_target, check_tokenizers
from specctl.convert_mtp.ignore import leave_out, take_back
from specctl.convert_mtp.inventory import Inventory, has_fp8, require_whole, stored_fp8, take_inventory
from specctl.convert_mtp.shared import Copy, Wish, check_originals, compare, decide, find_originals
from specctl.convert_mtp.source import Source, find_source
from specctl.convert_mtp.target import Target, is_beyond, open_target
from specctl.convert_mtp.tensors import DtypeWish, Recipe, check_uniform
from specctl.dialects import MTP, Reading, faults
from specctl.errors import CheckpointError, UsageError
from specctl.fp8 import E4M3
from specctl.heads.mtp import SHARED, MtpConfig
from specctl.heads.quantisation import Fp8Config, Scheme
from specctl.shard_writer import Entry
from specctl.shards import TensorInfo

COUNT = "num_nextn_predict_layers"
# Whose verdict is final. Another reader may be unable to take a layer that these take, which is told.
REQUIRED = ("deepseek", "vllm")


@dataclass(frozen=True)
class AttachWishes:
    """source: the donor, by directory or hub id. target: the directory it is put into."""

    source: str
    target: Path
    dtype: DtypeWish = "keep"
    shared: Wish = "auto"


@dataclass(frozen=True)
class Attachment:
    """All that is to be done. dtype: what the layer is written in. layers: numbers in the target. readers: by name,
    what each of them cannot take, empty where it takes all. notices: what the user should know."""

    wishes: AttachWishes
    source: Source
    change: Change
    dtype: DtypeWish
    layers: tuple[int, ...]
    copies: tuple[Copy, ...]
    entries: tuple[Entry, ...]
    readers: dict[str, tuple[str, ...]]
    notices: tuple[str, ...]

    def check(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Ask the readers about what was written. Raises CheckpointError for what they would not take."""
        target = self.change.target
        layers = {name: info for name, info in tensors.items() if is_beyond(name, target.mtp.num_layers)}
        _ask_readers(self.change.config, layers, target)


def prepare(wishes: AttachWishes) -> Attachment:
    """Decide everything. Reads headers, and embedding and head where copies are compared.

    Raises CheckpointError for a donor or a target that is not whole, IncompatiblePair for a donor that does not fit.
    """
    target = open_target(wishes.target)
    source = find_source(wishes.source)
    notices = check_fit(source, target)
    checkpoint = source.open()
    inventories = take_inventory(source, checkpoint)
    require_whole(inventories, wishes.source)
    for inventory in inventories:
        check_uniform(inventory.parts, wishes.dtype, wishes.source)
    dtype, why = written_dtype(wishes.dtype, source, target)
    notices += why
    originals = find_originals(checkpoint, {}, target)
    check_originals(originals, {name: e.shape for name, e in source.mtp.tensors().items() if name in SHARED})
    copies = [
        copy
        for inventory in inventories
        for copy in decide(inventory, compare(checkpoint, inventory, originals), wishes.shared, originals)
    ]
    recipe = Recipe(dtype, stored_fp8(source), target.scheme.fp8 if target.scheme else None)
    first = target.mtp.num_layers
    entries = tuple(layer_entries(inventories, copies, recipe, checkpoint, originals, first))
    layers = tuple(range(first, first + source.mtp.count))
    config, changes = attached_config(target, layers, any(e.info.dtype == E4M3 for e in entries), source.mtp)
    change = plan_change(target, config, entries)
    readers = _ask_readers(config, {entry.name: entry.info for entry in entries}, target)
    notices += [*changes, *_notices(source, copies, inventories, change, readers)]
    return Attachment(
        wishes, source, change, dtype, layers, tuple(copies), entries, readers, tuple(dict.fromkeys(notices))
    )


def check_fit(source: Source, target: Target) -> list[str]:
    """Donor and target compared. Raises IncompatiblePair by name; returns what could not be compared."""
    check_target(source, target.config, str(target.path))
    notice = check_tokenizers(source, target.path)
    return [notice] if notice else []


def written_dtype(wish: DtypeWish, source: Source, target: Target) -> tuple[DtypeWish, list[str]]:
    """What the layer is written in: as it is stored where the target's readers take it so, else in bfloat16."""
    stored, theirs = stored_fp8(source), target.scheme.fp8 if target.scheme else None
    if wish == "fp8" and theirs is None:
        raise UsageError(
            f"--dtype fp8: {target.path} is not in FP8 blocks, and readers build the layer as its config says; pass "
            "--dtype bf16"
        )
    if wish == "bf16" or stored is None or not has_fp8(source):
        return wish, []
    if theirs is not None and _is_readable(stored, theirs):
        return wish, []
    if wish == "fp8":
        raise UsageError(
            f"--dtype fp8: {source.where} and {target.path} have FP8 in different blocks or scales; pass --dtype bf16"
        )
    how = "is not quantised" if target.scheme is None else f"is quantised by {target.scheme.method}"
    how = "has FP8 of another kind" if theirs is not None else how
    return "bf16", [f"the layer is written in bfloat16: it is stored in FP8 blocks, and {target.path} {how}"]


def _is_readable(stored: Fp8Config, theirs: Fp8Config) -> bool:
    """Whether FP8 of one kind can be read as another. Powers of two are numbers like others, but not the reverse."""
    return stored.block == theirs.block and (stored.powers_of_two or not theirs.powers_of_two)


def attached_config(
    target: Target, layers: tuple[int, ...], is_fp8: bool, mtp: MtpConfig
) -> tuple[dict[str, Any], list[str]]:
    """The target's config.json with the layers in it, and what was changed."""
    config, changes = dict(target.config), []
    if config.get(COUNT) != len(layers):
        changes.append(f"config.json: {COUNT} becomes {len(layers)}")
    config[COUNT] = len(layers)
    for key, value in LOST.items():
        if config.get(key) is None:
            config[key] = value
            changes.append(f"config.json had no {key}, {value!r} is written")
    if (scheme := target.scheme) is not None:
        numbers = {*layers, *target.stale_layers}
        values = take_back(scheme.values, scheme.method, numbers)
        if not is_fp8:
            values = leave_out(replace(scheme, values=values), layers, mtp)
            changes.append(f"config.json: the modules of layer {_numbers(layers)} are left out of {scheme.method}")
        config[scheme.key] = values
    return config, changes


def _ask_readers(
    config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Target
) -> dict[str, tuple[str, ...]]:
    """What each reader would drop, leave unfilled or misread. Raises CheckpointError when it is one of REQUIRED."""
    mtp = MtpConfig.read(config, "config.json")
    scheme = Scheme.read(config, "config.json")
    found = {}
    for name, dialect in MTP.items():
        found[name] = tuple(faults(dialect, Reading(tensors, mtp, scheme, mtp.count), config))
        if found[name] and name in REQUIRED:
            more = f" ({len(found[name])} such faults)" if len(found[name]) > 1 else ""
            raise CheckpointError(f"{target.path}: {dialect.reader} would not read the result: {found[name][0]}{more}")
    return found


def _notices(
    source: Source,
    copies: list[Copy],
    inventories: list[Inventory],
    change: Change,
    readers: dict[str, tuple[str, ...]],
) -> Iterator[str]:
    for number, count in sorted(source.strays.items()):
        yield f"{count} tensors of layer {number} of {source.where} belong to no layer of its config and are left out"
    for copy in copies:
        if copy.state == "differs":
            done = "kept; vLLM and SGLang take the target's" if copy.kept else "left out as asked"
            yield f"{copy.name} differs from the target's and is {done}"
    yield from change_notices(change)
    for name, said in readers.items():
        if said:
            yield f"{MTP[name].reader} would not read the layer: {said[0]}"


def change_notices(change: Change) -> Iterator[str]:
    """Files that are not simply carried over."""
    target = change.target
    if target.stale_layers:
        yield f"what was there of layer {_numbers(target.stale_layers)} is removed"
    for old, new in change.moved.items():
        yield f"{old} becomes {new}: loaders take a file of that name for the whole model and do not look at the index"
    for name, file in target.others.items():
        if name not in change.removed and name not in change.shards:
            also = f", although it has {len(s)} tensors of MTP layers" if (s := target.stale.get(name)) else ""
            yield f"{file.path} is named by no index and stays as it is{also}"


def prepare_strip(path: Path) -> tuple[Change, tuple[str, ...]]:
    """MTP layers out, the count 0, and no entry about them in the list of a quantised target.

    Raises CheckpointError for what is no whole target, UsageError where there is nothing to take out.
    """
    target = open_target(path)
    if not target.stale and not target.gone and not target.mtp.count:
        raise UsageError(f"{path}: has no MTP layer and claims none; there is nothing to strip")
    config = dict(target.config) | {COUNT: 0}
    first = target.mtp.num_layers
    if (scheme := target.scheme) is not None:
        numbers = {*target.stale_layers, *range(first, first + max(1, target.mtp.count))}
        config[scheme.key] = take_back(scheme.values, scheme.method, numbers)
    change = plan_change(target, config, ())
    return change, tuple(change_notices(change))


def _numbers(layers: Mapping[int, Any] | tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, layers))
