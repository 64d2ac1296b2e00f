"""The work of a benchmark: prompts as token ids, checked against the context before anything runs, in groups."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from specctl.errors import RequestError, UsageError
from specctl.options import DecodingOptions
from specctl.pair import Target
from specctl.prompts import Prompt
from specctl.sampling.noise import make_key


@dataclass(frozen=True)
class Request:
    """One prompt as every run gets it. id: the prompt file's. seed: of its own noise, should it be sampled."""

    id: str
    token_ids: list[int]
    max_tokens: int
    seed: int
    class_: str


def read_work(target: Target, prompts: list[Prompt], decoding: DecodingOptions) -> list[Request]:
    """Raises UsageError naming the prompt that cannot be encoded, or that does not fit with its longest answer: every
    run must be able to do all of the work."""
    if len(prompts) < decoding.batch:
        raise UsageError(f"--batch {decoding.batch} needs at least as many prompts, there are {len(prompts)}")
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            token_ids = target.encode(prompt)
        except RequestError as error:
            raise UsageError(f"prompt {prompt.id}: {error}") from None
        max_tokens = prompt.max_tokens or decoding.max_tokens
        if not token_ids or len(token_ids) + max_tokens > target.max_length:
            raise UsageError(
                f"prompt {prompt.id}: {len(token_ids)} tokens and an answer of {max_tokens} are asked for, the context "
                f"holds {target.max_length}, one of them to begin with; leave the prompt out or lower max_tokens"
            )
        seed = make_key(decoding.seed or 0, index)
        requests.append(Request(prompt.id, token_ids, max_tokens, seed, prompt.class_ or "all"))
    return requests


def in_groups(requests: list[Request], size: int) -> list[list[Request]]:
    """In the order given, `size` at a time; the last group may be smaller."""
    return [requests[i : i + size] for i in range(0, len(requests), size)]


def work_sha(requests: list[Request]) -> str:
    """sha256 over what is asked: a line of JSON [token ids, longest answer] for each request."""
    total = hashlib.sha256()
    for request in requests:
        total.update((json.dumps([request.token_ids, request.max_tokens]) + "\n").encode())
    return total.hexdigest()
