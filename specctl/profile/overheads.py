"""What the engine adds to its passes: real steps of a real engine, and of each what its passes took.

What is left over is scheduling, packing, sampling by the draft and bookkeeping. The draft is made to fill its block, so
that one that looks things up is timed when it has something to propose. On a CPU the passes are timed inside the steps:
a pass takes so much longer than all the rest that the difference of two of them is mostly the machine's mood. On a
device, where the host's work goes on beside them, bare passes are timed after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from specctl.attention import AttentionBackend
from specctl.bench.clock import now
from specctl.bench.runners import Dial
from specctl.drafts import Draft, Drafter, OneHot
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.engine import MAX_K, Engine
from specctl.kv.batch import Batch
from specctl.pair import OpenedDraft, Target, build_engine, constant
from specctl.profile.grid import Grid
from specctl.profile.passes import Passes, Place
from specctl.sampling.batch import SamplingBatch
from specctl.sampling.params import SamplingParams
from specctl.schemas.profile import Overheads

PROMPT = 8
LENGTHS = (0, 1, 5)


class FullBlocks:
    """A drafter whose blocks are always as long as may be: what it does not propose, this makes up. It shows the engine
    the inner drafter's face, attention included."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "inner":
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def draft(self, batch: Batch, carry: Any, k: list[int], sampling: SamplingBatch) -> Draft:
        draft = self.inner.draft(batch, carry, k, sampling)
        if draft.length == k:
            return draft
        return Draft(batch.token_T.new_zeros(len(k), max(k)), list(k), OneHot())


@dataclass(frozen=True)
class _Leftover:
    """Milliseconds of one step beyond its passes. draft_steps: how often the draft was to run, its catching up
    counted."""

    k: int
    milliseconds: float


def measure_overheads(
    target: Target, draft: OpenedDraft | None, grid: Grid, repeats: int, progress: Callable[[str], None]
) -> Overheads:
    """At the smallest and the largest batch, where contexts are short: they are the passes' business."""
    lengths = tuple(k for k in LENGTHS if k < max(grid.rows))
    drafting = draft or OpenedDraft("ngram", NgramDrafter())
    found: list[_Leftover] = []
    for batch in sorted({min(grid.batches), max(grid.batches)}):
        progress(f"timing the engine's own part at batch {batch}")
        found += _leftovers(target, drafting, batch, lengths, repeats)
    base = float(np.median([each.milliseconds for each in found if each.k == 0]))
    spec, per_draft_step = _fit([each for each in found if each.k])
    return Overheads(base=max(0.0, base), spec=spec, per_draft_step=per_draft_step)


