"""A reduced draft vocabulary: which target ids a head's rows stand for, and how files say so.

In files d2t is what is added to a row's number to get its target id, int64 [D], and t2d says of every target id whether
it is among them, bool [V]. Rows are in the order of their ids. Legend: D rows of the head, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.errors import CheckpointError

D2T, T2D = "d2t", "t2d"


def offsets(ids_D: Tensor) -> Tensor:
    """d2t of these target ids."""
    return ids_D - torch.arange(len(ids_D), device=ids_D.device)


def members(ids_D: Tensor, vocab_size: int) -> Tensor:
    """t2d of these target ids."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=ids_D.device)
    mask_V[ids_D] = True
    return mask_V


def read_ids(d2t_D: Tensor, t2d_V: Tensor | None, num_rows: int, vocab_size: int, where: str) -> Tensor:
    """The target ids of a head's rows, int64 [D], checked. `where` names the file in errors.

    Raises CheckpointError for a d2t of another length, ids outside the target's vocabulary, ids that occur twice or out
    of order (which is what absolute ids or a table of another kind come to), and a t2d that says something else.
    """
    if d2t_D.dim() != 1 or len(d2t_D) != num_rows or d2t_D.is_floating_point():
        raise CheckpointError(
            f"{where}: d2t is {str(d2t_D.dtype).removeprefix('torch.')} {list(d2t_D.shape)}, the head has {num_rows} "
            f"rows, expected int64 [{num_rows}]"
        )
    ids_D = d2t_D.long() + torch.arange(num_rows)
    if bool(((ids_D < 0) | (ids_D >= vocab_size)).any()):
        row = int(((ids_D < 0) | (ids_D >= vocab_size)).nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t gives row {row} the target id {int(ids_D[row])} (row + d2t), the target has {vocab_size} "
            f"ids{_absolute(d2t_D, vocab_size)}"
        )
    if bool((ids_D.diff() <= 0).any()):
        row = int((ids_D.diff() <= 0).nonzero()[0]) + 1
        raise CheckpointError(
            f"{where}: d2t gives row {row} the target id {int(ids_D[row])} after {int(ids_D[row - 1])}, expected rows "
            f"in the order of their ids, each once{_absolute(d2t_D, vocab_size)}"
        )
    if t2d_V is not None:
        _check_members(t2d_V, ids_D, vocab_size, where)
    return ids_D


def most_frequent(counts_V: Sequence[int], size: int, always: Sequence[int]) -> Tensor:
    """The `size` ids that occur most often, those of `always` among them whatever they count; int64 [D], in order.

    Among equals the lower id comes first, so that everybody who counted the same chooses the same.
    """
    kept = set(list(dict.fromkeys(always))[:size])
    for index in sorted(range(len(counts_V)), key=lambda index: (-counts_V[index], index)):
        if len(kept) >= size:
            break
        kept.add(index)
    return torch.tensor(sorted(kept), dtype=torch.int64)


def _absolute(d2t_D: Tensor, vocab_size: int) -> str:
    """What a table of ids in place of offsets looks like."""
    ids_D = d2t_D.long()
    inside = bool(((ids_D >= 0) & (ids_D < vocab_size)).all())
    return "; it looks like a table of ids, not of offsets" if inside and bool((ids_D.diff() > 0).all()) else ""


def _check_members(t2d_V: Tensor, ids_D: Tensor, vocab_size: int, where: str) -> None:
    if t2d_V.dtype != torch.bool or list(t2d_V.shape) != [vocab_size]:
        raise CheckpointError(
            f"{where}: t2d is {str(t2d_V.dtype).removeprefix('torch.')} {list(t2d_V.shape)}, expected bool "
            f"[{vocab_size}]"
        )
    wrong_V = t2d_V != members(ids_D, vocab_size)
    if bool(wrong_V.any()):
        index = int(wrong_V.nonzero()[0])
        says = "in" if bool(t2d_V[index]) else "not in"
        raise CheckpointError(f"{where}: t2d says id {index} is {says} the draft's vocabulary, d2t says otherwise")
