"""The proof: plain and speculative decoding of the same prompts, interleaved on the loaded pair, before the port opens.

One prompt at a time, as a single user would feel it, with the draft lengths that will be served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specctl.bench.options import BenchOptions
from specctl.bench.run import run_bench
from specctl.errors import GateFailed, RequestError, UsageError
from specctl.options import DecodingOptions
from specctl.pair import OpenedDraft, Target
from specctl.prompts import Prompt
from specctl.schemas.report import Comparison

REPEATS = 2


@dataclass(frozen=True)
class Proof:
    """speedup: plain over speculative time. interval: 95 %. same_text: whether the answers are the same, near-ties
    apart; None when they need not be or cannot be told. passed: whether to serve with the draft."""

    speedup: float
    interval: tuple[float, float] | None
    same_text: bool | None
    num_prompts: int
    passed: bool

    def as_dict(self) -> dict[str, object]:
        return {
            "speedup": self.speedup,
            "ci95": None if self.interval is None else list(self.interval),
            "same_text": self.same_text,
            "prompts": self.num_prompts,
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
    """Measure and say what was found. Raises GateFailed when texts differ or the speed-up is below `min_speedup`,
    unless plain serving is the fallback; UsageError for prompts that cannot be answered."""
    say(f"verify: measuring {len(prompts)} prompts, plain and with {draft.name}, {REPEATS} times each")
    try:
        alone, told = replace(decoding, batch=1), replace(draft, notices=[])
        options = BenchOptions(repeats=REPEATS)
        report = run_bench(target, [told], prompts, options, alone, lambda sentence: say(f"verify: {sentence}"))
    except (UsageError, RequestError) as error:
        raise UsageError(f"--verify: {error}") from None
    measured = next(comparison for comparison in report.comparisons if comparison.against == "plain")
    interval = None if measured.ci95 is None else (measured.ci95[0], measured.ci95[1])
    found = _found(measured, len(prompts))
    say(f"verify: {found}")
    problem = problem_of(measured, min_speedup)
    counted = report.run(measured.run).speculation
    if counted is not None and not counted.num_drafts:
        nothing = "nothing was drafted on these prompts, so nothing is proven"
        if min_speedup is None:
            say(f"verify: {nothing}")
        problem = problem or (None if min_speedup is None else nothing)
    if problem is not None and not fallback_plain:
        raise GateFailed(f"--verify: {problem}; {found}; serve without --draft, tune it, or pass --fallback plain")
    if problem is not None:
        say(f"verify: {problem}; serving plain")
    return Proof(measured.speedup, interval, measured.identical, len(prompts), problem is None)


def _found(measured: Comparison, num_prompts: int) -> str:
    interval = "" if measured.ci95 is None else f" (95 % {measured.ci95[0]:.2f} to {measured.ci95[1]:.2f})"
    text = {True: "the text is the same", False: "the text changes", None: "texts not comparable"}[measured.identical]
    return f"measured speed-up {measured.speedup:.2f}{interval} on {num_prompts} prompts at batch 1, {text}"


def problem_of(measured: Comparison, min_speedup: float | None) -> str | None:
    """Why not to speculate; None when nothing speaks against it."""
    if measured.identical is False:
        worst = measured.near_ties[0]
        return f"the text of prompt {worst.prompt} changes at token {worst.position} of the answer"
    if min_speedup is not None and measured.speedup < min_speedup:
        return f"--min-speedup {min_speedup:g} is not reached"
    return None
