"""GATES.yaml: what must hold before a pair is released. It knows names and limits, not how anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specctl.errors import UsageError
from specctl.schemas.base import Checked, Document, Number, read_document
from specctl.shipped import shipped

GATES = (
    "compatible",
    "greedy_exact",
    "distribution",
    "draft_cache",
    "acceptance_length",
    "acceptance_rate",
    "latency",
    "speedup",
    "regression",
)
NEED_A_MODEL = ("compatible", "distribution", "draft_cache")

Least = Annotated[Number, Field(ge=0)]
Above0 = Annotated[Number, Field(gt=0)]
AtLeast1 = Annotated[int, Field(ge=1)]


class Compatible(Checked):
    """The pair opens, all weights are numbers, and draft and policy were made for this target and draft."""


class GreedyExact(Checked):
    """prompts: at most so many where they are decoded for this gate alone, null for all. max_gap: scores this close are
    a near-tie; null: 0 in float64, 0.001 in float32, and 16-bit numbers cannot be judged without it."""

    prompts: AtLeast1 | None = None
    max_gap: Least | None = None


class Distribution(Checked):
    """samples: tokens to sample, by each way of acceptance that may be used. alpha: how often a right sampler may be
    called wrong."""

    samples: Annotated[int, Field(ge=200)] = 2000
    alpha: Annotated[Number, Field(gt=0, lt=1)] = 1e-6


class DraftCache(Checked):
    """atol: null is 1e-9 in float64, 0.001 in float32, 0.25 in 16-bit numbers."""

    atol: Least | None = None


class AcceptanceLength(Checked):
    """min: mean acceptance length with the token after the accepted ones counted; null: half of the drafted tokens that
    were accepted when the draft was made, as its specctl.json says, and nothing where it does not say. k: at this draft
    length; null: at every one that was run."""

    min: Annotated[Number, Field(ge=1)] | None = None
    k: AtLeast1 | None = None


class AcceptanceRate(Checked):
    """min: accepted over drafted tokens."""

    min: Annotated[Number, Field(ge=0, le=1)]
    k: AtLeast1 | None = None


class Latency(Checked):
    """Upper limits of 95th percentiles, of single requests."""

    ttft_p95_ms: Above0 | None = None
    tpot_p95_ms: Above0 | None = None

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.ttft_p95_ms is None and self.tpot_p95_ms is None:
            raise ValueError("names no limit; expected ttft_p95_ms, tpot_p95_ms or both")
        return self


class Speedup(Checked):
    """bound: whether the lower end of the 95 % interval or the speed-up itself has to reach min."""

    min: Above0
    bound: Literal["lower", "mid"] = "lower"


class Regression(Checked):
    """baseline: a report, as seen from the gates file; --baseline goes before it. max_drop: the part of a figure that
    may be lost, 0.02 being 2 %."""

    baseline: str | None = None
    max_drop: Annotated[Number, Field(ge=0, lt=1)] = 0.02


class GatesFile(Document):
    """A file that people write: the schema's name may be left out, the names of the gates may not be wrong."""

    schema_: Literal["specctl.gates/1"] = Field(alias="schema", default="specctl.gates/1")
    compatible: Compatible | None = None
    greedy_exact: GreedyExact | None = None
    distribution: Distribution | None = None
    draft_cache: DraftCache | None = None
    acceptance_length: AcceptanceLength | None = None
    acceptance_rate: AcceptanceRate | None = None
    latency: Latency | None = None
    speedup: Speedup | None = None
    regression: Regression | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_names_count(cls, value: Any) -> Any:
        """`compatible:` with nothing after it is a gate without settings, not a gate that is switched off."""
        if not isinstance(value, dict):
            return value
        return {key: {} if given is None and key in GATES else given for key, given in value.items()}

    @property
    def names(self) -> list[str]:
        """The gates that are set, in the order of GATES."""
        return [name for name in GATES if getattr(self, name) is not None]


def read_gates(path: Path) -> GatesFile:
    """Raises UsageError for a file that cannot be read, holds an unknown key, or sets no gate at all."""
    gates = read_document(path, GatesFile)
    if not gates.names:
        raise UsageError(f"{path}: sets no gate, so nothing could fail; expected one of {', '.join(GATES)}")
    return gates


def find_gates(name: str) -> Path:
    """The file of --gates: a path, or the name of one that is shipped. Raises UsageError for what is neither."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    known = sorted(file.stem for file in shipped("templates").glob("gates*.yaml"))
    if name.removesuffix(".yaml") in known:
        return shipped("templates") / f"{name.removesuffix('.yaml')}.yaml"
    raise UsageError(f"--gates {name}: no such file, and none of that name is shipped (shipped: {', '.join(known)})")
