"""The directory of --engine-config: a file or two for each engine, and NOTES.md with what they leave out."""

from __future__ import annotations

from pathlib import Path

from specctl.tune.outputs.schedule import Engine, Schedule
from specctl.tune.outputs.sglang import sglang
from specctl.tune.outputs.tensorrt import tensorrt
from specctl.tune.outputs.vllm import vllm
from specctl.tune.words import of_range

NOTES = "NOTES.md"


def engines(schedule: Schedule) -> list[Engine]:
    return [vllm(schedule), sglang(schedule), tensorrt(schedule)]


def write(found: list[Engine], schedule: Schedule, policy: str, directory: Path) -> None:
    for engine in found:
        for name, text in engine.files.items():
            (directory / name).write_text(text, encoding="utf-8")
    (directory / NOTES).write_text(notes(found, schedule, policy), encoding="utf-8")


def notes(found: list[Engine], schedule: Schedule, policy: str) -> str:
    lines = [f"# {policy}, as other engines take it", "", "| batch | K |", "| --- | --- |"]
    for tier in schedule.tiers:
        lines.append(f"| {of_range([tier.low, tier.high])} | {tier.k} |")
    for engine in found:
        lines += ["", f"## {engine.name}", "", "Files: " + (", ".join(f"`{name}`" for name in engine.files) or "none")]
        lines += ["", *(f"- {note}" for note in engine.notes)] if engine.notes else []
    return "\n".join(lines) + "\n"
