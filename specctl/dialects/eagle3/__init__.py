"""EAGLE-3 heads on the disk: four layouts, one file for each with the rules of its reader.

A layout is read into a `View`, and the head is `View.head`; written by `written`, or refused with the reason. Every
reader's own account of a directory is a `View` too, so that what it would misread is the difference of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specctl.dialects.eagle3 import original, sglang, speculators, vllm
from specctl.dialects.eagle3.layouts import NAMES, Name, Stored, is_eagle3, misreadings, named_target, read, readers
from specctl.dialects.eagle3.view import View, differences
from specctl.heads.eagle3 import Eagle3Head

__all__ = [
    "NAMES",
    "Name",
    "Stored",
    "Target",
    "View",
    "differences",
    "is_eagle3",
    "misreadings",
    "named_target",
    "native",
    "read",
    "readers",
    "refusals",
    "stored_name",
    "written",
]


@dataclass(frozen=True)
class Target:
    """What layouts say about the target. Unknown fields are None."""

    name: str | None = None
    num_layers: int | None = None
    architectures: tuple[str, ...] = ()


def native(head: Eagle3Head) -> dict[str, Any]:
    """config.json as this project writes it, which vLLM reads as it is. Tensors have the module's own names, and d2t
    and t2d beside them when the vocabulary is reduced."""
    return vllm.config(head)


def refusals(layout: Name, head: Eagle3Head, target: Target) -> list[str]:
    """Why a layout cannot say this head, one sentence each; empty when it can."""
    if layout == "sglang":
        return sglang.refusals(head, target.num_layers, target.architectures)
    if layout == "original":
        return original.refusals(head, target.num_layers)
    of_vllm = vllm.refusals(head, target.architectures)  # which serves both layouts
    return of_vllm if layout == "vllm" else [*speculators.refusals(head, target.name), *of_vllm]


def written(layout: Name, head: Eagle3Head, target: Target, num_tokens: int) -> dict[str, Any]:
    """config.json of a layout that does not refuse the head. num_tokens: drafted at a time."""
    assert not refusals(layout, head, target)
    if layout == "speculators":
        assert target.name is not None
        return speculators.config(head, target.name, list(target.architectures), num_tokens)
    return {"vllm": vllm.config, "sglang": sglang.config, "original": original.config}[layout](head)


def stored_name(layout: Name, parameter: str) -> str:
    """What a layout calls a parameter of the module."""
    return speculators.name(parameter) if layout == "speculators" else parameter
