"""From a source to a directory that a reader takes: planned from headers, written as a stream, read back and checked.

What is not whole is refused before a byte is written, and what a reader would not take whole leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.checkpoint import Checkpoint
from specctl.convert_mtp.facts import config_sha, draft_facts, recorded_target
from specctl.convert_mtp.files import check_disk, find_files
from specctl.convert_mtp.fit import check_target
from specctl.convert_mtp.inventory import Inventory, require_whole, stored_fp8, take_inventory
from specctl.convert_mtp.places import locked, sweep
from specctl.convert_mtp.shared import Copy, Original, Wish, check_originals, compare, decide, find_originals
from specctl.convert_mtp.source import FACTS, Source, find_source
from specctl.convert_mtp.tensors import DtypeWish, Output, Recipe, check_uniform
from specctl.dialects import MTP, Dialect, Reading, faults
from specctl.errors import CheckpointError
from specctl.fp8 import E4M3
from specctl.heads.mtp import SHARED, MtpConfig
from specctl.heads.quantisation import KEY, OTHER_KEYS, Fp8Config, Scheme
from specctl.output import new_directory, to_json
from specctl.shard_writer import Entry, write_shards, write_synced
from specctl.shards import TensorInfo

STEM = "model-mtp"
WORKERS = 2
REDUCED = "draft_vocab_size"  # of a layer that this project trained for a part of the vocabulary
# What transformers 5 leaves out when it saves, and readers want: a DeepSeek-V3 layer has these values only.
LOST = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for. target: the model that will be drafted for, by directory or hub id."""

    source: str
    to: str = "deepseek"
    dtype: DtypeWish = "keep"
    shared: Wish = "auto"
    target: str | None = None


@dataclass(frozen=True)
class Job:
    """All that is to be written, decided from headers. notices: what the user should know."""

    wishes: Wishes
    source: Source
    dialect: Dialect
    checkpoint: Checkpoint
    target: Checkpoint | None
    config: dict[str, Any]
    num_layers: int
    entries: tuple[Entry, ...]
    copies: tuple[Copy, ...]
    notices: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.info.num_bytes for entry in self.entries)


def prepare(wishes: Wishes) -> Job:
    """Decide everything. Reads headers, and the embedding and head where copies are compared.

    Raises CheckpointError for a source that is no whole MTP layer, IncompatiblePair for a target of other sizes.
    """
    source = find_source(wishes.source)
    dialect = MTP[wishes.to]
    target = None if wishes.target is None else _open_target(wishes.target)
    if target is not None:
        check_target(source, target.config, str(target.path))
    checkpoint = source.open()
    inventories = take_inventory(source, checkpoint)
    require_whole(inventories, wishes.source)
    for inventory in inventories:
        check_uniform(inventory.parts, wishes.dtype, wishes.source)
    num_layers = _num_layers(source, dialect, target)
    recipe = _dtypes(wishes, source, target)
    originals = find_originals(checkpoint, source.shared, target or _recorded_target(source))
    check_originals(originals, {name: e.shape for name, e in source.mtp.tensors().items() if name in SHARED})
    copies = [
        copy
        for inventory in inventories
        for copy in decide(inventory, compare(checkpoint, inventory, originals), wishes.shared, originals)
    ]
    entries = tuple(layer_entries(inventories, copies, recipe, checkpoint, originals, dialect.first_layer(num_layers)))
    config, changes = _config(source, dialect, recipe, num_layers, entries)
    notices = (*changes, *_notices(source, copies, wishes, inventories))
    return Job(wishes, source, dialect, checkpoint, target, config, num_layers, entries, tuple(copies), notices)


def write(job: Job, output: Path, *, force: bool, progress: Callable[[int], object]) -> None:
    """Write the directory, or nothing. Raises CheckpointError when the reader would not take it as it is."""
    check_planned(job)
    check_disk(output.parent, job.num_bytes, "the tensors to write")
    sweep(output)
    with new_directory(output, force=force) as directory, locked(directory):
        fill(job, directory, progress)


