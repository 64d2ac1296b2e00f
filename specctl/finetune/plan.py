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

from specctl.checkpoint import Checkpoint
from specctl.errors import CapacityError
from specctl.finetune.data import DataSet
from specctl.finetune.memory import GIB, Memory, anonymous, estimate
from specctl.finetune.options import RunOptions
from specctl.finetune.start import Start, plan_start
from specctl.hub import locate
from specctl.models import Llama, read_config
from specctl.pair import free_memory, has_tokenizer, resolve_device, resolve_dtype
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer
from specctl.train.examples import Example
from specctl.train.feed import Cursor, Feed
from specctl.train.hidden_store import HiddenStore

RATE_SECONDS = 0.3  # how long this machine's speed is looked at
# A pass over few rows is bound by reading the weights: it takes a few times as long as its multiplications.
DECODING = 4


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
    start = plan_start(recipe.draft, checkpoint, tokenizer)
    data = answered(recipe, data)
    found = make_plan(recipe, options, data, start, checkpoint, anonymous())
    found.check()
    return replace(found, seconds=_seconds(recipe, options, data, start.skeleton(), found, checkpoint))


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
    memory: Memory = estimate(recipe, skeleton, load.largest, dtype, target_bytes, min(base, held))
    disk = _disk(recipe, data, skeleton, load, target, target_dtype)
    place = Path(recipe.output or ".").expanduser().resolve()
    return Plan(
        start=start.words,
        parameters=_count(skeleton),
        epochs=load.epochs,
        steps=load.steps,
        tokens=load.tokens,
        labels=load.labels,
        memory=dict(memory.parts),
        memory_free=free_memory(device) + held,
        disk=disk,
        disk_free=shutil.disk_usage(_there(place)).free,
        seconds={},
    )


def needs_target(recipe: Recipe, data: DataSet) -> bool:
    """Whether the target's weights are used for anything."""
    teaches = recipe.loss.kl > 0 or recipe.loss.tv > 0
    return teaches or bool(data.held_out) or recipe.data.regenerate is not None


def training_dtype(options: RunOptions) -> torch.dtype:
    """Weights are trained in float32, whatever the passes compute in, unless float64 is asked for."""
    return torch.float64 if options.model.dtype == "float64" else torch.float32


def keeps_hidden(recipe: Recipe, epochs: int) -> bool:
    """Whether the target's hidden states are worth the disk: somebody will ask for them again."""
    return (recipe.loss.kl > 0 or recipe.loss.tv > 0) and epochs > 1


def _disk(
    recipe: Recipe, data: DataSet, skeleton: Llama, load: Load, target: Checkpoint, target_dtype: torch.dtype
) -> dict[str, int]:
    """While the run lasts: a checkpoint more than are kept, the best weights and those before, and the output."""
    weights = 4 * _count(skeleton)
    parts = {"checkpoints": 3 * weights * (recipe.checkpoint.keep + 1), "output": weights}
    if data.held_out:
        parts["best weights"] = 2 * weights
    if keeps_hidden(recipe, load.epochs):
        width = read_config(target.config, str(target.path / "config.json")).hidden_size
        parts["hidden states"] = HiddenStore.bytes_needed(data.train, width, target_dtype)
    return parts


def _seconds(
    recipe: Recipe, options: RunOptions, data: DataSet, skeleton: Llama, found: Plan, target: Checkpoint
) -> dict[str, float]:
    """By counting multiplications (2 a parameter and row forward, 4 back, 2 more when layers run twice; the head twice
    forward) and this machine's speed at them."""
    config = skeleton.config
    rate = _rate(resolve_device(options.model.device), config.hidden_size, config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    layers = _count(skeleton) - head * (1 if config.tied else 2)
    passes = 8 if recipe.optimiser.checkpointing else 6
    seconds = {"training": (passes * layers * found.tokens + 8 * head * found.labels) / rate}
    size = 2 * _numbers(target)
    if data.pending and recipe.data.regenerate is not None:
        seconds["answers"] = DECODING * data.pending * recipe.data.regenerate.max_tokens * size / rate
    if recipe.loss.kl > 0 or recipe.loss.tv > 0:
        times = 1 if keeps_hidden(recipe, found.epochs) else found.epochs
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


def _count(model: Llama) -> int:
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
