"""Where a draft of kind llama begins: a checkpoint, some layers of the target, or random numbers.

Legend: V vocabulary rows, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specctl.attention.dense import DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.drafts.llama import LlamaDrafter
from specctl.errors import CheckpointError, IncompatiblePair, UsageError
from specctl.finetune.memory import of_llama
from specctl.finetune.start import Start
from specctl.heads.quantisation import KEY, OTHER_KEYS
from specctl.hub import locate
from specctl.models import FAMILIES, CausalLM, CommonConfig, Llama, ModelConfig, Weights, read_config
from specctl.models import load as load_model
from specctl.pair import has_tokenizer
from specctl.schemas.draft import Head
from specctl.schemas.recipe import Draft, Kind, Recipe
from specctl.text.tokenizer import Tokenizer
from specctl.text.vocabulary import check_vocabularies
from specctl.train.gradients import trainable

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NOT_A_DRAFTS = ("num_nextn_predict_layers",)
DEVIATION = 0.02  # of random weights, as the family's own models begin


@dataclass(frozen=True)
class LlamaStart(Start):
    """source: where its weights are copied from, None for random ones; layers: which of the source's, None for all."""

    layers: tuple[int, ...] | None

    @property
    def kind(self) -> Kind:
        return "llama"

    @property
    def head(self) -> Head:
        return Head(reads="tokens", taps=[], norms={}, vocabulary={"shared": self.vocab_size}, feedback=None)

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig.read(self.config, "the draft's config.json")

    def skeleton(self) -> Llama:
        with torch.device("meta"):
            return Llama(self.model_config)

    def build(self, seed: int, dtype: torch.dtype, device: torch.device, target: CausalLM | None) -> Llama:
        return build(self, seed, dtype, device)

    def drafter(self, model: nn.Module) -> LlamaDrafter:
        assert isinstance(model, Llama)
        return LlamaDrafter(model, self.vocab_size)

    def learner(self, model: nn.Module, checkpointing: bool, in_place: bool = True) -> LlamaDrafter:
        assert isinstance(model, Llama)
        drafter = self.drafter(trainable(model, checkpointing, in_place))
        drafter.attn = DenseAttention()
        return drafter

    def multiplied(self) -> tuple[int, int, CommonConfig]:
        config = self.model_config
        head = config.vocab_size * config.hidden_size
        total = sum(parameter.numel() for parameter in self.skeleton().parameters())
        return total - head * (1 if config.tied else 2), head, config

    def memory(self, recipe: Recipe, rows: int, dtype: torch.dtype) -> dict[str, int]:
        return of_llama(recipe, self.skeleton(), rows, dtype)


def plan_llama(draft: Draft, target: Checkpoint, tokenizer: Tokenizer | None) -> LlamaStart:
    """What a recipe's `draft` comes to; no weights are read. tokenizer: the target's.

    Raises UsageError naming the key, CheckpointError and IncompatiblePair for an init that cannot be used.
    """
    if draft.init is not None:
        return _from_checkpoint(draft, target, tokenizer)
    rows = read_config(target.config, str(target.path / "config.json")).vocab_size
    shared = rows if tokenizer is None else check_vocabularies(tokenizer, tokenizer, rows, rows)
    if draft.width is not None:
        config = _scratch_config(draft, target)
        words = f"random weights, width {draft.width}, {draft.depth} layers"
        return LlamaStart(words, config, None, shared, None)
    config, layers = _layers_config(draft, target)
    words = f"layers {', '.join(map(str, layers))} of the target"
    return LlamaStart(words, config, target, shared, layers)


def build(start: LlamaStart, seed: int, dtype: torch.dtype, device: torch.device) -> Llama:
    """The model with its first weights, to be trained; random ones depend on the seed alone."""
    if start.source is not None and start.layers is None and start.config["tie_word_embeddings"] == _tied(start.source):
        load_model(start.source, dtype, torch.device("meta"), "train")  # says which tensor is not as it should be
    model = start.skeleton()
    tensors = _random(model, seed) if start.source is None else _copied(model, start, dtype)
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        # A copy: a mapped file would give way under a weight that changes.
        parameter = nn.Parameter(tensor.to(device=device, dtype=dtype, copy=True))
        setattr(model.get_submodule(owner), leaf, parameter)
    if model.config.tied:
        model.tie()
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def _from_checkpoint(draft: Draft, target: Checkpoint, tokenizer: Tokenizer | None) -> LlamaStart:
    assert draft.init is not None
    source = Checkpoint(locate(draft.init))
    where = source.path / "config.json"
    if source.config.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type {source.config.get('model_type')!r} is no model this version trains, expected one of "
            f"{', '.join(FAMILIES)}"
        )
    rows = read_config(source.config, str(where)).vocab_size
    target_rows = read_config(target.config, str(target.path / "config.json")).vocab_size
    shared = min(rows, target_rows)
    if tokenizer is not None and has_tokenizer(source.path):
        shared = check_vocabularies(tokenizer, Tokenizer(source.path), target_rows, rows)
    elif rows != target_rows:
        raise IncompatiblePair(
            f"{draft.init}: has a vocabulary of {rows} and {target.path} one of {target_rows}, and without both "
            "tokenizers it cannot be told which tokens they share; add the tokenizer files"
        )
    return LlamaStart(f"{draft.init}", _tie(source.config, draft.tie), source, shared, None)


