"""Where a head begins: an MTP layer or an EAGLE-3 head of the target's sizes, with what it can take from the target.

An MTP layer uses the target's embedding and output head, which stay as they are. An EAGLE-3 head has an output head of
its own, which begins as the target's rows. Legend: V ids that the head scores, D width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specctl.attention.dense import ChainAttention
from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layout
from specctl.drafts import eagle3_checkpoint
from specctl.drafts.eagle3 import Eagle3
from specctl.drafts.head import HeadDrafter, HeadModule
from specctl.drafts.mtp import Mtp, mtp_drafter
from specctl.drafts.mtp_checkpoint import Found, find_mtp, load_mtp, read_vocabulary
from specctl.errors import CheckpointError, UsageError
from specctl.finetune.memory import of_head
from specctl.finetune.start import Start
from specctl.heads import mtp
from specctl.heads.eagle3 import Eagle3Head, original_taps
from specctl.heads.quantisation import KEY, OTHER_KEYS
from specctl.heads.vocabulary import D2T, T2D, members, offsets
from specctl.hub import locate
from specctl.models import ARCHITECTURES, CausalLM, CommonConfig, ModelConfig, Weights, read_config
from specctl.pair import stored_head
from specctl.schemas.draft import Head, recorded
from specctl.schemas.recipe import Draft, Kind, Recipe
from specctl.train.gradients import trainable_head

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DEVIATION = 0.02  # of random weights
WRITERS = ("o_proj.weight", "down_proj.weight")  # what adds to the residual


@dataclass(frozen=True)
class HeadStart(Start):
    """target: its checkpoint. ids_V: the target ids it scores, None for all. source: the head it begins with."""

    target: Checkpoint
    ids_V: Tensor | None = field(repr=False)

    @property
    def tables(self) -> Mapping[str, Tensor]:
        if self.ids_V is None:
            return {}
        return {D2T: offsets(self.ids_V), T2D: members(self.ids_V, self._target_config.vocab_size)}

    def build(self, seed: int, dtype: torch.dtype, device: torch.device, target: CausalLM | None) -> nn.Module:
        assert target is not None
        model = self._module(target)
        first = self._random(model, seed) if self.source is None else self._copied(model, target)
        for name, tensor in first:
            owner, _, leaf = name.rpartition(".")
            # A copy: a mapped file would give way under a weight that changes.
            parameter = nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, parameter)
        if model.ids_V is not None:
            model.ids_V = model.ids_V.to(device)
        assert not any(parameter.is_meta for parameter in model.parameters())
        return model

    def learner(self, model: nn.Module, checkpointing: bool, in_place: bool = True) -> HeadDrafter:
        drafter = trainable_head(self.drafter(model), checkpointing, in_place)
        drafter.attn = ChainAttention()
        return drafter

    def drafter(self, model: nn.Module) -> HeadDrafter:
        assert isinstance(model, HeadModule)
        return HeadDrafter(self.kind, model)

    def multiplied(self) -> tuple[int, int, CommonConfig]:
        model = self.skeleton()
        head = model.num_columns * model.width
        own = sum(parameter.numel() for name, parameter in model.named_parameters() if name != HEAD)
        return own, head, self._target_config

    def memory(self, recipe: Recipe, rows: int, dtype: torch.dtype) -> dict[str, int]:
        return of_head(recipe, self.skeleton(), self._target_config, rows, dtype)

    def skeleton(self) -> HeadModule:
        with torch.device("meta"):
            return self._module(ARCHITECTURES[self._target_config.model_type](self._target_config))

    @abstractmethod
    def _module(self, target: CausalLM) -> HeadModule:
        """On the meta device."""

    @abstractmethod
    def _random(self, model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Of every parameter, but for what the target has."""

    @abstractmethod
    def _copied(self, model: nn.Module, target: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """Of every parameter, from the source."""

    @cached_property
    def _target_config(self) -> CommonConfig:
        return read_config(self.target.config, str(self.target.path / "config.json"))

    def scored_rows(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.ids_V is None else self._target_rows(dtype)

    def _target_rows(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The target's output head, the rows that are scored, [V, D]."""
        name = EMBEDDING if self._target_config.tied else HEAD
        rows_VD = Weights(self.target).tensor(name, dtype)
        return rows_VD if self.ids_V is None else rows_VD[self.ids_V]


@dataclass(frozen=True)
class MtpStart(HeadStart):
    """layer: of the target, whose weights the decoder layer begins with; None for random ones. found: the layer that it
    begins as."""

    layer: int | None
    found: Found | None = None

    @property
    def kind(self) -> Kind:
        return "mtp"

    @property
    def head(self) -> Head:
        vocabulary = None if self.ids_V is None else {"size": len(self.ids_V), "of": self._target_config.vocab_size}
        return Head(**(mtp.HEAD_FACTS | {"vocabulary": vocabulary}))

    def build(self, seed: int, dtype: torch.dtype, device: torch.device, target: CausalLM | None) -> nn.Module:
        model = super().build(seed, dtype, device, target)
        assert isinstance(model, Mtp)
        if model.layer.shared_head.head is None:  # else it scores by its own
            model.use_rows(self._target_rows().to(device=device, dtype=dtype, copy=True))
        return model

    def drafter(self, model: nn.Module) -> HeadDrafter:
        assert isinstance(model, Mtp)
        return mtp_drafter(model)

    def _module(self, target: CausalLM) -> Mtp:
        found = self.found
        embedding, head = (found is not None and found.name(copy) in found.checkpoint for copy in mtp.SHARED)
        with torch.device("meta"):
            # A head of all rows beside a vocabulary of its own is the target's, else it cannot be read.
            return Mtp(target, self._target_config.num_layers, embedding, head and self.ids_V is None, self.ids_V)

    def _copied(self, model: nn.Module, target: CausalLM) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(model, Mtp)
        assert self.found is not None
        load_mtp(self.found, target, self.target, torch.device("meta"), "train")  # says what is not as it should be
        weights = Weights(self.found.checkpoint)
        for name, _ in model.named_parameters():
            part = name.removeprefix(f"{model.prefix}.")
            yield name, weights.tensor(self.found.name(part), torch.float32)

    def _random(self, model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(model, Mtp)
        if self.layer is None:
            yield from _drawn(model, seed)
            return
        weights, prefix = Weights(self.target), f"model.layers.{self.layer}"
        parts = {name for name, _ in model.layer.decoder.named_parameters()}
        for name, tensor in _drawn(model, seed):
            part = name.removeprefix(f"{model.prefix}.")
            yield name, weights.tensor(f"{prefix}.{part}", torch.float32) if part in parts else tensor


@dataclass(frozen=True)
class Eagle3Start(HeadStart):
    """stored: the head that it begins as."""

    description: Eagle3Head = field(repr=False)
    stored: eagle3_checkpoint.Stored | None = None

    @property
    def kind(self) -> Kind:
        return "eagle3"

    @property
    def head(self) -> Head:
        return Head(**self.description.facts())

    @property
    def taps(self) -> tuple[int, ...]:
        return self.description.taps

    def _module(self, target: CausalLM) -> Eagle3:
        config = ModelConfig.read(self.description.layer, "the head's config.json")
        with torch.device("meta"):
            return Eagle3(self.description, config, target, self.ids_V)

    def _copied(self, model: nn.Module, target: CausalLM) -> Iterator[tuple[str, Tensor]]:
        assert self.stored is not None
        weights = Weights(self.stored.checkpoint)
        for name, _ in model.named_parameters():
            stored = self.stored.names[name]
            if fault := weights.fault(stored):
                raise CheckpointError(f"{self.stored.where}: {fault}")
            yield name, weights.tensor(stored, torch.float32)

    def _random(self, model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _drawn(model, seed):
            yield name, self._target_rows() if name == HEAD else tensor


def plan_mtp(draft: Draft, target: Checkpoint, ids_V: Tensor | None) -> MtpStart:
    """ids_V: the draft's vocabulary. Raises UsageError for a layer that the target does not have."""
    config = read_config(target.config, str(target.path / "config.json"))
    if draft.init is not None:
        return _mtp_from(draft, target, config)
    layer = None if draft.layers is None else draft.layers[0]
    if layer is not None and layer >= config.num_layers:
        raise UsageError(f"draft.layers names layer {layer}, {target.path} has {config.num_layers}, counted from 0")
    begin = "random weights" if layer is None else f"layer {layer} of the target"
    words = f"an MTP layer, {begin}{_of(ids_V, config.vocab_size)}"
    return MtpStart(words, _mtp_config(target, ids_V), None, config.vocab_size, target, ids_V, layer)


def _mtp_from(draft: Draft, target: Checkpoint, config: CommonConfig) -> MtpStart:
    """The layer in a directory, the target's own among them."""
    checkpoint = Checkpoint(locate(str(draft.init)))
    found = find_mtp(checkpoint)
    ids_V = None if checkpoint.path == target.path else read_vocabulary(checkpoint)
    _check_own_vocabulary(draft, ids_V, config.vocab_size)
    words = f"the MTP layer of {draft.init}{_of(ids_V, config.vocab_size)}"
    written = _mtp_config(target, ids_V)
    return MtpStart(words, written, checkpoint, config.vocab_size, target, ids_V, None, found)


def _mtp_config(target: Checkpoint, ids_V: Tensor | None) -> dict[str, Any]:
    """config.json of the layer: the target's, but for its quantisation, which the layer does not have."""
    kept = {key: deepcopy(value) for key, value in target.config.items() if key not in (KEY, *OTHER_KEYS)}
    reduced = {} if ids_V is None else {"draft_vocab_size": len(ids_V)}
    return kept | {"num_nextn_predict_layers": 1} | reduced


def _check_own_vocabulary(draft: Draft, ids_V: Tensor | None, vocab_size: int) -> None:
    """A head keeps the vocabulary it was trained with: its rows are of these tokens."""
    size = vocab_size if ids_V is None else len(ids_V)
    if draft.vocab_size not in (None, size):
        raise UsageError(
            f"draft.vocab_size is {draft.vocab_size}, {draft.init} has a vocabulary of {size} tokens, which it keeps; "
            "leave it out"
        )


def plan_eagle3(draft: Draft, target: Checkpoint, ids_V: Tensor | None) -> Eagle3Start:
    """Raises UsageError for taps that the target does not have."""
    where = str(target.path / "config.json")
    config = read_config(target.config, where)
    if draft.init is not None:
        return _eagle3_from(draft, target, config)
    taps = tuple(draft.taps) if draft.taps is not None else default_taps(config.num_layers)
    if max(taps) > config.num_layers:
        raise UsageError(
            f"draft.taps names tap {max(taps)}, expected at most {config.num_layers}: tap k is what enters layer k, "
            "and the last one what leaves the last layer"
        )
    description = Eagle3Head(
        taps=taps,
        target_hidden=config.hidden_size,
        target_vocab=config.vocab_size,
        draft_vocab=config.vocab_size if ids_V is None else len(ids_V),
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        own_embedding=False,
        layer=_layer_config(draft, target, config),
    )
    words = f"an EAGLE-3 head, taps {', '.join(map(str, taps))}{_of(ids_V, config.vocab_size)}"
    return Eagle3Start(words, layout.native(description), None, config.vocab_size, target, ids_V, description)


def _eagle3_from(draft: Draft, target: Checkpoint, config: CommonConfig) -> Eagle3Start:
    """The head in a directory, whatever its layout."""
    checkpoint = Checkpoint(locate(str(draft.init)))
    if not layout.is_eagle3(checkpoint):
        raise CheckpointError(f"{draft.init}: is no EAGLE-3 head; draft.init has to name one, or be left out")
    said = recorded(checkpoint.path)
    found = layout.read(checkpoint, None if said is None else said.taps, config.num_layers)
    stored = stored_head(found, config.num_layers)
    eagle3_checkpoint.check_fit(stored, config)
    _check_own_vocabulary(draft, stored.ids_D, config.vocab_size)
    words = f"the EAGLE-3 head of {draft.init}{_of(stored.ids_D, config.vocab_size)}"
    return Eagle3Start(
        words, layout.native(stored.head), checkpoint, config.vocab_size, target, stored.ids_D, stored.head, stored
    )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The published three, as far as a shallow target has them."""
    first, middle, last = original_taps(num_layers)
    return tuple(sorted({min(first, num_layers - 1), middle, max(last, 0)}))


def _layer_config(draft: Draft, target: Checkpoint, of: CommonConfig) -> dict[str, Any]:
    """A Llama layer of the target's sizes, positions and rotation. What the target's own layer has beyond a Llama's
    (latents, experts, norms of queries) it has not."""
    groups = of.num_kv_heads if isinstance(of, ModelConfig) else of.num_heads
    rope = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    dim = of.head_dim if isinstance(of, ModelConfig) else 128
    heads = of.num_heads if isinstance(of, ModelConfig) else max(1, of.hidden_size // dim)
    return {
        "model_type": "llama",
        "vocab_size": of.vocab_size,
        "hidden_size": of.hidden_size,
        "intermediate_size": draft.intermediate or of.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": draft.heads or heads,
        "num_key_value_heads": (draft.heads or groups) if isinstance(of, ModelConfig) else heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "max_position_embeddings": of.max_position,
        "rms_norm_eps": of.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{key: deepcopy(target.config[key]) for key in (*rope, *ends) if key in target.config},
    }


def _of(ids_V: Tensor | Sequence[int] | None, vocab_size: int) -> str:
    return "" if ids_V is None else f", {len(ids_V):,} of {vocab_size:,} tokens"


def _drawn(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms of one, everything else drawn; what writes to the residual, twice in a layer, is smaller for it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            yield name, torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
        else:
            deviation = DEVIATION / math.sqrt(2) if name.endswith(WRITERS) else DEVIATION
            yield name, torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
