"""CausalLM: what every target and every draft model is, whatever its architecture. A family says what its layers are.

It knows nothing about pages, sampling or speculation: attention is injected, logits are computed for chosen rows only.
Legend: T rows, R chosen rows, D width, V vocabulary, A taps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specctl.attention import AttentionBackend
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.layers import MLP, Embedding, Linear, Purpose, RMSNorm
from specctl.models.config import CommonConfig
from specctl.moe import MoE
from specctl.rope import Rope

Owner = Literal["target", "draft"]
Turn = tuple[Tensor, Tensor]
"""cos and sin of every row, as a family's rotation() gives them."""

Fill = Callable[[str, nn.Module], None]
"""fill(prefix, part) gives a part its numbers; its tensors are called prefix.name in the checkpoint."""


@dataclass(frozen=True)
class Hidden:
    """What a forward pass leaves. final_TD: after the last norm. taps_ATD: the residual entering each tapped layer."""

    final_TD: Tensor
    taps_ATD: Tensor | None = None


class SelfAttention(nn.Module, ABC):
    """The attention of a family, called as attention(x_TD, turn, attn)."""

    @abstractmethod
    def prepare(self, purpose: Purpose) -> None:
        """Make its weights ready."""


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added to the residual."""

    def __init__(self, config: CommonConfig, self_attn: SelfAttention, mlp: MLP | MoE) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_TD: Tensor, turn: Turn, attn: AttentionBackend) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), turn, attn)
        out: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out

    def prepare(self, purpose: Purpose, fill: Fill | None = None, prefix: str = "") -> None:
        """See CausalLM.prepare. Experts come one by one, so that no more than one is held twice at a time."""
        if isinstance(self.mlp, MoE):
            for index, expert in enumerate(self.mlp.experts.each()):
                if fill is not None:
                    fill(f"{prefix}.mlp.experts.{index}", expert)
                expert.prepare(purpose, single=True)
        if fill is not None:
            fill(prefix, self)
        self.self_attn.prepare(purpose)
        self.mlp.prepare(purpose)


class Decoder(nn.Module):
    """The part under `model.` in a checkpoint."""

    def __init__(self, config: CommonConfig, layers: Iterator[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


RunLayer = Callable[[nn.Module, Tensor, Turn, AttentionBackend], Tensor]


def _run_layer(layer: nn.Module, x_TD: Tensor, turn: Turn, attn: AttentionBackend) -> Tensor:
    out: Tensor = layer(x_TD, turn, attn)
    return out


class CausalLM(nn.Module, ABC):
    """A causal language model. Build it on the meta device and let `models.load` fill it.

    A family is a subclass with layer(), rotation() and kv_layer(), all that a draft needs to build one layer of it.
    run_layer: how a layer is run; training has a way of its own that holds less.
    """

    def __init__(self, config: CommonConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, (self.layer(config, i, i) for i in range(config.num_layers)))
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self._rope = self.rotation(config)
        self.run_layer: RunLayer = _run_layer
        if config.tied:
            self.tie()

    @staticmethod
    @abstractmethod
    def layer(config: Any, index: int, kv_index: int) -> DecoderLayer:
        """The decoder layer that a checkpoint of this family calls model.layers.`index`, called as
        layer(x_TD, rotation.cos_sin(...), attn). kv_index: its place among the owner's layers in the cache."""

    @staticmethod
    @abstractmethod
    def rotation(config: Any) -> Rope:
        """What turns queries and keys by their positions."""

    @staticmethod
    @abstractmethod
    def kv_layer(config: Any, owner: Owner, dtype: torch.dtype) -> LayerKV:
        """What one layer keeps for a token."""

    def tie(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: Batch, attn: AttentionBackend, taps: tuple[int, ...] = ()) -> Hidden:
        """Run the rows of `batch`. Tap k is the residual entering layer k; k = the number of layers is the
        residual before the last norm."""
        assert all(0 <= k <= len(self.model.layers) for k in taps), f"taps {taps} of {len(self.model.layers)} layers"
        x_TD = self.model.embed_tokens(batch.token_T)
        turn = self._rope.cos_sin(batch.position_T, x_TD.dtype)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            if index in taps:
                tapped[index] = x_TD
            x_TD = self.run_layer(layer, x_TD, turn, attn)
        tapped[len(self.model.layers)] = x_TD
        return Hidden(self.model.norm(x_TD), torch.stack([tapped[k] for k in taps]) if taps else None)

    def logits(self, final_RD: Tensor) -> Tensor:
        """[R, V] in the model's dtype."""
        out: Tensor = self.lm_head(final_RD)
        return out

    def kv_layers(self, owner: Owner) -> list[LayerKV]:
        layer = self.kv_layer(self.config, owner, self.model.norm.weight.dtype)
        return [layer] * self.config.num_layers

    def prepare(self, purpose: Purpose, fill: Fill | None = None) -> None:
        """Make the weights ready; after "serve" the module only runs and has no state_dict.

        fill is called for each part just before the part is prepared. The order is the one that needs least memory at
        once: packing holds a weight twice for a moment, so the largest one comes first, and last the embedding, which
        is not packed. (A tied head is packed from it, and both stay.)
        """
        fill = fill or (lambda prefix, part: None)
        if not self.config.tied:
            self._prepare_head(purpose, fill)
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, DecoderLayer)
            layer.prepare(purpose, fill, f"model.layers.{index}")
        fill("model.norm", self.model.norm)
        fill("model.embed_tokens", self.model.embed_tokens)
        if self.config.tied:
            self._prepare_head(purpose, fill)

    def _prepare_head(self, purpose: Purpose, fill: Fill) -> None:
        fill("lm_head", self.lm_head)
        self.lm_head.prepare(purpose)
