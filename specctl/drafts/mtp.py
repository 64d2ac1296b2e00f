"""The MTP layer of a checkpoint: one decoder layer of the target's architecture that reads the target's hidden states.

Row i holds token i + 1 beside the target's hidden state of position i, after its last norm, and lies in slot i at
position i: the target's own slots, with the tokens moved by one. What it gives after its own last norm goes to the
head, and takes the place of the target's hidden state when more than one token is drafted. Nothing here depends on the
architecture: the decoder layer, its rotation and what it stores are the target's.
Legend: T rows, R chosen rows, B sequences, L lanes, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specctl.attention import AttentionBackend
from specctl.drafts import Draft
from specctl.drafts.chain import draft_chain
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.layers import Embedding, Linear, Purpose, RMSNorm
from specctl.models import Hidden
from specctl.models.causal import CausalLM, DecoderLayer, Fill
from specctl.sampling.batch import SamplingBatch


class SharedHead(nn.Module):
    """The norm that ends the layer, and a head of the layer's own where it has one."""

    def __init__(self, width: int, eps: float, own_rows: int | None) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.head = None if own_rows is None else Linear(width, own_rows)


class MtpLayer(nn.Module):
    """The part under `model.layers.N.` in a checkpoint, the decoder layer's tensors beside the others."""

    def __init__(self, target: CausalLM, own_embedding: bool, own_head: bool) -> None:
        super().__init__()
        config = target.config
        width, rows = config.hidden_size, config.vocab_size
        self.embed_tokens = Embedding(rows, width) if own_embedding else None
        self.enorm = RMSNorm(width, config.norm_eps)
        self.hnorm = RMSNorm(width, config.norm_eps)
        self.eh_proj = Linear(2 * width, width)
        # The layer behind the target's own, whatever number it has here. In a tuple a module is no child: its tensors
        # are known by the names of its parts.
        self._decoder = (target.layer(config, config.num_layers, 0),)
        for name, part in self.decoder.named_children():
            self.add_module(name, part)
        self.shared_head = SharedHead(width, config.norm_eps, rows if own_head else None)

    @property
    def decoder(self) -> DecoderLayer:
        return self._decoder[0]

    def prepare(self, purpose: Purpose, fill: Fill, prefix: str) -> None:
        """See CausalLM.prepare: what is packed comes first, the largest of it before the rest."""
        if self.shared_head.head is not None:
            fill(f"{prefix}.shared_head.head", self.shared_head.head)
            self.shared_head.head.prepare(purpose)
        self.decoder.prepare(purpose, fill, prefix)
        fill(f"{prefix}.eh_proj", self.eh_proj)
        self.eh_proj.prepare(purpose)
        for name, norm in (("enorm", self.enorm), ("hnorm", self.hnorm), ("shared_head.norm", self.shared_head.norm)):
            fill(f"{prefix}.{name}", norm)
        if self.embed_tokens is not None:
            fill(f"{prefix}.embed_tokens", self.embed_tokens)


class Mtp(nn.Module):
    """An MTP layer beside its target, whose embedding and head it uses unless it has its own.

    number: of the layer in its checkpoint. Build it on the meta device and fill it by prepare().
    """

    def __init__(self, target: CausalLM, number: int, own_embedding: bool = False, own_head: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(number): MtpLayer(target, own_embedding, own_head)})
        self.prefix = f"model.layers.{number}"
        self.config = target.config
        self._target = (target,)  # no child of this one
        self._rope = target.rotation(target.config)

    @property
    def layer(self) -> MtpLayer:
        layer = self.get_submodule(self.prefix)
        assert isinstance(layer, MtpLayer)
        return layer

    def forward(self, rows: Batch, hidden_TD: Tensor, attn: AttentionBackend) -> Tensor:
        """[T, D] after the last norm. hidden_TD: of the target, or what this gave for the row before."""
        layer, target = self.layer, self._target[0]
        embedding = target.model.embed_tokens if layer.embed_tokens is None else layer.embed_tokens
        both_T2D = torch.cat((layer.enorm(embedding(rows.token_T)), layer.hnorm(hidden_TD)), dim=-1)
        x_TD: Tensor = layer.eh_proj(both_T2D)
        x_TD = layer.decoder(x_TD, self._rope.cos_sin(rows.position_T, x_TD.dtype), attn)
        out: Tensor = layer.shared_head.norm(x_TD)
        return out

    def logits(self, out_RD: Tensor) -> Tensor:
        """[R, V] of what forward() gave."""
        own = self.layer.shared_head.head
        found: Tensor = self._target[0].logits(out_RD) if own is None else own(out_RD)
        return found

    def kv_layer(self, dtype: torch.dtype) -> LayerKV:
        return self._target[0].kv_layer(self.config, "draft", dtype)

    def prepare(self, purpose: Purpose, fill: Fill) -> None:
        self.layer.prepare(purpose, fill, self.prefix)


@dataclass(frozen=True)
class Carry:
    """What the last row of each sequence gave."""

    logits_LV: Tensor
    out_LD: Tensor


class MtpDrafter:
    """`Drafter` of kind "mtp". Set `attn` (the "draft" owner's backend) before the first pass.

    num_layers: MTP layers of the checkpoint. The first one drafts; a chain runs it again on what it gave, and of a
    checkpoint with more of them that is not what they are for.
    """

    kind = "mtp"
    taps: tuple[int, ...] = ()
    reads_hidden = True
    shift: Literal[0, 1] = 1
    window: int | None = None

    def __init__(self, model: Mtp, num_layers: int = 1) -> None:
        self.model = model
        self.max_k: int | None = None if num_layers == 1 else 1
        self.depth: int | None = 1
        self.max_length: int | None = model.config.max_length
        self.attn: AttentionBackend | None = None

    @property
    def kv_layers(self) -> list[LayerKV]:
        return [self.model.kv_layer(self._weight.dtype)]

    @property
    def _weight(self) -> Tensor:
        return self.model.layer.enorm.weight

    def follow_rows(self, k: int) -> int:
        return k + 1

    def new_carry(self, num_lanes: int) -> Carry:
        config, like = self.model.config, self._weight
        return Carry(like.new_zeros(num_lanes, config.vocab_size), like.new_zeros(num_lanes, config.hidden_size))

    def catch_up(self, rows: Batch, hidden: Hidden | None, carry: Carry) -> None:
        assert hidden is not None
        carry.out_LD[rows.lane_B], carry.logits_LV[rows.lane_B] = self._last(rows, hidden.final_TD)

    def draft(self, batch: Batch, carry: Carry, k: list[int], sampling: SamplingBatch) -> Draft:
        out_BD = carry.out_LD[batch.lane_B]

        def run(slot: int, token_B: Tensor) -> Tensor:
            nonlocal out_BD
            out_BD, logits_BV = self._last(batch.at(slot - 1, token_B), out_BD)
            return logits_BV

        return draft_chain(batch, carry.logits_LV[batch.lane_B], k, sampling, run)

    def _last(self, rows: Batch, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What the last row of every sequence gives, [B, D], and its logits."""
        assert self.attn is not None
        self.attn.plan(rows)
        out_BD = self.model(rows, hidden_TD, self.attn)[rows.last_row_B]
        return out_BD, self.model.logits(out_BD)
