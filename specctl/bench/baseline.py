"""The baseline: transformers' own `generate`, plain and assisted, as its users run it, one prompt at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl.bench.runners import Answer
from specctl.bench.work import Request
from specctl.checkpoint import Checkpoint
from specctl.errors import CheckpointError
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target
from specctl.sampling.params import Accept


@dataclass(frozen=True)
class TransformersRunner:
    """k: how many tokens the assistant model drafts, or prompt lookup where there is none; 0 for plain decoding."""

    name: str
    k: int
    model: Any
    target: Target
    decoding: DecodingOptions
    assistant: Any = None
    batch: int = 1
    accept: Accept | None = None

    def warm_up(self, requests: list[Request]) -> None:
        self.answer(requests)

    def answer(self, requests: list[Request]) -> list[Answer]:
        return [self._answer(request) for request in requests]

    def scores_after(self, request: Request, answer: list[int]) -> Tensor:
        with torch.inference_mode():
            scores_V: Tensor = self.model(self._ids(request.token_ids + answer)).logits[0, -1].double()
        return scores_V

    def _answer(self, request: Request) -> Answer:
        if self.decoding.temperature > 0:
            torch.manual_seed(request.seed)
        ids = self._ids(request.token_ids)
        clock = _TokenClock()
        generated = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._config(request.max_tokens),
            streamer=clock,
            assistant_model=self.assistant,
        )
        return Answer(generated[0, ids.shape[1] :].tolist(), clock.first, clock.last, None)

    def _ids(self, token_ids: list[int]) -> Tensor:
        return torch.tensor([token_ids], device=self.target.device)

    def _config(self, max_tokens: int) -> Any:
        from transformers import GenerationConfig

        decoding = self.decoding
        ends = None if decoding.ignore_eos else sorted(self.target.eos_ids) or None
        sampling: dict[str, Any] = {}
        if decoding.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": decoding.temperature,
                "top_k": decoding.top_k,
                "top_p": decoding.top_p,
                "min_p": decoding.min_p or None,
            }
        lookup = {"prompt_lookup_num_tokens": self.k} if self.k and self.assistant is None else {}
        values = {"max_new_tokens": max_tokens, "eos_token_id": ends, "pad_token_id": 0, **lookup, **sampling}
        return GenerationConfig(**values)  # type: ignore[no-untyped-call]


class _TokenClock:
    """A streamer that notes when tokens come. The first thing it is handed is the prompt, as soon as it is known."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._puts = 0
        self.first = self.last = 0.0

    def put(self, tokens: Tensor) -> None:
        self.last = time.perf_counter() - self._start
        if self._puts == 1:
            self.first = self.last
        self._puts += 1

    def end(self) -> None:
        """Nothing is held back."""


def transformers_runners(
    target: Target,
    drafts: dict[str, tuple[OpenedDraft, int]],
    decoding: DecodingOptions,
    progress: Callable[[str], None],
) -> list[TransformersRunner]:
    """Plain generation, and assisted generation for each draft (by label, with its draft length) that it can use."""
    model = _load(target.checkpoint, target)
    runners = [TransformersRunner("transformers", 0, model, target, decoding)]
    for label, (draft, k) in drafts.items():
        if draft.drafter.reads_hidden:
            progress(f"transformers does not assist with {label}: it has no model for a draft that reads hidden states")
            continue
        assistant = None if draft.checkpoint is None else _assistant(draft.checkpoint, target, k)
        if assistant is not None and assistant.config.vocab_size != model.config.vocab_size:
            progress(f"transformers does not assist with {label}: its vocabulary and the target's differ in their rows")
            continue
        runners.append(TransformersRunner(assisted_name(label, k), k, model, target, decoding, assistant))
    return runners


def assisted_name(label: str, k: int) -> str:
    return f"transformers assisted ({label}) k={k}"


def _assistant(checkpoint: Checkpoint, target: Target, k: int) -> Any:
    """It drafts k tokens every time, as our run does: not adapted on the way, nor stopped by the assistant's doubts."""
    assistant = _load(checkpoint, target)
    assistant.generation_config.num_assistant_tokens = k
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def _load(checkpoint: Checkpoint, target: Target) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # assisted generation warns of its own calls
    # Its grouped experts know no float64.
    experts = {"experts_implementation": "eager"} if target.dtype == torch.float64 else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.path), dtype=target.dtype, local_files_only=True, trust_remote_code=False, **experts
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: transformers cannot load it ({' '.join(str(error).split())[:300]}); leave out "
            "--baseline transformers"
        ) from error
    # Its own defaults would fill whatever the command leaves open: a temperature, penalties, ends of text.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return model.to(target.device).eval()
