"""Bare forward passes outside the engine: plain, verify, draft and catch-up, head included. Their ratios are c, v, u.

A pass here is planning, the forward pass and the head; packing, sampling and scheduling are the engine's and left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specctl import attention
from specctl.attention import AttentionBackend
from specctl.bench.clock import now
from specctl.drafts import Drafter
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import CausalLM, Hidden
from specctl.pair import OpenedDraft, Target

Kind = tuple[str, int]
"""Whose pass, and how many rows of each sequence, or for the target the draft length."""

MIN_ROUNDS, MAX_ROUNDS, SECONDS = 7, 31, 20.0
"""Rounds of all kinds of pass in turn: as many as SECONDS allow, within bounds."""


@dataclass(frozen=True)
class Costs:
    """Of one draft at one length: draft pass, verify pass and catch-up pass in plain passes."""

    c: float
    v: float
    u: float

    def implied(self, k: int, mean_acceptance_length: float) -> float:
        """The speed-up of steps that consist of these passes alone. k at least 1: the first token needs no draft pass,
        as its logits are carried over."""
        return mean_acceptance_length / (self.v + (k - 1) * self.c + self.u)


@dataclass(frozen=True)
class PassTimes:
    """Medians in milliseconds. verify: by draft length. draft: by the draft's label, catch_up: by label and draft
    length; 0 for a draft that has no model to run."""

    plain: float
    verify: dict[int, float]
    draft: dict[str, float]
    catch_up: dict[tuple[str, int], float]

    def costs(self, label: str, k: int) -> Costs:
        u = self.catch_up[label, k] / self.plain
        return Costs(self.draft[label] / self.plain, self.verify[k] / self.plain, u)


class BareModel:
    """A model with a small KV cache of its own, in which sequence b has the b-th run of pages."""

    def __init__(self, model: CausalLM, attn: AttentionBackend, device: torch.device) -> None:
        self.model = model
        self.attn = attn
        self.device = device

    @classmethod
    def of_target(cls, target: Target, num_tokens: int, batch: int = 1) -> BareModel:
        """Room for `batch` texts of `num_tokens`."""
        cache = KVCache(target.model.kv_layers("target"), *cache_shape(num_tokens, batch), target.device)
        attn = attention.choose(target.options.attention, cache, "target", target.device)
        return cls(target.model, attn, target.device)

    @torch.inference_mode()
    def run(self, batch: Batch, logits_row: Tensor | None = None) -> Tensor:
        """[R, V] logits of the rows named (None: of all)."""
        self.attn.plan(batch)
        final_TD = self.model(batch, self.attn).final_TD
        return self.model.logits(final_TD if logits_row is None else final_TD[logits_row])

    def logits_after(self, token_ids: list[int]) -> Tensor:
        """[V]: what the model says after a text, in one pass over it."""
        span = Span(token_ids, 0, _pages(0, len(token_ids)), 0)
        batch = Batch.pack([span], PAGE_SIZE, self.device)
        return self.run(batch, batch.last_row_B)[0]


def measure_passes(
    target: Target, drafts: dict[str, OpenedDraft], ks: list[int], batch: int, context: int
) -> PassTimes:
    """Time one pass of each kind in turn, round after round, over `batch` sequences with `context` tokens before them.
    drafts: by label. ks: draft lengths from 1 up."""
    num_tokens = context + max(ks, default=0) + 1
    bare = BareModel.of_target(target, num_tokens, batch)
    kinds: dict[Kind, Callable[[], object]] = {}
    for k in {0, *ks}:
        kinds["target", k] = partial(bare.run, rows_after(context, k + 1, batch, num_tokens, target))
    with own_attention(target, list(drafts.values()), num_tokens, batch):
        for label, draft in drafts.items():
            if draft.checkpoint is not None:
                for num_rows in {1, *map(draft.drafter.follow_rows, ks)}:
                    rows = rows_after(context, num_rows, batch, num_tokens, target)
                    kinds[f"draft {label}", num_rows] = draft_pass(draft.drafter, rows, target)
        ms = _medians(kinds, target.device)
    return PassTimes(
        plain=ms["target", 0],
        verify={k: ms["target", k] for k in ks},
        draft={label: ms.get((f"draft {label}", 1), 0.0) for label in drafts},
        catch_up={
            (label, k): ms.get((f"draft {label}", draft.drafter.follow_rows(k)), 0.0)
            for label, draft in drafts.items()
            for k in ks
        },
    )


def rows_after(context: int, num_rows: int, batch: int, num_tokens: int, target: Target) -> Batch:
    """`num_rows` rows of each of `batch` sequences, after `context` - 1 cached ones: a step feeds the newest token."""
    tokens = [(7 * i) % target.model.config.vocab_size for i in range(num_rows)]
    spans = [Span(tokens, max(context - 1, 0), _pages(b, num_tokens), b) for b in range(batch)]
    return Batch.pack(spans, PAGE_SIZE, target.device)


def draft_pass(drafter: Drafter, rows: Batch, target: Target) -> Callable[[], object]:
    """The draft's pass over these rows, head included. One that reads hidden states is given random ones: what they say
    takes no time."""
    width, count = target.model.config.hidden_size, len(rows.token_T)
    generator = torch.Generator().manual_seed(0)
    states_STD = torch.randn(1 + len(drafter.taps), count, width, generator=generator).to(target.device, target.dtype)
    hidden = Hidden(states_STD[0], states_STD[1:])
    return partial(drafter.catch_up, rows, hidden, drafter.new_carry(rows.num_sequences))


@contextmanager
def own_attention(target: Target, drafts: list[OpenedDraft], num_tokens: int, batch: int) -> Iterator[None]:
    """Let the drafts attend to caches made for the occasion, and give them back what their engines gave them."""
    before = [draft.drafter.attn for draft in drafts]
    try:
        for draft in drafts:
            if draft.drafter.kv_layers:
                cache = KVCache(draft.drafter.kv_layers, *cache_shape(num_tokens, batch), target.device)
                draft.drafter.attn = attention.choose(target.options.attention, cache, "draft", target.device)
        yield
    finally:
        for draft, attn in zip(drafts, before, strict=True):
            draft.drafter.attn = attn


@torch.inference_mode()
def _medians(kinds: dict[Kind, Callable[[], object]], device: torch.device) -> dict[Kind, float]:
    """Milliseconds. Every kind is run once beforehand, and the order turns with each round."""
    for run in kinds.values():
        run()
    seconds: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    begin = now(device)
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and now(device) - begin > SECONDS:
            break
        for kind in order[done % len(order) :] + order[: done % len(order)]:
            start = now(device)
            kinds[kind]()
            seconds[kind].append(now(device) - start)
    return {kind: 1000 * statistics.median(values) for kind, values in seconds.items()}


def cache_shape(num_tokens: int, batch: int) -> tuple[int, int]:
    """Pages (one of them scratch) and slots of a page."""
    return 1 + batch * -(-num_tokens // PAGE_SIZE), PAGE_SIZE


def _pages(b: int, num_tokens: int) -> list[int]:
    per_sequence = -(-num_tokens // PAGE_SIZE)
    return list(range(1 + b * per_sequence, 1 + (b + 1) * per_sequence))
