"""Generating: prompts in, text on the terminal as it is decided, or one JSON object at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from specctl.engine.engine import Engine
from specctl.engine.sequence import Sequence
from specctl.engine.stats import SpeculationCounters
from specctl.errors import RequestError, UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.output import say, to_json
from specctl.pair import OpenedDraft, Target, build_engine, effective_k, open_draft, open_policy, open_target
from specctl.prompts import Prompt
from specctl.sampling.params import Accept
from specctl.schemas.base import Provenance

SCHEMA = "specctl.generation/1"


def generate(
    target_name: str,
    prompts: list[Prompt],
    model: ModelOptions,
    decoding: DecodingOptions,
    request: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Answer every prompt. `request`: further fields of SamplingParams. Answers go to stdout, all else to stderr."""
    target = open_target(target_name, model)
    draft = None if decoding.draft is None else open_draft(decoding.draft, target)
    policy, accept = open_policy(decoding, target, draft)
    for notice in [] if draft is None else draft.notices:
        say(f"note: {notice}")
    engine = build_engine(
        target, draft, policy, max_sequences=decoding.batch, accept=accept, seed=decoding.seed or 0, announce=say
    )
    asked = _ask(engine, target, prompts, decoding, request)
    stream = not as_json and len(asked) == 1 and len(asked[0][1]) == 1
    while engine.has_work:
        outputs = engine.step()
        if stream:
            _show("".join(output.text for output in outputs))
    if as_json:
        report = _report(engine, target, draft, accept, asked)
        sys.stdout.write(to_json({**report, "effective": _effective(engine, decoding, draft)}) + "\n")
    elif stream:
        _show("\n")
    else:
        _show("".join(_entry(prompt, choice) for prompt, choices in asked for choice in choices))
    say(_summary(engine.stats.speculation, accept))


def _ask(
    engine: Engine, target: Target, prompts: list[Prompt], decoding: DecodingOptions, request: Mapping[str, Any]
) -> list[tuple[Prompt, list[Sequence]]]:
    """Queue every prompt; its choices fill while the engine steps. Raises UsageError naming the prompt at fault."""
    asked = []
    for prompt in prompts:
        try:
            params = decoding.params(prompt.max_tokens, **request)
            request_id = engine.add(target.encode(prompt), params)
        except RequestError as error:
            raise UsageError(f"prompt {prompt.id}: {error}") from None
        asked.append((prompt, engine.choices(request_id)))
    return asked


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _entry(prompt: Prompt, choice: Sequence) -> str:
    mark = f"{prompt.id}.{choice.choice}" if choice.params.n > 1 else prompt.id
    return f"[{mark}] {_text(choice)}\n"


def _text(choice: Sequence) -> str:
    """The answer, as ids when there is no tokenizer."""
    return ",".join(map(str, choice.output)) if choice.text is None else choice.text.text


def _summary(counters: SpeculationCounters, accept: Accept | None) -> str:
    words = f"{counters.emitted_tokens} tokens"
    if counters.num_drafts:
        words += (
            f", {counters.num_accepted_tokens} of {counters.num_draft_tokens} drafted accepted "
            f"({counters.acceptance_rate:.0%}), mean acceptance length {counters.mean_acceptance_length:.2f}"
        )
    return words + (f"; accept {accept} is lossy" if accept is not None and accept.lossy else "")


def _report(
    engine: Engine,
    target: Target,
    draft: OpenedDraft | None,
    accept: Accept | None,
    asked: list[tuple[Prompt, list[Sequence]]],
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "provenance": Provenance.here(str(target.device), target.num_threads).model_dump(),
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "results": [_result(prompt, choice) for prompt, choices in asked for choice in choices],
        "speculation": None if draft is None else speculation(engine.stats.speculation, accept),
    }


def _effective(engine: Engine, decoding: DecodingOptions, draft: OpenedDraft | None) -> dict[str, Any]:
    """The settings the run had, defaults filled in. draft_length: null when the policy's file says it."""
    return {
        "draft_length": effective_k(decoding, draft),
        "policy": None if decoding.policy is None else str(decoding.policy),
        "batch": decoding.batch,
        "max_model_len": engine.options.max_length,
        "max_tokens": decoding.max_tokens,
        "temperature": decoding.temperature,
        "top_k": decoding.top_k,
        "top_p": decoding.top_p,
        "min_p": decoding.min_p,
        "seed": decoding.seed,
        "ignore_eos": decoding.ignore_eos,
    }


def speculation(counters: SpeculationCounters, accept: Accept | None) -> dict[str, Any]:
    """The counters as reports have them. accept None: exact, or coupled for requests with a seed."""
    return {
        **counters.as_dict(),
        "accept": "exact" if accept is None else str(accept),
        "lossy": accept is not None and accept.lossy,
    }


def _result(prompt: Prompt, choice: Sequence) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "choice": choice.choice,
        "prompt_token_ids": choice.prompt,
        "token_ids": choice.output,
        "text": None if choice.text is None else choice.text.text,
        "finish_reason": choice.finish_reason,
        "logprobs": None
        if choice.params.logprobs is None
        else [{"logprob": entry.logprob, "top": [list(pair) for pair in entry.top]} for entry in choice.logprobs],
        "speculation": speculation(choice.counters, choice.accept),
    }
