"""From the streams of one round to what a step took: no engine says so, but all streams get the tokens of a step at the
same time.

Only the time in which every stream of the round was decoding counts: before it prompts are taken in, after it the batch
is smaller. A stream without a draft gets a token a step. With a draft an event is a step, however many tokens it has;
where a busy engine puts two steps into an event, its counter of drafts tells so.

A draft that looks things up finds nothing until a text begins to say the same again. Then only what comes after counts,
where events have several tokens, which a plain step cannot give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specctl.profile.served.engine import Served
from specctl.profile.served.metrics import Metrics
from specctl.profile.served.streams import Stream

ALL, NONE = 0.9, 0.02
"""Of steps: with fewer that had a block they are of two kinds; with fewer than the second, plain."""

UNEVEN = 0.25
"""How far the mean length of blocks may be from a whole number."""

COUNTERS = {"drafts": "spec_decode_num_drafts_total", "tokens": "spec_decode_num_draft_tokens_total"}
PREEMPTIONS = "num_preemptions_total"


@dataclass(frozen=True)
class Window:
    """In which all streams were decoding. seconds, events, tokens: summed over streams, from each one's first event in
    it to its last. lead: tokens that the first of them had when it began. made: tokens of a stream in its middle."""

    seconds: float
    events: int
    tokens: int
    lead: int
    made: float


@dataclass(frozen=True)
class Round:
    """One run of a batch. ms: of a step; steps: of each stream that were timed. k: tokens drafted a step; None where
    that cannot be said, and why. made: tokens of the answers in the middle. per_step: tokens of a step."""

    ms: float
    steps: float
    k: int | None
    why: str
    lead: int
    made: float
    per_step: float


def window(streams: Sequence[Stream]) -> Window | None:
    """None where they were never all decoding."""
    begin, end = max(stream.moments[0] for stream in streams), min(stream.moments[-1] for stream in streams)
    seconds, events, tokens, lead, made = 0.0, 0, 0, 0, 0.0
    for stream in streams:
        inside = [i for i, moment in enumerate(stream.moments) if begin <= moment <= end]
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        seconds += stream.moments[last] - stream.moments[first]
        events += last - first
        tokens += stream.tokens[last] - stream.tokens[first]
        lead = max(lead, stream.tokens[first])
        made += (stream.tokens[first] + stream.tokens[last]) / 2 / len(streams)
    return Window(seconds, events, tokens, lead, made) if seconds > 0 else None


def read_round(served: Served, streams: Sequence[Stream], before: Metrics, after: Metrics) -> Round | None:
    """before, after: the engine's counters. None where the streams were never all decoding."""
    timed = [stream.but_last() for stream in streams] if served.speculation else list(streams)
    events = sum(len(stream.moments) - 1 for stream in streams)
    drafts, tokens = (after.totals.get(name, 0.0) - before.totals.get(name, 0.0) for name in COUNTERS.values())
    k, why = _length(served, drafts, tokens, events)
    if k is None and NONE * events < drafts < ALL * events:
        drafting = [each for stream in timed if (each := once_drafting(stream)) is not None]
        if len(drafting) == len(timed):
            timed, (k, why) = drafting, _whole_number(tokens / drafts)
    found = window(timed)
    if found is None:
        return None
    joined = max(1.0, drafts / events if events else 1.0)
    steps = float(found.tokens) if k == 0 else found.events * joined
    if after.totals.get(PREEMPTIONS, 0.0) > before.totals.get(PREEMPTIONS, 0.0):
        k, why = None, "the engine had no room for all of them and began some anew"
    return Round(
        ms=1000 * found.seconds / steps,
        steps=steps / len(streams),
        k=k,
        why=why,
        lead=found.lead,
        made=found.made,
        per_step=found.tokens / steps,
    )


def _length(served: Served, drafts: float, tokens: float, events: int) -> tuple[int | None, str]:
    """Tokens drafted in every step of a round."""
    if served.speculation is None:
        return 0, ""
    if served.speculation.k is not None:  # an engine that does not count drafts, and drafts in every step
        return served.speculation.k, ""
    share = drafts / events if events else 0.0
    if share <= NONE:
        return None, "nothing was drafted, though the engine speculates"
    if share < ALL:
        return None, f"only {share:.0%} of steps had a block"
    return _whole_number(tokens / drafts)


def _whole_number(mean: float) -> tuple[int | None, str]:
    if abs(mean - round(mean)) > UNEVEN or round(mean) < 1:
        return None, f"blocks were of different lengths, {mean:.2f} tokens on average"
    return round(mean), ""


def once_drafting(stream: Stream) -> Stream | None:
    """From the event on after which hardly any brings a single token. None where there is no such place."""
    several = [after > before + 1 for before, after in pairwise(stream.tokens)]
    for first in range(len(several) - 1):
        if sum(several[first:]) >= ALL * len(several[first:]):
            return Stream(stream.sent, stream.moments[first:], stream.tokens[first:])
    return None
