"""A tuning as people read it in a terminal, and its policy as a file: for places of the profile what each length costs
and brings, and why one was chosen. Only here and in the reports are numbers rounded."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.profile.render import aligned, as_yaml
from specctl.schemas.policy import Cell
from specctl.tune.choice import Decision
from specctl.tune.load import Played, Steady
from specctl.tune.places import nearest, ruled
from specctl.tune.run import Tuning
from specctl.tune.study import Load, Study
from specctl.tune.what_if import Answer
from specctl.tune.words import of_range, reason

MOST_PLACES = 8
"""More are told in a line each; the report has all of them."""

NOTES = """\
survival: drafts whose first K tokens were all accepted. tokens: of one sequence a step, the definite one counted.
drafting: steps of a sequence that have a block. v: verifying K tokens, c: a draft step, u: the draft's pass after a
block, in plain passes. tok/s: of one sequence. speed-up: against decoding without a draft, prefill apart; 95 %: what
acceptance as it was counted and the spread of the profile leave open. >: chosen."""


def policy_yaml(tuning: Tuning) -> str:
    return as_yaml(tuning.policy)


def terminal(tuning: Tuning, study: Study, answer: Answer | None = None) -> str:
    return "\n".join(_lines(tuning, study, answer)) + "\n"


def _lines(tuning: Tuning, study: Study, answer: Answer | None) -> Iterator[str]:
    acceptance = tuning.acceptance
    heat = "" if acceptance.temperature is None else f", temperature {acceptance.temperature:g}"
    yield f"profile: {tuning.profile}; acceptance: {acceptance.source}{heat}; K up to {tuning.k_max}"
    few = len(tuning.decisions) <= MOST_PLACES
    if few:
        for decision in tuning.decisions:
            yield from _place(tuning, decision)
    else:
        yield from _short(tuning, study)
    yield "\npolicy"
    yield aligned([_words(tuning, cell) for cell in tuning.policy.k])
    yield f"\nways of choosing, over {study.served.words}"
    rows = [["", "K", "speed-up", "worst loss"]]
    for way in study.ways:
        low, high = min(way.ks), max(way.ks)
        rows.append([way.name, f"{low}" if low == high else f"{low}-{high}", f"{way.gain:.3f}", f"{way.loss:.1%}"])
    yield aligned(rows)
    if study.load is not None:
        yield from _load(study.load)
    if tuning.prefill is not None:
        plain, drafts = tuning.prefill.ms(drafts=False), tuning.prefill.ms(drafts=True)
        yield f"\nfirst token: {plain:.1f} ms after the prompt, {drafts:.1f} ms with the draft's pass over it"
    if answer is not None:
        yield from _what_if(answer)
    if few:
        yield f"\n{NOTES}"


def _place(tuning: Tuning, decision: Decision) -> Iterator[str]:
    times = decision.times
    shares = pass_shares(tuning, decision)
    where = f"batch {decision.batch}, context {decision.context}"
    said = "steps are whole (no c, v, u)" if shares is None else f"c {shares[0]:.2f}, u {shares[1]:.2f}"
    yield f"\n{where}: plain step {times.plain_S[0]:.2f} ms, {said}"
    yield aligned(list(_rows(tuning, decision)))
    yield reason(decision)
    if (here := ruled(tuning, decision)).key != decision.chosen.key:
        yield f"in the policy {reason(decision, here)}"


def _rows(tuning: Tuning, decision: Decision) -> Iterator[list[str]]:
    yield ["", "K", "survival", "tokens", "drafting", "v", "step ms", "tok/s", "speed-up", "95 %"]
    acceptance = tuning.chooser.by_context.at(decision.context)
    survival = acceptance.survival()
    stop = decision.chosen.confidence
    extra = [] if decision.chosen in decision.candidates else [decision.chosen]
    for each in [*decision.candidates, *extra]:
        low, middle, high = each.band
        mark = "*" if acceptance.extrapolated(each.k) else ""
        v = verify_share(tuning, decision, each.k)
        yield [
            ">" if each is decision.chosen else "",
            f"{each.k}{mark}" + (f" stop {stop:g}" if each in extra else ""),
            f"{survival[each.k - 1]:.3f}" if each.k and each not in extra else "",
            f"{each.tokens_S[0]:.2f}",
            f"{each.drafting:.0%}" if each.k else "",
            "" if v is None else f"{v:.2f}",
            f"{each.step_S[0]:.2f}",
            f"{each.tok_s:.1f}",
            f"{middle:.3f}",
            f"{low:.2f} - {high:.2f}" if each.k else "",
        ]


def verify_share(tuning: Tuning, decision: Decision, k: int) -> float | None:
    """v; None where steps were timed as wholes, so that a pass alone is not known."""
    if tuning.of.whole_steps:
        return None
    return float(decision.times.target_SQ[0, k] / decision.times.target_SQ[0, 0])


def pass_shares(tuning: Tuning, decision: Decision) -> tuple[float, float] | None:
    """c and u; None as above."""
    times = decision.times
    if tuning.of.whole_steps:
        return None
    return float(times.draft_S[0] / times.target_SQ[0, 0]), float(times.follow_SK[0, 0] / times.target_SQ[0, 0])


def _short(tuning: Tuning, study: Study) -> Iterator[str]:
    """A line for every profiled batch that is a power of two, at the context that counts most."""
    context = nearest(tuning, study.context)
    here = [d for d in tuning.decisions if d.context == context and d.batch & (d.batch - 1) == 0]
    rows = [["batch", "K", "plain ms", "step ms", "tokens", "speed-up", "95 %", "why"]]
    for decision in here:
        chosen, plain = ruled(tuning, decision), float(decision.times.plain_S[0])
        low, middle, high = chosen.band
        row = [
            f"{decision.batch}",
            f"{chosen.k}",
            f"{plain:.2f}",
            f"{chosen.step_S[0]:.2f}",
            f"{chosen.tokens_S[0]:.2f}",
        ]
        rows.append([*row, f"{middle:.3f}", f"{low:.2f} - {high:.2f}", reason(decision, chosen)])
    yield f"\nat context {context}; --report FILE.html has all of it"
    yield aligned(rows)


def _words(tuning: Tuning, cell: Cell) -> list[str]:
    stop = "" if cell.confidence is None else f"stop {cell.confidence:g}"
    low, middle, high = cell.speedup or [1.0, 1.0, 1.0]
    gain = f"{middle:.2f} x ({low:.2f} - {high:.2f})" if cell.k else ""
    mark = "*" if tuning.acceptance.extrapolated(cell.k) else ""
    return [f"batch {of_range(cell.batch)}", f"context {of_range(cell.context)}", f"K = {cell.k}{mark}", stop, gain]


def _load(load: Load) -> Iterator[str]:
    yield f"\n{load.words}, context {load.context}"
    rows = [["", "batch", "ms a token", "ms to the first", ""]]
    for name, found in (("without a draft", load.plain), ("under the policy", load.policy)):
        rows.append([name, f"{mean_batch(found):.1f}", f"{found.tpot_ms:.2f}", f"{found.ttft_ms:.1f}", _end(found)])
    yield aligned(rows)


def mean_batch(found: Steady | Played) -> float:
    """By output tokens, where a load is played through."""
    return found.batch if isinstance(found, Steady) else sum(batch * share for batch, share in found.tokens.items())


def _end(found: Steady | Played) -> str:
    if isinstance(found, Played):
        return f"all in {found.seconds:.1f} s"
    return f"{'saturated, ' if found.saturated else ''}at most {found.most:.3g} a second"


def _what_if(answer: Answer) -> Iterator[str]:
    yield f"\nwhat if {answer.what_if.text}"
    rows = [["batch", "context", "K now", "speed-up", "K then", "speed-up", "ms a token now", "then"]]
    for place in answer.places:
        now, then = place.now.chosen, None if place.then is None else place.then.chosen
        row = [f"{place.batch}", f"{place.context}", f"{now.k}", f"{now.speedup:.3f}"]
        row += (
            ["does not fit", "", f"{now.tpot_ms:.2f}", ""]
            if then is None
            else [f"{then.k}", f"{then.speedup:.3f}", f"{now.tpot_ms:.2f}", f"{then.tpot_ms:.2f}"]
        )
        rows.append(row)
    if len(rows) > 4 * MOST_PLACES:
        rows = [row for row in rows if not row[0].isdigit() or int(row[0]) & (int(row[0]) - 1) == 0]
    yield aligned(rows)
