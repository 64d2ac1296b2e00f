"""What an engine's /metrics show, as numbers by name without the engine's prefix. It does not know what they mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specctl.errors import UsageError
from specctl.profile.served.wire import Wire

PATH = "/metrics"
PREFIXES = ("vllm", "sglang", "specctl")
_PREFIX = re.compile(rf"^({'|'.join(PREFIXES)}):", re.MULTILINE)


@dataclass(frozen=True)
class Metrics:
    """prefix: whose names they have; None where there are none of a known engine. totals: over all labels. labels: of
    each name, every set that there is."""

    prefix: str | None
    totals: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, list[Mapping[str, str]]] = field(default_factory=dict)

    def values(self, label: str, *names: str) -> list[str]:
        """What a label is in samples of these names; of all names if there are none."""
        found = (sets for name, sets in self.labels.items() if not names or name in names)
        return sorted({each[label] for sets in found for each in sets if label in each})


def scrape(wire: Wire) -> Metrics:
    """Nothing where there is no such page. Raises EngineUnreachable, UsageError for what Prometheus could not read."""
    status, text = wire.get(PATH)
    prefix = _PREFIX.search(text)
    if status != 200 or prefix is None:
        return Metrics(None)
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise UsageError(f"{wire.url}{PATH}: is no Prometheus text: {' '.join(str(error).split())}") from None
    return _of(prefix[1], samples)


def _of(prefix: str, samples: list[Sample]) -> Metrics:
    totals: dict[str, float] = {}
    labels: dict[str, list[Mapping[str, str]]] = {}
    for sample in samples:
        owner, _, name = sample.name.partition(":")
        if owner == prefix and math.isfinite(sample.value):
            totals[name] = totals.get(name, 0.0) + sample.value
            labels.setdefault(name, []).append(sample.labels)
    return Metrics(prefix, totals, labels)