def check_planned(job: Job) -> None:
    """Raises CheckpointError when the reader would not take what is planned as it is."""
    _fits_reader(job, {entry.name: entry.info for entry in job.entries})


def fill(job: Job, directory: Path, progress: Callable[[int], object]) -> None:
    """Write everything into an empty directory, and read it back by its reader's rules."""
    write_shards(directory, job.entries, stem=STEM, workers=WORKERS, progress=progress)
    write_synced(directory / "config.json", to_json(job.config) + "\n")
    facts = draft_facts(job.wishes.source, job.source, job.checkpoint, job.target, recipe_facts(job))
    write_synced(directory / FACTS, to_json(facts) + "\n")
    _read_back(job, directory)


def _read_back(job: Job, directory: Path) -> None:
    """Open what was written as its reader does."""
    written = Checkpoint(directory)
    tensors = {name: written.info(name) for name in written.names()}
    if tensors != {entry.name: entry.info for entry in job.entries}:
        raise CheckpointError(f"{directory}: read back other tensors than were written; is the disk sound?")
    _fits_reader(replace(job, config=written.config), tensors)


def _fits_reader(job: Job, tensors: dict[str, TensorInfo]) -> None:
    """Raises CheckpointError for anything that the reader would drop, leave unfilled or misread."""
    config = job.config
    if job.dialect.target_decides and job.target is not None:
        config = job.target.config
    where = "config.json"
    scheme = Scheme.read(config, where)
    reading = Reading(tensors, MtpConfig.read(job.config, where), scheme, job.source.mtp.count)
    found = faults(job.dialect, reading, config)
    if not job.dialect.own_copies:
        found += [
            f"tensor {copy.name} of layer {copy.layer} differs from the target's, which {job.dialect.reader} takes in "
            "its place; pass --shared omit to accept that"
            for copy in job.copies
            if copy.kept and copy.state == "differs"
        ]
    if found:
        more = f" ({len(found)} such faults)" if len(found) > 1 else ""
        raise CheckpointError(f"{job.wishes.source}: {job.dialect.reader} would not read the result: {found[0]}{more}")


def _open_target(name: str) -> Checkpoint:
    """The target's config, and the files with its embedding and head, which is all that is looked at."""
    files = find_files(name)
    if files.index is None:
        return files.open()
    names = [n for name in SHARED.values() for n in (name, name.removeprefix("model.")) if n in files.index]
    if not names:
        raise CheckpointError(f"{name}: has neither of {', '.join(SHARED.values())}; expected the target's checkpoint")
    return files.open({files.index[n] for n in names})


def _recorded_target(source: Source) -> Checkpoint | None:
    """For a head by itself: the target that its specctl.json names, if it is here with the same config."""
    if source.shared:
        return None
    recorded = recorded_target(source.files.path)
    if recorded is None or recorded.name is None or not (Path(recorded.name) / "config.json").is_file():
        return None
    path = Path(recorded.name)
    return _open_target(recorded.name) if config_sha(path) == recorded.config_sha else None


def _num_layers(source: Source, dialect: Dialect, target: Checkpoint | None) -> int:
    """The target's number of layers, by which the MTP layer is numbered."""
    if source.num_layers is not None:
        return source.num_layers
    if target is not None:
        return MtpConfig.read(target.config, str(target.path / "config.json")).num_layers
    if dialect.first_layer(1) == 0:
        return 1
    raise CheckpointError(
        f"{source.where}: is a NextN export, which does not say how many layers its target has; pass --target"
    )


def _dtypes(wishes: Wishes, source: Source, target: Checkpoint | None) -> Recipe:
    stored = stored_fp8(source)
    wanted = stored
    if wishes.dtype == "fp8" and stored is None:
        if target is not None:
            wanted = Fp8Config.read(target.config, str(target.path / "config.json"))
        wanted = wanted or Fp8Config.published()
    return Recipe(wishes.dtype, stored, wanted)


