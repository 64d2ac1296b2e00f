"""Logits to scores, and scores to a token. Order as transformers has it: penalties, temperature, top-k, top-p, min-p.

Scores are unnormalised log-probabilities, -inf where a token is ruled out; of a greedy row, the penalised logits.
Legend: R rows, V vocabulary (or a draft's part of it), S the best tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 0.5 + 0.3 fills a nucleus of top_p = 0.8, and 0.5 * 0.6 reaches 0.3, whichever way float32 rounds them.
_ROUNDING = 1e-6
# On a CPU, sorting a vocabulary takes ten times as long as finding its best tokens, and these hold most nuclei.
_LIKELY_NUCLEUS = 1024


def penalise(
    logits_RV: Tensor,
    seen_RV: Tensor,
    count_RV: Tensor,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """seen: the token is in the prompt or the output. count: how often it is in the output."""
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
    logits_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    return logits_RV - frequency * count_RV - presence * (count_RV > 0)


def heat(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Logits over temperature; one too low for float32 to divide by is as good as the lowest that is not."""
    return logits_RV / temperature_R.clamp(min=1e-30).to(logits_RV.dtype)[..., None]


def keep_top_k(scores_RV: Tensor, top_k_R: Tensor, largest: int) -> Tensor:
    """Rule out what scores below the k-th best; ties with it stay. largest: of all k, which are positive."""
    best_RS = scores_RV.topk(min(largest, scores_RV.shape[-1]), dim=-1).values
    kth_R1 = best_RS.gather(-1, (top_k_R - 1).clamp(max=best_RS.shape[-1] - 1)[:, None])
    return scores_RV.masked_fill(scores_RV < kth_R1, -torch.inf)


def keep_top_p(scores_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the smallest set of best tokens whose probability reaches top_p; among equals, the lowest ids."""
    vocab = scores_RV.shape[-1]
    size = min(vocab, _LIKELY_NUCLEUS) if scores_RV.device.type == "cpu" else vocab
    keep_RV, whole_R = _nucleus(scores_RV, top_p_R, size)
    if size < vocab and not bool(whole_R.all()):
        keep_RV[~whole_R] = _nucleus(scores_RV[~whole_R], top_p_R[~whole_R], vocab)[0]
    return scores_RV.masked_fill(~keep_RV, -torch.inf)


def _nucleus(scores_RV: Tensor, top_p_R: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The part of the nucleus that is among the best `size` tokens, and for which rows that is all of it. A token whose
    equals may be outside does not count as known."""
    if size == scores_RV.shape[-1]:
        id_RS = torch.arange(size, device=scores_RV.device).expand_as(scores_RV)
    else:
        id_RS = scores_RV.topk(size, dim=-1).indices.sort(-1).values
    best_RS, order_RS = scores_RV.gather(-1, id_RS).sort(dim=-1, descending=True, stable=True)
    prob_RS = (best_RS.double() - scores_RV.double().logsumexp(-1, keepdim=True)).exp()
    keep_RS = prob_RS.cumsum(-1) - prob_RS < top_p_R.double()[:, None] - _ROUNDING
    keep_RS[:, 0] = True
    whole_R = best_RS.masked_fill(~keep_RS, torch.inf).amin(-1) > best_RS[:, -1]
    keep_RV = torch.zeros_like(scores_RV, dtype=torch.bool).scatter(-1, id_RS.gather(-1, order_RS), keep_RS)
    return keep_RV, whole_R


def keep_min_p(scores_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Rule out what is less likely than min_p times the likeliest token."""
    floor_R1 = scores_RV.amax(-1, keepdim=True) + min_p_R.log()[:, None] - _ROUNDING
    return scores_RV.masked_fill(scores_RV < floor_R1, -torch.inf)


def draw(prob_RV: Tensor, u_R: Tensor) -> Tensor:
    """The token at u of each row's cumulative distribution, which need not be normalised: never one of weight 0."""
    cdf_RV = prob_RV.double().cumsum(-1)
    total_R1 = cdf_RV[:, -1:].contiguous()
    at_R1 = torch.searchsorted(cdf_RV, u_R[:, None] * total_R1, right=True)
    last_R1 = torch.searchsorted(cdf_RV, total_R1)  # the last token of weight, should u round up to 1
    return torch.minimum(at_R1, last_R1)[:, 0]
