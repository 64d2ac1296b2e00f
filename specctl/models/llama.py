"""The Llama family (Llama, Mistral without a window, Qwen2, Qwen3): one decoder, Hugging Face tensor names.

Legend: T rows, D width, N query heads, G key-value heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.kv.cache import LayerKV
from specctl.layers import MLP, Linear, Purpose, RMSNorm
from specctl.models.causal import CausalLM, DecoderLayer, Owner, SelfAttention, Turn
from specctl.models.config import ModelConfig
from specctl.rope import Rope, rotate


class Attention(SelfAttention):
    """inputs: how wide the rows are that it reads, where that is not the model's width."""

    def __init__(self, config: ModelConfig, kv_index: int, inputs: int | None = None) -> None:
        super().__init__()
        inputs = inputs or config.hidden_size
        self.kv_index = kv_index
        self.heads, self.groups, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_width, kv_width = self.heads * self.head_dim, self.groups * self.head_dim
        self.q_proj = Linear(inputs, q_width, config.qkv_bias)
        self.k_proj = Linear(inputs, kv_width, config.qkv_bias)
        self.v_proj = Linear(inputs, kv_width, config.qkv_bias)
        self.o_proj = Linear(q_width, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self._qkv: Linear | None = None

    def forward(self, x_TD: Tensor, turn: Turn, attn: AttentionBackend) -> Tensor:
        qk_TNH, v_TGH = self._project(x_TD)
        # Queries and keys are turned in one go: on a CPU a call costs more than the numbers in it.
        q_TNH, k_TGH = torch.split(rotate(qk_TNH, *turn), [self.heads, self.groups], dim=1)
        out_TNH = attn.attend(self.kv_index, q_TNH, k_TGH, v_TGH)
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


class Llama(CausalLM):
    """A model of the family."""

    config: ModelConfig

    @staticmethod
    def layer(config: ModelConfig, index: int, kv_index: int) -> DecoderLayer:
        mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        return DecoderLayer(config, Attention(config, kv_index), mlp)

    @staticmethod
    def rotation(config: ModelConfig) -> Rope:
        return Rope(config.rope, config.head_dim)

    @staticmethod
    def kv_layer(config: ModelConfig, owner: Owner, dtype: torch.dtype) -> LayerKV:
        shape = (config.num_kv_heads, config.head_dim)
        return LayerKV(owner, (shape, shape), dtype)
