"""The Llama family (Llama, Mistral without a window, Qwen2, Qwen3): one decoder, Hugging Face tensor names.

It knows nothing about pages, sampling or speculation: attention is injected, logits are computed for chosen rows only.
Legend: T rows, R chosen rows, D width, N query heads, G key-value heads, H head dim, V vocabulary, A taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specctl.attention import AttentionBackend
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.layers import Embedding, Linear, Purpose, RMSNorm
from specctl.models.config import ModelConfig
from specctl.rope import Rope, rotate


@dataclass(frozen=True)
class Hidden:
    """What a forward pass leaves. final_TD: after the last norm. taps_ATD: the residual entering each tapped layer."""

    final_TD: Tensor
    taps_ATD: Tensor | None = None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads, self.groups, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_width, kv_width = self.heads * self.head_dim, self.groups * self.head_dim
        self.q_proj = Linear(config.hidden_size, q_width, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = Linear(q_width, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self._qkv: Linear | None = None

    def forward(self, x_TD: Tensor, rope: tuple[Tensor, Tensor], attn: AttentionBackend) -> Tensor:
        qk_TNH, v_TGH = self._project(x_TD)
        # Queries and keys are turned in one go: on a CPU a call costs more than the numbers in it.
        q_TNH, k_TGH = torch.split(rotate(qk_TNH, *rope), [self.heads, self.groups], dim=1)
        out_TNH = attn.attend(self.index, q_TNH, k_TGH, v_TGH)
        out: Tensor = self.o_proj(out_TNH.flatten(1))
        return out

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys side by side, [T, N + G, H], and values."""
        if self._qkv is None:
            parts = self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)
            qkv: Tensor = torch.cat(parts, dim=-1).view(len(x_TD), -1, self.head_dim)
        else:
            qkv = self._qkv(x_TD).view(len(x_TD), -1, self.head_dim)
        qk_TNH, v_TGH = torch.split(qkv, [self.heads + self.groups, self.groups], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TGH = torch.split(qk_TNH, [self.heads, self.groups], dim=1)
            qk_TNH = torch.cat((self.q_norm(q_TNH), self.k_norm(k_TGH)), dim=1)
        return qk_TNH, v_TGH

    def prepare(self, purpose: Purpose) -> None:
        if purpose == "serve":
            self._qkv = Linear.fused([self.q_proj, self.k_proj, self.v_proj])
            del self.q_proj, self.k_proj, self.v_proj
            self._qkv.prepare(purpose)
        self.o_proj.prepare(purpose)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)
        self._gate_up: Linear | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        if self._gate_up is None:
            gate, up = self.gate_proj(x_TD), self.up_proj(x_TD)
        else:
            gate, up = self._gate_up(x_TD).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out

    def prepare(self, purpose: Purpose) -> None:
        if purpose == "serve":
            self._gate_up = Linear.fused([self.gate_proj, self.up_proj])
            del self.gate_proj, self.up_proj
            self._gate_up.prepare(purpose)
        self.down_proj.prepare(purpose)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_TD: Tensor, rope: tuple[Tensor, Tensor], attn: AttentionBackend) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rope, attn)
        out: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out

    def prepare(self, purpose: Purpose) -> None:
        self.self_attn.prepare(purpose)
        self.mlp.prepare(purpose)


class Decoder(nn.Module):
    """The part under `model.` in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


RunLayer = Callable[[nn.Module, Tensor, tuple[Tensor, Tensor], AttentionBackend], Tensor]


def _run_layer(layer: nn.Module, x_TD: Tensor, rope: tuple[Tensor, Tensor], attn: AttentionBackend) -> Tensor:
    out: Tensor = layer(x_TD, rope, attn)
    return out


class Llama(nn.Module):
    """A causal language model of the family. Build it on the meta device and let `models.load` fill it.

    run_layer: how a layer is run; training has a way of its own that holds less.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self._rope = Rope(config.rope, config.head_dim)
        self.run_layer: RunLayer = _run_layer
        if config.tied:
            self.tie()

    def tie(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: Batch, attn: AttentionBackend, taps: tuple[int, ...] = ()) -> Hidden:
        """Run the rows of `batch`. Tap k is the residual entering layer k; k = the number of layers is the
        residual before the last norm."""
        assert all(0 <= k <= len(self.model.layers) for k in taps), f"taps {taps} of {len(self.model.layers)} layers"
        x_TD = self.model.embed_tokens(batch.token_T)
        rope = self._rope.cos_sin(batch.position_T, x_TD.dtype)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            if index in taps:
                tapped[index] = x_TD
            x_TD = self.run_layer(layer, x_TD, rope, attn)
        tapped[len(self.model.layers)] = x_TD
        return Hidden(self.model.norm(x_TD), torch.stack([tapped[k] for k in taps]) if taps else None)

    def logits(self, final_RD: Tensor) -> Tensor:
        """[R, V] in the model's dtype."""
        out: Tensor = self.lm_head(final_RD)
        return out

    def kv_layers(self, owner: Literal["target", "draft"]) -> list[LayerKV]:
        shape = (self.config.num_kv_heads, self.config.head_dim)
        dtype = self.model.norm.weight.dtype
        return [LayerKV(owner, (shape, shape), dtype) for _ in range(self.config.num_layers)]

    def prepare(self, purpose: Purpose, fill: Callable[[str, nn.Module], None] | None = None) -> None:
        """Make the weights ready; after "serve" the module only runs and has no state_dict.

        fill(prefix, part) is called for each part just before the part is prepared; its tensors are called
        prefix.name in the checkpoint.
        """
        for prefix, part in self._parts():
            if fill is not None:
                fill(prefix, part)
            if isinstance(part, DecoderLayer | Linear):
                part.prepare(purpose)

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        """In the order that needs least memory at once. Packing holds a weight twice for a moment, so the largest one
        comes first, and last the embedding, which is not packed. (A tied head is packed from it, and both stay.)"""
        if not self.config.tied:
            yield "lm_head", self.lm_head
        for index, layer in enumerate(self.model.layers):
            yield f"model.layers.{index}", layer
        yield "model.norm", self.model.norm
        yield "model.embed_tokens", self.model.embed_tokens
        if self.config.tied:
            yield "lm_head", self.lm_head
