"""What commands that run a model, and those that decode, are told: frozen values, no torch, no click."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specctl.sampling.params import Accept, SamplingParams


@dataclass(frozen=True)
class ModelOptions:
    """How a model is run. None and "auto" leave the choice to the machine and the checkpoint. kv_memory is in GiB."""

    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    max_model_len: int | None = None
    kv_memory: float | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Offer:
    """A model on a device that is known by constants alone. model_config, draft_config: a directory, a config.json or a
    hub id; a draft's also `mtp` or `eagle3`, None for one that has no passes to run. engine: None for the first that
    the     constants have. nodes: None for as few as tp allows. quantisation, kv_dtype: None for what the
    checkpoint has, and
    16 bits."""

    model_config: str | None = None
    draft_config: str | None = None
    engine: str | None = None
    tp: int | None = None
    ep: int | None = None
    nodes: int | None = None
    quantisation: Literal["bf16", "fp8", "fp8-block"] | None = None
    kv_dtype: Literal["bf16", "fp8"] | None = None


@dataclass(frozen=True)
class DecodingOptions:
    """How text is decoded. k None: the policy's, else the head's trained depth, else 3. accept None: exact, but coupled
    for a request with a seed of its own. seed: of the run; it does not select coupled."""

    drafts: tuple[str, ...] = ()
    k: int | None = None
    policy: Path | None = None
    batch: int = 1
    accept: Accept | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    @property
    def draft(self) -> str | None:
        """The draft of a command that takes one."""
        assert len(self.drafts) <= 1
        return self.drafts[0] if self.drafts else None

    def params(self, max_tokens: int | None = None, **more: Any) -> SamplingParams:
        """What one request asks for; `max_tokens` of its own goes before the command's, `more` are further fields."""
        return SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            ignore_eos=self.ignore_eos,
            accept=self.accept,
            **more,
        )
