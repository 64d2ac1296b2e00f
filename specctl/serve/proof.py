"""The proof: plain and speculative decoding of the same prompts, interleaved on the loaded pair, before the port opens.

One prompt at a time, as a single user would feel it, with the draft lengths that will be served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specctl.bench.options import BenchOptions
from specctl.bench.run import run_bench
from specctl.errors import GateFailed, UsageError
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target
from specctl.prompts import Prompt

REPEATS = 2


@dataclass(frozen=True)
class Proof:
    """speedup: plain over speculative time. interval: 95 %, None when there is too little to say. same_text: whether the
    answers are the same, near-ties apart; None when they need not be. passed: whether to serve with the draft."""

    speedup: float
    interval: tuple[float, float] | None
    same_text: bool | None
    prompts: int
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return {
            "speedup": self.speedup,
            "ci95": None if self.interval is None else list(self.interval),
            "same_text": self.same_text,
            "prompts": self.prompts,
            "batch": 1,
        }


def prove(
    target: Target,
    draft: OpenedDraft,
    prompts: list[Prompt],
    decoding: DecodingOptions,
    min_speedup: float | None,
    fallback_plain: bool,
    say: Callable[[str], None],
) -> Proof:
    """Measure and say what was found. Raises GateFailed when texts differ or the speed-up is below `min_speedup`, unless
    plain serving is the fallback."""
    alone = replace(decoding, batch=1)
    report = run_bench(target, [draft], prompts, BenchOptions(repeats=REPEATS), alone, say)
    speculative = next((c for c in report.comparisons if c.against == "plain"), None)
    if speculative is None:
        raise UsageError(f"--verify: {draft.name} drafts nothing at batch 1 (k is 0), so there is no speed-up to prove")
    interval = None if speculative.ci95 is None else (speculative.ci95[0], speculative.ci95[1])
    found = f"measured speed-up {speculative.speedup:.2f}"
    if interval is not None:
        found += f" (95 % {interval[0]:.2f} to {interval[1]:.2f})"
    found += f" on {len(prompts)} prompts at batch 1"
    problem = None
    if speculative.identical is False:
        where = speculative.near_ties[0]
        problem = f"the text changes: prompt {where.prompt} differs at token {where.position}"
    elif min_speedup is not None and speculative.speedup < min_speedup:
        problem = f"--min-speedup {min_speedup:g} is not reached"
    words = {True: "same text", False: "other text", None: "texts not comparable"}[speculative.identical]
    say(f"verify: {found}, {words}")
    if problem is not None and not fallback_plain:
        raise GateFailed(f"--verify: {problem}; {found}; serve without --draft, tune it, or pass --fallback plain")
    if problem is not None:
        say(f"verify: {problem}; serving plain")
    return Proof(speculative.speedup, interval, speculative.identical, len(prompts), problem is None)
