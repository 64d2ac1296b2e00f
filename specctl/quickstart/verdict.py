"""What a report comes to: a table to close with, the draft and its length to go on with, and sentences that say why.

A run pays when the whole 95 % interval of its speed-up lies above 1 and its text is the target's own. It knows
nothing about pages or terminals.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.bench.render import answers
from specctl.bench.steps import StepCost, step_costs
from specctl.schemas.report import Comparison, Report, Run

FEW_PROMPTS = 10
COLUMNS = ("run", "K", "tok/s", "speed-up", "95 %", "accepted", "length", "efficiency", "same text")


@dataclass(frozen=True)
class Row:
    """A line of the closing table; `cells` are as COLUMNS say. best: the run to go on with."""

    cells: tuple[str, ...]
    best: bool


@dataclass(frozen=True)
class Verdict:
    """run: the one to go on with, None when no draft pays; label, k: its draft and draft length. speedup, ci95: of it,
    or of the one that came nearest. headline: the outcome; because: for each draft what its best run is made of; text:
    whether the text is the target's own."""

    run: str | None
    label: str
    k: int
    speedup: float
    ci95: tuple[float, float] | None
    headline: str
    because: tuple[str, ...]
    text: str

    @property
    def pays(self) -> bool:
        return self.run is not None


def judge(report: Report, model: str) -> Verdict:
    """The verdict on the drafts of a report; `model` is what the sentences call the target."""
    drafted = [c for c in report.comparisons if c.against == "plain" and report.run(c.run).k]
    paying = [c for c in drafted if pays(c) and _proposed(report.run(c.run))]
    chosen = max(paying or drafted, key=lambda c: c.speedup)
    label, k = label_of(report.run(chosen.run))
    ci95 = None if chosen.ci95 is None else (chosen.ci95[0], chosen.ci95[1])
    faster = f"{chosen.speedup:.2f} times as fast"
    sure = "" if ci95 is None else f" (95 %: {ci95[0]:.2f} to {ci95[1]:.2f})"
    if paying:
        headline = f"{called(label)} with K = {k} makes {model} {faster}{sure} on this machine."
    else:
        headline = f"Nothing pays for {model} on this machine: at best, {_lower(called(label))} with K = {k}, "
        headline += f"it is {faster}{sure}."
        if chosen.speedup > 1:
            doubt = "one prompt is no measurement" if ci95 is None else "the interval reaches down to 1 or below"
            headline += f" That may be chance: {doubt}."
    best_of = {label_of(report.run(c.run))[0]: c for c in sorted(drafted, key=lambda c: c.speedup)}
    others = [c for c in best_of.values() if c is not chosen]
    because = tuple(_because(report, report.run(c.run), c) for c in [chosen, *others])
    return Verdict(
        run=chosen.run if paying else None,
        label=label,
        k=k,
        speedup=chosen.speedup,
        ci95=ci95,
        headline=headline,
        because=because,
        text=_text(drafted) + _doubt(report),
    )


def called(label: str) -> str:
    """A draft at the beginning of a sentence."""
    return "Prompt lookup" if label == "ngram" else "The trained draft"


def label_of(run: Run) -> tuple[str, int]:
    """The draft of a run of ours, and its length."""
    assert run.k is not None
    return run.name.removesuffix(f" k={run.k}"), run.k


def pays(comparison: Comparison) -> bool:
    return comparison.ci95 is not None and comparison.ci95[0] > 1 and comparison.identical is not False


def _proposed(run: Run) -> bool:
    """What never drafted is not faster but lucky."""
    return run.speculation is not None and run.speculation.num_drafts > 0


def table(report: Report, best: str | None) -> list[Row]:
    """The closing table; `best`: the run to go on with, None where it is not chosen. Speed-ups are over plain
    decoding."""
    return [_row(report, run, run.name == best) for run in report.runs]


def _row(report: Report, run: Run, best: bool) -> Row:
    against_plain = next((c for c in report.comparisons if (c.run, c.against) == (run.name, "plain")), None)
    counters = run.speculation
    efficiency = None if against_plain is None else against_plain.efficiency
    return Row(
        (
            run.name,
            "" if run.k is None else str(run.k),
            f"{run.tok_s:.1f}",
            *_speedup(report, run),
            "" if counters is None else _number(counters.acceptance_rate, "{:.0%}"),
            "" if counters is None else _number(counters.mean_acceptance_length, "{:.2f}"),
            "" if efficiency is None else f"{efficiency:.2f}",
            _same_text(report, run),
        ),
        best,
    )


