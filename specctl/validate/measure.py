"""Measuring a loaded pair for its gates: `bench` with what they need, no more. It judges nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specctl.bench.options import BenchOptions
from specctl.bench.run import run_bench
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target
from specctl.prompts import Prompt
from specctl.schemas.gates import GatesFile
from specctl.validate.evidence import Evidence

Progress = Callable[[str], None]

TIMED_REPEATS = 3


@dataclass(frozen=True)
class Bench:
    """A pair, and how to measure it."""

    target: Target
    draft: OpenedDraft
    prompts: list[Prompt]
    decoding: DecodingOptions
    progress: Progress

    def measure(self, gates: GatesFile) -> Evidence | None:
        """What the gates over figures need; None when there are none."""
        limits = (gates.acceptance_rate, gates.latency, gates.speedup, gates.regression)
        exact, length = gates.greedy_exact, gates.acceptance_length
        bare = all(gate is None for gate in limits) and (length is None or length.min is None)
        if bare and length is None:
            return None if exact is None else self._run(greedy(self.decoding), exact.prompts)
        timed = gates.latency is not None or gates.speedup is not None
        # A draft's own record is held by as many prompts as its text.
        limit = exact.prompts if bare and exact is not None else None
        main = self._run(self.decoding, limit, repeats=TIMED_REPEATS if timed else 1, passes=timed)
        also = []
        if exact is not None and self.decoding.temperature > 0:
            also.append(self._run(greedy(self.decoding), exact.prompts))
        for gate in (gates.acceptance_length, gates.acceptance_rate):
            if gate is not None and gate.k is not None and not _has(gate.k, [main, *also]):
                also.append(self._run(replace(self.decoding, k=gate.k)))
        return replace(main, also=tuple(also))

    def _run(
        self, decoding: DecodingOptions, limit: int | None = None, *, repeats: int = 1, passes: bool = False
    ) -> Evidence:
        options = BenchOptions(repeats=repeats, passes=passes)
        draft, prompts = replace(self.draft, notices=[]), self.prompts[:limit]
        if limit is not None:
            decoding = replace(decoding, batch=min(decoding.batch, len(prompts)))
        report = run_bench(self.target, [draft], prompts, options, decoding, self.progress)
        value = report.model_dump(mode="json", by_alias=True)
        keys = ("work", "runs", "comparisons", "provenance")
        return Evidence("this run", **{key: value[key] for key in keys})


def greedy(decoding: DecodingOptions) -> DecodingOptions:
    return replace(decoding, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _has(k: int, measured: list[Evidence]) -> bool:
    """Whether acceptance at this draft length is known for the decoding asked for: the first is of that, and so is
    whatever has its temperature."""
    wanted = measured[0].work["temperature"]
    return any(run["k"] == k for each in measured if each.work["temperature"] == wanted for run in each.runs)
