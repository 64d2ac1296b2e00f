"""What the tests of the engine share: loaded models, engines over them, reference texts, and chi-square."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.drafts import Drafter
from specctl.drafts.eagle3_checkpoint import load_eagle3
from specctl.drafts.head import HeadDrafter
from specctl.drafts.llama import LlamaDrafter
from specctl.drafts.mtp_checkpoint import find_mtp, load_mtp
from specctl.engine.engine import Engine, EngineOptions
from specctl.engine.scheduler import DraftLength, Policy
from specctl.engine.sequence import Sequence
from specctl.models import CausalLM, load
from specctl.pair import stored_head
from specctl.sampling.params import SamplingParams
from specctl.text.tokenizer import Tokenizer

ALPHA = 1e-6  # a right distribution comes out below it once in a million seeds; the seeds are fixed
FAULT = 1e-12  # a wrong one must come out below this


@cache
def model(path: Path, dtype: torch.dtype = torch.float64) -> CausalLM:
    """The model of a checkpoint that never changes, loaded once."""
    return load(Checkpoint(path), dtype, torch.device("cpu"))


@cache
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


def llama_draft(path: Path, dtype: torch.dtype = torch.float64) -> LlamaDrafter:
    """A draft with weights of its own, even where the path is the target's."""
    loaded = load(Checkpoint(path), dtype, torch.device("cpu"))
    return LlamaDrafter(loaded, loaded.config.vocab_size)


def mtp_draft(path: Path, target: Path | None = None, dtype: torch.dtype = torch.float64) -> HeadDrafter:
    """The MTP layer in `path`, beside the target's model, or the model in `path` itself."""
    original = Checkpoint(target or path)
    found = find_mtp(original if target is None else Checkpoint(path))
    return load_mtp(found, model(target or path, dtype), original, torch.device("cpu"))


def eagle3_draft(path: Path, target: Path, dtype: torch.dtype = torch.float64) -> HeadDrafter:
    """The EAGLE-3 head in `path`, beside the target's model."""
    loaded = model(target, dtype)
    num_layers = loaded.config.num_layers
    stored = stored_head(layouts.read(Checkpoint(path), None, num_layers), num_layers)
    return load_eagle3(stored, loaded, Checkpoint(target), torch.device("cpu"))


def engine(
    target: CausalLM,
    drafter: Drafter | None = None,
    policy: int | Policy = 0,
    *,
    tokens: Tokenizer | None = None,
    pages: int = 200,
    **options: Any,
) -> Engine:
    """An engine that checks its pages after every step. policy: a draft length, or a real one."""
    settings = {"max_length": target.config.max_length, "attention": "torch", "check_pages": True} | options
    asked = (lambda batch, context: DraftLength(policy)) if isinstance(policy, int) else policy
    return Engine(target, EngineOptions(num_pages=pages, **settings), drafter, asked, tokens)


def design() -> Iterator[tuple[int, int, int, int]]:
    """(k, batch, chunk, pages) of engines that have to say the same: 6 pages hold one text and a little of the next."""
    for index, k in enumerate((0, 1, 1, 2, 3, 3, 5)):
        yield k, (1, 3, 8)[index % 3], (512, 7, 16, 40)[index % 4], (6, 200, 9, 6, 13)[index % 5]


def outputs(choices: Iterable[list[Sequence]]) -> list[list[int]]:
    """The token ids of every choice of every request."""
    return [sequence.output for request in choices for sequence in request]


def all_back(e: Engine) -> bool:
    """Whether every page and lane of an idle engine is free."""
    e.scheduler.check()
    return e.cache_usage == 0 and e.num_running == e.num_waiting == 0 and not e.has_work


@cache
def _reference_model(path: Path) -> Any:
    # The grouped experts of transformers know no float64.
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    loaded.generation_config.eos_token_id = None  # which stands in for a None that is asked for
    return loaded


@cache
def greedy(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """transformers' own greedy text in float64, `count` tokens whatever they are."""
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        text = _reference_model(path).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return text[0, len(prompt) :].tolist()


def greedy_params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def chi_square(observed: Iterable[float], expected: Iterable[float], df: int) -> float:
    """The probability of a deviation at least this large. A token that must not come but did: 0."""
    statistic = 0.0
    for count, mean in zip(observed, expected, strict=True):
        if mean == 0:
            if count:
                return 0.0
            continue
        statistic += (count - mean) ** 2 / mean
    return float(torch.special.gammaincc(torch.tensor(df / 2.0).double(), torch.tensor(statistic / 2).double()))


def kolmogorov(values: torch.Tensor) -> float:
    """sqrt(n) times the largest distance from the uniform distribution; above 2.7 once in a million."""
    ordered = values.double().flatten().sort().values
    n = len(ordered)
    step = torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * float(torch.maximum(step[1:] - ordered, ordered - step[:-1]).max())
