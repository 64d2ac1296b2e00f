"""Acceptance from what engines tell with every answer: vLLM's `metrics.speculative_decoding`, SGLang's `meta_info`.

Each is a histogram of drafts by accepted tokens, so requests are known and so is what they leave open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.errors import UsageError
from specctl.tune.acceptance import Acceptance, Blocks
from specctl.tune.evidence import Evidence, Kind
from specctl.tune.only import Only

HISTOGRAMS = ("acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram")
LENGTHS = ("mean_acceptance_length", "spec_accept_length")
ROOM = 0.02


@dataclass(frozen=True)
class _Request:
    """histogram[j]: drafts of which exactly j tokens were accepted. k: the longest, None where it is not said."""

    histogram: list[int]
    k: int | None
    class_: str


def looks_like(bodies: Sequence[Any]) -> bool:
    return any(_find(body) is not None for body in bodies)


def from_bodies(bodies: Sequence[Any], where: str, only: Only) -> Evidence:
    """Raises UsageError for a histogram that is impossible, or that does not count what it should."""
    only.takes(where, ("class",))
    requests = list(_requests(bodies, where))
    kept = [request for request in requests if only.allows("class", request.class_)]
    drafted = [request for request in kept if sum(request.histogram)]
    if not drafted:
        raise UsageError(f"{where}: no answer in it tells of a draft{only.words()}")
    ks = {request.k for request in drafted if request.k is not None}
    if len(ks) > 1:
        raise UsageError(
            f"{where}: its answers had drafts of up to {', '.join(map(str, sorted(ks)))} tokens; acceptance at a "
            "position is told by drafts that could reach it, so keep those of one length"
        )
    k = max(max(len(request.histogram) - 1 for request in drafted), *ks, 1)
    notices = []
    if len(requests) < len(bodies):
        notices.append(f"{where}: {len(bodies) - len(requests)} of {len(bodies)} answers tell nothing about drafts")
    names = sorted({request.class_ for request in drafted})
    kinds = [
        Kind(name, None, _acceptance([r for r in drafted if r.class_ == name], k, f"{where}, class {name}"))
        for name in names
    ]
    return Evidence(_acceptance(drafted, k, where), notices, kinds=tuple(kinds) if len(kinds) > 1 else ())


def _requests(bodies: Sequence[Any], where: str) -> Iterator[_Request]:
    for number, body in enumerate(bodies, start=1):
        found = _find(body)
        if found is not None:
            yield _read(found, body, f"{where}: answer {number}")


def _find(value: Any) -> Mapping[str, Any] | None:
    """The object with a histogram, wherever in the body it is."""
    if isinstance(value, list):
        return next((found for each in value if (found := _find(each)) is not None), None)
    if not isinstance(value, dict):
        return None
    if any(isinstance(value.get(key), list) for key in HISTOGRAMS):
        return value
    return next((found for each in value.values() if (found := _find(each)) is not None), None)


def _read(found: Mapping[str, Any], body: Any, where: str) -> _Request:
    key = next(key for key in HISTOGRAMS if isinstance(found.get(key), list))
    histogram = found[key]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in histogram):
        raise UsageError(f"{where}: {key} is {histogram}, expected how many drafts had 0, 1, ... tokens accepted")
    drafts, accepted = sum(histogram), sum(j * n for j, n in enumerate(histogram))
    said = next((found[name] for name in LENGTHS if isinstance(found.get(name), (int, float))), None)
    if drafts and said is not None and abs(1 + accepted / drafts - said) > ROOM * said:
        raise UsageError(
            f"{where}: {key} gives a mean length of {1 + accepted / drafts:.3f} and {said:g} is said, so it does not "
            "count accepted tokens"
        )
    k = found.get("num_spec_tokens")
    if isinstance(k, int) and len(histogram) > k + 1:
        raise UsageError(f"{where}: {key} counts {len(histogram) - 1} accepted tokens, num_spec_tokens is {k}")
    class_ = body.get("class") if isinstance(body, dict) else None
    return _Request(list(histogram), k if isinstance(k, int) and k > 0 else None, str(class_ or "all"))


def _acceptance(requests: Sequence[_Request], k: int, where: str) -> Acceptance:
    histogram_RJ = np.zeros((len(requests), k + 1))
    for row, request in zip(histogram_RJ, requests, strict=True):
        row[: len(request.histogram)] = request.histogram
    drafts_R = histogram_RJ.sum(1)
    accepted_RK = histogram_RJ[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
    return Acceptance(
        source=f"{where}: {drafts_R.sum():.0f} drafts in {len(requests)} requests",
        temperature=None,
        iid=False,
        drafts_R=drafts_R,
        tokens_R=(histogram_RJ * np.arange(1, k + 2)).sum(1),
        idle_R=np.zeros(len(requests)),
        stops=(Blocks(None, np.repeat(drafts_R[:, None], k, axis=1), accepted_RK),),
    )
