"""Drafts: whatever proposes tokens for a target. One narrow interface for every kind; nothing above asks which it is.

A drafter has its own watermark in the sequence's pages and its own carry: the logits (and hidden states) its last row
left, from which the first token of the next block is drawn. Legend: B sequences, K draft slots, D scored ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from specctl.attention import AttentionBackend
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.models import Hidden
from specctl.sampling.batch import SamplingBatch

KINDS = ("llama", "mtp", "ngram")


@dataclass(frozen=True)
class Dense:
    """q, the distribution each token was really drawn from, over columns 0..D - 1 or over the target ids ids_D."""

    prob_BKD: Tensor
    ids_D: Tensor | None = None


@dataclass(frozen=True)
class OneHot:
    """q of a deterministic proposal: all its mass on the proposed token."""


@dataclass(frozen=True)
class Draft:
    """A block of proposals. Slots from length[b] on are masked: neither drafted nor rejected.

    token_BK: int64 on the device, some valid id in masked slots too. length: on the host. parent_BK: for trees, the
    slot each slot follows; None for chains.
    """

    token_BK: Tensor
    length: list[int]
    q: Dense | OneHot
    parent_BK: Tensor | None = None
    confidence_BK: Tensor | None = None

    def cut(self, num_slots: int) -> Draft:
        """The same block without its slots from num_slots on, which nobody uses."""
        q = Dense(self.q.prob_BKD[:, :num_slots], self.q.ids_D) if isinstance(self.q, Dense) else self.q
        confidence = None if self.confidence_BK is None else self.confidence_BK[:, :num_slots]
        assert max(self.length) <= num_slots
        return Draft(self.token_BK[:, :num_slots], self.length, q, self.parent_BK, confidence)


class Drafter(Protocol):
    """One draft of any kind.

    max_k: the longest block it can propose, depth: the one it was trained for; None: any, and nothing is said.
    taps: the target's residuals it reads besides the final hidden state. reads_hidden: whether catch_up needs `hidden`.
    Then it follows every step, over the target's own rows with what the target left in them; of a block that are all
    K + 1, whatever was accepted. Else it may lag and catch up in one chunk. shift: 0 when its row at position i holds
    token i, 1 when it holds token i + 1 beside the hidden state of i. window: of one that may lag: after a block it
    runs over the last `window` committed rows, whatever was accepted, because drafting itself has filled its cache up
    to them; None: drafting fills nothing that stays. attn: attention over its own layers; set by the engine when it has
    any.
    """

    kind: str
    max_k: int | None
    depth: int | None
    max_length: int | None
    taps: tuple[int, ...]
    reads_hidden: bool
    shift: Literal[0, 1]
    window: int | None
    attn: AttentionBackend | None

    @property
    def kv_layers(self) -> list[LayerKV]:
        """The layers it appends to the cache, all with owner "draft"."""

    def follow_rows(self, k: int) -> int:
        """Rows of each sequence in its pass after a step with k draft slots; 0: it makes none."""

    def new_carry(self, num_lanes: int) -> Any:
        """Buffers for `num_lanes` sequences, opaque to the caller; catch_up fills and draft reads them, by lane."""

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Any) -> None:
        """Run over newly committed rows and leave in `carry` what the last row of each sequence gives.

        hidden: what the target left in these rows. The tokens of the batch are those of the rows' positions, shifted by
        `shift`. Rows after `rows.last_row_B` are there for the shape; nobody reads what they leave.
        """

    def draft(self, batch: Batch, carry: Any, k: list[int], sampling: SamplingBatch) -> Draft:
        """Propose up to k[b] tokens for each sequence of `batch`, whose one row each stands at the next position."""


class Objective(Protocol):
    """A loss over labelled rows, R of them, of a draft's final hidden states and its head's weight [V or more, D]."""

    def __call__(
        self, final_RD: Tensor, head: nn.Parameter, vocab_size: int, label_R: Tensor, teacher_RE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss, summed over rows, and what else was measured, summed too. vocab_size: ids that count."""


class Trainable(Protocol):
    """A draft of a kind that can be trained by examples."""

    attn: AttentionBackend | None

    def loss(
        self, batch: Batch, label_T: Tensor, teacher_RE: Tensor | None, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """What `objective` says of the batch. label_T: what each row should say next, negative for a row that is only
        read; teacher_RE: the target's final hidden states of the R labelled rows, for an objective that looks at them.
        """