def _leftovers(
    target: Target, draft: OpenedDraft, batch: int, lengths: tuple[int, ...], repeats: int
) -> Iterator[_Leftover]:
    """Medians by length."""
    per_round = sum(k + 1 for k in lengths)
    room = min(target.max_length, draft.drafter.max_length or target.max_length) - PROMPT - MAX_K
    rounds = max(1, min(repeats, room // per_round - 1))
    num_tokens = min(target.max_length, PROMPT + (rounds + 1) * per_round + MAX_K)
    engine, dial = _engine(target, draft, batch, num_tokens)
    left: dict[int, list[float]] = {k: [] for k in lengths}
    with _passes_of(engine, target, draft, num_tokens, batch) as passes:
        for number in range(rounds + 1):  # the first one warms up
            for k in lengths[number % len(lengths) :] + lengths[: number % len(lengths)]:
                whole = _step(engine, dial, k, target.device)
                part = passes.time(k, len(engine.scheduler.running[0]))
                if number:
                    left[k].append(whole - part)
    for k, values in left.items():
        yield _Leftover(k, float(np.median(values)))


def _engine(target: Target, draft: OpenedDraft, batch: int, num_tokens: int) -> tuple[Engine, Dial]:
    """An engine in which `batch` sequences are decoding."""
    dial = Dial()
    target = replace(target, max_length=num_tokens)
    filling = replace(draft, drafter=FullBlocks(draft.drafter))
    engine = build_engine(target, filling, dial, max_sequences=batch, ignore_tokenizer=True)
    vocab = target.model.config.vocab_size
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for b in range(batch):
        engine.add([(7 * (b + i)) % vocab for i in range(PROMPT)], params)
    dial.policy = constant(1)  # so that the draft sees the prompts
    while not engine.stats.steps_by_k:
        engine.step()
    return engine, dial


def _step(engine: Engine, dial: Dial, k: int, device: torch.device) -> float:
    dial.policy = constant(k)
    start = now(device)
    engine.step()
    return 1000 * (now(device) - start)


class _Inside:
    """The passes of the engine's steps, timed where they are made, until close()."""

    def __init__(self, engine: Engine, draft: OpenedDraft) -> None:
        self._seconds = 0.0
        self._running = False
        self._undo: list[Callable[[], None]] = []
        self._wrap(engine, "_run_target", "_decide")
        self._wrap(engine.target, "logits")
        if draft.checkpoint is not None:
            self._wrap(draft.drafter, "catch_up")
            self._wrap(draft.drafter.model, "forward", "logits")  # type: ignore[attr-defined]

    def time(self, k: int, context: int) -> float:
        """Milliseconds of the passes since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return 1000 * seconds

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _wrap(self, owner: object, *names: str) -> None:
        for name in names:
            own, before = name in vars(owner), getattr(owner, name)
            setattr(owner, name, self._timed(before))
            self._undo.append(partial(setattr, owner, name, before) if own else partial(delattr, owner, name))

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            if self._running:  # a part of something that is timed
                return run(*args, **more)
            self._running, start = True, time.perf_counter()
            try:
                return run(*args, **more)
            finally:
                self._seconds += time.perf_counter() - start
                self._running = False

        return timed


@dataclass(frozen=True)
class _Beside:
    """The passes of the engine's steps, over other caches."""

    passes: Passes
    batch: int
    drafter: Drafter
    attn: AttentionBackend | None

    @torch.inference_mode()
    def time(self, k: int, context: int) -> float:
        """Milliseconds of the passes of a step with draft length k."""
        passes, device = self.passes, self.passes.target.device
        runs = [passes.at(Place("steps", self.batch, k + 1, context))]
        if passes.drafter is not None:
            runs += [passes.at(Place("draft", self.batch, 1, context))] * (k - 1)
            if rows := passes.drafter.follow_rows(k):
                runs += [passes.at(Place("draft_follow", self.batch, rows, context))]
        with _attending(self.drafter, self.attn):
            start = now(device)
            for run in runs:
                run()
            return 1000 * (now(device) - start)


@contextmanager
def _passes_of(
    engine: Engine, target: Target, draft: OpenedDraft, num_tokens: int, batch: int
) -> Iterator[_Inside | _Beside]:
    """The engine's drafter attends to the engine's pages except while its bare passes are timed."""
    if _times_inside(target):
        inside = _Inside(engine, draft)
        try:
            yield inside
        finally:
            inside.close()
        return
    drafter, engines_own = draft.drafter, draft.drafter.attn
    with Passes.over(target, draft, num_tokens, batch) as passes:
        bare = drafter.attn
        with _attending(drafter, engines_own):
            yield _Beside(passes, batch, drafter, bare)


@contextmanager
def _attending(drafter: Drafter, attn: AttentionBackend | None) -> Iterator[None]:
    before = drafter.attn
    drafter.attn = attn
    try:
        yield
    finally:
        drafter.attn = before


def _times_inside(target: Target) -> bool:
    return target.device.type == "cpu"


def _fit(leftovers: list[_Leftover]) -> tuple[float, float]:
    """spec + k * per_draft_step by least squares, neither below zero: noise may say so, machines do not."""
    k = np.array([each.k for each in leftovers], dtype=float)
    y = np.array([each.milliseconds for each in leftovers])
    if len(set(k.tolist())) < 2:
        return max(0.0, float(y.mean())), 0.0
    slope, start = np.polyfit(k, y, 1)
    if slope < 0:
        return max(0.0, float(y.mean())), 0.0
    if start < 0:
        return 0.0, float((k @ y) / (k @ k)) if (k @ y) > 0 else 0.0
    return float(start), float(slope)
