"""The constants of a roofline: what a device can do at most, what an engine's kernels reach of it, and what the engine
adds. It knows no formula; those are in specctl/roofline/."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specctl.schemas.base import Checked
from specctl.schemas.counts import Positive

Microseconds = Annotated[float, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Relative = Annotated[float, Field(ge=0, lt=1)]
Weights = Literal["bf16", "fp8", "fp8-block"]
"""How weights are stored. fp8: a scale for each tensor or row. fp8-block: one for each block of 128 x 128."""

Cache = Literal["bf16", "fp8"]
Unit = Literal["tokens", "sequences"]
CellSource = Literal["measured", "interpolated", "roofline"]


class Source(Checked):
    """Where numbers come from. numbers: which of the file's. tables: of a package or page, by name."""

    numbers: str
    what: str
    package: str | None = None
    version: str | None = None
    licence: str | None = None
    tables: list[str] = Field(default_factory=list)
    url: str | None = None
    date: str | None = None


class Graphs(Checked):
    """The sizes that an engine has captured CUDA graphs for: a step is padded up to the next of them, and run without
    a graph, unpadded, beyond the last."""

    unit: Unit
    sizes: Annotated[list[Size], Field(min_length=1)]

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if sorted(set(self.sizes)) != self.sizes:
            raise ValueError(f"graphs.sizes have to rise, found {self.sizes}")
        return self


class Overheads(Checked):
    """Milliseconds of a step that are no pass. base: of a plain step. spec: of a step that drafts, in place of base.
    per_draft_step: for each of its draft passes besides. tree: for a tree in place of a chain."""

    base: Milliseconds
    spec: Milliseconds
    per_draft_step: Milliseconds
    tree: Milliseconds | None = None


class Peaks(Checked):
    """Of one device, as its maker states them. fp8_tflops: null where it has no such units. link_gbps: to the other
    devices of a node, one way."""

    memory_gb: Positive
    memory_gbps: Positive
    bf16_tflops: Positive
    fp8_tflops: Positive | None = None
    link_gbps: Positive
    node_devices: Size = 8


class Product(Checked):
    """Matrix products with weights. bandwidth, flops: what share of the peaks is reached. start_us: of every call.
    tile: rows are computed in multiples of it. norm: how reading and computing overlap, 1 not at all."""

    bandwidth: Share
    flops: Share
    start_us: Microseconds
    tile: Size
    norm: Annotated[float, Field(ge=1)]


class Attention(Checked):
    """Attention over a cache, per layer. flops: of a prompt's own attention, and of latent attention everywhere."""

    bandwidth: Share
    flops: Share
    start_us: Microseconds


class AllReduce(Checked):
    """Among `devices` of one node: start_us + min(bytes / small_gbps, switch_us + bytes / gbps)."""

    devices: Size
    start_us: Microseconds
    small_gbps: Positive
    switch_us: Microseconds
    gbps: Positive


class Elementwise(Checked):
    """What is no product: per layer `calls` kernels of start_us that read and write the hidden states."""

    calls: Size
    start_us: Microseconds
    bandwidth: Share


class Lane(Checked):
    """One engine. version: whose kernels these are. scheduling: whether prompts join decoding steps or stop them.
    chunk: prompt tokens of a step. experts: where every device has a part of each. whole_experts: where each has some
    of them whole; null: the same. across_us: added to every all-reduce that leaves a node. per_sequence_us: of the
    host, for each sequence of a step. missing: what is known to be wrong or absent in this lane."""

    version: str
    scheduling: Literal["mixed", "prefill-first"]
    chunk: Size
    products: dict[Weights, Product]
    attention: dict[Cache, Attention]
    latent: Attention
    experts: Product
    whole_experts: Product | None = None
    all_reduce: list[AllReduce]
    across_us: Microseconds
    elementwise: Elementwise
    overheads_ms: Overheads
    per_sequence_us: Microseconds = 0.0
    graphs: Graphs | None = None
    missing: str | None = None


class Doubt(Checked):
    """One standard deviation of a step's time as a share of it. shared: the part that all steps of a profile have in
    common, so that it cancels where they are compared."""

    step: Relative
    shared: Relative = 0.0

    @model_validator(mode="after")
    def _a_part(self) -> Self:
        if self.shared > self.step:
            raise ValueError(f"doubt.shared {self.shared:g} is more than doubt.step {self.step:g}, of which it is part")
        return self


class Roofline(Checked):
    """reserve_gb: of a device's memory that neither weights nor caches get. memory_share: that an engine takes."""

    peaks: Peaks
    lanes: Annotated[dict[str, Lane], Field(min_length=1)]
    memory_share: Share
    reserve_gb: Annotated[float, Field(ge=0)]
    dense: Doubt
    experts: Doubt
