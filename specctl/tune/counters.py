"""Acceptance from counters of whole runs: a REPORT.json of `bench`, or the metrics that a server shows.

They tell how many drafts got how far and not whose, so what they leave open is binomial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specctl.errors import UsageError
from specctl.sampling.params import Accept
from specctl.schemas.report import Report, Run, Speculation
from specctl.tune.acceptance import Acceptance, constant, of_survival
from specctl.tune.evidence import Evidence
from specctl.tune.only import Only
from specctl.tune.rates import Survival, geometric_rate

PREFIXES = ("vllm:", "specctl:", "sglang:")
FULL = 0.98
"""Of all positions: with fewer drafted, some drafts were shorter, and it is not told which."""

LOOSE = 0.05
"""Of the tokens that a step brings: how much of it blocks of unknown lengths may leave open."""

GIVEN = "generation_tokens"
FIRST = "time_to_first_token_seconds_count"
"""What vLLM counts besides drafts: tokens of answers, and answers that have begun."""


def from_report(report: Report, where: str, only: Only) -> Evidence:
    """The run with the longest draft, or the one that is asked for. Raises UsageError where that leaves a choice."""
    only.takes(where, ("run", "draft"))
    runs = [run for run in report.runs if run.speculation is not None and run.speculation.num_drafts]
    runs = [run for run in runs if only.allows("run", run.name) and only.allows("draft", _draft(run))]
    if not runs:
        raise UsageError(f"{where}: has no run with drafts in it{only.words()}, so it tells nothing about acceptance")
    labels = sorted({_draft(run) for run in runs})
    if len(labels) > 1:
        raise UsageError(f"{where}: has runs of several drafts ({', '.join(labels)}); name one: --only draft=NAME")
    run = max(runs, key=lambda run: len(_counts(run).accepted_per_position))
    counts = _counts(run)
    if counts.lossy or Accept.parse(counts.accept).lossy:
        raise UsageError(f"{where}: run {run.name} accepted by {counts.accept}, which is lossy; take an exact run")
    acceptance = of_counts(
        counts.drafted_per_position,
        counts.accepted_per_position,
        f"{where}, run {run.name}: {counts.num_drafts} drafts",
        report.work.temperature,
    )
    notices = [f"{where}: a report does not keep requests apart, so its interval is binomial, which is too narrow"]
    others = [each for each in runs if each is not run and each.k is not None]
    if others:
        notices.append(_others(others, acceptance, run.name))
    return Evidence(acceptance, notices, accept=counts.accept)


def from_metrics(text: str, where: str, only: Only) -> Evidence:
    """The counters of vLLM, SGLang or `specctl serve`, as /metrics shows them. Raises UsageError naming the one that is
    missing or cannot be."""
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError as error:
        raise UsageError(f"{where}: is no Prometheus text: {' '.join(str(error).split())}") from None
    about = [s for s in samples if s.name.startswith(PREFIXES) and ":spec_" in s.name]
    labels = {name for sample in about for name in sample.labels}
    only.takes(where, sorted(labels - {"position"}))
    steps = [s for s in samples if s.name in (f"vllm:{GIVEN}_total", f"vllm:{FIRST}")]
    kept = [s for s in (*about, *steps) if all(only.allows(name, value) for name, value in s.labels.items())]
    models = sorted({s.labels["model_name"] for s in kept if "model_name" in s.labels})
    if len(models) > 1:
        raise UsageError(f"{where}: counts several models ({', '.join(models)}); name one: --only model_name=NAME")
    found = _Samples(kept)
    if found.has("spec_decode_num_accepted_tokens_per_pos"):
        return _per_position(found, where)
    if found.has("spec_accept_length"):
        return _mean_length(found, where)
    raise UsageError(
        f"{where}: has neither spec_decode_num_accepted_tokens_per_pos (vLLM, specctl) nor sglang:spec_accept_length"
        f"{only.words()}; scrape /metrics after the server has speculated"
    )


def of_counts(
    drafted: Sequence[float],
    accepted: Sequence[float],
    source: str,
    temperature: float | None = None,
    idle: float = 0.0,
) -> Acceptance:
    """drafted, accepted: by position, of which each is at most the one before it. idle: steps without a draft."""
    pairs = [(a, d) for a, d in zip(accepted, drafted, strict=True) if d]
    survival = Survival.checked(tuple(_falling([a / d for a, d in pairs])), source)
    return of_survival(survival, tuple(d for _, d in pairs), source, temperature, idle)


class _Samples:
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def has(self, name: str) -> bool:
        return any(_bare(sample) == name for sample in self._samples)

    def total(self, name: str) -> float | None:
        """Over all engines."""
        values = [sample.value for sample in self._samples if _bare(sample) == name]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        values = [sample.value for sample in self._samples if _bare(sample) == name]
        return sum(values) / len(values) if values else None

    def by_position(self, name: str, where: str) -> list[float]:
        """From position 0 on."""
        counts: dict[int, float] = {}
        for sample in self._samples:
            if _bare(sample) == name:
                place = sample.labels.get("position", "")
                if not place.isdigit():
                    raise UsageError(f"{where}: {sample.name} has position {place!r}, expected a number from 0")
                counts[int(place)] = counts.get(int(place), 0.0) + sample.value
        if sorted(counts) != list(range(len(counts))):
            raise UsageError(f"{where}: {name} has positions {sorted(counts)}, expected all from 0 on")
        return [counts[place] for place in range(len(counts))]


def _bare(sample: Sample) -> str:
    return sample.name.partition(":")[2].removesuffix("_total")


def _per_position(found: _Samples, where: str) -> Evidence:
    drafts = found.total("spec_decode_num_drafts")
    if not drafts:
        raise UsageError(f"{where}: spec_decode_num_drafts is {'0' if drafts == 0 else 'missing'}: nothing was drafted")
    accepted = found.by_position("spec_decode_num_accepted_tokens_per_pos", where)
    _check_counts(accepted, drafts, found.total("spec_decode_num_accepted_tokens"), where)
    notices = [f"{where}: counters do not keep requests apart, so their interval is binomial, which is too narrow"]
    if found.has("spec_decode_num_draft_tokens_per_pos"):
        drafted = found.by_position("spec_decode_num_draft_tokens_per_pos", where)[: len(accepted)]
    else:
        drafted = [drafts] * len(accepted)
        notices += _of_all(accepted, drafts, found.total("spec_decode_num_draft_tokens"), where)
    idle = _idle(found, drafts + sum(accepted))
    if idle:
        notices.append(
            f"{where}: {idle / (idle + drafts):.0%} of steps had no draft, as the tokens tell that were given out "
            "beside drafts; they are counted as steps in which nothing was found to propose, so scrape a server whose "
            "schedule has no K = 0"
        )
    reached = [k for k, count in enumerate(drafted, start=1) if count]
    source = f"{where}: counters of {drafts:.0f} drafts"
    acceptance = of_counts(drafted[: len(reached)], accepted[: len(reached)], source, idle=idle)
    return Evidence(acceptance, notices)


def _of_all(accepted: Sequence[float], drafts: float, tokens: float | None, where: str) -> list[str]:
    """Where blocks differ in length, and it is not told how many reached each position.

    The share of all drafts is right for a lookup, which proposes as much as it finds: it is what a block brings, at any
    shorter K too. If K itself changed, or drafts were cut, more than that is accepted of those that got so far. How
    much more at most is known from the sum of all lengths; UsageError where it is too much to leave open.
    """
    longest = len(accepted)
    if tokens is None or tokens >= FULL * longest * drafts:
        return []
    least, most = 1 + sum(accepted) / drafts, 1 + accepted[0] / drafts
    for k, count in enumerate(accepted[1:], start=2):
        fewest = max(count, (tokens - (k - 1) * drafts) / (longest - k + 1))  # as many as can be ended just before k
        most += count / fewest if fewest > 0 else 0.0
    mean = f"its {drafts:.0f} drafts had {tokens / drafts:.2f} tokens on average and some had {longest}"
    if most - least > LOOSE * least:
        rates = ", ".join(f"{count / drafts:.3f}" for count in accepted)
        raise UsageError(
            f"{where}: {mean}, and it does not tell how many reached each position: full ones may bring {least:.2f} to "
            f"{most:.2f} tokens a step; scrape a server whose draft length is fixed, or if blocks are short because "
            f'the draft finds no more (prompt lookup), give what they bring: {{"survival": [{rates}], "drafts": '
            f"{drafts:.0f}}}"
        )
    return [
        f"{where}: {mean}; survival is of all drafts, as if each could have got there, which is what a lookup brings; "
        f"if the length itself changed, full drafts bring up to {most:.2f} tokens a step and not {least:.2f}"
    ]


def _idle(found: _Samples, of_drafts: float) -> float:
    """Steps of texts without a draft: each gave one token. What vLLM counts as accepted beyond the end of an answer was
    not given out, so there may be some more. of_drafts: tokens that came of drafts."""
    given, first = found.total(GIVEN), found.total(FIRST)
    return 0.0 if given is None or first is None else max(0.0, given - first - of_drafts)


def _check_counts(accepted: Sequence[float], drafts: float, total: float | None, where: str) -> None:
    for k, count in enumerate(accepted, start=1):
        if count > drafts:
            raise UsageError(
                f"{where}: {count:.0f} drafts were accepted up to position {k}, and there were {drafts:.0f}: a rate "
                "above 1; scrape all counters at one time"
            )
        if k > 1 and count > accepted[k - 2]:
            raise UsageError(
                f"{where}: {count:.0f} drafts were accepted up to position {k} and {accepted[k - 2]:.0f} up to the one "
                "before; survival can only fall"
            )
    if total is not None and abs(sum(accepted) - total) > 0.01 * max(total, 1):
        raise UsageError(
            f"{where}: spec_decode_num_accepted_tokens is {total:.0f}, its positions add up to {sum(accepted):.0f}"
        )


def _mean_length(found: _Samples, where: str) -> Evidence:
    """SGLang tells a mean length and nothing about positions."""
    length = found.mean("spec_accept_length")
    steps, tokens, rate = (found.mean(f"spec_{n}") for n in ("num_steps", "num_draft_tokens", "accept_rate"))
    assert length is not None
    if steps:
        k = round(steps)
    elif tokens and tokens > 1:
        k = round(tokens) - 1
    elif rate and length > 1:
        k = max(1, round((length - 1) / rate))
    else:
        raise UsageError(
            f"{where}: sglang:spec_accept_length is {length:g} and nothing tells of which K: expected spec_num_steps, "
            "spec_num_draft_tokens or spec_accept_rate beside it"
        )
    chance = geometric_rate(length, k, f"{where}: sglang:spec_accept_length")
    words = f"{where}: a mean length of {length:g} at K = {k}, as if every token were accepted with {chance:.3f}"
    notice = (
        f"{where}: SGLang tells the mean length alone, so acceptance is taken to be i.i.d.; per-request "
        "spec_correct_drafts_histogram or a trace tells positions apart"
    )
    return Evidence(constant(chance, k, words), [notice])


def _falling(values: Sequence[float]) -> list[float]:
    """Shares of fewer and fewer drafts may rise by chance; of the same drafts they cannot."""
    least, kept = 1.0, []
    for value in values:
        least = min(least, value)
        kept.append(least)
    return kept


def _others(others: Sequence[Run], acceptance: Acceptance, name: str) -> str:
    """What shorter runs of the same report brought, beside what this one says they should."""
    survival = acceptance.survival()
    said: Mapping[int, tuple[float, float]] = {
        run.k: (_counts(run).mean_acceptance_length or 1.0, 1 + float(survival[: run.k].sum()))
        for run in others
        if run.k is not None
    }
    words = ", ".join(f"K = {k} {seen:.2f} ({told:.2f})" for k, (seen, told) in sorted(said.items()))
    return f"lengths of the other runs, and what {name} says of them in brackets: {words}"


def _counts(run: Run) -> Speculation:
    assert run.speculation is not None
    return run.speculation


def _draft(run: Run) -> str:
    """The draft's label, which the names of its runs begin with."""
    return run.name.rpartition(" k=")[0] or run.name.removesuffix(" policy")
