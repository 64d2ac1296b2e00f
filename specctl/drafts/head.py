"""Heads: drafts of one decoder layer that reads what the target leaves. What they share, drafting and training alike.

Row i of a head holds token i + 1 beside what the target left at position i, and lies in slot i at position i: the
target's own slots, with the tokens moved by one. To draft more than one token the head runs on, on what it gave itself.
In training the same is done for all rows at once: at step j row i holds token i + 1 + j, lies at position i + j, and
sees the target's rows up to i and what it gave itself since (`begin_step` of the dense backend).
Legend: T rows, R chosen rows, B sequences, L lanes, D width, V scored ids, J steps of the chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specctl.attention import AttentionBackend, ChainBackend
from specctl.drafts import Draft, Objective, OutputHead, Scored, TrainingRows
from specctl.drafts.chain import draft_chain
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.layers import Purpose
from specctl.models import Hidden
from specctl.models.causal import Fill
from specctl.sampling.batch import SamplingBatch


class Given(NamedTuple):
    """What a pass gives. final: for the head; fed: in place of what the target would have left, for the next row."""

    final_TD: Tensor
    fed_TD: Tensor


class HeadModule(nn.Module, ABC):
    """The layer beside its target. Build it on the meta device and fill it by prepare().

    taps: the target's residuals it reads besides the final hidden state. ids_V: the target ids of its columns, int64 in
    order; None when they are the target's own. max_length: the longest text.
    """

    taps: tuple[int, ...] = ()
    ids_V: Tensor | None = None

    @property
    @abstractmethod
    def width(self) -> int:
        """D."""

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """V."""

    @property
    @abstractmethod
    def max_length(self) -> int: ...

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """Some weight, for dtype and device."""

    @abstractmethod
    def read(self, hidden: Hidden) -> Tensor:
        """[T, D]: what rows read beside their tokens, of what the target left in them."""

    @abstractmethod
    def forward(self, rows: Batch, read_TD: Tensor, attn: AttentionBackend) -> Given:
        """Run the rows. read_TD: as read() gives it, or what was fed back."""

    @abstractmethod
    def logits(self, final_RD: Tensor) -> Tensor:
        """[R, V] of what forward() gave."""

    @abstractmethod
    def output_head(self) -> OutputHead:
        """The matrix that makes logits, for a loss. Asked of a module that is prepared for training."""

    @abstractmethod
    def trained(self) -> Iterator[nn.Parameter]:
        """The parameters that training moves: not those that are the target's, or stand for them."""

    @abstractmethod
    def kv_layer(self, dtype: torch.dtype) -> LayerKV: ...

    @abstractmethod
    def prepare(self, purpose: Purpose, fill: Fill) -> None:
        """See CausalLM.prepare."""


@dataclass(frozen=True)
class Carry:
    """What the last row of each sequence gave."""

    logits_LV: Tensor
    fed_LD: Tensor


RunStep = Callable[[Callable[[Tensor], tuple[Tensor, ...]], Tensor], tuple[Tensor, ...]]


def _totals(rows: TrainingRows, row_JR: list[Tensor], objective: Objective) -> list[Tensor | None]:
    """The objective's totals for the rows of every step. Steps look at the same places, one further each; what is said
    of a place is computed once."""
    assert rows.hidden is not None
    place_JR = [rows.place(step, row_R) for step, row_R in enumerate(row_JR)]
    place_P, index = torch.unique(torch.cat(place_JR), return_inverse=True)
    total_P = objective.totals(rows.hidden.final_TD[place_P])
    if total_P is None:
        return [None] * len(row_JR)
    return list(torch.split(total_P[index], [len(row_R) for row_R in row_JR]))


def _run_step(step: Callable[[Tensor], tuple[Tensor, ...]], read_TD: Tensor) -> tuple[Tensor, ...]:
    return step(read_TD)


def run_step_again(step: Callable[[Tensor], tuple[Tensor, ...]], read_TD: Tensor) -> tuple[Tensor, ...]:
    """Run a step of the chain and keep its input only: it is run again for its gradients."""
    if not torch.is_grad_enabled():
        return step(read_TD)
    found = checkpoint(step, read_TD, use_reentrant=False, preserve_rng_state=False)
    return cast(tuple[Tensor, ...], found)


