"""Logits to scores, and scores to a token. Order as transformers has it: penalties, temperature, top-k, top-p, min-p.

Scores are unnormalised log-probabilities, -inf where a token is ruled out; of a greedy row, the penalised logits.
Legend: R rows, V vocabulary (or a draft's part of it).
"""

from __future__ import annotations

import torch
from torch import Tensor

# A nucleus that holds top_p up to float32 rounding is complete: 0.5 + 0.3 is enough for top_p = 0.8.
_TOP_P_ROUNDING = 1e-6


def penalise(
    logits_RV: Tensor,
    seen_RV: Tensor,
    count_RV: Tensor,
    repetition_R1: Tensor,
    presence_R1: Tensor,
    frequency_R1: Tensor,
) -> Tensor:
    """seen: the token is in the prompt or the output. count: how often it is in the output."""
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    return logits_RV - frequency_R1 * count_RV - presence_R1 * (count_RV > 0)


def keep_top_k(scores_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Rule out what scores below the k-th best; ties with it stay. Rows with k = 0 are left alone."""
    vocab = scores_RV.shape[-1]
    k_R = torch.where(top_k_R > 0, top_k_R, vocab).clamp(max=vocab)
    best = scores_RV.topk(int(k_R.where(k_R < vocab, 1).max()), dim=-1).values
    kth_R1 = best.gather(-1, (k_R - 1).clamp(max=best.shape[-1] - 1)[:, None])
    return scores_RV.masked_fill((scores_RV < kth_R1) & (k_R < vocab)[:, None], -torch.inf)


def keep_top_p(scores_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the smallest set of best tokens whose probability reaches top_p: what comes before a kept token has less."""
    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    prob_RV = sorted_RV.double().softmax(-1)
    before_RV = prob_RV.cumsum(-1) - prob_RV
    drop_RV = (before_RV >= top_p_R.double()[:, None] - _TOP_P_ROUNDING) & (top_p_R < 1)[:, None]
    drop_RV[:, 0] = False
    return scores_RV.masked_fill(torch.zeros_like(drop_RV).scatter(-1, order_RV, drop_RV), -torch.inf)


def keep_min_p(scores_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Rule out what is less likely than min_p times the likeliest token."""
    floor_R1 = scores_RV.amax(-1, keepdim=True) + min_p_R.log()[:, None]
    return scores_RV.masked_fill(scores_RV < floor_R1, -torch.inf)


def draw(prob_RV: Tensor, u_R: Tensor) -> Tensor:
    """The token at u of the cumulative distribution of each row (which need not be normalised). Never one of weight 0."""
    cdf_RV = prob_RV.double().cumsum(-1)
    total_R1 = cdf_RV[:, -1:].contiguous()
    at_R1 = torch.searchsorted(cdf_RV, u_R[:, None] * total_R1, right=True)
    last_R1 = torch.searchsorted(cdf_RV, total_R1)  # the last token of weight, should u round up to 1
    return torch.minimum(at_R1, last_R1)[:, 0]
