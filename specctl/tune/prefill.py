"""What prompts cost beside decoding: the time to a first token, the draft's part in it, and the share of all time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.errors import UsageError
from specctl.schemas.profile import PrefillCell, Profile


@dataclass(frozen=True)
class Prefill:
    """Of requests with this many tokens in and out, in milliseconds. base: what the engine adds to a pass."""

    input_tokens: int
    output_tokens: int
    target_ms: float
    draft_ms: float
    base: float

    def ms(self, drafts: bool) -> float:
        return self.target_ms + self.base + (self.draft_ms if drafts else 0.0)

    def share(self, plain_ms: float, batch: int) -> float:
        """Of a busy machine's time without a draft, where a step of `batch` sequences takes plain_ms."""
        prompts = self.ms(drafts=False) / self.output_tokens
        return prompts / (prompts + plain_ms / batch)

    def gain(self, speedup: float, plain_ms: float, batch: int) -> float:
        """The speed-up of everything, prompts included, from one of decoding."""
        prompts, decode = self.ms(drafts=False) / self.output_tokens, plain_ms / batch
        drafts = speedup != 1.0
        return (prompts + decode) / (self.ms(drafts) / self.output_tokens + decode / speedup)


def read_prefill(profile: Profile, where: str, input_tokens: int, output_tokens: int) -> Prefill:
    """Raises UsageError for a profile that has no prefill in it."""
    if not profile.prefill:
        raise UsageError(
            f"{where}: has no prefill, so what prompts of {input_tokens} tokens cost is not known; leave out "
            "--input-tokens, or profile with prompts"
        )
    cells = sorted(profile.prefill, key=lambda cell: cell.tokens)
    return Prefill(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        target_ms=_at(cells, [cell.target_ms for cell in cells], input_tokens),
        draft_ms=_at(cells, [cell.draft_ms or 0.0 for cell in cells], input_tokens),
        base=profile.overheads_ms.base,
    )


def _at(cells: Sequence[PrefillCell], ms: Sequence[float], tokens: int) -> float:
    """Linear between cells; beyond the last in proportion, as long prompts are taken in pieces."""
    if tokens > cells[-1].tokens:
        return ms[-1] * tokens / cells[-1].tokens
    return float(np.interp(tokens, [cell.tokens for cell in cells], ms))
