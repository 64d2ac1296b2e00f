"""A profile for any model on a known device: constants and a config.json in, cells out. No weights are needed.

What does not fit into memory has no cell, and is said.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.errors import CapacityError, UsageError
from specctl.hub import locate
from specctl.options import Offer
from specctl.roofline import drafts, memory
from specctl.roofline.drafts import DraftCosts
from specctl.roofline.grid import PROMPTS, ROWS, batches_with_edges, contexts_up_to
from specctl.roofline.memory import Room
from specctl.roofline.passes import Passes, Placement
from specctl.roofline.shape import Grouped, ModelShape
from specctl.schemas.base import Provenance, read_mapping
from specctl.schemas.policy import BoundDraft
from specctl.schemas.profile import (
    SCHEMA,
    Constants,
    Measured,
    PrefillCell,
    Profile,
    Serving,
    StepCell,
    TargetCell,
)
from specctl.schemas.roofline import Doubt, Lane

GIB = 2**30
CONFIG = "config.json"


def profile_for(constants: Constants, where: str, offer: Offer) -> Profile:
    """where: names the file of constants in errors.

    Raises UsageError or CheckpointError for what cannot be, CapacityError where the weights do not fit.
    """
    if offer.model_config is None:
        raise UsageError(f"{where}: has constants and no cells; name whose steps to compute with --model-config")
    engine, lane = _lane(constants, where, offer.engine)
    config, config_sha, name = read_config(offer.model_config)
    shape = ModelShape.read(config, name, offer.quantisation)
    target = Passes(shape, _placement(shape, offer, constants, lane), lane, constants.roofline.peaks)
    draft = None if offer.draft_config is None else _draft(offer.draft_config, target)
    left = _room(constants, where, target, draft)
    doubt = constants.roofline.dense if shape.experts is None else constants.roofline.experts
    grid, absent = _grid(shape, left)
    return Profile(
        schema=SCHEMA,
        provenance=Provenance.here(),
        hardware=constants.hardware.model_copy(update={"devices": target.place.tp, "nodes": target.place.nodes}),
        engine=_serving(engine, lane),
        model=_identity(offer.model_config, config_sha, target.place),
        drafter=None if draft is None else BoundDraft(kind=draft.kind),
        steps=list(_target_cells(target, grid, doubt)),
        draft=[] if draft is None else list(_draft_cells(draft.step, grid, (1,), doubt)),
        draft_follow=[] if draft is None else list(_follow_cells(draft, grid, doubt)),
        prefill=list(_prefill(target, draft)),
        overheads_ms=lane.overheads_ms,
        shared_spread=doubt.shared,
        roofline=constants.roofline.model_copy(update={"lanes": {engine: lane}}),
        sources=constants.sources,
        notes=[*constants.notes, *_notes(lane, engine, target, left, absent)],
    )


def read_config(model: str) -> tuple[dict[str, Any], str, str]:
    """A config.json, its hash, and what it is called in errors."""
    path = Path(model).expanduser()
    file = path if path.is_file() and path.suffix == ".json" else locate(model, weights=False) / CONFIG
    if not file.is_file():
        raise UsageError(f"{model}: has no {CONFIG}, expected the directory of a model or a hub id like org/name")
    return read_mapping(file), hashlib.sha256(file.read_bytes()).hexdigest(), str(file)


def _lane(constants: Constants, where: str, engine: str | None) -> tuple[str, Lane]:
    lanes = constants.roofline.lanes
    name = next(iter(lanes)) if engine is None else engine
    if name not in lanes:
        raise UsageError(f"--engine {name}: {where} has constants for {', '.join(lanes)}")
    return name, lanes[name]


def _placement(shape: ModelShape, offer: Offer, constants: Constants, lane: Lane) -> Placement:
    attention, tp, ep = shape.attention, offer.tp or 1, offer.ep or 1
    kinds = {"num_attention_heads": attention.heads, "intermediate_size": shape.inner}
    if isinstance(attention, Grouped) and attention.kv_heads < tp:
        if tp % attention.kv_heads:
            raise UsageError(
                f"--tp {tp}: is no multiple of num_key_value_heads {attention.kv_heads} of {shape.name}, which it "
                "would "
                "have to repeat"
            )
    elif isinstance(attention, Grouped):
        kinds["num_key_value_heads"] = attention.kv_heads
    for key, value in kinds.items():
        if value % tp:
            fits = [str(n) for n in (1, 2, 4, 8, 16, 32) if all(each % n == 0 for each in kinds.values())]
            raise UsageError(f"--tp {tp}: does not divide {key} {value} of {shape.name}, expected {' or '.join(fits)}")
    _check_ep(shape, tp, ep)
    peaks = constants.roofline.peaks
    nodes = offer.nodes or math.ceil(tp / peaks.node_devices)
    if tp % nodes or tp // nodes > peaks.node_devices:
        raise UsageError(
            f"--nodes {nodes}: --tp {tp} cannot stand in them evenly, {peaks.node_devices} devices at most in each"
        )
    cache = offer.kv_dtype or "bf16"
    for what, kind, known in (("weights", shape.weights, lane.products), ("caches", cache, lane.attention)):
        if kind not in known:
            raise UsageError(
                f"{constants.hardware.name}: has no constants for {what} in {kind}, expected {' or '.join(known)}; "
                "say so "
                "with --quantisation or --kv-dtype"
            )
    return Placement(tp, ep, nodes, shape.weights, cache)


def _check_ep(shape: ModelShape, tp: int, ep: int) -> None:
    if ep == 1:
        return
    if shape.experts is None:
        raise UsageError(f"--ep {ep}: {shape.name} has no experts, leave it out")
    if tp % ep or shape.experts.count % ep:
        raise UsageError(f"--ep {ep}: has to divide --tp {tp} and the {shape.experts.count} experts of {shape.name}")


def _draft(given: str, target: Passes) -> DraftCosts:
    if given == "mtp":
        return drafts.mtp_layer(target)
    if given == "eagle3":
        return drafts.eagle3_like(target)
    config, _, name = read_config(given)
    return drafts.read_draft(config, name, target)


def _room(constants: Constants, where: str, target: Passes, draft: DraftCosts | None) -> Room:
    extra = (0.0, 0.0) if draft is None else (draft.weights, draft.cache)
    left = memory.room(constants.roofline, target, *extra)
    if left.tokens < 1 + max(ROWS):
        has = constants.roofline.peaks.memory_gb
        raise CapacityError(
            f"--tp {target.place.tp}: {target.shape.name} takes {left.weights / 1e9:.0f} GB of weights on each device, "
            f"{where} has {has:g} GB; spread it over more devices or quantise it"
        )
    return left


@dataclass(frozen=True)
class _Grid:
    """Places as arrays: batch_N, context_N."""

    batch_N: np.ndarray
    context_N: np.ndarray

    def with_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q = np.tile(np.array(rows), len(self.batch_N))
        return np.repeat(self.batch_N, len(rows)), q, np.repeat(self.context_N, len(rows))


def _grid(shape: ModelShape, left: Room) -> tuple[_Grid, list[tuple[int, int]]]:
    """The places whose caches fit, and for every context with some that do not the least batch of them."""
    places, absent = [], []
    batches = batches_with_edges()
    for context in contexts_up_to(shape.max_length):
        fits = [batch for batch in batches if batch * (context + max(ROWS)) <= left.tokens]
        places += [(batch, context) for batch in fits]
        if len(fits) < len(batches):
            absent.append((batches[len(fits)], context))
    if not places:  # the shortest context is too long for one sequence: half of what there is
        places = [(1, max(1, (left.tokens - max(ROWS)) // 2))]
    batch, context_N = np.array(sorted(places)).T
    return _Grid(batch, context_N), absent


def _target_cells(target: Passes, grid: _Grid, doubt: Doubt) -> Iterator[TargetCell]:
    batch, q, context = grid.with_rows(ROWS)
    ms = target.step(batch, q, context).total + batch * target.lane.per_sequence_us / 1e3
    for b, rows, c, value in zip(batch.tolist(), q.tolist(), context.tolist(), ms.tolist(), strict=True):
        yield TargetCell(batch=b, q=rows, context=c, ms=value, spread=value * doubt.step, source="roofline")


def _draft_cells(passes: Passes, grid: _Grid, rows: Sequence[int], doubt: Doubt) -> Iterator[StepCell]:
    batch, q, context = grid.with_rows(rows)
    ms = passes.step(batch, q, context).total
    for b, r, c, value in zip(batch.tolist(), q.tolist(), context.tolist(), ms.tolist(), strict=True):
        yield StepCell(batch=b, q=r, context=c, ms=value, spread=value * doubt.step, source="roofline")


def _follow_cells(draft: DraftCosts, grid: _Grid, doubt: Doubt) -> Iterator[StepCell]:
    """One that reads tokens runs over two after any block; one that reads hidden states over all rows of every step."""
    return _draft_cells(draft.follow, grid, ROWS if draft.reads_hidden else (2,), doubt)


def _prefill(target: Passes, draft: DraftCosts | None) -> Iterator[PrefillCell]:
    tokens = np.array([n for n in PROMPTS if n <= target.shape.max_length] or [target.shape.max_length])
    target_ms = target.prompts(tokens, tokens).total.tolist()
    draft_ms = [None] * len(tokens) if draft is None else draft.follow.prompts(tokens, tokens).total.tolist()
    for n, ms, more in zip(tokens.tolist(), target_ms, draft_ms, strict=True):
        yield PrefillCell(tokens=n, target_ms=ms, draft_ms=more, source="roofline")


def _serving(engine: str, lane: Lane) -> Serving:
    scheduler = "prompts join decoding steps" if lane.scheduling == "mixed" else "prompts stop decoding"
    cuda_graphs = None if lane.graphs is None else True
    return Serving(name=engine, version=lane.version, cuda_graphs=cuda_graphs, scheduler=scheduler, graphs=lane.graphs)


def _identity(model: str, config_sha: str, place: Placement) -> Measured:
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model
    return Measured(
        name=name, config_sha=config_sha, dtype=place.weights, kv_dtype=place.cache, tp=place.tp, ep=place.ep
    )


def _notes(lane: Lane, engine: str, target: Passes, left: Room, absent: Sequence[tuple[int, int]]) -> Iterator[str]:
    yield (
        f"weights take {left.weights / GIB:.1f} GiB of each device, caches have room for {left.tokens:,} tokens of "
        f"{left.per_token / 1024:.0f} KiB"
    )
    if absent:
        places = ", ".join(f"{batch} at {context}" for batch, context in absent)
        yield f"no cells where caches do not fit, from batch and context: {places}"
    if lane.missing is not None:
        yield f"{engine}: {lane.missing}"
    if target.place.nodes > 1:
        yield f"every all-reduce between nodes is taken to cost {lane.across_us:g} us more, a calibrated constant"
