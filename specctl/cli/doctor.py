"""`specctl doctor`: what is installed here and what works, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from specctl.cli.options import json_option
from specctl.cli.show import pairs, size

if TYPE_CHECKING:
    from specctl.doctor import Device, Diagnosis, Package


@click.command
@json_option
def command(as_json: bool) -> None:
    """Tell what is installed on this machine, which devices and attention backends work and, if one does not, why; and
    what is missing for what.

    Exit code 3 when something specctl cannot do without is missing, else 0.
    """
    from specctl.doctor import diagnose
    from specctl.output import to_json

    diagnosis = diagnose()
    click.echo(to_json(_as_json(diagnosis)) if as_json else pairs(_rows(diagnosis)))
    for package in diagnosis.missing:
        click.echo(f"Missing: {_package(package)}; pip install '{package.name}{package.needed}'", err=True)
    if diagnosis.missing:
        raise click.exceptions.Exit(3)


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {**asdict(diagnosis), "ok": not diagnosis.missing}


def _rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    cpu = diagnosis.cpu
    yield "specctl", f"{diagnosis.specctl} on Python {diagnosis.python}, {diagnosis.platform}"
    for package in diagnosis.packages:
        yield "", _package(package)
    yield "processor", f"{cpu.model}, {cpu.threads} threads to use"
    yield (
        "",
        f"torch uses {cpu.capability or 'nothing'}; has {' '.join(cpu.flags) or 'no vector instructions known here'}",
    )
    yield (
        "",
        "weights are packed for few rows" if cpu.packed_linear else "no oneDNN: weights are not packed for few rows",
    )
    for label, device in zip(_labels("devices", len(diagnosis.devices)), diagnosis.devices, strict=True):
        yield label, _device(device)
    for label, backend in zip(_labels("attention", len(diagnosis.attention)), diagnosis.attention, strict=True):
        yield label, f"{backend.name}: {'works' if backend.why_not is None else f'no: {backend.why_not}'}"
    for label, extra in zip(_labels("extras", len(diagnosis.extras)), diagnosis.extras, strict=True):
        yield label, f"{extra.name}: {extra.purpose}"
        missing = f"missing {', '.join(extra.missing)}: {' && '.join(extra.remedy)}"
        yield "", f"  {missing if extra.missing else 'there'}"


def _labels(first: str, count: int) -> list[str]:
    return [first, *[""] * (count - 1)]


def _package(package: Package) -> str:
    found = package.installed or "not installed"
    return f"{package.name} {found}" + ("" if package.ok else f", needed {package.needed or 'in any version'}")


def _device(device: Device) -> str:
    known = [f"{size(device.free)} free" if device.free is not None else "", f"of {size(device.memory or 0)}"]
    return f"{device.name}: {device.model}, " + (" ".join(known) if device.memory is not None else "memory unknown")
