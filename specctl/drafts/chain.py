"""A chain of proposals, slot after slot, as drafts with a model make it. How the model runs is the drafter's.

Legend: B sequences, K slots, V ids that are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specctl.drafts import Dense, Draft, OneHot
from specctl.kv.batch import Batch
from specctl.sampling.batch import Drawn, SamplingBatch


def draft_chain(
    batch: Batch,
    logits_BV: Tensor,
    k: list[int],
    sampling: SamplingBatch,
    run: Callable[[int, Tensor], Tensor],
    ids_V: Tensor | None = None,
) -> Draft:
    """Draw the first token from the carried logits, then roll on.

    run(slot, token_B): the logits after the tokens drawn for `slot`, [B, V]; asked for while another slot is to come.
    ids_V: the target ids of the columns, None when these are the ids.
    """
    drawn: list[Drawn] = []
    length = [0] * len(k)
    for slot in range(max(k)):
        tokens_BK = _tokens(drawn) if drawn else None
        proposal = _named(sampling.draw_draft(logits_BV, slot, tokens_BK, ids_V), ids_V)
        length = _extend(length, slot, k, proposal.confidence_B, sampling.min_confidence)
        if slot not in {n - 1 for n in length}:
            break  # nobody is confident enough for this slot
        drawn.append(proposal)
        if slot + 1 < max(k):
            logits_BV = run(slot, proposal.token_B)
    return _block(drawn, length, batch, ids_V)


def _extend(
    length: list[int], slot: int, k: list[int], confidence_B: Tensor | None, min_confidence: float | None
) -> list[int]:
    """Lengths with `slot` added where it is asked for, nothing before it was stopped, and q is confident enough."""
    sure = [True] * len(k)
    if confidence_B is not None and min_confidence is not None:
        sure = (confidence_B >= min_confidence).tolist()
    return [n + 1 if n == slot < limit and ok else n for n, limit, ok in zip(length, k, sure, strict=True)]


def _named(proposal: Drawn, ids_V: Tensor | None) -> Drawn:
    """With target ids for tokens."""
    return proposal if ids_V is None else replace(proposal, token_B=ids_V[proposal.token_B])


def _tokens(drawn: list[Drawn]) -> Tensor:
    return torch.stack([proposal.token_B for proposal in drawn], dim=1)


def _block(drawn: list[Drawn], length: list[int], batch: Batch, ids_V: Tensor | None) -> Draft:
    if not drawn:
        return Draft(batch.token_T.new_zeros(batch.num_sequences, 0), length, OneHot())
    probs = [proposal.prob_BV for proposal in drawn if proposal.prob_BV is not None]
    confidences = [proposal.confidence_B for proposal in drawn if proposal.confidence_B is not None]
    return Draft(
        token_BK=_tokens(drawn),
        length=length,
        q=Dense(torch.stack(probs, dim=1), ids_V) if probs else OneHot(),
        confidence_BK=torch.stack(confidences, dim=1) if confidences else None,
    )
