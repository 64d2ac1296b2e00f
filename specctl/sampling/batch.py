"""SamplingBatch: the sampling of B sequences as tensors, used alike by the draft that proposes and the target that verifies.

Legend: B sequences, M rows of each (1 when plain or drafting, K + 1 when verifying), K draft slots, V token ids scored
(all of the target's, or a draft's part of them), D rows that need something, picked out of B.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.sampling import noise, process
from specctl.sampling.params import Accept, SamplingParams


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
    """One drafted token a sequence. prob_BV is the distribution it was drawn from, None when every row is deterministic.
    confidence_B is the largest probability before drawing, None unless asked for."""

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
        self._params = params

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=self.device)

        self.key_B = torch.tensor([state.key for state in self.states], device=self.device)
        self.position_B = torch.tensor([state.position for state in self.states], device=self.device)
        # Rows whose token is a function of scores and keyed noise: accepted when draft and target choose the same.
        self.greedy = [p.greedy for p in params]
        self.coupled = [state.accept.method == "coupled" and not state.params.greedy for state in self.states]
        self.temperature_B = floats([p.temperature or 1.0 for p in params])
        self.top_k_B = torch.tensor([p.top_k if not p.greedy else 0 for p in params], device=self.device)
        self.top_p_B = floats([p.top_p if not p.greedy else 1.0 for p in params])
        self.min_p_B = floats([p.min_p if not p.greedy else 0.0 for p in params])

    def scores(self, logits_BMV: Tensor, block_BK: Tensor | None = None, ids_V: Tensor | None = None) -> Tensor:
        """Processed scores of M rows a sequence, in float32 or the logits' wider dtype.

        Row m follows the drafted tokens block_BK[:, :m] when M > 1; with M = 1 it follows all of block_BK, so that a
        draft can ask slot by slot. ids_V: the target ids of a reduced vocabulary's columns.
        """
        if all(self.greedy) and not any(p.penalised for p in self._params):
            return logits_BMV
        scores_BMV = self._penalised(logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32)), block_BK, ids_V)
        if not all(self.greedy):
            scores_BMV = scores_BMV / self.temperature_B[:, None, None].to(scores_BMV.dtype)
        for keep, value_B, needed in (
            (process.keep_top_k, self.top_k_B, [p.top_k > 0 for p in self._params]),
            (process.keep_top_p, self.top_p_B, [p.top_p < 1 for p in self._params]),
            (process.keep_min_p, self.min_p_B, [p.min_p > 0 for p in self._params]),
        ):
            rows = [b for b, need in enumerate(needed) if need and not self.greedy[b]]
            if rows:
                scores_BMV = _on_rows(scores_BMV, rows, keep, value_B)
        return scores_BMV

    def choose(self, scores_BMV: Tensor, first: int = 0, ids_V: Tensor | None = None) -> Tensor:
        """[B, M]: the token a deterministic row chooses; row m decides position + first + m. Greedy rows take the best score,
        coupled rows the best score plus Gumbel noise, both the lowest id among equals. Other rows: the best score."""
        choice_BM = scores_BMV.argmax(-1)
        num_rows = scores_BMV.shape[1]
        for b, coupled in enumerate(self.coupled):
            if coupled:
                noise_MV = self._gumbel(b, first, num_rows, scores_BMV.shape[2], ids_V)
                choice_BM[b] = (scores_BMV[b].double() + noise_MV).argmax(-1)
        return choice_BM

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

    def _gumbel(self, b: int, first: int, num_rows: int, vocab: int, ids_V: Tensor | None) -> Tensor:
        position_M = self.position_B[b] + first + torch.arange(num_rows, device=self.device)
        ids_V = torch.arange(vocab, device=self.device) if ids_V is None else ids_V
        return noise.gumbel(self.key_B[b].expand(num_rows), position_M, ids_V)

    def _penalised(self, logits_BMV: Tensor, block_BK: Tensor | None, ids_V: Tensor | None) -> Tensor:
        rows = [b for b, p in enumerate(self._params) if p.penalised]
        if not rows:
            return logits_BMV
        logits_BMV = logits_BMV.clone()
        for b in rows:
            p, state = self._params[b], self.states[b]
            block_K = None if block_BK is None else block_BK[b]
            seen_MV, count_MV = _history(state, logits_BMV.shape[1:], block_K, ids_V, self.device)
            one = logits_BMV.new_ones(1, 1)
            logits_BMV[b] = process.penalise(
                logits_BMV[b],
                seen_MV,
                count_MV,
                one * p.repetition_penalty,
                one * p.presence_penalty,
                one * p.frequency_penalty,
            )
        return logits_BMV


def _on_rows(scores_BMV: Tensor, rows: list[int], keep: object, value_B: Tensor) -> Tensor:
    """Apply a keep_* function to the rows that need it; a full sort of the others' vocabularies would be wasted."""
    assert callable(keep)
    num_rows, vocab = scores_BMV.shape[1:]
    index_D = torch.tensor(rows, device=scores_BMV.device)
    value_R = value_B[index_D].repeat_interleave(num_rows)
    kept_RV = keep(scores_BMV[index_D].reshape(-1, vocab), value_R)
    return scores_BMV.index_copy(0, index_D, kept_RV.view(len(rows), num_rows, vocab))


def _history(
    state: SequenceState, shape: torch.Size, block_K: Tensor | None, ids_V: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(seen, count in the output) of every scored token for each row, drafted tokens of the block before it included."""
    num_rows, vocab = shape
    top = max(vocab if ids_V is None else int(ids_V.max()) + 1, *state.prompt, *state.output) + 1
    top = top if block_K is None or not len(block_K) else max(top, int(block_K.max()) + 1)

    def count(tokens: Seq[int]) -> Tensor:
        return torch.bincount(torch.tensor(tokens, dtype=torch.int64, device=device), minlength=top)

    count_MV = count(state.output).repeat(num_rows, 1)
    if block_K is not None:
        for m in range(num_rows):
            before_K = block_K if num_rows == 1 else block_K[:m]
            count_MV[m] += torch.bincount(before_K.clamp(min=0), minlength=top)
    seen_MV = (count_MV > 0) | (count(state.prompt) > 0)
    columns = slice(vocab) if ids_V is None else ids_V
    return seen_MV[:, columns], count_MV[:, columns]
