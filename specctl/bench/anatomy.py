"""Where the time goes: by phase of the engine for each run, and by part of the model for one pass.

Parts are timed by hooks on the target's modules and a wrapper around its attention, put on for the occasion; the model
itself knows nothing of it. Timing each part costs something too, so parts add up to a little more than a bare pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specctl.attention import AttentionBackend
from specctl.attention.latent import LatentRows
from specctl.bench.clock import now
from specctl.bench.contest import Tally
from specctl.bench.passes import BareModel, rows_after
from specctl.bench.runners import EngineRunner
from specctl.engine.stats import PHASES
from specctl.kv.batch import Batch
from specctl.models import CausalLM
from specctl.pair import Target

PARTS = ("embedding", "norms", "qkv", "attention", "o", "mlp", "head", "rest")
ROUNDS = 15
_PART_OF = {
    "embed_tokens": "embedding",
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "_qkv": "qkv",
    "q_a_proj": "qkv",
    "q_b_proj": "qkv",
    "kv_a_proj_with_mqa": "qkv",
    "_first": "qkv",
    "o_proj": "o",
    "mlp": "mlp",
    "lm_head": "head",
}


@dataclass(frozen=True)
class Anatomy:
    """phases: run name to milliseconds a token by engine phase. passes: "1 row", "4 rows", ... (of each sequence) to
    milliseconds by part of the model; "rest" is rotations, sums, planning, and the timing itself."""

    phases: dict[str, dict[str, float]]
    passes: dict[str, dict[str, float]]


def dissect(
    target: Target, runners: list[EngineRunner], tallies: list[Tally], ks: list[int], batch: int, context: int
) -> Anatomy:
    """After the contest: what its phases took, and the parts of a plain pass and of the longest verify pass."""
    phases = {}
    for runner, tally in zip(runners, tallies, strict=True):
        tokens = int(tally.tokens.sum())
        phases[runner.name] = {phase: 1000 * runner.stats.seconds[phase] / tokens for phase in PHASES}
    rows = [1, max(ks) + 1] if ks else [1]
    passes = {f"{n} row{'s' if n > 1 else ''}": _parts(target, n, batch, context) for n in rows}
    return Anatomy(phases, passes)


@dataclass
class _Stopwatch:
    """Seconds by part of the pass that runs now."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)

    def hooks(self, module: nn.Module, part: str) -> Iterator[Any]:
        def start(module: nn.Module, inputs: Any) -> None:
            self.started[id(module)] = now(self.device)

        def stop(module: nn.Module, inputs: Any, output: Any) -> None:
            self.add(part, now(self.device) - self.started.pop(id(module)))

        yield module.register_forward_pre_hook(start)
        yield module.register_forward_hook(stop)

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class _TimedAttention:
    """An attention backend with its attend() on the stopwatch."""

    def __init__(self, inner: AttentionBackend, watch: _Stopwatch) -> None:
        self._inner = inner
        self._watch = watch

    def plan(self, batch: Batch) -> None:
        self._inner.plan(batch)

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        return self._timed(lambda: self._inner.attend(layer, q_TNH, k_TGH, v_TGH))

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        return self._timed(lambda: self._inner.attend_latent(layer, rows))

    def _timed(self, attend: Callable[[], Tensor]) -> Tensor:
        start = now(self._watch.device)
        out = attend()
        self._watch.add("attention", now(self._watch.device) - start)
        return out


def _parts(target: Target, num_rows: int, batch: int, context: int) -> dict[str, float]:
    """Medians in milliseconds, and the rest of the median pass."""
    num_tokens = context + num_rows
    bare = BareModel.of_target(target, num_tokens, batch)
    rows = rows_after(context, num_rows, batch, num_tokens, target)
    watch = _Stopwatch(target.device)
    timed = BareModel(bare.model, _TimedAttention(bare.attn, watch), target.device)
    rounds: list[dict[str, float]] = []
    with _watched(bare.model, watch):
        for _ in range(ROUNDS + 1):
            watch.seconds = {}
            start = now(target.device)
            timed.run(rows)
            total = now(target.device) - start
            rounds.append(watch.seconds | {"rest": total - sum(watch.seconds.values())})
    return {part: 1000 * statistics.median(each.get(part, 0.0) for each in rounds[1:]) for part in PARTS}


@contextmanager
def _watched(model: CausalLM, watch: _Stopwatch) -> Iterator[None]:
    handles: list[Any] = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        part = "norms" if last.endswith("norm") else _PART_OF.get(last)
        if part is not None:
            handles += watch.hooks(module, part)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