class HeadDrafter:
    """`Drafter` of a head, and `Trainable`. Set `attn` (the "draft" owner's backend) before the first pass.

    depth: steps it was trained for. run_step: how a step of the chain is run in training.
    """

    reads_hidden = True
    shift: Literal[0, 1] = 1
    window: int | None = None

    def __init__(self, kind: str, model: HeadModule, *, max_k: int | None = None, depth: int | None = 1) -> None:
        self.kind = kind
        self.model = model
        self.max_k = max_k
        self.depth = depth
        self.max_length: int | None = model.max_length
        self.taps = model.taps
        self.attn: AttentionBackend | None = None
        self.run_step: RunStep = _run_step

    @property
    def kv_layers(self) -> list[LayerKV]:
        return [self.model.kv_layer(self.model.like.dtype)]

    def follow_rows(self, k: int) -> int:
        return k + 1

    def new_carry(self, num_lanes: int) -> Carry:
        like = self.model.like
        return Carry(like.new_zeros(num_lanes, self.model.num_columns), like.new_zeros(num_lanes, self.model.width))

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Carry) -> None:
        assert hidden is not None
        carry.fed_LD[rows.lane_B], carry.logits_LV[rows.lane_B] = self._last(rows, self.model.read(hidden))

    def draft(self, batch: Batch, carry: Carry, k: list[int], sampling: SamplingBatch) -> Draft:
        fed_BD = carry.fed_LD[batch.lane_B]

        def run(slot: int, token_B: Tensor) -> Tensor:
            nonlocal fed_BD
            fed_BD, logits_BV = self._last(batch.at(slot - 1, token_B), fed_BD)
            return logits_BV

        return draft_chain(batch, carry.logits_LV[batch.lane_B], k, sampling, run, self.model.ids_V)

    def loss(self, rows: TrainingRows, objective: Objective) -> tuple[Tensor, Tensor]:
        """See `Trainable`; `attn` is one with gradients; `rows` have as many steps as the chain is trained for."""
        losses, sums = [], []
        row_JR = [(label_T >= 0).nonzero()[:, 0] for label_T in rows.label_JT]
        total_JR = _totals(rows, row_JR, objective) if objective.needs_teacher else [None] * len(row_JR)
        for step, (final_TD, row_R, total_R) in enumerate(zip(self.unroll(rows), row_JR, total_JR, strict=True)):
            scored = Scored(
                final_RD=final_TD[row_R],
                label_R=self._columns(rows.label_JT[step][row_R]),
                weight_R=rows.weight_JT[step][row_R],
                teacher_RE=None if not objective.needs_teacher else rows.following(step, row_R),
                total_R=total_R,
            )
            loss, measured = objective(scored, self.model.output_head())
            losses.append(loss)
            sums.append(measured)
        return torch.stack(losses).sum(), torch.stack(sums)

    def unroll(self, rows: TrainingRows) -> list[Tensor]:
        """[T, D] for every step of the chain: what forward() gives the head, all rows' chains at once."""
        assert rows.hidden is not None
        attn = cast(ChainBackend, self.attn)
        attn.plan(rows.batch)
        fed_TD, found = self.model.read(rows.hidden), list[Tensor]()
        for step, token_T in enumerate(rows.token_JT):
            moved = replace(rows.batch, token_T=token_T, position_T=rows.batch.position_T + step)

            def run(read_TD: Tensor, step: int = step, moved: Batch = moved) -> tuple[Tensor, ...]:
                attn.begin_step(step)  # here, since it may be run again
                return tuple(self.model(moved, read_TD, attn))

            final_TD, fed_TD = self.run_step(run, fed_TD)
            found.append(final_TD)
        return found

    def _columns(self, label_R: Tensor) -> Tensor:
        """Target ids as columns, -1 for ids that have none."""
        ids_V = self.model.ids_V
        if ids_V is None:
            return label_R
        column_R = torch.searchsorted(ids_V, label_R).clamp(max=len(ids_V) - 1)
        return torch.where(ids_V[column_R] == label_R, column_R, -1)

    def _last(self, rows: Batch, read_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Of the last row of every sequence: what is fed back, [B, D], and logits."""
        assert self.attn is not None
        self.attn.plan(rows)
        given: Given = self.model(rows, read_TD, self.attn)
        last_B = rows.last_row_B
        return given.fed_TD[last_B], self.model.logits(given.final_TD[last_B])
