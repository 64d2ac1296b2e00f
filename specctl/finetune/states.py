"""The target's states of a run: computed when they are asked for, or kept on the disk, then from the answers on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from specctl.finetune.data import DataSet, Request
from specctl.finetune.harvest import Harvester
from specctl.finetune.plan import UNASKED, reads_of
from specctl.finetune.progress import Bar
from specctl.finetune.start import Start
from specctl.pair import Target
from specctl.schemas.recipe import Recipe
from specctl.train.examples import Example
from specctl.train.hidden import HiddenStates, Reads
from specctl.train.hidden_store import Identity, Shards, StoredStates, bytes_needed, key_of
from specctl.train.loop import Teacher

Say = Callable[[str], None]


class States:
    """directory: of the run's own store. identity: of the target."""

    def __init__(self, recipe: Recipe, start: Start, directory: Path, identity: str, say: Say) -> None:
        self._recipe = recipe
        self._reads = reads_of(recipe, start)
        self._own = recipe.hidden.directory is None
        self._directory = directory if self._own else Path(str(recipe.hidden.directory)).expanduser()
        self._identity = identity
        self._say = say
        self._shards: Shards | None = None

    def harvest(self, target: Target) -> Harvest | None:
        """What keeps them while the target answers; None where it is clear that nobody asks for them, or only once."""
        hidden, epochs = self._recipe.hidden, self._recipe.num_epochs
        asked = hidden.keep or not self._own
        if hidden.keep is False or not (asked or epochs is None or epochs > 1):
            return None
        return Harvest(self._open(target), self._reads, None if asked else UNASKED)

    def teacher(self, target: Target, data: DataSet, keep: bool) -> Teacher:
        """keep: see kept_states. Raises UsageError for a store of something else."""
        states = HiddenStates(target.model, data.train, self._reads)
        if not keep:
            self._drop()
            return states
        stored = StoredStates(states, self._open(target), target.dtype)
        with Bar("target's states", len(stored.keys), "examples", done=len(stored.keys) - len(stored.missing)) as bar:
            stored.fill(lambda: bar.add(1))
        return stored

    def _open(self, target: Target) -> Shards:
        if self._shards is None:
            identity = Identity.of(self._identity, target.dtype, self._recipe.hidden.format, self._reads)
            self._shards = Shards(self._directory, identity, self._say)
        return self._shards

    def _drop(self) -> None:
        """What was kept before it was known to be too much."""
        if self._shards is not None and self._own:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._shards = None


class Harvest:
    """Keeps states of answers as they are made. limit: bytes from which on it stops."""

    def __init__(self, shards: Shards, reads: Reads, limit: int | None) -> None:
        self.harvester = Harvester(reads.taps)
        self._shards = shards
        self._reads = reads
        self._limit = limit
        self._bytes = 0

    def keep(self, request: Request, answer: Sequence[int]) -> None:
        """Of one finished answer."""
        ids = [*request.ids, *answer]
        hidden = self.harvester.take(ids)
        if hidden is None or not answer or (self._limit is not None and self._bytes > self._limit):
            return
        example = Example.of(request.id, ids, [(len(request.ids), len(ids))])
        width, dtype = hidden.final_TD.shape[1], hidden.final_TD.dtype
        self._bytes += bytes_needed([example], self._reads, width, dtype, self._shards.identity.format)
        self._shards.put(key_of(example, self._reads), self._reads.of(example, hidden))

    def flush(self) -> None:
        self._shards.flush()
