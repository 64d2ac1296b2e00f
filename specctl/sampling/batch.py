"""SamplingBatch: the sampling of B sequences as tensors, one for the draft that proposes and the target that judges.

Legend: B sequences, M rows of each (1 when plain or drafting, K + 1 when verifying), K draft slots, V token ids scored
(all of the target's, or a draft's part of them), R rows and D sequences that need something, picked out of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specctl.sampling import noise, process
from specctl.sampling.params import Accept, SamplingParams

# Noise made at a time: on a CPU a row or so, which stays in its caches; elsewhere few launches count more.
_CPU_CELLS, _CELLS = 2**16, 2**24


@dataclass(frozen=True)
class SequenceState:
    """What sampling has to know of a sequence: its request, its noise key, and its tokens so far."""

    params: SamplingParams
    key: int
    prompt: Seq[int]
    output: Seq[int]
    accept: Accept

    @property
    def position(self) -> int:
        """The absolute position of the next token."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True)
class Drawn:
    """One drafted token a sequence. prob_BV: the distribution it was drawn from, None when every row is deterministic.
    confidence_B: the largest probability before drawing, None unless asked for."""

    token_B: Tensor
    prob_BV: Tensor | None
    confidence_B: Tensor | None


class SamplingBatch:
    """min_confidence: a draft slot whose best probability is below it, and all after it, is not drafted."""

    def __init__(
        self, states: Seq[SequenceState], device: torch.device | str = "cpu", min_confidence: float | None = None
    ) -> None:
        self.states = list(states)
        self.device = torch.device(device)
        self.min_confidence = min_confidence
        params = [state.params for state in self.states]
        self.key_B = torch.tensor([state.key for state in self.states], device=self.device)
        self.position_B = torch.tensor([state.position for state in self.states], device=self.device)
        # Rows whose token is a function of scores and keyed noise: accepted when draft and target choose the same.
        self.greedy = [p.greedy for p in params]
        self.coupled = [state.accept.method == "coupled" and not state.params.greedy for state in self.states]
        self._penalised = [b for b, p in enumerate(params) if p.penalised]
        self._temperature_B = self._floats([p.temperature or 1.0 for p in params])
        self._filters = self._filters_of(params)
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def foreseeable(self) -> bool:
        """Whether sampling does not depend on which tokens there are, only on where."""
        return not self._penalised

    def after(self, num_tokens_B: Tensor) -> SamplingBatch:
        """The same batch so many tokens on; which ones they are is not known yet."""
        assert self.foreseeable
        later = copy(self)
        later.position_B = self.position_B + num_tokens_B
        return later

    def scores(self, logits_BMV: Tensor, block_BK: Tensor | None = None, ids_V: Tensor | None = None) -> Tensor:
        """Processed scores of M rows a sequence, in float32 or the logits' wider dtype.

        Row m follows the drafted tokens block_BK[:, :m] when M > 1; with M = 1 it follows all of block_BK, so that a
        draft can ask slot by slot. ids_V: the target ids of a reduced vocabulary's columns.
        """
        if all(self.greedy) and not self._penalised:
            return logits_BMV
        scores_BMV = logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32))
        if self._penalised:
            scores_BMV = self._penalise(scores_BMV, block_BK, ids_V)
        if not all(self.greedy):
            scores_BMV = process.heat(scores_BMV, self._temperature_B[:, None])
        for index_D, value_D, keep in self._filters:
            num_rows, vocab = scores_BMV.shape[1:]
            kept_RV = keep(scores_BMV[index_D].view(-1, vocab), value_D.repeat_interleave(num_rows))
            scores_BMV = scores_BMV.index_copy(0, index_D, kept_RV.view(-1, num_rows, vocab))
        return scores_BMV

    def choose(self, scores_BMV: Tensor, first: int = 0, ids_V: Tensor | None = None) -> Tensor:
        """[B, M]: the token a deterministic row chooses; row m decides position + first + m. Greedy rows take the best
        score, coupled rows the best score plus Gumbel noise, both the lowest id among equals. Other rows: the best."""
        choice_BM = scores_BMV.argmax(-1)
        if not any(self.coupled):
            return choice_BM
        num_rows, vocab = scores_BMV.shape[1:]
        index_D = self._index(self.coupled)
        ids_V = torch.arange(vocab, device=self.device) if ids_V is None else ids_V
        offset_M = first + torch.arange(num_rows, device=self.device)
        position_R = (self.position_B[index_D, None] + offset_M).flatten()
        key_R = self.key_B[index_D].repeat_interleave(num_rows)
        scores_RV = scores_BMV[index_D].view(-1, vocab)
        at_once = max(1, (_CPU_CELLS if self.device.type == "cpu" else _CELLS) // vocab)
        chosen = []
        for start in range(0, len(scores_RV), at_once):
            part = slice(start, start + at_once)
            noise_RV = noise.gumbel(key_R[part], position_R[part], ids_V)
            chosen.append((scores_RV[part].double() + noise_RV).argmax(-1))
        return choice_BM.index_copy(0, index_D, torch.cat(chosen).view(-1, num_rows))

    def uniform(self, offset_B: Tensor | int, purpose: int) -> Tensor:
        """float64 [B]: the uniform number of position + offset for `purpose`."""
        return noise.uniform(self.key_B, self.position_B + offset_B, purpose)

    def draw_draft(
        self, logits_BV: Tensor, slot: int, block_BK: Tensor | None = None, ids_V: Tensor | None = None
    ) -> Drawn:
        """Draw the draft token of `slot` (0-based) as the target would draw it, from the draft's logits.

        block_BK: the slots before it. Tokens are columns of the logits; the caller maps them through ids_V.
        """
        scores_BMV = self.scores(logits_BV[:, None], block_BK, ids_V)
        token_B = self.choose(scores_BMV, slot, ids_V)[:, 0]
        sampled = [not (g or c) for g, c in zip(self.greedy, self.coupled, strict=True)]
        if not any(sampled) and self.min_confidence is None:
            return Drawn(token_B, None, None)
        prob_BV = scores_BMV[:, 0].to(torch.promote_types(scores_BMV.dtype, torch.float32)).softmax(-1)
        confidence_B = None if self.min_confidence is None else prob_BV.amax(-1)
        if not any(sampled):
            return Drawn(token_B, None, confidence_B)
        drawn_B = process.draw(prob_BV, self.uniform(slot, noise.DRAFT))
        sampled_B = torch.tensor(sampled, device=self.device)
        return Drawn(torch.where(sampled_B, drawn_B, token_B), prob_BV, confidence_B)

    def _filters_of(
        self, params: list[SamplingParams]
    ) -> list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]]:
        """(sequences, their values, function) of each filter that some sequence needs; sorting a vocabulary for one
        that does not would be wasted."""
        top_k = [0 if p.greedy else p.top_k for p in params]
        top_p = [1.0 if p.greedy else p.top_p for p in params]
        min_p = [0.0 if p.greedy else p.min_p for p in params]
        return [
            (self._index(needed), values[self._index(needed)], keep)
            for needed, values, keep in (
                ([k > 0 for k in top_k], self._ints(top_k), partial(process.keep_top_k, largest=max(top_k))),
                ([p < 1 for p in top_p], self._floats(top_p), process.keep_top_p),
                ([p > 0 for p in min_p], self._floats(min_p), process.keep_min_p),
            )
            if any(needed)
        ]

    def _penalise(self, scores_BMV: Tensor, block_BK: Tensor | None, ids_V: Tensor | None) -> Tensor:
        scores_BMV = scores_BMV.clone()
        num_rows, vocab = scores_BMV.shape[1:]
        columns = slice(vocab) if ids_V is None else ids_V
        width = vocab if ids_V is None else int(ids_V.max()) + 1
        for b in self._penalised:
            p = self.states[b].params
            block_K = torch.empty(0, dtype=torch.int64, device=self.device) if block_BK is None else block_BK[b]
            seen_MV, count_MV = self._history(b, num_rows, width, block_K)
            scores_BMV[b] = process.penalise(
                scores_BMV[b],
                seen_MV[:, columns],
                count_MV[:, columns],
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
        return scores_BMV

    def _history(self, b: int, num_rows: int, width: int, block_K: Tensor) -> tuple[Tensor, Tensor]:
        """(seen at all, count in the output) of every token id for each row, the drafted tokens before it included."""
        if b not in self._counts:
            state = self.states[b]
            self._counts[b] = self._count(state.prompt), self._count(state.output)
        prompt_N, output_N = self._counts[b]
        width = max(width, len(prompt_N), len(output_N))
        count_MN = output_N.new_zeros(num_rows, width)
        count_MN[:, : len(output_N)] = output_N
        for k in range(len(block_K)):
            after_MN = count_MN if num_rows == 1 else count_MN[k + 1 :]
            after_MN.index_add_(1, block_K[k : k + 1], after_MN.new_ones(len(after_MN), 1))
        seen_MN = count_MN > 0
        seen_MN[:, : len(prompt_N)] |= prompt_N > 0
        return seen_MN, count_MN

    def _count(self, tokens: Seq[int]) -> Tensor:
        return self._ints(tokens).bincount()

    def _index(self, wanted: Seq[bool]) -> Tensor:
        return self._ints([b for b, want in enumerate(wanted) if want])

    def _ints(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _floats(self, values: Seq[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)
