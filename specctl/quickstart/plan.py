"""How much to do: the model is timed on a few tokens, and what is trained and measured follows from the time there is.

It knows what a run costs, not what comes out of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.bench.entrants import enter
from specctl.bench.options import BenchOptions
from specctl.bench.work import Request, read_work
from specctl.errors import RequestError, UsageError
from specctl.options import DecodingOptions
from specctl.pair import Target, build_engine
from specctl.prompts import Prompt, read_prompts
from specctl.quickstart.classes import HELD_OUT

PROMPTS = Path(__file__).with_name("prompts.jsonl")

TRIAL_TOKENS, WARM_UP_TOKENS, TRIALS = 16, 4, 2
TOGETHER = 16
"""Answers that the trial decodes at once, and the training's answers are decoded in."""

LONGEST = 48
"""Tokens of an answer, where the user names no other number: most of a short class."""

# What is trained, at most and at least: fewer answers teach nothing about others.
MOST_ANSWERS, LEAST_ANSWERS, EPOCHS = 384, 96, 4
TRAINING_SHARE = 0.47  # of the time there is, answers and training together
UTMOST_SHARE = 0.65  # the same, before no draft is trained at all
TUNING_SHARE = 0.15  # profile, tuning and gates

# In plain tokens. What drafts is taken to win nothing; transformers takes about twice as long on a CPU. A token that is
# trained on: forward and backward pass and the optimiser's step of a head, for the three steps of its chain. Every
# run is warmed up and the passes are timed as well, whatever the number of prompts.
COST_OF_DRAFTING, COST_OF_TRANSFORMERS, COST_OF_TRAINING, FIXED_TOKENS = 1.0, 1.9, 0.016, 250
MANY_REPEATS = 3


@dataclass(frozen=True)
class Pace:
    """Seconds to the first token of a plain answer, and for each one after it. prompt, together: a prompt's token, and
    an answer's, when TOGETHER prompts are answered at once."""

    first: float
    token: float
    prompt: float = 0.0
    together: float = 0.0

    def answer(self, max_tokens: int) -> float:
        return self.first + self.token * (max_tokens - 1)


@dataclass(frozen=True)
class Training:
    """answers: how many the draft learns from; 0: no draft is trained. seconds: for the answers, and for training."""

    answers: int
    answering: float = 0.0
    training: float = 0.0

    @property
    def seconds(self) -> float:
        return self.answering + self.training


@dataclass(frozen=True)
class Plan:
    """What will be measured. seconds: what it is expected to take."""

    prompts: list[Prompt]
    max_tokens: int
    repeats: int
    transformers: bool
    seconds: float


def held_out_prompts(target: Target, max_tokens: int) -> list[Prompt]:
    """What is measured on in the narrow domain."""
    return fitting(HELD_OUT.prompts("class"), target, max_tokens)


def general_prompts(target: Target, max_tokens: int) -> list[Prompt]:
    """What is measured on beside it: kinds of prompts that the draft has never seen."""
    return fitting(read_prompts(str(PROMPTS)), target, max_tokens)


def fitting(prompts: list[Prompt], target: Target, max_tokens: int) -> list[Prompt]:
    """Prompts as chats, or as plain texts for a model without a chat template; those are left out that do not fit into
    the model's context with their answers.

    Raises UsageError for a model without a tokenizer, and for one for which none is left.
    """
    if target.tokenizer is None:
        raise UsageError(
            f"{target.name}: has no tokenizer, and the prompts of quickstart are text; add its tokenizer files, or use "
            "bench with token_ids"
        )
    if not target.tokenizer.has_chat_template:
        prompts = [_as_text(prompt) for prompt in prompts]
    room = target.max_length - max(max_tokens, TRIAL_TOKENS)
    fit = [prompt for prompt in prompts if _length(prompt, target) <= room]
    if not fit:
        raise UsageError(
            f"{target.name}: a context of {target.max_length} tokens is too short for any prompt of quickstart with "
            "its answer; use bench with prompts of your own"
        )
    return fit


