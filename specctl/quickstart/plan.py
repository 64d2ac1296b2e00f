"""How much to measure: one plain answer is timed, and prompts, answer length and repeats follow from the time there is.

It knows what a run costs, not what comes out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specctl.bench.entrants import enter
from specctl.bench.options import BenchOptions
from specctl.bench.work import read_work
from specctl.errors import RequestError, UsageError
from specctl.options import DecodingOptions
from specctl.pair import Target
from specctl.prompts import Prompt, read_prompts

PROMPTS = Path(__file__).with_name("prompts.jsonl")
LENGTHS = (1, 2, 3, 5)
"""The draft lengths measured."""

TRIAL_TOKENS, WARM_UP_TOKENS = 16, 4
ANSWERS = (64, 32, 16)
"""Lengths of answers, the best first."""

MANY_REPEATS = 3
# In plain answers. What drafts is taken to win nothing; transformers runs plain and with its own prompt lookup, each at
# about this price on a CPU. Every run is warmed up and the passes are timed as well, whatever the number of prompts.
COST_OF_DRAFTING, COST_OF_TRANSFORMERS, COST_OF_TRACE = 1.0, 2 * 1.9, 1.0
FIXED_TOKENS = 400


@dataclass(frozen=True)
class Pace:
    """Seconds to the first token of a plain answer, and for each one after it."""

    first: float
    token: float

    def answer(self, max_tokens: int) -> float:
        return self.first + self.token * (max_tokens - 1)


@dataclass(frozen=True)
class Plan:
    """What will be measured. seconds: what it is expected to take."""

    prompts: list[Prompt]
    max_tokens: int
    repeats: int
    transformers: bool
    seconds: float


def own_prompts(target: Target, max_tokens: int) -> list[Prompt]:
    """The prompts that come with the package, as chats, or as plain texts for a model without a chat template. Those
    are left out that do not fit into the model's context with their answers.

    Raises UsageError for a model without a tokenizer, and for one for which none is left.
    """
    if target.tokenizer is None:
        raise UsageError(
            f"{target.name}: has no tokenizer, and the prompts of quickstart are text; add its tokenizer files, or use "
            "bench with token_ids"
        )
    prompts = read_prompts(str(PROMPTS))
    if not target.tokenizer.has_chat_template:
        prompts = [_as_text(prompt) for prompt in prompts]
    room = target.max_length - max(max_tokens, TRIAL_TOKENS)
    fitting = [prompt for prompt in prompts if _length(prompt, target) <= room]
    if not fitting:
        raise UsageError(
            f"{target.name}: a context of {target.max_length} tokens is too short for any prompt of quickstart with "
            "its answer; use bench with prompts of your own"
        )
    return fitting


def trial(target: Target, prompt: Prompt) -> Pace:
    """Answer one prompt without a draft, once to warm up and once to time it."""
    decoding = DecodingOptions(max_tokens=TRIAL_TOKENS, ignore_eos=True)
    requests = read_work(target, [prompt], decoding)
    (plain,) = enter(target, {}, requests, BenchOptions(), decoding, lambda sentence: None)
    plain.warm_up([replace(request, max_tokens=WARM_UP_TOKENS) for request in requests])
    (answer,) = plain.answer(requests)
    return Pace(answer.first, (answer.last - answer.first) / (len(answer.token_ids) - 1))


def choose(
    prompts: list[Prompt],
    pace: Pace,
    seconds: float,
    *,
    transformers: bool = True,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> Plan:
    """As many prompts as there is time for, each class with equally many; then shorter answers before fewer than two
    prompts of a class; then repeats. max_tokens, limit: settled already. Raises UsageError for a limit there is not."""
    if limit is not None and limit > len(prompts):
        raise UsageError(f"--limit {limit}: there are {len(prompts)} prompts that fit this model")
    classes = len({prompt.class_ for prompt in prompts})

    def affordable(tokens: int, repeats: int = 1) -> int:
        left = seconds - FIXED_TOKENS * pace.token
        return int(left / _cost(pace, tokens, repeats, transformers))

    enough = (tokens for tokens in ANSWERS if affordable(tokens) >= 2 * classes)
    tokens = max_tokens or next(enough, ANSWERS[-1])
    number = limit or min(len(prompts), max(classes, affordable(tokens) // classes * classes))
    repeats = next((n for n in range(MANY_REPEATS, 1, -1) if affordable(tokens, n) >= number), 1)
    expected = number * _cost(pace, tokens, repeats, transformers) + FIXED_TOKENS * pace.token
    return Plan(prompts[:number], tokens, repeats, transformers, expected)


def _cost(pace: Pace, tokens: int, repeats: int, transformers: bool) -> float:
    """Seconds that one more prompt costs."""
    runs = 1 + len(LENGTHS) * COST_OF_DRAFTING + COST_OF_TRANSFORMERS * transformers
    return pace.answer(tokens) * (repeats * runs + COST_OF_TRACE)


def _as_text(prompt: Prompt) -> Prompt:
    assert prompt.messages is not None
    text = "\n\n".join(message.content for message in prompt.messages)
    return replace(prompt, messages=None, prompt=text + "\n\n")


def _length(prompt: Prompt, target: Target) -> int:
    try:
        return len(target.encode(prompt))
    except RequestError as error:
        raise UsageError(f"{target.name}: prompt {prompt.id} of quickstart: {error}") from None
