"""Small models that draft, for the engines that run a second model beside the target: a plain Hugging Face directory.

The numbers stay as they are. A tied head is not written twice, and config.json says what readers would have to fill in:
the rotation in both spellings, the dtype, whether the head is tied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl import models
from specctl.attention.dense import DenseAttention
from specctl.checkpoint import Checkpoint
from specctl.dialects.eagle3.layer import rotation
from specctl.errors import CheckpointError, UsageError
from specctl.export.job import TOLERANCE, Job, Proof, compare_configs, compare_tensors, copied, fits_twice
from specctl.export.source import Draft, Engine
from specctl.export.standin import IDS, ROWS, SEED, positions
from specctl.kv.batch import Batch, Span
from specctl.models import FAMILIES, CommonConfig, read_config
from specctl.pair import has_tokenizer
from specctl.schemas.draft import Head
from specctl.text.tokenizer import Tokenizer
from specctl.text.vocabulary import check_vocabularies

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class LlamaJob(Job):
    """names: of its tensors, which stay what they are. read: the source's config."""

    names: tuple[str, ...] = field(repr=False)
    read: CommonConfig

    @property
    def head(self) -> Head | None:
        return None if self.source.said is None else self.source.said.head

    @property
    def k(self) -> int:
        return self.source.k()

    def prove(self, directory: Path) -> Proof:
        written, reader = Checkpoint(directory), ENGINES[self.to]
        theirs = read_config(written.config, str(directory / "config.json"))
        for config in (theirs, _by_class(written.config, theirs, directory)):
            compare_configs(self.source.name, self.read, config, reader)
        same = {name: name for name in self.names}
        compare_tensors(self.source.checkpoint, written, same, reader, same)
        if not fits_twice(sum(written.info(name).num_parameters for name in self.names)):
            return Proof(None, 0)
        difference = float((_logits(self.source.checkpoint) - _logits(written)).abs().max())
        if not difference <= TOLERANCE:
            raise CheckpointError(
                f"{self.source.name}: logits of the draft as {reader} reads it differ by {difference:.2g}, expected at "
                f"most {TOLERANCE:g}"
            )
        return Proof(difference, ROWS)


def plan(source: Draft, to: Engine) -> LlamaJob:
    """Raises UsageError for an engine that runs no such draft, IncompatiblePair for another vocabulary."""
    checkpoint = source.checkpoint
    if to not in ENGINES:
        raise UsageError(f"--to {to}: has no layout for a draft that is a model, expected {' or '.join(ENGINES)}")
    read = read_config(checkpoint.config, str(checkpoint.path / "config.json"))
    models.load(checkpoint, torch.float32, torch.device("meta"), "train")  # says which tensor is not as it should be
    notices = list(_against_target(source, read, ENGINES[to]))
    names = tuple(name for name in checkpoint.names() if not (read.tied and name == models.HEAD))
    entries = tuple(copied(checkpoint, {name: name for name in names}))
    return LlamaJob(source, to, _config(checkpoint, read), entries, tuple(notices), names, read)


def _config(checkpoint: Checkpoint, read: CommonConfig) -> dict[str, Any]:
    where = str(checkpoint.path / "config.json")
    config = {key: value for key, value in checkpoint.config.items() if key not in ("auto_map", "torch_dtype")}
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if not isinstance(named, str):
        named = str(checkpoint.dtype(models.EMBEDDING))
    config |= {"tie_word_embeddings": read.tied, "dtype": named.removeprefix("torch.")}
    if read.model_type in FAMILIES:
        config |= rotation(config, where)
        config.setdefault("architectures", [ARCHITECTURES[read.model_type]])
    return config


def _against_target(source: Draft, read: CommonConfig, engine: str) -> Iterator[str]:
    target = source.target
    if target is None:
        yield f"{engine} wants a draft with as many vocabulary rows as the target; --target has them compared"
        return
    rows = target.sizes.vocab_size
    if rows != read.vocab_size:
        raise UsageError(
            f"{source.name}: has {read.vocab_size} vocabulary rows, {target.name} has {rows}: {engine} takes only a "
            "draft with as many; train one from the target's own layers"
        )
    if has_tokenizer(source.path) and has_tokenizer(target.files.path):
        check_vocabularies(Tokenizer(target.files.path), Tokenizer(source.path), rows, rows)
    context = target.config.get("max_position_embeddings")
    if isinstance(context, int) and context > read.max_length:
        yield (
            f"{source.name}: has a context of {read.max_length}, the target one of {context}: {engine} does not draft "
            "beyond it"
        )


def _by_class(config: Mapping[str, Any], read: CommonConfig, directory: Path) -> CommonConfig:
    """The config as transformers' class for its model_type has it, which is what engines go by."""
    if read.model_type not in FAMILIES:
        return read
    from transformers import AutoConfig

    return read_config(AutoConfig.from_pretrained(directory).to_dict(), "config.json as transformers reads it")


@torch.no_grad()
def _logits(checkpoint: Checkpoint) -> Tensor:
    model = models.load(checkpoint, torch.float32, CPU, "train")
    config = model.config
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(min(IDS, config.vocab_size), (ROWS,), generator=generator).tolist()
    batch = Batch.pack([Span(tokens, 0, list(range(1, 2 + ROWS)), 0)])
    attn = DenseAttention()
    attn.plan(batch)
    hidden = model(replace(batch, position_T=positions(config.max_length)), attn)
    return model.logits(hidden.final_TD)