def trial(target: Target, prompts: list[Prompt]) -> Pace:
    """Answer one prompt without a draft, once to warm up and then to time it; then several at once. The fastest time of
    each counts: what else the machine had to do for a moment says nothing about the minutes to come."""
    decoding = DecodingOptions(max_tokens=TRIAL_TOKENS, ignore_eos=True)
    requests = read_work(target, prompts[:TOGETHER], decoding)
    (plain,) = enter(target, {}, requests, BenchOptions(), decoding, lambda sentence: None)
    plain.warm_up([replace(request, max_tokens=WARM_UP_TOKENS) for request in requests[:1]])
    alone = [plain.answer(requests[:1])[0] for _ in range(TRIALS)]
    together = [_together(target, requests) for _ in range(TRIALS)]
    return Pace(
        first=min(answer.first for answer in alone),
        token=min((answer.last - answer.first) / (len(answer.token_ids) - 1) for answer in alone),
        prompt=min(prompt for prompt, _ in together),
        together=min(token for _, token in together),
    )


def _together(target: Target, requests: list[Request]) -> tuple[float, float]:
    """Seconds for a prompt's token and for an answer's, when all are answered at once."""
    decoding = DecodingOptions(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    engine = build_engine(target, max_sequences=len(requests), ignore_tokenizer=True)
    for request in requests:
        engine.add(list(request.token_ids), decoding.params())
    start = time.perf_counter()
    while engine.num_waiting or engine.stats.speculation.emitted_tokens < len(requests):
        engine.step()
    middle, before = time.perf_counter(), engine.stats.speculation.emitted_tokens
    while engine.has_work:
        engine.step()
    decoded = engine.stats.speculation.emitted_tokens - before
    prompt_tokens = sum(len(request.token_ids) for request in requests)
    return (middle - start) / prompt_tokens, (time.perf_counter() - middle) / max(1, decoded)


def choose_training(
    pace: Pace, prompt_tokens: float, seconds: float, max_tokens: int, answers: int | None = None
) -> Training:
    """As many answers as there is time for, which is a share of all. prompt_tokens: of a mean prompt. answers: settled
    already."""
    answering = prompt_tokens * pace.prompt + max_tokens * pace.together
    training = EPOCHS * (prompt_tokens + max_tokens) * COST_OF_TRAINING * pace.token
    if answers is None:
        affordable = int(TRAINING_SHARE * seconds / (answering + training))
        answers = min(MOST_ANSWERS, max(LEAST_ANSWERS, affordable))
        if answers * (answering + training) > UTMOST_SHARE * seconds:
            answers = 0
    return Training(answers, answers * answering, answers * training)


def choose(
    prompts: list[Prompt],
    pace: Pace,
    seconds: float,
    *,
    runs: int,
    max_tokens: int,
    transformers: bool = True,
    limit: int | None = None,
) -> Plan:
    """As many prompts as there is time for, each class with equally many, then repeats. runs: those that draft. limit:
    settled already. Raises UsageError for a limit there is not."""
    if limit is not None and limit > len(prompts):
        raise UsageError(f"--limit {limit}: there are {len(prompts)} prompts that fit this model")
    classes = len({prompt.class_ for prompt in prompts})
    cost = pace.answer(max_tokens) * (1 + runs * COST_OF_DRAFTING + COST_OF_TRANSFORMERS * transformers)
    fixed = FIXED_TOKENS * pace.token

    def affordable(repeats: int = 1) -> int:
        return int((seconds - fixed) / (cost * repeats))

    number = limit or min(len(prompts), max(2 * classes, affordable() // classes * classes))
    repeats = next((n for n in range(MANY_REPEATS, 1, -1) if affordable(n) >= number), 1)
    return Plan(prompts[:number], max_tokens, repeats, transformers, number * repeats * cost + fixed)


def mean_length(prompts: list[Prompt], target: Target) -> float:
    """Tokens of a prompt."""
    return sum(_length(prompt, target) for prompt in prompts) / len(prompts)


def by_class(prompts: list[Prompt]) -> Iterator[tuple[str, int]]:
    """How many of each, in the order in which they come."""
    for name in dict.fromkeys(prompt.class_ for prompt in prompts):
        yield name or "prompts", sum(prompt.class_ == name for prompt in prompts)


def _as_text(prompt: Prompt) -> Prompt:
    if prompt.messages is None:
        return prompt
    text = "\n\n".join(message.content for message in prompt.messages)
    return replace(prompt, messages=None, prompt=text + "\n\n")


def _length(prompt: Prompt, target: Target) -> int:
    try:
        return len(target.encode(prompt))
    except RequestError as error:
        raise UsageError(f"{target.name}: prompt {prompt.id} of quickstart: {error}") from None