def _layers_config(draft: Draft, target: Checkpoint) -> tuple[dict[str, Any], tuple[int, ...]]:
    of = read_config(target.config, str(target.path / "config.json"))
    if of.model_type not in FAMILIES:
        raise UsageError(
            f"{target.path} is a {of.model_type} model, and drafts of this kind are of the Llama family, so none can "
            "begin with its layers; set draft.width and draft.depth, or draft.init"
        )
    depth = of.num_layers
    layers = tuple(draft.layers) if draft.layers is not None else spread(depth)
    for layer in layers:
        if layer >= depth:
            raise UsageError(f"draft.layers names layer {layer}, {target.path} has {depth}, counted from 0")
    config = _tie(target.config, draft.tie) | {"num_hidden_layers": len(layers)}
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    if "max_window_layers" in config:
        config["max_window_layers"] = len(layers)
    return config, layers


def spread(depth: int) -> tuple[int, ...]:
    """A quarter of the layers, the first and the last among them: what a recipe that names no start begins with."""
    count = max(1, round(depth / 4))
    return (0,) if count == 1 else tuple(round(i * (depth - 1) / (count - 1)) for i in range(count))


def _scratch_config(draft: Draft, target: Checkpoint) -> dict[str, Any]:
    """A Llama with the target's vocabulary, positions and rotation."""
    assert draft.width is not None
    assert draft.depth is not None
    of = read_config(target.config, str(target.path / "config.json"))
    heads = draft.heads or _heads(draft.width, of.head_dim)
    if draft.width % heads or draft.width // heads % 2:
        raise UsageError(f"draft.heads {heads} do not divide draft.width {draft.width} into heads of an even size")
    ratio = of.intermediate_size / of.hidden_size
    inner = draft.intermediate or max(8, round(draft.width * ratio / 8) * 8)
    kept = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings", "dtype", "torch_dtype")
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": of.vocab_size,
        "hidden_size": draft.width,
        "intermediate_size": inner,
        "num_hidden_layers": draft.depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": draft.width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": of.max_position,
        "rms_norm_eps": of.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": of.tied if draft.tie is None else draft.tie,
        **{key: target.config[key] for key in (*kept, *ends) if key in target.config},
    }


def _heads(width: int, head_dim: int) -> int:
    """As many as give heads of about the target's size."""
    fits = [n for n in range(1, width + 1) if width % n == 0 and width // n % 2 == 0]
    if not fits:
        raise UsageError(f"draft.width is {width}, expected an even number")
    return min(fits, key=lambda n: (abs(math.log(width / n / head_dim)), n))


def _tie(config: dict[str, Any], tie: bool | None) -> dict[str, Any]:
    """The config of a draft, whose weights are plain and without MTP layers whatever those of `config` are."""
    own = bool(config.get("tie_word_embeddings", False))
    kept = {key: deepcopy(value) for key, value in config.items() if key not in (*NOT_A_DRAFTS, KEY, *OTHER_KEYS)}
    return kept | {"tie_word_embeddings": own if tie is None else tie}


def _tied(source: Checkpoint) -> bool:
    return bool(source.config.get("tie_word_embeddings", False))


def _copied(model: Llama, start: LlamaStart, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The source's tensors under the draft's names. A head that parts from a tied embedding begins as its copy."""
    assert start.source is not None
    weights = Weights(start.source)
    for name, parameter in model.named_parameters():
        found = name
        if start.layers is not None and name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            found = f"model.layers.{start.layers[int(index)]}.{rest}"
        if name == HEAD and found not in start.source:
            found = EMBEDDING
        tensor = weights.tensor(found, dtype)
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{start.source.path}: tensor {found} has shape {list(tensor.shape)}, the config expects "
                f"{list(parameter.shape)}"
            )
        yield name, tensor


def _random(model: Llama, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms of one, biases of zero, everything else drawn; what writes to the residual is smaller by its number of
    writers, so that depth does not make it grow."""
    generator = torch.Generator().manual_seed(seed)
    writers = math.sqrt(2 * model.config.num_layers)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            yield name, torch.zeros(parameter.shape)
        elif parameter.dim() == 1:
            yield name, torch.ones(parameter.shape)
        else:
            deviation = DEVIATION / writers if name.endswith(("o_proj.weight", "down_proj.weight")) else DEVIATION
            yield name, torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
