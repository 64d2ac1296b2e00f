"""Noise by counter: every random number is a hash of (key, position, purpose or token id), never a stream.

So a request's numbers do not depend on its batch mates, its place in the batch, the draft length or a preemption.
Legend: R rows, V token ids. Hash: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping int64 arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Purposes of a position's uniform numbers; far from token ids, which key the Gumbel noise of the same position.
DRAFT, ACCEPT, DEFINITE = (-(2**40) - i for i in range(3))

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(x: int) -> int:
    x &= _MASK64
    return x - 2**64 if x >= 2**63 else x


def make_key(*words: int) -> int:
    """A 64-bit key (as a signed int64) from any integers: the seed, the choice index, the request's number."""
    h = 0
    for word in words:
        h = (h + _GOLDEN + word) & _MASK64
        h ^= h >> 30
        h = h * _MIX_1 & _MASK64
        h ^= h >> 27
        h = h * _MIX_2 & _MASK64
        h ^= h >> 31
    return _signed(h)


def uniform(key_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """Uniform in [0, 1) with 53 bits, float64, one a row."""
    h_R = _absorb(_absorb(key_R, position_R), torch.full_like(position_R, purpose))
    return _top53(h_R).double() * 2.0**-53


def gumbel(key_R: Tensor, position_R: Tensor, id_V: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [R, V], looked up by token id."""
    h_RV = _absorb(_absorb(key_R, position_R)[:, None], id_V[None, :])
    # -log(-log(1 - u)) rather than -log(-log u): the large values, which win, come from small u, which are dense; and
    # where u rounds to 1 the noise is -inf, which loses, and not inf, which would win from any score.
    u_RV = _top53(h_RV).double().add_(0.5).mul_(2.0**-53)
    return u_RV.neg_().log1p_().neg_().log_().neg_()


def _absorb(h: Tensor, word: Tensor) -> Tensor:
    h = h + word + _signed(_GOLDEN)
    h = h.bitwise_xor_(_shift(h, 30)).mul_(_signed(_MIX_1))
    h = h.bitwise_xor_(_shift(h, 27)).mul_(_signed(_MIX_2))
    return h.bitwise_xor_(_shift(h, 31))


def _shift(h: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (h >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _top53(h: Tensor) -> Tensor:
    return _shift(h, 11)
