"""Latent attention (MLA): a token keeps one vector for all heads, of which each head's key and value are made.

Two forms say the same. Plain: keys and values are made of what every slot keeps. Absorbed: the query goes through the
keys' matrix instead, and what came out through the values', so that nothing kept is ever expanded. The second costs
less for few rows, the first for many. Which one is used is the backend's to decide.
Legend: T rows, S slots, N heads, P width of a key without rotation, R width rotated, H = P + R, V width of a value, C
width of a latent, E = C + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specctl.layers import Purpose


class UpProjection(nn.Module):
    """What makes keys and values of what is kept. The weight is [N * (P + V), C], as checkpoints have it."""

    def __init__(self, rank: int, heads: int, key: int, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads * (key + value), rank))
        self._rank, self._heads, self._key, self._value = rank, heads, key, value
        self._prepared: tuple[Tensor, Tensor] | None = None

    def expand(self, kept_SE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, N, H] and values [S, N, V]."""
        both = F.linear(kept_SE[:, : self._rank], self.weight).view(len(kept_SE), self._heads, -1)
        k_SNP, v_SNV = torch.split(both, [self._key, self._value], dim=-1)
        k_SNR = kept_SE[:, None, self._rank :].expand(-1, self._heads, -1)
        return torch.cat((k_SNP, k_SNR), dim=-1), v_SNV

    def absorb(self, q_TNH: Tensor) -> Tensor:
        """Queries to be held against what is kept, [T, N, E]."""
        q_NTC = torch.bmm(q_TNH[..., : self._key].transpose(0, 1), self._matrices[0])
        return torch.cat((q_NTC.transpose(0, 1), q_TNH[..., self._key :]), dim=-1)

    def values(self, out_TNE: Tensor) -> Tensor:
        """Values [T, N, V] of sums of what is kept."""
        return torch.bmm(out_TNE[..., : self._rank].transpose(0, 1), self._matrices[1]).transpose(0, 1)

    @property
    def rank(self) -> int:
        """The width of a latent."""
        return self._rank

    @property
    def rows_to_expand(self) -> float:
        """From how many rows on the plain form costs less: it takes P + V multiplications a row, head and slot (the
        rotated part aside) in place of 2 C, and C (P + V) beforehand for each head and slot."""
        rank, width = self._rank, self._key + self._value
        return rank * width / (2 * rank - width) if width < 2 * rank else float("inf")

    @property
    def _matrices(self) -> tuple[Tensor, Tensor]:
        """[N, P, C] and [N, C, V], views."""
        if self._prepared is not None:
            return self._prepared
        by_head = self.weight.view(self._heads, -1, self._rank)
        key_NPC, value_NVC = torch.split(by_head, [self._key, self._value], dim=1)
        return key_NPC, value_NVC.transpose(1, 2)

    def prepare(self, purpose: Purpose) -> None:
        if purpose == "serve":
            self.weight.requires_grad_(False)
            self._prepared = self._matrices


@dataclass(frozen=True)
class LatentRows:
    """The rows of a pass. q_TNH: queries, the rotated part last. kept_TE: what a token keeps, its latent and then its
    rotated key. up: what makes keys and values of that. scale: of the scores."""

    q_TNH: Tensor
    kept_TE: Tensor
    up: UpProjection
    scale: float
