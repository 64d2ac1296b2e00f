"""Layouts of heads on the disk, one file for each reader: what it maps, skips, fills by itself and takes for
granted."""

from __future__ import annotations

from specctl.dialects import deepseek, sglang, vllm
from specctl.dialects.reading import Dialect, Reading, faults

__all__ = ["MTP", "Dialect", "Reading", "faults"]

MTP: dict[str, Dialect] = {d.name: d for d in (deepseek.DIALECT, vllm.DIALECT, sglang.DIALECT)}
