"""What a run comes to before it is begun: tokens, steps, memory, disk, time. It refuses what the machine cannot
hold."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specctl.checkpoint import Checkpoint
from specctl.dist import local_size, world_size
from specctl.errors import CapacityError
from specctl.finetune.data import DataSet
from specctl.finetune.kinds import plan_start
from specctl.finetune.memory import GIB, anonymous, spread
from specctl.finetune.options import RunOptions
from specctl.finetune.start import Start
from specctl.hub import locate
from specctl.models import read_config
from specctl.pair import free_memory, has_tokenizer, resolve_device, resolve_dtype
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer
from specctl.train.examples import Example
from specctl.train.feed import Cursor, Feed
from specctl.train.hidden import Reads
from specctl.train.hidden_store import bytes_needed
from specctl.train.packing import Chain

RATE_SECONDS = 0.3  # how long this machine's speed is looked at
# A pass over few rows is bound by reading the weights: it takes a few times as long as its multiplications.
DECODING = 4
UNASKED = 8 * GIB  # of the target's states that are kept without being asked to


@dataclass(frozen=True)
class Plan:
    """memory, disk: bytes by part; seconds: by part, a rough estimate. epochs, steps, tokens (rows run), labels (of
    these trained): of the whole run."""

    start: str
    parameters: int
    epochs: int
    steps: int
    tokens: int
    labels: int
    memory: dict[str, int]
    memory_free: int
    disk: dict[str, int]
    disk_free: int
    seconds: dict[str, float]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What to show, two columns."""
        seconds = sum(self.seconds.values())
        return [
            ("draft", f"{self.start}, {self.parameters / 1e6:,.1f} M parameters"),
            ("steps", f"{self.steps:,} in {self.epochs} epochs"),
            ("tokens", f"{self.tokens:,}, {self.labels:,} of them trained"),
            *((f"memory: {part}", _gib(size)) for part, size in self.memory.items()),
            ("memory", f"{_gib(sum(self.memory.values()))} of {_gib(self.memory_free)} that can be had"),
            *((f"disk: {part}", _gib(size)) for part, size in self.disk.items()),
            ("disk", f"{_gib(sum(self.disk.values()))} of {_gib(self.disk_free)} that are free"),
            *((f"time: {part}", _duration(each)) for part, each in self.seconds.items()),
            ("time", f"about {_duration(seconds)}"),
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        """Raises CapacityError naming what is short, and what to change."""
        memory, disk = sum(self.memory.values()), sum(self.disk.values())
        if memory > self.memory_free:
            largest = max(self.memory, key=lambda part: self.memory[part])
            raise CapacityError(
                f"training takes about {_gib(memory)} of memory ({largest}: {_gib(self.memory[largest])}) and "
                f"{_gib(self.memory_free)} can be had; make the draft, optimiser.tokens_per_batch or loss.chunk "
                "smaller, or set optimiser.checkpointing"
            )
        if disk > self.disk_free:
            raise CapacityError(
                f"training takes about {_gib(disk)} of disk, {_gib(self.disk_free)} are free; free some, lower "
                "checkpoint.keep, or name another output"
            )


@dataclass(frozen=True)
class Load:
    """Steps of a run and what they read. epochs: begun; largest: rows of the largest packed batch."""

    epochs: int
    steps: int
    tokens: int
    labels: int
    largest: int


def count(recipe: Recipe, feed: Feed) -> Load:
    """Go through a run's steps without running them."""
    epochs, limit = recipe.num_epochs, recipe.max_steps
    steps = tokens = labels = largest = 0
    cursor = Cursor()
    while (epochs is None or cursor.epoch < epochs) and (limit is None or steps < limit):
        rows, cursor = feed.take(cursor)
        lengths = [sum(len(feed.examples[index].ids) for index in row) for row in rows]
        steps, tokens, largest = steps + 1, tokens + sum(lengths), max(largest, *lengths)
        labels += sum(feed.examples[index].num_labels for row in rows for index in row)
    return Load(cursor.epoch + (cursor.index > 0), steps, tokens, labels, largest)


def answered(recipe: Recipe, data: DataSet) -> DataSet:
    """The data as it will be at most: prompts that are still to be answered, with the longest answers."""
    settings = recipe.data.regenerate
    if not data.pending or settings is None:
        return data
    train = []
    for example in data.train:
        length = len(example.ids)
        if not example.num_labels:
            ids = (*example.ids, *(0,) * settings.max_tokens)
            example = Example.of(example.id, ids, [(length, len(ids))]).trimmed(recipe.data.max_length)
        train.append(example)
    return replace(data, train=train, label_tokens=sum(example.num_labels for example in train))


def make_feed(recipe: Recipe, data: DataSet) -> Feed:
    return Feed(data.train, recipe.tokens_per_batch, recipe.optimiser.accumulate, recipe.seed)


def plan(recipe: Recipe, options: RunOptions, data: DataSet) -> Plan:
    """No weights are read. Raises CapacityError when memory or disk is short, besides whatever is wrong with the
    recipe."""
    checkpoint = Checkpoint(locate(recipe.target))
    tokenizer = Tokenizer(checkpoint.path) if has_tokenizer(checkpoint.path) else None
    data = answered(recipe, data)
    start = plan_start(recipe, checkpoint, tokenizer, data)
    found = make_plan(recipe, options, data, start, checkpoint, anonymous())
    found.check()
    return replace(found, seconds=_seconds(recipe, options, data, start, found, checkpoint))


def make_plan(recipe: Recipe, options: RunOptions, data: DataSet, start: Start, target: Checkpoint, base: int) -> Plan:
    """The plan, without a judgement and without the time, which takes some to find out. base: what the process held in
    memory before it had opened anything."""
    device = resolve_device(options.model.device)
    skeleton = start.skeleton()
    load = count(recipe, make_feed(recipe, data))
    wanted = needs_target(recipe, data)
    dtype = training_dtype(options)
    target_dtype = resolve_dtype(options.model.dtype, target, device)
    target_bytes = _resident(target) * target_dtype.itemsize if wanted else 0
    held = anonymous() if device.type == "cpu" else 0
    memory = {"process": min(base, held), "target": target_bytes, **start.memory(recipe, load.largest, dtype)}
    memory = spread(memory, world_size(), local_size() if device.type == "cpu" else 1)
    states = kept_states(recipe, start, data, load.epochs, target, target_dtype)
    disk = _disk(recipe, data, skeleton, states)
    place = Path(recipe.output or ".").expanduser().resolve()
    return Plan(
        start=start.words,
        parameters=_count(skeleton),
        epochs=load.epochs,
        steps=load.steps,
        tokens=load.tokens,
        labels=load.labels,
        memory=memory,
        memory_free=free_memory(device) + held,
        disk=disk,
        disk_free=shutil.disk_usage(_there(place)).free,
        seconds={},
    )


def needs_target(recipe: Recipe, data: DataSet) -> bool:
    """Whether the target's weights are used for anything."""
    decodes = bool(data.held_out) or recipe.draft.init is not None
    return needs_states(recipe) or decodes or recipe.data.regenerate is not None


def training_dtype(options: RunOptions) -> torch.dtype:
    """Weights are trained in float32, whatever the passes compute in, unless float64 is asked for."""
    return torch.float64 if options.model.dtype == "float64" else torch.float32


def kept_states(
    recipe: Recipe, start: Start, data: DataSet, epochs: int, target: Checkpoint, dtype: torch.dtype
) -> int | None:
    """Bytes of the target's states that the run keeps on the disk; None when it keeps none. dtype: of the target."""
    if not needs_states(recipe) or recipe.hidden.keep is False:
        return None
    width = read_config(target.config, str(target.path / "config.json")).hidden_size
    size = bytes_needed(data.train, reads_of(recipe, start), width, dtype, recipe.hidden.format)
    asked = recipe.hidden.keep or recipe.hidden.directory is not None
    return size if asked or (epochs > 1 and size <= UNASKED) else None


def reads_of(recipe: Recipe, start: Start) -> Reads:
    """What training reads of the target."""
    return Reads(start.taps, every_row=recipe.reads_hidden)


def needs_states(recipe: Recipe) -> bool:
    """Whether training looks at what the target leaves."""
    return recipe.reads_hidden or recipe.loss.kl > 0 or recipe.loss.tv > 0


def chain_of(recipe: Recipe) -> Chain:
    """What training asks of the draft."""
    shift = 1 if recipe.reads_hidden else 0
    return Chain(recipe.loss.steps, shift, recipe.loss.decay, per_sequence=recipe.loss.average == "examples")


def _disk(recipe: Recipe, data: DataSet, skeleton: nn.Module, states: int | None) -> dict[str, int]:
    """While the run lasts: a checkpoint more than are kept, the best weights and those before, and the output."""
    weights = 4 * _count(skeleton)
    parts = {"checkpoints": 3 * weights * (recipe.checkpoint.keep + 1), "output": weights}
    if data.held_out:
        parts["best weights"] = 2 * weights
    if states is not None:
        parts["hidden states"] = states
    return parts


def _seconds(
    recipe: Recipe, options: RunOptions, data: DataSet, start: Start, found: Plan, target: Checkpoint
) -> dict[str, float]:
    """By counting multiplications (2 a parameter and row forward, 4 back, 2 more when layers run twice; the head twice
    forward) and this machine's speed at them."""
    layers, head, config = start.multiplied()
    rate = _rate(resolve_device(options.model.device), config.hidden_size, config.intermediate_size)
    passes, steps = 8 if recipe.optimiser.checkpointing else 6, recipe.loss.steps
    seconds = {"training": steps * (passes * layers * found.tokens + 8 * head * found.labels) / rate}
    size = 2 * _numbers(target)
    if data.pending and recipe.data.regenerate is not None:
        seconds["answers"] = DECODING * data.pending * recipe.data.regenerate.max_tokens * size / rate
    if needs_states(recipe):
        times = 1 if "hidden states" in found.disk else found.epochs
        seconds["target's states"] = size * times * found.tokens / found.epochs / rate
    if data.held_out:
        times = 2 + found.steps // recipe.validation.every_steps
        asked = recipe.validation.prompts * recipe.validation.max_tokens * len(recipe.validation.temperatures)
        seconds["validation"] = DECODING * times * asked * size / rate
    return seconds


def _rate(device: torch.device, width: int, inner: int) -> float:
    """Multiplications and additions a second, of float32 matrices like the draft's."""
    width, inner = min(width, 4096), min(inner, 4096)  # larger ones are not any faster
    a, b = torch.ones(256, width, device=device), torch.ones(inner, width, device=device).T

    def run() -> None:
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _per_second(run) * 2 * 256 * width * inner


def _per_second(run: Callable[[], None]) -> float:
    run()
    begin, times = time.perf_counter(), 0
    while time.perf_counter() - begin < RATE_SECONDS:
        run()
        times += 1
    return times / (time.perf_counter() - begin)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _resident(target: Checkpoint) -> int:
    """Numbers of a target that serves: a tied head has a copy of its own, packed."""
    config = read_config(target.config, str(target.path / "config.json"))
    return _numbers(target) + config.tied * config.vocab_size * config.hidden_size


def _numbers(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.info(name).num_parameters for name in checkpoint.names())


def _there(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
