"""HiddenStore: the target's final hidden states of the labelled rows of examples, computed once and kept on the disk.

An example is run alone, so that its states depend on nothing else: whether they were kept or are computed again makes
no difference, to the last bit. Legend: R labelled rows, E the target's width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.attention.dense import DenseAttention
from specctl.models import CausalLM
from specctl.train.examples import Example
from specctl.train.packing import packed

DATA, INDEX = "states.bin", "states.json"


class HiddenStates:
    """Computes the states whenever they are asked for."""

    def __init__(self, target: CausalLM, examples: Sequence[Example]) -> None:
        self._target = target
        self._examples = examples
        self._attn = DenseAttention()

    def rows(self, indices: list[int]) -> Tensor:
        """[R, E] on the target's device."""
        return torch.cat([self.example(index) for index in indices])

    @torch.no_grad()
    def example(self, index: int) -> Tensor:
        row = packed([self._examples[index]], self._target.model.norm.weight.device)
        self._attn.plan(row.batch)
        final_TE: Tensor = self._target(row.batch, self._attn).final_TD
        return final_TE[row.label_T >= 0]


class HiddenStore(HiddenStates):
    """The same, kept in `directory`. identity: of the target; what was kept for another target, or for other examples,
    is dropped. What was kept after the last sync() may be lost when the machine fails."""

    def __init__(self, target: CausalLM, examples: Sequence[Example], directory: Path, identity: str) -> None:
        super().__init__(target, examples)
        norm = target.model.norm.weight
        self._device, self._width = norm.device, len(norm)
        self._starts = [0, *accumulate(example.num_labels for example in examples)]
        self._directory = directory
        self._digest = _digest(examples, identity, str(norm.dtype))
        directory.mkdir(parents=True, exist_ok=True)
        self._kept = self._read_index()
        data = directory / DATA
        data.touch()
        # Not filled but stretched: what nobody computes takes no space.
        os.truncate(data, self.bytes_needed(examples, self._width, norm.dtype))
        self._map_RE = torch.from_file(
            str(data), shared=True, size=self._starts[-1] * self._width, dtype=norm.dtype
        ).view(-1, self._width)

    @staticmethod
    def bytes_needed(examples: Sequence[Example], width: int, dtype: torch.dtype) -> int:
        return sum(example.num_labels for example in examples) * width * dtype.itemsize

    def example(self, index: int) -> Tensor:
        kept_RE = self._map_RE[self._starts[index] : self._starts[index + 1]]
        if index in self._kept:
            return kept_RE.to(self._device, copy=True)
        found_RE = super().example(index)
        kept_RE.copy_(found_RE)
        self._kept.add(index)
        return found_RE

    def sync(self) -> None:
        """Have the disk hold what is kept, and then say so."""
        descriptor = os.open(self._directory / DATA, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary = self._directory / f"{INDEX}.partial"
        temporary.write_text(json.dumps({"digest": self._digest, "examples": sorted(self._kept)}), encoding="utf-8")
        temporary.replace(self._directory / INDEX)

    def _read_index(self) -> set[int]:
        try:
            value: dict[str, Any] = json.loads((self._directory / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return set()
        return set(value["examples"]) if value.get("digest") == self._digest else set()


def _digest(examples: Sequence[Example], identity: str, dtype: str) -> str:
    total = hashlib.sha256(f"{identity}\0{dtype}\0".encode())
    add: Callable[[bytes], None] = total.update
    for example in examples:
        add(json.dumps([example.ids, example.labels]).encode() + b"\n")
    return total.hexdigest()
