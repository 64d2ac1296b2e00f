"""Drafts: whatever proposes tokens for a target. One narrow interface for every kind; nothing above asks which it is.

A drafter has its own watermark in the sequence's pages and its own carry: the logits (and hidden states) its last row
left, from which the first token of the next block is drawn. Legend: B sequences, K draft slots, D scored ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.models import Hidden
from specctl.sampling.batch import SamplingBatch

KINDS = ("llama", "mtp", "eagle3", "ngram")


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


@dataclass(frozen=True)
class TrainingRows:
    """Whole examples, packed, and what is to be learnt from them by a chain of J steps; one for a draft without steps.

    token_JT: the token each row holds at each step; any id where the example is over. label_JT: what should be said
    there, negative for a row that is only read. weight_JT: how much it counts. hidden: what the target left in the
    rows, as far as somebody asked for it.
    """

    batch: Batch
    token_JT: Tensor
    label_JT: Tensor
    weight_JT: Tensor
    hidden: Hidden | None = None
    shift: int = 0

    def place(self, step: int, row_R: Tensor) -> Tensor:
        """The rows in which the target said what these rows are to say at this step, [R]."""
        return row_R + self.shift + step

    def following(self, step: int, row_R: Tensor) -> Tensor:
        """The target's final hidden states there, [R, E]."""
        assert self.hidden is not None
        return self.hidden.final_TD[self.place(step, row_R)]


@dataclass(frozen=True)
class Scored:
    """Labelled rows of one step. label_R: columns of the head, -1 for what the head has no column for. weight_R: how
    much each counts in the loss. teacher_RE: the target's final hidden states, for an objective that looks at them;
    total_R: what it said of these before, see Objective.totals."""

    final_RD: Tensor
    label_R: Tensor
    weight_R: Tensor
    teacher_RE: Tensor | None = None
    total_R: Tensor | None = None


@dataclass(frozen=True)
class OutputHead:
    """The matrix that makes logits of final hidden states, [V or more, D]. vocab_size: columns that count. ids_V: the
    target ids of these; None when they are the target's own. trained: whether it gets a gradient, which is added to
    weight.grad."""

    weight: Tensor
    vocab_size: int
    ids_V: Tensor | None = None
    trained: bool = True


class Objective(Protocol):
    """A loss over labelled rows."""

    @property
    def needs_teacher(self) -> bool:
        """Whether it looks at the target's hidden states."""

    def totals(self, teacher_RE: Tensor) -> Tensor | None:
        """A number for each of the target's final hidden states that takes time and is the same at whichever step of a
        chain it is looked at, [R]; None where there is nothing of the kind."""

    def __call__(self, scored: Scored, head: OutputHead) -> tuple[Tensor, Tensor]:
        """The loss, weighted and summed over rows, and what else was measured, summed without weights."""


class Trainable(Protocol):
    """A draft of a kind that can be trained by examples."""

    attn: AttentionBackend | None

    def loss(self, rows: TrainingRows, objective: Objective) -> tuple[Tensor, Tensor]:
        """What `objective` says of the rows, summed over steps, and its measures for each step, [J, M]."""