def _speedup(report: Report, run: Run) -> tuple[str, str]:
    """Over plain decoding, with its interval where one was measured: plain over transformers is turned round."""
    if run.name == "plain":
        return "1", ""
    for comparison in report.comparisons:
        low, high = comparison.ci95 or (None, None)
        if (comparison.run, comparison.against) == (run.name, "plain"):
            return f"{comparison.speedup:.2f}", "" if low is None else f"{low:.2f} - {high:.2f}"
        if (comparison.run, comparison.against) == ("plain", run.name):
            turned = "" if low is None or high is None else f"{1 / high:.2f} - {1 / low:.2f}"
            return f"{1 / comparison.speedup:.2f}", turned
    return f"{run.tok_s / report.run('plain').tok_s:.2f}", ""


def _same_text(report: Report, run: Run) -> str:
    """What the comparison says that measures this run against plain decoding, of its own engine or of transformers."""
    wanted = ((run.name, "plain"), ("plain", run.name), (run.name, "transformers"))
    for comparison in report.comparisons:
        if (comparison.run, comparison.against) in wanted:
            return answers(report, comparison)
    return ""


def _because(report: Report, run: Run, comparison: Comparison) -> str:
    """The speed-up taken apart: what a step brings over what it costs."""
    step = next((step for step in step_costs(report) if step.run == run.name), None)
    counters = run.speculation
    label, k = label_of(run)
    head = f"{called(label)}, K = {k}:"
    if step is None or counters is None or counters.acceptance_rate is None:
        return f"{head} nothing was ever proposed: no text had a place that repeats an earlier one."
    cost = step.passes + step.rest
    accepted = f"{counters.acceptance_rate:.0%} of the drafted tokens were accepted"
    found = f"a draft was found in {step.drafting:.0%} of the steps and " if label == "ngram" else ""
    costs = [
        f"checking {k} token{'s' if k > 1 else ''} is a pass over {k + 1} rows, v = {comparison.v:.2f} plain passes"
    ]
    if comparison.c:
        costs.append(f"drafting is {k - 1} times c = {comparison.c:.2f}" if k > 1 else "the first token needs no pass")
        costs.append(f"running the draft over what was decided u = {comparison.u:.2f}")
    seldom = " with the steps that had no draft," if label == "ngram" else ""
    return (
        f"{head} {found}{accepted}, so a step brings {step.tokens:.2f} tokens. {_upper(', '.join(costs))};{seldom} and "
        f"all else that a step does, it costs {cost:.2f} plain ones. {step.tokens:.2f} / {cost:.2f} = "
        f"{comparison.speedup:.2f}.{_hint(step, comparison)}"
    )


def _hint(step: StepCost, comparison: Comparison) -> str:
    if comparison.speedup > 1:
        return ""
    if step.tokens < 1.1:
        return " Its drafts are too seldom right for these texts."
    if (comparison.v or 0) > step.tokens:
        return " The pass that checks a draft is too expensive on this machine for what the drafts bring."
    if step.draft + step.catch_up > step.tokens - 1:
        return " The draft's own passes are too expensive for what they bring."
    return ""


def _doubt(report: Report) -> str:
    number = report.work.n
    if number >= FEW_PROMPTS:
        return ""
    return f" Only {number} prompts were measured, so the interval itself is rough; more --minutes measure more."


def _text(drafted: list[Comparison]) -> str:
    if any(c.identical is False for c in drafted):
        return "The text is NOT the target's own everywhere: do not serve this before the difference is understood."
    if any(c.identical is None for c in drafted):
        return "Whether the text is the same cannot be judged in 16-bit numbers; run it with --dtype float32 to see."
    ties = sum(len(c.near_ties) for c in drafted)
    if ties:
        return (
            f"The text is the target's own, but for {ties} near-ties, where two tokens score the same up to rounding."
        )
    return "The text is the target's own, token by token, with every K."


def _number(value: float | None, shown: str) -> str:
    return "-" if value is None else shown.format(value)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
