"""The interpolated profiles of common pairs, from a published operator database. By hand:

    python profiles/build.py --data DIRECTORY [--output profiles]

DIRECTORY holds CSV extracts of aiconfigurator-core (profiles/query.py makes them, see there) and the measured points
that profiles are held against (profiles/README.md). A profile's cell is a sum of kernels that were timed one by one and
interpolated; a verification over q rows of each of B sequences with context c is taken to be

    kernels without a cache at B q tokens  +  attention over one token at B q rows
        +  attention over c at B rows  -  attention over one token at B rows

so that a cache is read once for all rows of a block (the database's own speculative mode reads it for each, which turns
decisions around at long contexts). What the database cannot tell is of other sources and says so: the host's part, the
exchange between nodes, prefill of DeepSeek-R1 and of heads (roofline). Places that do not fit into memory are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import constants
import extracts
import hosts
from extracts import Placement, Step, passes_of
from h100 import dense, speculative

from specctl.roofline import drafts
from specctl.roofline.drafts import DraftCosts
from specctl.roofline.memory import room
from specctl.roofline.passes import Passes
from specctl.roofline.serving import Load
from specctl.schemas.base import Provenance
from specctl.schemas.profile import SCHEMA, Constants, Profile, read_either

ROWS = tuple(range(1, 10))
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS = 61
# As for rooflines (profiles/constants.py); what does not cancel is of steps that draft (t(drafting) / t(plain) off by
# 6 %) and of DeepSeek-R1's speed-ups (by 12 to 16 %).
SPREAD, SHARED = 0.125, 0.118
SPARSE_SPREAD, SPARSE_SHARED = 0.16, 0.125

BF16, FP8 = ("bf16", "bf16"), ("fp8", "fp8")
R1 = ("fp8-block", "bf16")
LANES: list[tuple[str, str, str, Placement, tuple[str, ...]]] = [
    *(
        ("h100-sxm", engine, model, Placement(tp, 1, 1, *kinds), ("llama-3.2-1b", "eagle3"))  # type: ignore[arg-type]
        for engine in extracts.ENGINES
        for model, tp, kinds in (
            ("llama-3.1-8b", 1, BF16),
            ("llama-3.1-8b", 1, FP8),
            ("llama-3.x-70b", 4, BF16),
            ("llama-3.x-70b", 4, FP8),
            ("llama-3.x-70b", 8, BF16),
            ("llama-3.x-70b", 8, FP8),
        )
    ),
    ("h100-sxm", "sglang", "deepseek-r1", Placement(16, 1, 2, *R1), ("mtp",)),  # type: ignore[arg-type]
    ("h100-sxm", "trtllm", "deepseek-r1", Placement(16, 16, 2, *R1), ("mtp",)),  # type: ignore[arg-type]
    ("h200-sxm", "sglang", "deepseek-r1", Placement(8, 1, 1, *R1), ("mtp",)),  # type: ignore[arg-type]
    ("h200-sxm", "trtllm", "deepseek-r1", Placement(8, 8, 1, *R1), ("mtp",)),  # type: ignore[arg-type]
]
LEFT_OUT = {
    "vllm with DeepSeek-R1": "products in FP8 blocks are too slow in its tables (Qwen3-8B: 11 ms, 5.4 measured)",
    "sglang with an FP8 cache of latents": "its tables are five times slower than with 16 bits, so caches have 16 bits",
    "DeepSeek-R1 on one node of H100": "671 GB of weights do not fit into 8 devices of 80 GB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory of the CSV extracts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    database = Database.read(args.data)
    for system, engine, model, place, kinds in LANES:
        for kind in kinds:
            pair = Pair(system, engine, model, place, kind, database)
            value = pair.profile()
            text = yaml.safe_dump(constants.rounded(value), sort_keys=False, default_flow_style=None, width=118)
            Profile.model_validate(yaml.safe_load(text))
            (args.output / f"{pair.name}.yaml").write_text(text, encoding="utf-8")
            sys.stderr.write(f"written: {pair.name}.yaml, {len(text) / 1000:.0f} kB\n")


@dataclass(frozen=True)
class Database:
    steps: dict[Any, list[Step]]
    heads: list[dict[str, str]]
    prefill: dict[tuple[str, str, int, str, int], float]
    rooflines: dict[str, Constants]
    across_us: dict[str, float]
    dense: list[dense.Row]
    pairs: list[speculative.MtpPair]
    points: list[dict[str, str]]

    @classmethod
    def read(cls, data: Path) -> Database:
        steps: dict[Any, list[Step]] = {}
        for step in extracts.steps(data):
            steps.setdefault((step.system, step.engine, step.model, step.place), []).append(step)
        prefill = {
            (
                row["backend"],
                extracts.NAMES.get(row["model"], row["model"]),
                int(row["tp"]),
                row["gemm_dtype"],
                int(row["isl"]),
            ): float(row["prefill_ms"])
            for row in extracts.rows(data / "aic_prefill.csv")
        }
        rooflines = {}
        for name in constants.PEAKS:
            found = read_either(Path(__file__).parent / f"{name}.yaml")
            assert isinstance(found, Constants)
            rooflines[name] = found
        roofline = rooflines["h100-sxm"].roofline
        points = speculative.read_points(data)
        return cls(
            steps,
            list(extracts.rows(data / "aic_eagle3_draft_step.csv")),
            prefill,
            rooflines,
            hosts.across_us(data, roofline.lanes, "interpolated"),
            dense.read(data, roofline),
            speculative.mtp_pairs(points, data, roofline),
            points,
        )


@dataclass(frozen=True)
class Pair:
    system: str
    engine: str
    model: str
    place: Placement
    draft: str
    database: Database

    @property
    def name(self) -> str:
        ep = f"-ep{self.place.ep}" if self.place.ep > 1 else ""
        return f"{self.system}-{self.model}-{self.place.weights}-tp{self.place.tp}{ep}-{self.engine}-{self.draft}"

    @property
    def roofline(self) -> Constants:
        return self.database.rooflines[self.system]

    @property
    def target(self) -> Passes:
        roofline = self.roofline.roofline
        return passes_of(self.model, self.place, roofline.lanes[self.engine], roofline.peaks)

    @property
    def across_us(self) -> float:
        """What every all-reduce takes more than the tables have."""
        return self.database.across_us[self.engine] if self.place.nodes > 1 else 0.0

    @property
    def sparse(self) -> bool:
        return self.target.shape.experts is not None

    @property
    def steps(self) -> list[Step]:
        """Those that fit into memory beside the draft."""
        costs = self.costs
        tokens = room(self.roofline.roofline, self.target, costs.weights, costs.cache).tokens
        found = self.database.steps[self.system, self.engine, self.model, self.place]
        return [step for step in found if step.q in ROWS and step.batch * (step.context + max(ROWS)) <= tokens]

    @property
    def costs(self) -> DraftCosts:
        if self.draft == "mtp":
            return drafts.mtp_layer(self.target)
        if self.draft == "eagle3":
            return drafts.eagle3_like(self.target)
        return drafts.small_model(extracts.shape_of(self.draft), self.target.lane, self.target.peaks, self.place)

    # -- cells ---------------------------------------------------------------------------------------------------------

    def profile(self) -> dict[str, Any]:
        lane, spread = self.target.lane, SPARSE_SPREAD if self.sparse else SPREAD
        steps = self.steps
        across = 2 * self.target.shape.layers * self.across_us / 1e3
        host = lane.per_sequence_us / 1e3
        cells = {(s.batch, s.context, s.q): s.ms + across + host * s.batch for s in steps}
        draft, follow = self._draft(steps)
        graphs = None if lane.graphs is None else lane.graphs.model_dump()
        return {
            "schema": SCHEMA,
            "provenance": Provenance.here().model_dump()
            | {"device": "none: computed", "threads": None, "command": "python profiles/build.py --data DIRECTORY"},
            "hardware": {"name": self.roofline.hardware.name, "devices": self.place.tp, "nodes": self.place.nodes},
            "engine": {
                "name": self.engine,
                "version": lane.version,
                "cuda_graphs": None if graphs is None else True,
                "graphs": graphs,
            },
            "model": {
                "name": self.model,
                "dtype": self.place.weights,
                "kv_dtype": self.place.cache,
                "tp": self.place.tp,
                "ep": self.place.ep,
            },
            "drafter": {"kind": self.costs.kind},
            "steps": table(cells, ROWS, spread),
            "draft": table(draft, (1,), spread),
            "draft_follow": table(follow, ROWS if self.costs.reads_hidden else (2,), spread),
            "prefill": list(self._prefill()),
            "overheads_ms": lane.overheads_ms.model_dump(),
            "shared_spread": SPARSE_SHARED if self.sparse else SHARED,
            "sources": list(self._sources()),
            "notes": list(self._notes()),
            "validated_against": list(self._validated()),
        }

    def _draft(self, steps: Sequence[Step]) -> tuple[dict[Any, float], dict[Any, float]]:
        places = sorted({(step.batch, step.context) for step in steps})
        if self.draft == "mtp":
            return self._mtp(steps)
        if self.draft == "eagle3":
            return self._eagle3(places)
        own = self.database.steps["h100-sxm", self.engine, self.draft, Placement()]
        ms = {(step.batch, step.context, step.q): step.ms for step in own}
        return (
            {(batch, context, 1): ms[batch, context, 1] for batch, context in places},
            {(batch, context, 2): ms[batch, context, 2] for batch, context in places},
        )

    def _mtp(self, steps: Sequence[Step]) -> tuple[dict[Any, float], dict[Any, float]]:
        """One layer of the target's, its head, and the projection of two hidden states to one (roofline)."""
        layer, costs = {}, self.costs
        sparse = self.target.shape.sparse_layers
        for step in steps:
            tokens = np.array([float(step.batch * step.q)])
            ends = float(costs.step.ends(tokens, tokens)[0])
            shared = (step.attention + step.other) / LAYERS + (step.experts + step.exchange) / sparse
            layer[step.batch, step.context, step.q] = shared + ends + 2 * self.across_us / 1e3
        return {place: ms for place, ms in layer.items() if place[2] == 1}, layer

    def _eagle3(self, places: Iterable[tuple[int, int]]) -> tuple[dict[Any, float], dict[Any, float]]:
        """After a block: the layer's products at all its rows, attention to the cache once, and the projection."""
        head = extracts.HEADS[self.model]
        own = [
            row
            for row in self.database.heads
            if (row["backend"], row["head"], int(row["tp"])) == (self.engine, head, self.place.tp)
        ]
        by_place = {(int(row["batch"]), int(row["ctx"])): row for row in own}
        tokens = sorted({int(row["batch"]) for row in own})
        step, follow = {}, {}
        for batch, context in places:
            row = by_place[batch, context]
            step[batch, context, 1] = float(row["t_draft_step_ms"])
            attention = float(row["attn_ms"])
            rest = [self._rest(by_place[each, context]) for each in tokens]
            for q in ROWS:
                follow[batch, context, q] = attention + line(batch * q, tokens, rest)
        return step, follow

    @staticmethod
    def _rest(row: dict[str, str]) -> float:
        return float(row["t_draft_step_ms"]) - float(row["attn_ms"]) + float(row["fc_ms_per_verify"])

    def _prefill(self) -> Iterator[dict[str, Any]]:
        weights = next(key for key, value in extracts.WEIGHTS.items() if value == self.place.weights)
        for tokens in PROMPTS:
            array = np.array([float(tokens)])
            key = (self.engine, self.model, self.place.tp, weights, tokens)
            tabled = self.database.prefill.get(key)
            computed = float(self.target.prompts(array, array).total[0])
            own = self.database.prefill.get((self.engine, self.draft, 1, "bfloat16", tokens))
            draft_ms = float(self.costs.follow.prompts(array, array).total[0]) if own is None else own
            yield {
                "tokens": tokens,
                "target_ms": computed if tabled is None else tabled,
                "draft_ms": draft_ms,
                "source": "roofline" if tabled is None else "interpolated",
            }

    # -- measured points -----------------------------------------------------------------------------------------------

    def _validated(self) -> Iterator[dict[str, Any]]:
        """Plain steps of this target in this place; whatever the draft. In milliseconds a token."""
        host = self.target.lane.per_sequence_us / 1e3
        for row in self.database.dense:
            same = (row.model, row.engine, row.weights, row.tp) == (
                self.model,
                self.engine,
                self.place.weights,
                self.place.tp,
            )
            if same and row.load.osl >= dense.LONG:
                name = point(f"{self.engine} {row.version or '2025-10'}", row.load)
                yield validation(name, row.measured, row.predicted["interpolated"] + host * row.running)
        if self.model == "deepseek-r1":
            yield from self._validated_r1(host)

    def _validated_r1(self, host: float) -> Iterator[dict[str, Any]]:
        if self.place.nodes > 1:
            for pair in self.database.pairs:
                if pair.engine == self.engine:
                    ms = pair.predicted_ms("interpolated", self.across_us) + host * pair.batch
                    yield validation(f"{pair.batch} requests, prompts elsewhere", pair.plain_ms, ms)
        elif self.engine == "sglang":
            for row, ms in speculative.h200_steps(self.database.points, self.roofline.roofline)["interpolated"]:
                load = Load(int(row["concurrency"]), int(row["isl"]), int(row["osl"]))
                yield validation(point("sglang 0.5.9", load), float(row["measured"]), ms + host * load.batch)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _sources(self) -> Iterator[dict[str, Any]]:
        date = datetime.now(UTC).date().isoformat()
        yield {
            "numbers": "steps, draft, draft_follow, prefill (interpolated)",
            "what": f"kernels timed by NVIDIA, {self.engine} {self.target.lane.version}, summed and composed as "
            "profiles/build.py says",
            "package": "aiconfigurator-core",
            "version": "0.12.0",
            "licence": "Apache-2.0, copyright NVIDIA CORPORATION & AFFILIATES",
            "tables": tables_of(self.sparse, self.system),
            "date": date,
        }
        for source in self.roofline.sources:
            if "overheads" in source.numbers or "per_sequence" in source.numbers or "graphs" in source.numbers:
                yield source.model_dump(exclude_none=True)

    def _notes(self) -> Iterator[str]:
        if self.place.nodes > 1:
            yield (
                f"every all-reduce between nodes takes {self.across_us:.0f} us more than the tables have, which is "
                "fitted to the points in validated_against"
            )
        if self.sparse:
            yield "prefill is a roofline's; experts are those of balanced routing, so a block costs at most this"
        elif self.draft == "eagle3":
            yield "the head's prefill is a roofline's"
        if self.engine != "sglang":
            yield "no step that drafts is published for this engine: what its host adds to one is SGLang's"


def point(engine: str, load: Load) -> str:
    return f"{engine}, {load.batch} requests, {load.isl} in, {load.osl} out, prompts of others in it"


def validation(name: str, measured: float, predicted: float) -> dict[str, Any]:
    return {"point": name, "measured_ms": measured, "predicted_ms": predicted}


def tables_of(sparse: bool, system: str) -> list[str]:
    kinds = ["gemm", "custom_allreduce", "nccl"]
    kinds += ["generation_mla", "context_mla", "moe"] if sparse else ["generation_attention", "context_attention"]
    return [f"systems/data/{system.replace('-', '_')}/{kind}_perf" for kind in kinds]


def line(x: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Linear between points, and on beyond the last two."""
    if x <= xs[-1]:
        return float(np.interp(x, xs, ys))
    return ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])


def table(cells: dict[tuple[int, int, int], float], rows: Sequence[int], spread: float) -> dict[str, Any]:
    places = sorted({(batch, context) for batch, context, _ in cells})
    return {
        "source": "interpolated",
        "spread": spread,
        "q": list(rows),
        "rows": [[batch, context, *(cells.get((batch, context, q)) for q in rows)] for batch, context in places],
    }


if __name__ == "__main__":
    main()
