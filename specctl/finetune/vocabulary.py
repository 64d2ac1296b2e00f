"""A draft's own vocabulary: the target's tokens that occur most often as labels, and those that end things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from specctl.errors import UsageError
from specctl.heads.vocabulary import most_frequent
from specctl.train.examples import IGNORED, Example

ADDED_PART = 4  # tokens of templates take up to a quarter: some tokenizers have hundreds that nobody uses


@dataclass(frozen=True)
class DraftVocabulary:
    """ids_V: int64, in order. coverage: of the labels, the share that is among them; None without any label. seen: how
    many of them occur as labels."""

    ids_V: Tensor
    coverage: float | None
    seen: int

    @property
    def words(self) -> str:
        covered = "" if self.coverage is None else f", which are {self.coverage:.2%} of all labels"
        return f"draft vocabulary: {len(self.ids_V):,} tokens, {self.seen:,} of them seen as labels{covered}"


def choose(
    examples: Sequence[Example], size: int, vocab_size: int, ends: Collection[int], added: Collection[int]
) -> DraftVocabulary:
    """`size` of the target's `vocab_size` ids: what ends texts and turns however seldom the data has it, the other
    tokens that templates write (added) unless they would take more than a part of the room, then the most frequent.

    Counting is over all examples, so that whoever has the same data chooses the same. Raises UsageError when there is
    no room for `ends`.
    """
    if len(ends) > size:
        raise UsageError(
            f"draft.vocab_size is {size}, the tokens that end an answer are {len(ends)} already; expected at least that"
        )
    counted = Counter(label for example in examples for label in example.labels if label != IGNORED)
    always = [*ends, *(added if len(added) <= size / ADDED_PART else ())]
    ids_V = most_frequent([counted[index] for index in range(vocab_size)], size, always)
    kept = ids_V.tolist()
    total = counted.total()
    covered = sum(counted[index] for index in kept)
    return DraftVocabulary(ids_V, covered / total if total else None, sum(counted[index] > 0 for index in kept))
