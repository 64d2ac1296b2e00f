"""An EAGLE-3 head beside its target: three of the target's residuals, joined, and one Llama layer that sees token and
hidden state side by side. What it is in every detail is specctl/heads/eagle3.py.

Tensors have the names of the published heads. Legend: A taps, T rows, R chosen rows, D width, E the target's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from specctl.attention import AttentionBackend
from specctl.drafts import OutputHead
from specctl.drafts.head import Given, HeadModule
from specctl.heads.eagle3 import EMBEDDING, LAYER, Eagle3Head
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.layers import MLP, Embedding, Linear, Purpose, RMSNorm
from specctl.models import CausalLM, Hidden, Llama, ModelConfig
from specctl.models.causal import Fill, Turn
from specctl.models.llama import Attention


class MidLayer(nn.Module):
    """The decoder layer, whose attention reads 2 D and gives D."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = Attention(config, 0, inputs=2 * width)
        self.mlp = MLP(width, config.intermediate_size, config.mlp_bias)
        self.input_layernorm = RMSNorm(width, config.norm_eps)
        self.hidden_norm = RMSNorm(width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(width, config.norm_eps)
        self._norm_before_residual = norm_before_residual

    def forward(self, embedding_TD: Tensor, hidden_TD: Tensor, turn: Turn, attn: AttentionBackend) -> Tensor:
        normed_TD = self.hidden_norm(hidden_TD)
        x_TD = normed_TD if self._norm_before_residual else hidden_TD
        both_T2D = torch.cat((self.input_layernorm(embedding_TD), normed_TD), dim=-1)
        x_TD = x_TD + self.self_attn(both_T2D, turn, attn)
        out: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out

    def prepare(self, purpose: Purpose) -> None:
        self.self_attn.prepare(purpose)
        self.mlp.prepare(purpose)


class Eagle3(HeadModule):
    """ids_V: the target ids of the head's rows, where it has some of them only. Embeddings are the target's unless the
    head has its own."""

    def __init__(self, head: Eagle3Head, config: ModelConfig, target: CausalLM, ids_V: Tensor | None) -> None:
        super().__init__()
        width = config.hidden_size
        assert head.own_embedding or width == target.config.hidden_size
        assert (ids_V is not None) == head.reduced
        self.head, self.config = head, config
        self.taps, self.ids_V = head.taps, ids_V
        self._target = (target,)  # no child of this one
        joined = len(head.taps) * head.target_hidden
        self.embed_tokens = Embedding(head.target_vocab, width) if head.own_embedding else None
        self.input_norm = RMSNorm(joined, config.norm_eps) if head.norm_before_fc else None
        norms = [RMSNorm(head.target_hidden, config.norm_eps) for _ in head.taps if head.fc_norm]
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.fc = Linear(joined, width)
        self.midlayer = MidLayer(config, head.norm_before_residual)
        self.norm = RMSNorm(width, config.norm_eps)
        self.lm_head = Linear(width, head.draft_vocab)
        self._rope = Llama.rotation(config)

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def num_columns(self) -> int:
        return self.head.draft_vocab

    @property
    def max_length(self) -> int:
        return self.config.max_length

    @property
    def like(self) -> Tensor:
        return self.norm.weight

    def read(self, hidden: Hidden) -> Tensor:
        assert hidden.taps_ATD is not None
        joined = hidden.taps_ATD.transpose(0, 1).flatten(1).to(self.like.dtype)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        if self.fc_norm is not None:
            parts = joined.chunk(len(self.taps), dim=-1)
            joined = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(joined)
        return out

    def forward(self, rows: Batch, read_TD: Tensor, attn: AttentionBackend) -> Given:
        embed = self._target[0].model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        turn = self._rope.cos_sin(rows.position_T, read_TD.dtype)
        out_TD = self.midlayer(embed(rows.token_T).to(read_TD.dtype), read_TD, turn, attn)
        final_TD = self.norm(out_TD)
        return Given(final_TD, final_TD if self.head.norm_output else out_TD)

    def logits(self, final_RD: Tensor) -> Tensor:
        out: Tensor = self.lm_head(final_RD)
        return out

    def output_head(self) -> OutputHead:
        return OutputHead(self.lm_head.weight, self.num_columns, self.ids_V)

    def trained(self) -> Iterator[nn.Parameter]:
        return (parameter for name, parameter in self.named_parameters() if name != EMBEDDING)

    def kv_layer(self, dtype: torch.dtype) -> LayerKV:
        return Llama.kv_layer(self.config, "draft", dtype)

    def prepare(self, purpose: Purpose, fill: Fill) -> None:
        """See CausalLM.prepare."""
        for name in ("lm_head", "fc"):
            part = cast(Linear, self.get_submodule(name))
            fill(name, part)
            part.prepare(purpose)
        fill(LAYER, self.midlayer)
        self.midlayer.prepare(purpose)
        for name in ("norm", "input_norm", "fc_norm", "embed_tokens"):
            if getattr(self, name) is not None:
                fill(name, self.get_submodule(name))
