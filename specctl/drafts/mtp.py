"""The MTP layer of a checkpoint: one decoder layer of the target's architecture that reads the target's hidden states.

What it reads beside a token is the target's hidden state after its last norm. What it gives after its own last norm
goes to the head, and takes the place of the target's hidden state when more than one token is drafted. Nothing here
depends on the architecture: the decoder layer, its rotation and what it stores are the target's.
Legend: T rows, R chosen rows, D width, V scored ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specctl.attention import AttentionBackend
from specctl.drafts import OutputHead
from specctl.drafts.head import Given, HeadDrafter, HeadModule
from specctl.heads.mtp import BIAS_LEAF
from specctl.kv.batch import Batch
from specctl.kv.cache import LayerKV
from specctl.layers import Embedding, Linear, Purpose, RMSNorm
from specctl.models import Hidden
from specctl.models.causal import CausalLM, DecoderLayer, Fill


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


class Mtp(HeadModule):
    """An MTP layer beside its target, whose embedding and head it uses unless it has its own.

    number: of the layer in its checkpoint. ids_V: the target ids that it scores, where these are a part of all. Build
    it on the meta device and fill it by prepare().
    """

    def __init__(
        self,
        target: CausalLM,
        number: int,
        own_embedding: bool = False,
        own_head: bool = False,
        ids_V: Tensor | None = None,
    ) -> None:
        super().__init__()
        assert ids_V is None or not own_head
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(number): MtpLayer(target, own_embedding, own_head)})
        self.prefix = f"model.layers.{number}"
        self.config = target.config
        self.ids_V = ids_V
        self._target = (target,)  # no child of this one
        self._rows: tuple[Linear, ...] = ()  # nor this, it is the target's
        self._rope = target.rotation(target.config)

    @property
    def layer(self) -> MtpLayer:
        layer = self.get_submodule(self.prefix)
        assert isinstance(layer, MtpLayer)
        return layer

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def num_columns(self) -> int:
        return self.config.vocab_size if self.ids_V is None else len(self.ids_V)

    @property
    def max_length(self) -> int:
        return self.config.max_length

    @property
    def like(self) -> Tensor:
        return self.layer.enorm.weight

    def read(self, hidden: Hidden) -> Tensor:
        return hidden.final_TD.to(self.like.dtype)

    def forward(self, rows: Batch, read_TD: Tensor, attn: AttentionBackend) -> Given:
        layer, target = self.layer, self._target[0]
        embedding = target.model.embed_tokens if layer.embed_tokens is None else layer.embed_tokens
        both_T2D = torch.cat((layer.enorm(embedding(rows.token_T).to(read_TD.dtype)), layer.hnorm(read_TD)), dim=-1)
        x_TD: Tensor = layer.eh_proj(both_T2D)
        x_TD = layer.decoder(x_TD, self._rope.cos_sin(rows.position_T, x_TD.dtype), attn)
        out: Tensor = layer.shared_head.norm(x_TD)
        return Given(out, out)

    def logits(self, final_RD: Tensor) -> Tensor:
        own = self.layer.shared_head.head
        if self._rows:
            own = self._rows[0]
        found: Tensor = self._target[0].logits(final_RD) if own is None else own(final_RD)
        return found

    def use_rows(self, weight_VD: Tensor) -> None:
        """Rows of the target's head for its columns: those of ids_V, or all of them for training, which cannot use a
        head that is packed."""
        assert len(weight_VD) == self.num_columns
        with torch.device("meta"):
            rows = Linear(self.width, self.num_columns)
        rows.weight = nn.Parameter(weight_VD, requires_grad=False)
        self._rows = (rows,)

    def trained(self) -> Iterator[nn.Parameter]:
        """See HeadModule; and not what no gradient moves, the bias that a router's choices hang on."""
        frozen = ("embed_tokens.", "shared_head.head.")
        return (
            parameter
            for name, parameter in self.layer.named_parameters()
            if not name.startswith(frozen) and not name.endswith(BIAS_LEAF)
        )

    def output_head(self) -> OutputHead:
        own = self.layer.shared_head.head
        if own is not None:
            return OutputHead(own.weight, self.num_columns, trained=False)
        return OutputHead(self._rows[0].weight, self.num_columns, self.ids_V, trained=False)

    def kv_layer(self, dtype: torch.dtype) -> LayerKV:
        return self._target[0].kv_layer(self.config, "draft", dtype)

    def prepare(self, purpose: Purpose, fill: Fill) -> None:
        for rows in self._rows:
            rows.prepare(purpose)
        self.layer.prepare(purpose, fill, self.prefix)


def mtp_drafter(model: Mtp, num_layers: int = 1) -> HeadDrafter:
    """num_layers: MTP layers of the checkpoint. The first one drafts; a chain runs it again on what it gave, and of a
    checkpoint with more of them that is not what they are for."""
    return HeadDrafter("mtp", model, max_k=None if num_layers == 1 else 1)
