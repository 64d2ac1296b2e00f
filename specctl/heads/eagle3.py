"""An EAGLE-3 head: one description for every layout of it. What it reads, where its norms are, how its vocabulary maps,
what it feeds back, and every tensor it has, by the names of the published heads.

The head's row i reads the embedding of token i + 1 and the target's residuals at position i, tapped where they enter
three layers and joined by `fc` into one hidden state. Attention sees [input_layernorm(embedding) ;
hidden_norm(hidden)]; the residual is the hidden state. What comes out goes through `norm` to the head's own lm_head,
and back in as the next row's hidden state. Source: Li et al. 2025, EAGLE-3, and the readers named in specctl/dialects/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYER = "midlayer"
EMBEDDING = "embed_tokens.weight"
FUSE, INPUT_NORM = "fc.weight", "input_norm.weight"


@dataclass(frozen=True)
class Eagle3Head:
    """taps: tap k is the residual entering layer k of the target; with L layers, tap L is what leaves the last of them,
    before the last norm. layer: the decoder layer's config, as a Llama's config.json says it, with everything that a
    reader would have to fill in said.

    norm_before_residual: the residual is the hidden state after hidden_norm, not before. norm_before_fc: one norm over
    all taps side by side, before fc; fc_norm: one norm for each of them. norm_output: what is fed back is what went to
    lm_head, not what was before `norm`.
    """

    taps: tuple[int, ...]
    target_hidden: int
    target_vocab: int
    draft_vocab: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    layer: Mapping[str, Any] = field(repr=False)

    @property
    def reduced(self) -> bool:
        """Whether the head has rows for a part of the target's vocabulary only."""
        return self.draft_vocab != self.target_vocab

    def facts(self) -> dict[str, Any]:
        """As specctl.json has it."""
        norms = {
            "embedding": "input_layernorm",
            "hidden": "hidden_norm",
            "output": "norm",
            "order": "embedding, hidden",
        }
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {
            "reads": "taps",
            "taps": list(self.taps),
            "norms": norms | {flag: str(getattr(self, flag)).lower() for flag in flags},
            "vocabulary": {"size": self.draft_vocab, "of": self.target_vocab} if self.reduced else None,
            "feedback": "after the output norm" if self.norm_output else "before the output norm",
        }


def original_taps(num_layers: int) -> tuple[int, ...]:
    """The three that EAGLE-3 was published with."""
    return 2, num_layers // 2, num_layers - 3
