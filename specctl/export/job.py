"""An export decided: what is written, and what has to hold of it afterwards. What the kinds have in common."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specctl.checkpoint import COMPANIONS, INDEX, SINGLE, Checkpoint
from specctl.errors import CheckpointError
from specctl.export.source import Draft, Engine
from specctl.models import CommonConfig
from specctl.models.config import spelled
from specctl.models.quantised import PLAIN
from specctl.output import to_json
from specctl.pair import free_memory
from specctl.schemas.base import Provenance
from specctl.schemas.draft import FACTS, DraftFile, Head
from specctl.shard_writer import Entry, write_shards, write_synced

TOLERANCE = 1e-5
RUN = "RUN.md"


@dataclass(frozen=True)
class Proof:
    """How the written directory was found to be the draft. difference: the largest between logits, None where these
    would not have fitted into memory; the numbers of every tensor were compared in any case. rows: logits that were
    compared."""

    difference: float | None
    rows: int

    @property
    def words(self) -> str:
        bits = "every tensor is the draft's bit for bit"
        if self.difference is None:
            return f"{bits}; logits were not compared, the draft does not fit into memory twice"
        return f"{bits}, and {self.rows} rows of logits differ by at most {self.difference:.1g}"


@dataclass(frozen=True)
class Job(ABC):
    """source: the draft. notices: what the user should know."""

    source: Draft
    to: Engine
    config: dict[str, Any] = field(repr=False)
    entries: tuple[Entry, ...] = field(repr=False)
    notices: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.info.num_bytes for entry in self.entries)

    @property
    @abstractmethod
    def head(self) -> Head | None:
        """As specctl.json has it."""

    @property
    @abstractmethod
    def k(self) -> int:
        """Drafted tokens at a time, in commands."""

    @abstractmethod
    def prove(self, directory: Path) -> Proof:
        """Open what was written as its reader does. Raises CheckpointError naming the first tensor, flag or number
        that is not the draft's."""

    def write(self, directory: Path, progress: Callable[[int], object]) -> None:
        """Weights and config.json, into an empty directory."""
        files = set(write_shards(directory, self.entries, stem="model", progress=progress).values())
        if len(files) == 1:  # as everybody calls a single file, which then needs no index
            (directory / files.pop()).rename(directory / SINGLE)
            (directory / INDEX).unlink()
        write_synced(directory / "config.json", to_json(self.config) + "\n")

    def companions(self, directory: Path) -> None:
        """Tokenizer and generation config, where the draft has them."""
        for name in COMPANIONS:
            if (self.source.path / name).is_file() and not (directory / name).exists():
                shutil.copyfile(self.source.path / name, directory / name)

    def recipe(self, directory: Path) -> dict[str, Any]:
        """How the draft was made, with this step behind the others."""
        said = self.source.said
        made = dict(said.recipe) if said is not None and said.recipe is not None else {}
        return made | {"export": {"source": self.source.name, "to": self.to}}

    def facts(self, directory: Path) -> dict[str, Any]:
        """specctl.json: what was known of the draft, and where it is from now."""
        said, provenance = self.source.said, Provenance.here("cpu")
        facts = DraftFile(
            provenance=provenance,
            kind=self.source.kind,
            head=self.head,
            target=self.source.named_target,
            data_sha=None if said is None else said.data_sha,
            recipe=self.recipe(directory),
            versions={package: getattr(provenance, package) for package in ("specctl", "torch", "transformers")},
            acceptance=None if said is None else said.acceptance,
        )
        value: dict[str, Any] = facts.model_dump(mode="json", by_alias=True)
        return value


def write_facts(job: Job, directory: Path) -> None:
    facts = job.facts(directory)
    (directory / FACTS).unlink(missing_ok=True)
    write_synced(directory / FACTS, to_json(facts) + "\n")


def copied(checkpoint: Checkpoint, names: Mapping[str, str]) -> Iterator[Entry]:
    """Tensors as they are stored. names: in the source, to what they are called in the output."""
    for stored, written in names.items():
        yield Entry(written, checkpoint.info(stored), partial(_whole, checkpoint, stored))


def _whole(checkpoint: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    yield checkpoint.tensor(name)


def compare_configs(
    draft: str, ours: CommonConfig, theirs: CommonConfig, reader: str, leaving_out: Collection[str] = ()
) -> None:
    """Raises CheckpointError naming the first key that a reader takes for something else."""
    said = spelled(theirs, leaving_out)
    for key, value in spelled(ours, leaving_out).items():
        if said.get(key) != value:
            raise CheckpointError(f"{draft}: {reader} takes {key} for {said.get(key)}, the draft has {value}")


def compare_tensors(
    source: Checkpoint, written: Checkpoint, names: Mapping[str, str], reader: str, parameters: Mapping[str, str]
) -> None:
    """Hold what a reader fills its parameters with against the source. names: of the parameters in the source;
    parameters: the same in the output, by that reader's rules."""
    for parameter, ours in names.items():
        theirs = parameters.get(parameter)
        if theirs is None:
            raise CheckpointError(f"{written.path}: {reader} fills parameter {parameter} with nothing")
        one, other = source.tensor(ours), written.tensor(theirs)
        if not _same(one, other):
            raise CheckpointError(
                f"{written.path}: {reader} would read other numbers in tensor {theirs} than in {ours}"
            )


def fits_twice(num_parameters: int) -> bool:
    """Whether so many numbers in float32 fit into memory beside what was made of them."""
    return 3 * 4 * num_parameters < free_memory(torch.device("cpu"))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, or number for number in a wider dtype."""
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype and {one.dtype, other.dtype} <= set(PLAIN):
        return torch.equal(one.double(), other.double())
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
