"""The MTP layer's copies of the target's embedding and head: equal to it or not, and whether they are written.

A copy is left out only where it is bit for bit the target's, since a reader then fills it; one that differs was trained
by itself and is never replaced unasked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.convert_mtp.inventory import Inventory
from specctl.errors import CheckpointError, UsageError
from specctl.heads.mtp import SHARED
from specctl.shards import TensorInfo

Wish = Literal["auto", "copy", "omit"]
State = Literal["absent", "equal", "equal in samples", "differs", "unknown"]
SAMPLES, SAMPLE = 1024, 4096  # how many pieces of how many bytes a quick look takes


class Tensors(Protocol):
    """A checkpoint, or a target that is being changed: what gives tensors by name."""

    @property
    def path(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def info(self, name: str) -> TensorInfo: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Original:
    """A tensor of the target."""

    checkpoint: Tensors
    name: str

    def tensor(self) -> Tensor:
        return self.checkpoint.tensor(self.name)


@dataclass(frozen=True)
class Copy:
    """One copy in one layer. kept: whether it is written."""

    layer: int
    name: str
    state: State
    kept: bool


def find_originals(checkpoint: Checkpoint, names: dict[str, str], target: Tensors | None = None) -> dict[str, Original]:
    """The target's embedding and head by the names of their copies: from `target` when given, else from the source.

    names: what they are called in the source. A target that ties them has no head of its own.
    """
    if target is None:
        return {copy: Original(checkpoint, name) for copy, name in names.items() if name in checkpoint}
    found: dict[str, Original] = {}
    for copy, name in SHARED.items():
        for option in (name, name.removeprefix("model.")):
            if option in target:
                found[copy] = Original(target, option)
    return found


def compare(
    checkpoint: Checkpoint, inventory: Inventory, originals: dict[str, Original], *, quick: bool = False
) -> dict[str, State]:
    """What each copy of a layer is. quick: of a large one, pieces all over it are compared."""
    found: dict[str, State] = {}
    weights = {part.name: part.weight for part in inventory.parts}
    for name in SHARED:
        if name not in weights:
            found[name] = "absent"
        elif name not in originals:
            found[name] = "unknown"
        else:
            found[name] = _compare(checkpoint.tensor(weights[name]), originals[name].tensor(), quick)
    return found


def decide(inventory: Inventory, states: dict[str, State], wish: Wish, originals: dict[str, Original]) -> list[Copy]:
    """Which copies are written. Raises UsageError when one is wanted that nothing can give."""
    keep: dict[Wish, Callable[[State], bool]] = {
        "auto": lambda state: state in ("differs", "unknown"),
        "copy": lambda state: True,
        "omit": lambda state: False,
    }
    copies = [Copy(inventory.number, name, state, keep[wish](state)) for name, state in states.items()]
    for copy in copies:
        if copy.kept and copy.state == "absent" and copy.name not in originals:
            raise UsageError(
                f"--shared copy: layer {copy.layer} has no {copy.name} and the target's is not here; give --target"
            )
    return copies


def _compare(first: Tensor, second: Tensor, quick: bool) -> State:
    if quick and first.nbytes > 2 * SAMPLES * SAMPLE:
        return "equal in samples" if first.nbytes == second.nbytes and _same_samples(first, second) else "differs"
    return "equal" if same_bits(first, second) else "differs"


def _same_samples(first: Tensor, second: Tensor) -> bool:
    step = (first.nbytes - SAMPLE) // (SAMPLES - 1)
    pieces = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (first, second)]
    starts = range(0, first.nbytes - SAMPLE + 1, step)
    return all(torch.equal(*(piece[start : start + SAMPLE] for piece in pieces)) for start in starts)


def same_bits(first: Tensor, second: Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
    )


def check_originals(originals: dict[str, Original], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError when the target's embedding or head has another shape than the layer's."""
    for name, original in originals.items():
        found = original.checkpoint.shape(original.name)
        if found != shapes[name]:
            raise CheckpointError(
                f"{original.checkpoint.path}: {original.name} has shape {list(found)}, the MTP layer's is "
                f"{list(shapes[name])}: they are not of one model"
            )
