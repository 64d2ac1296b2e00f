"""Verification: which drafted tokens the target accepts, and the one definite token after them. Pure functions.

Losslessness lives here. Legend: B sequences, K draft slots, M = K + 1 rows, V vocabulary, S sequences picked out of B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.drafts import Dense, Draft, OneHot
from specctl.sampling import noise
from specctl.sampling.batch import SamplingBatch
from specctl.sampling.process import draw


@dataclass(frozen=True)
class Verdict:
    """token_BM: the accepted tokens, then the definite token, then -1. num_accepted_B: how many were accepted."""

    token_BM: Tensor
    num_accepted_B: Tensor


def verify(draft: Draft, scores_BMV: Tensor, sampling: SamplingBatch) -> Verdict:
    """Accept the longest prefix of each sequence's block and decide the token after it.

    Row m of scores_BMV (processed) gives the target's distribution of slot m; the last row that of the bonus token.
    Greedy and coupled sequences accept a token iff the target chooses it too. Exact ones accept d with probability
    min(1, p(d) / q(d)) and, at the first rejection, draw from norm(max(p - q, 0)) (Leviathan et al. 2023, Chen et al.
    2023); a masked slot is no rejection, its token is drawn from p. Typical and threshold acceptance are lossy.
    """
    choice_BM = sampling.choose(scores_BMV)
    drafted_BK = _drafted(draft, scores_BMV.device)
    accept_BK = (draft.token_BK == choice_BM[:, :-1]) & drafted_BK
    methods = [state.accept.method for state in sampling.states]
    ratio = [m == "exact" and not g for m, g in zip(methods, sampling.greedy, strict=True)]
    lossy = [m in ("typical", "threshold") for m in methods]
    if any(lossy) and draft.token_BK.shape[1]:
        accept_BK = _accept_lossy(accept_BK, drafted_BK, draft, scores_BMV, sampling, lossy)
    if any(ratio) and draft.token_BK.shape[1]:
        accept_BK = _accept_ratio(accept_BK, drafted_BK, draft, scores_BMV, sampling, ratio)
    num_accepted_B = accept_BK.long().cumprod(-1).sum(-1)
    definite_B = choice_BM.gather(1, num_accepted_B[:, None])[:, 0]
    sampled = [(r or lo) and not g for r, lo, g in zip(ratio, lossy, sampling.greedy, strict=True)]
    if any(sampled):
        drawn_B = _draw_definite(draft, drafted_BK, scores_BMV, num_accepted_B, sampling, ratio)
        definite_B = torch.where(torch.tensor(sampled, device=drawn_B.device), drawn_B, definite_B)
    return Verdict(_emit(draft.token_BK, num_accepted_B, definite_B), num_accepted_B)


def _drafted(draft: Draft, device: torch.device) -> Tensor:
    """[B, K]: which slots hold a proposal."""
    length_B1 = torch.tensor(draft.length, device=device)[:, None]
    return torch.arange(draft.token_BK.shape[1], device=device) < length_B1


def _emit(token_BK: Tensor, num_accepted_B: Tensor, definite_B: Tensor) -> Tensor:
    token_BM = torch.cat((token_BK, definite_B[:, None]), dim=1)
    slot_M = torch.arange(token_BM.shape[1], device=token_BM.device)
    token_BM = token_BM.masked_fill(slot_M > num_accepted_B[:, None], -1)
    return token_BM.scatter(1, num_accepted_B[:, None], definite_B[:, None])


def _rows(wanted: list[bool], device: torch.device) -> Tensor:
    return torch.tensor([b for b, want in enumerate(wanted) if want], device=device)


def _probability(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)


def _accept_ratio(
    accept_BK: Tensor,
    drafted_BK: Tensor,
    draft: Draft,
    scores_BMV: Tensor,
    sampling: SamplingBatch,
    wanted: list[bool],
) -> Tensor:
    """Replace the rows of exact sequences: u q(d) < p(d), u uniform in [0, 1)."""
    index_S = _rows(wanted, accept_BK.device)
    token_SK = draft.token_BK[index_S]
    p_SK = _probability(scores_BMV[index_S, :-1]).gather(2, token_SK[..., None])[..., 0].double()
    q_SK = _proposal_probability(draft, index_S, scores_BMV.shape[2])
    u_SK = torch.stack([sampling.uniform(k, noise.ACCEPT)[index_S] for k in range(token_SK.shape[1])], dim=1)
    accept_SK = (u_SK * q_SK < p_SK) & drafted_BK[index_S]
    return accept_BK.index_copy(0, index_S, accept_SK)


def _proposal_probability(draft: Draft, index_S: Tensor, vocab: int) -> Tensor:
    """q of each proposed token, float64 [S, K]; anything in a masked slot."""
    column_SK = draft.token_BK[index_S]
    if isinstance(draft.q, OneHot):
        return torch.ones_like(column_SK, dtype=torch.float64)
    if draft.q.ids_D is not None:
        column_V = column_SK.new_zeros(vocab)
        column_V[draft.q.ids_D] = torch.arange(len(draft.q.ids_D), device=column_SK.device)
        column_SK = column_V[column_SK]
    return draft.q.prob_BKD[index_S].gather(2, column_SK[..., None])[..., 0].double()


def _accept_lossy(
    accept_BK: Tensor,
    drafted_BK: Tensor,
    draft: Draft,
    scores_BMV: Tensor,
    sampling: SamplingBatch,
    wanted: list[bool],
) -> Tensor:
    """Replace the rows of typical sequences (p(d) >= min(epsilon, delta exp(-H(p))), Cai et al. 2024) and of threshold
    sequences (the product of p over the prefix stays at or above the threshold)."""
    for b in (b for b, want in enumerate(wanted) if want):
        accept = sampling.states[b].accept
        p_KV = _probability(scores_BMV[b, :-1]).double()
        p_K = p_KV.gather(1, draft.token_BK[b][:, None])[:, 0]
        if accept.method == "typical":
            entropy_K = torch.special.entr(p_KV).sum(-1)
            ok_K = p_K >= (accept.delta * torch.exp(-entropy_K)).clamp(max=accept.epsilon)
        else:
            ok_K = p_K.cumprod(0) >= accept.threshold
        accept_BK = accept_BK.clone()
        accept_BK[b] = ok_K & drafted_BK[b]
    return accept_BK


def _draw_definite(
    draft: Draft,
    drafted_BK: Tensor,
    scores_BMV: Tensor,
    num_accepted_B: Tensor,
    sampling: SamplingBatch,
    ratio: list[bool],
) -> Tensor:
    """Draw the token after the accepted prefix: from the residual where an exact sequence rejected, else from p."""
    row_B = torch.arange(len(num_accepted_B), device=scores_BMV.device)
    p_BV = _probability(scores_BMV[row_B, num_accepted_B]).double()
    num_slots = draft.token_BK.shape[1]
    if num_slots:
        slot_B = num_accepted_B.clamp(max=num_slots - 1)
        rejected_B = (num_accepted_B < num_slots) & drafted_BK[row_B, slot_B]
        rejected_B = rejected_B & torch.tensor(ratio, device=rejected_B.device)
        residual_BV = (p_BV - _proposal_distribution(draft, slot_B, p_BV)).clamp(min=0)
        # Rounding can leave nothing where p and q agree to the last bit; then p itself is the residual's limit.
        usable_B = rejected_B & (residual_BV.sum(-1) > 0)
        p_BV = torch.where(usable_B[:, None], residual_BV, p_BV)
    return draw(p_BV, sampling.uniform(num_accepted_B, noise.DEFINITE))


def _proposal_distribution(draft: Draft, slot_B: Tensor, like_BV: Tensor) -> Tensor:
    """q at slot_B of each sequence over the target's vocabulary, float64 [B, V]."""
    row_B = torch.arange(len(slot_B), device=slot_B.device)
    q_BV = torch.zeros_like(like_BV)
    if isinstance(draft.q, Dense):
        prob_BD = draft.q.prob_BKD[row_B, slot_B].double()
        if draft.q.ids_D is None:
            q_BV[:, : prob_BD.shape[1]] = prob_BD
        else:
            q_BV[:, draft.q.ids_D] = prob_BD
        return q_BV
    return q_BV.scatter(1, draft.token_BK[row_B, slot_B][:, None], 1.0)