def layer_entries(
    inventories: list[Inventory],
    copies: list[Copy],
    recipe: Recipe,
    checkpoint: Checkpoint,
    originals: dict[str, Original],
    first: int,
) -> Iterator[Entry]:
    """What is written of every layer, the first of them under this number."""
    kept = {(copy.layer, copy.name) for copy in copies if copy.kept}
    for index, inventory in enumerate(inventories):
        prefix = f"model.layers.{first + index}."
        stored = {part.name for part in inventory.parts}
        for part in inventory.parts:
            if part.expected.role == "copy" and (inventory.number, part.name) not in kept:
                continue
            for output in recipe.outputs(part, checkpoint):
                yield _entry(prefix, output)
        for name in SHARED:
            if (inventory.number, name) in kept and name not in stored:
                yield _entry(prefix, recipe.copied(name, originals[name].checkpoint, originals[name].name))


def _entry(prefix: str, output: Output) -> Entry:
    return Entry(prefix + output.name, output.info, output.pieces)


def _config(
    source: Source, dialect: Dialect, recipe: Recipe, num_layers: int, entries: tuple[Entry, ...]
) -> tuple[dict[str, Any], list[str]]:
    """config.json of the output, and what was put right in it."""
    config = dict(source.config) | {"num_hidden_layers": num_layers, "num_nextn_predict_layers": source.mtp.count}
    config["architectures"] = _target_architectures(source.config)
    lost = {key: value for key, value in LOST.items() if config.get(key) is None}
    config |= lost
    reduced = config.pop(REDUCED, None)
    for key in OTHER_KEYS:
        config.pop(key, None)
    if any(entry.info.dtype == E4M3 for entry in entries):
        assert recipe.target is not None
        config[KEY] = dict(recipe.target.values)
    else:
        config.pop(KEY, None)
    if recipe.wish == "bf16":
        config["dtype" if "dtype" in config else "torch_dtype"] = "bfloat16"
    changes = [f"config.json had no {key}, {value!r} is written" for key, value in lost.items()]
    if reduced not in (None, config["vocab_size"]):
        changes.append(
            f"the layer scores {reduced} of {config['vocab_size']} token ids here; engines have no such choice for MTP "
            "layers and score all of them, by the same rows of the target's head: it is left out"
        )
    return dialect.config(config), changes


def _target_architectures(config: dict[str, Any]) -> list[str]:
    architectures = config.get("architectures")
    named = (
        [a.removesuffix("NextN") for a in architectures if isinstance(a, str)]
        if isinstance(architectures, list)
        else []
    )
    return named or ["DeepseekV3ForCausalLM"]


def _notices(source: Source, copies: list[Copy], wishes: Wishes, inventories: list[Inventory]) -> Iterator[str]:
    for number, count in sorted(source.strays.items()):
        yield f"{count} tensors of layer {number} belong to no layer of the config and are left out"
    for copy in copies:
        if copy.state == "unknown":
            done = "kept" if copy.kept else "left out"
            yield f"{copy.name} is {done} without a comparison: the target's is not here (--target gives it)"
        elif copy.state == "differs":
            done = "kept" if copy.kept else "left out as asked: readers put the target's in its place"
            yield f"{copy.name} differs from the target's and is {done}"
    if wishes.to == "vllm":
        yield from _vllm_notices(copies, wishes, any(inventory.is_fp8 for inventory in inventories))


def _vllm_notices(copies: list[Copy], wishes: Wishes, was_fp8: bool) -> Iterator[str]:
    if wishes.target is None and was_fp8 and wishes.dtype == "bf16":
        yield "vLLM builds the layer by the target's quantization_config: use it with a bfloat16 target only"
    if any(not copy.kept and copy.name.startswith("embed") for copy in copies):
        yield "the embedding is the target's; vLLM with pipeline parallelism wants it here (--shared copy)"


def recipe_facts(job: Job) -> dict[str, Any]:
    return {
        "command": "convert-mtp",
        "source": job.wishes.source,
        "to": job.dialect.name,
        "dtype": job.wishes.dtype,
        "num_hidden_layers": job.num_layers,
        "layers": [layer.number for layer in job.source.layers],
        "copies": [
            {"layer": copy.layer, "tensor": copy.name, "target": copy.state, "written": copy.kept}
            for copy in job.copies
        ],
    }
