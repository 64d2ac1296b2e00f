"""Processes that work together, as torchrun starts them: who this one is, and what they tell each other.

One process is a world of its own, in which nothing is told to anybody. Between processes on CPUs gloo carries what is
said, between GPUs NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from specctl.errors import UsageError

T = TypeVar("T")

PATIENCE = timedelta(hours=12)  # that the others wait for the one that decodes or reads


@dataclass(frozen=True)
class World:
    """rank: of this process among `size`."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes; on the CPU."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is true for one of them."""
        return bool(self.sum(torch.tensor([int(flag)]))) if self.size > 1 else flag

    def tell(self, value: Any) -> Any:
        """What the leading process says, to all of them."""
        if self.size == 1:
            return value
        told = [value]
        torch.distributed.broadcast_object_list(told)
        return told[0]

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            torch.distributed.barrier()


ALONE = World()


def in_turn(world: World, make: Callable[[], T]) -> T:
    """What `make` gives, to every process: the leading one first, so that the others find what it has written."""
    if world.leads:
        made = make()
        world.wait()
        return made
    world.wait()
    return make()


def world_size() -> int:
    """As the environment says it, without joining anything. Raises UsageError for what torchrun would not say."""
    return _processes("WORLD_SIZE", "1")


def local_size() -> int:
    """Of the same processes, those on this machine."""
    return _processes("LOCAL_WORLD_SIZE", str(world_size()))


def _processes(name: str, default: str) -> int:
    size = os.environ.get(name, default)
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"{name} is {size!r}, expected a number of processes; start them with torchrun")
    return int(size)


def leads() -> bool:
    """Whether this is the process that writes and speaks, as the environment says it."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined() -> Iterator[World]:
    """The world that the environment describes, for as long as the block lasts."""
    size = world_size()
    if size == 1:
        yield ALONE
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)  # what "cuda" means here
    torch.distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        yield World(torch.distributed.get_rank(), size)
    finally:
        torch.distributed.destroy_process_group()
