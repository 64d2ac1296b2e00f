"""Log-probabilities of decided tokens: log-softmax of the target's raw logits, for the sequences that ask.

Legend: B sequences, M rows of each, V vocabulary, N alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.engine.sequence import Logprob


def logprobs_of(logits_BMV: Tensor, token_BM: Tensor, wanted: list[int | None]) -> list[list[Logprob]]:
    """For each sequence one entry a row (rows without a decided token have a meaningless one), none if not wanted."""
    return [
        [] if count is None else _of_rows(logits_MV, token_M, count)
        for logits_MV, token_M, count in zip(logits_BMV, token_BM, wanted, strict=True)
    ]


def _of_rows(logits_MV: Tensor, token_M: Tensor, count: int) -> list[Logprob]:
    logprob_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)).log_softmax(-1)
    chosen = logprob_MV.gather(1, token_M.clamp(min=0)[:, None])[:, 0].tolist()
    value_MN, id_MN = logprob_MV.topk(min(count, logprob_MV.shape[1]), dim=-1)
    tops = [tuple(zip(i, v, strict=True)) for i, v in zip(id_MN.tolist(), value_MN.tolist(), strict=True)]
    return [Logprob(value, top) for value, top in zip(chosen, tops, strict=True)]
