"""DeepSeek V2, V3, R1 and V3.1: latent attention (MLA) and a mixture of experts, Hugging Face tensor names.

Legend: T rows, D width, N heads, P width of a head's key without rotation, R width rotated, H = P + R, C width of a
latent, E = C + R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.attention import AttentionBackend
from specctl.attention.latent import LatentRows, UpProjection
from specctl.kv.cache import LayerKV
from specctl.layers import MLP, Linear, Purpose, RMSNorm
from specctl.models.causal import CausalLM, DecoderLayer, Owner, SelfAttention, Turn
from specctl.models.deepseek_config import LOW_RANK_EPS, DeepSeekConfig
from specctl.moe import MoE
from specctl.rope import Rope, rotate, rotate_pairs


class LatentAttention(SelfAttention):
    """What a token keeps is a latent and one rotated key, both shared by all heads."""

    def __init__(self, config: DeepSeekConfig, kv_index: int) -> None:
        super().__init__()
        self.kv_index = kv_index
        self._heads, self._scale = config.num_heads, config.score_scale
        self._widths = [config.nope, config.rotated]
        self._rotate = rotate_pairs if config.interleaved else rotate
        q_width = config.num_heads * config.head_dim
        if config.q_rank is None:
            self.q_proj: Linear | None = Linear(config.hidden_size, q_width)
        else:
            self.q_proj = None
            self.q_a_proj = Linear(config.hidden_size, config.q_rank)
            self.q_a_layernorm = RMSNorm(config.q_rank, LOW_RANK_EPS)
            self.q_b_proj = Linear(config.q_rank, q_width)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.kv_rank + config.rotated)
        self.kv_a_layernorm = RMSNorm(config.kv_rank, LOW_RANK_EPS)
        self.kv_b_proj = UpProjection(config.kv_rank, config.num_heads, config.nope, config.value)
        self.o_proj = Linear(config.num_heads * config.value, config.hidden_size)
        self._first: Linear | None = None
        self._first_widths = [config.q_rank or q_width, config.kv_rank, config.rotated]
        self._low_rank = config.q_rank is not None

    def forward(self, x_TD: Tensor, turn: Turn, attn: AttentionBackend) -> Tensor:
        q, latent_TC, k_TR = self._project(x_TD)
        if self._low_rank:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_TNP, q_TNR = torch.split(q.view(len(x_TD), self._heads, -1), self._widths, dim=-1)
        # Queries and the key are turned in one go: on a CPU a call costs more than the numbers in it.
        turned = self._rotate(torch.cat((q_TNR, k_TR[:, None]), dim=1), *turn)
        rows = LatentRows(
            torch.cat((q_TNP, turned[:, :-1]), dim=-1),
            torch.cat((self.kv_a_layernorm(latent_TC), turned[:, -1]), dim=-1),
            self.kv_b_proj,
            self._scale,
        )
        out: Tensor = self.o_proj(attn.attend_latent(self.kv_index, rows).flatten(1))
        return out

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, or what they are made of; latents before their norm, keys before they are turned."""
        if self._first is None:
            first = torch.cat((self._q_in(x_TD), self.kv_a_proj_with_mqa(x_TD)), dim=-1)
        else:
            first = self._first(x_TD)
        q, latent_TC, k_TR = torch.split(first, self._first_widths, dim=-1)
        return q, latent_TC, k_TR

    @property
    def _q_in(self) -> Linear:
        return self.q_a_proj if self.q_proj is None else self.q_proj

    def prepare(self, purpose: Purpose) -> None:
        if purpose == "serve":
            self._first = Linear.fused([self._q_in, self.kv_a_proj_with_mqa])
            del self.kv_a_proj_with_mqa
            if self._low_rank:
                del self.q_a_proj
            else:
                del self.q_proj
            self._first.prepare(purpose)
        if self._low_rank:
            self.q_b_proj.prepare(purpose)
        self.kv_b_proj.prepare(purpose)
        self.o_proj.prepare(purpose)


class DeepSeek(CausalLM):
    """A model of the family."""

    config: DeepSeekConfig

    @staticmethod
    def layer(config: DeepSeekConfig, index: int, kv_index: int) -> DecoderLayer:
        """Layers from num_layers on are MTP layers, which have experts whatever first_k_dense_replace is."""
        mlp: MLP | MoE
        if index < min(config.first_dense, config.num_layers):
            mlp = MLP(config.hidden_size, config.intermediate_size)
        else:
            mlp = MoE(config.hidden_size, config.expert_inner, config.shared_inner, config.routing)
        return DecoderLayer(config, LatentAttention(config, kv_index), mlp)

    @staticmethod
    def rotation(config: DeepSeekConfig) -> Rope:
        return Rope(config.rope, config.rotated, config.interleaved)

    @staticmethod
    def kv_layer(config: DeepSeekConfig, owner: Owner, dtype: torch.dtype) -> LayerKV:
        return LayerKV(owner, ((config.kv_rank + config.rotated,),), dtype)
