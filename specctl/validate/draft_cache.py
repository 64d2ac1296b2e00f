"""The gate `draft_cache`: what the draft keeps of a text, built step by step, is what a single pass over it builds.

A broken draft cache changes no text, it only lowers acceptance, so nothing else finds it. The steps are the engine's,
through rejections, whole blocks and steps that do not draft; the single pass is made outside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl import attention
from specctl.bench.passes import BareModel, cache_shape
from specctl.bench.work import Request
from specctl.drafts import Draft, Drafter
from specctl.engine.engine import MAX_K, Engine
from specctl.engine.scheduler import DraftLength, Policy
from specctl.engine.sequence import Sequence
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import Hidden
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target, build_engine
from specctl.sampling.batch import SamplingBatch
from specctl.sampling.params import Accept
from specctl.schemas import gates
from specctl.schemas.validation import Check, GateResult
from specctl.validate.verdicts import absent, held, result

TEXTS, LENGTH, EVERY = 4, 24, 3
"""Texts, tokens of each, and after how many steps they are looked at."""
ATOL = {torch.float64: 1e-9, torch.float32: 1e-3}
ATOL_16 = 0.25


@dataclass(frozen=True)
class Difference:
    """The largest found, NaN when something is no number. where: in words."""

    size: float
    where: str


def draft_cache(
    gate: gates.DraftCache,
    target: Target,
    draft: OpenedDraft,
    requests: list[Request],
    decoding: DecodingOptions,
    policy: Policy,
    progress: Callable[[str], None],
) -> GateResult:
    progress("comparing the draft's cache with one built in a single pass")
    atol = ATOL.get(target.dtype, ATOL_16) if gate.atol is None else gate.atol
    found = list(_differences(target, draft, requests[:TEXTS], decoding, policy))
    if not found:
        return result("draft_cache", [absent("cache", "the draft was never run: K is 0, or the texts are too short")])
    return result("draft_cache", [_check(found, atol, draft)])


def _check(found: list[Difference], atol: float, draft: OpenedDraft) -> Check:
    worst = max(found, key=lambda difference: math.inf if math.isnan(difference.size) else difference.size)
    says = (
        f"{len(found)} comparisons, the largest difference {worst.size:.2g} ({worst.where}), expected at most {atol:g}"
    )
    if not draft.drafter.kv_layers:
        says = f"{len(found)} comparisons of what {draft.name} proposes, {worst.where}"
    measured = worst.size if math.isfinite(worst.size) else None
    return held("cache", None, worst.size <= atol, says, measured=measured, limit=atol)


def _differences(
    target: Target, draft: OpenedDraft, requests: list[Request], decoding: DecodingOptions, policy: Policy
) -> Iterator[Difference]:
    longest = max(len(request.token_ids) for request in requests) + LENGTH
    target = replace(target, max_length=min(target.max_length, longest + MAX_K + 2))
    now = [0]

    def with_pauses(batch: int, context: float) -> DraftLength:
        """The policy, but every third stretch does not draft, so that the draft is left behind and catches up."""
        return DraftLength(0) if now[0] // EVERY % 3 == 2 else policy(batch, context)

    engine = build_engine(target, draft, with_pauses, max_sequences=len(requests), ignore_tokenizer=True)
    for request in requests:
        params = replace(decoding.params(LENGTH, seed=request.seed), accept=Accept("exact"), ignore_eos=True)
        engine.add(request.token_ids, params)
    while engine.has_work:
        engine.step()
        now[0] += 1
        if now[0] % EVERY == 0:
            for text in engine.scheduler.running:
                if text.draft_cached:
                    yield _difference(engine, target, text)


@torch.inference_mode()
def _difference(engine: Engine, target: Target, text: Sequence) -> Difference:
    drafter, count = engine.drafter, text.draft_cached
    assert drafter is not None
    pages = list(range(1, cache_shape(len(text) + MAX_K, 1)[0]))
    cache = KVCache(drafter.kv_layers, len(pages) + 1, PAGE_SIZE, engine.device)
    carry, kept = drafter.new_carry(1), drafter.attn
    hidden = _hidden(target, text.tokens(0, count), drafter.taps) if drafter.reads_hidden else None
    tokens = text.tokens(drafter.shift, count + drafter.shift)
    whole = Batch.pack([Span(tokens, 0, pages, 0)], PAGE_SIZE, engine.device)
    try:
        if drafter.kv_layers:
            drafter.attn = attention.choose(target.options.attention, cache, "draft", engine.device)
        drafter.catch_up(whole, hidden, carry)
        if not drafter.kv_layers:
            return _proposals(drafter, text, engine.carry, carry)
    finally:
        drafter.attn = kept
    where = f"text {text.request_id + 1} after {count} tokens"
    sizes = [
        float((ours.flatten(0, 1)[_slots(text.pages, count)] - theirs.flatten(0, 1)[_slots(pages, count)]).abs().max())
        for layer in range(len(drafter.kv_layers))
        for ours, theirs in zip(engine.cache.layer("draft", layer), cache.layer("draft", layer), strict=True)
    ]
    return Difference(math.nan if any(map(math.isnan, sizes)) else max(sizes), where)


def _hidden(target: Target, tokens: list[int], taps: tuple[int, ...]) -> Hidden:
    """What one pass of the target over a text leaves."""
    bare = BareModel.of_target(target, len(tokens))
    rows = Batch.pack([Span(tokens, 0, list(range(1, cache_shape(len(tokens), 1)[0])), 0)], PAGE_SIZE, bare.device)
    bare.attn.plan(rows)
    hidden: Hidden = bare.model(rows, bare.attn, taps)
    return hidden


def _slots(pages: list[int], count: int) -> Tensor:
    return torch.tensor([pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(count)])


def _proposals(drafter: Drafter, text: Sequence, stepwise: object, whole: object) -> Difference:
    """For a draft without keys and values: what it proposes next from either."""
    sampling = SamplingBatch([text.sampling_state()])

    def propose(carry: object, lane: int) -> Draft:
        return drafter.draft(Batch.pack([Span((0,), len(text), text.pages, lane)]), carry, [MAX_K], sampling)

    ours, theirs = propose(stepwise, text.lane), propose(whole, 0)
    same = ours.length == theirs.length and torch.equal(ours.token_BK, theirs.token_BK)
    return Difference(0.0 if same else math.inf, "all the same" if same else f"text {text.request_id + 1} differs")
