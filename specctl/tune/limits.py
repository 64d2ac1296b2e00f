"""Limits that a policy has to keep to: milliseconds a token, and milliseconds to the first one.

At a given batch and context the fastest length is also the one with the fewest milliseconds a token, so a limit rarely
changes a length; what it decides is up to which batch it is kept, and that speculation moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.errors import GateFailed, UsageError
from specctl.tune.prefill import Prefill


@dataclass(frozen=True)
class Limits:
    """prefill: what prompts add to a token, where their lengths are known. with_draft: whether a first token keeps to
    its limit with the draft's own pass over the prompt."""

    max_tpot_ms: float | None = None
    prefill: Prefill | None = None
    with_draft: bool = True

    def within(self, tpot_CN: np.ndarray, batch_N: np.ndarray) -> np.ndarray:
        """[C, N]: which candidates, by K from 0, keep to them."""
        within_CN = np.ones_like(tpot_CN, dtype=bool)
        if not self.with_draft:
            within_CN[1:] = False
        if self.max_tpot_ms is None:
            return within_CN
        for c in range(len(tpot_CN)):
            tpot_N = tpot_CN[c] + self.shared_ms(batch_N, drafts=c > 0)
            within_CN[c] &= tpot_N <= self.max_tpot_ms
        return within_CN

    def shared_ms(self, batch: np.ndarray | int, drafts: bool) -> np.ndarray | float:
        """What the prompts of the others add to each token of a sequence."""
        if self.prefill is None:
            return 0.0
        return batch * self.prefill.ms(drafts) / self.prefill.output_tokens


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Kept:
    """Up to which batch a limit is kept, without a draft and with the policy; 0: at none."""

    context: int
    plain: int
    policy: int


def check_first_token(prefill: Prefill | None, limit: float) -> bool:
    """Whether the limit is kept with the draft's prefill. Raises GateFailed when it is not kept without it either."""
    if prefill is None:
        raise UsageError(
            "--max-ttft-ms needs --input-tokens and --output-tokens, and a profile with prefill: a first token takes "
            "as long as its prompt does"
        )
    plain = prefill.ms(drafts=False)
    if plain > limit:
        raise GateFailed(
            f"--max-ttft-ms {limit:g}: nothing meets it, a prompt of {prefill.input_tokens} tokens takes {plain:.1f} "
            "ms without any draft"
        )
    return prefill.ms(drafts=True) <= limit


def up_to(batches: Sequence[int], tpots: Sequence[float], limit: float) -> int:
    """The last batch before the first that misses the limit; 0 when the first one does."""
    kept = 0
    for batch, tpot in zip(batches, tpots, strict=True):
        if tpot > limit:
            break
        kept = batch
    return kept
