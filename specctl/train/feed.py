"""Feed: which examples an optimiser step is made of, from a cursor that says how far the data has been read.

Legend: a row is a packed batch of examples, by index; a step has up to `accumulate` rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from specctl.train.examples import Example
from specctl.train.packing import fill


@dataclass(frozen=True)
class Cursor:
    """The next example to read: its place in the order of its epoch, both from 0."""

    epoch: int = 0
    index: int = 0


class Feed:
    """Every epoch has all examples in an order of its own, which the seed and the epoch's number decide. A step ends
    with its epoch, however few rows it has by then: nothing is dropped."""

    def __init__(self, examples: Sequence[Example], tokens_per_batch: int, accumulate: int, seed: int) -> None:
        self.examples = examples
        self._room = tokens_per_batch
        self._accumulate = accumulate
        self._seed = seed
        self._order = lru_cache(maxsize=1)(self._shuffled)

    def take(self, cursor: Cursor) -> tuple[list[list[int]], Cursor]:
        """The rows of the step at `cursor`, and where the next one begins."""
        order = self._order(cursor.epoch)
        rows = list(islice(fill(self.examples, self._room, order[cursor.index :]), self._accumulate))
        after = cursor.index + sum(map(len, rows))
        return rows, Cursor(cursor.epoch, after) if after < len(order) else Cursor(cursor.epoch + 1)

    def steps(self, cursor: Cursor, epochs: int) -> Iterator[list[list[int]]]:
        """The steps from `cursor` to the end of the last of `epochs` epochs."""
        while cursor.epoch < epochs:
            rows, cursor = self.take(cursor)
            yield rows

    def _shuffled(self, epoch: int) -> tuple[int, ...]:
        order = list(range(len(self.examples)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return tuple(order)
