"""What every file of ours has in common: how it is read, how its errors sound, and where its numbers come from."""

from __future__ import annotations

import difflib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

import specctl
from specctl.errors import UsageError

Model = TypeVar("Model", bound="Checked")
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def _number(value: Any) -> Any:
    """1e-4 is a string to YAML 1.1, which wants 1.0e-4; it is a number to everybody else."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_number)]


class Checked(BaseModel):
    """A frozen value whose every key is known and whose every number is a number of the declared kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)


class Provenance(Checked):
    """Where numbers come from. A file without it is a rumour."""

    specctl: str
    torch: str | None
    transformers: str | None
    device: str
    threads: int | None
    command: str
    date: str

    @classmethod
    def here(cls, device: str = "cpu", threads: int | None = None) -> Self:
        """Of this process, now. device: "cpu", or "cuda:i", which is told by its name."""
        return cls(
            specctl=specctl.__version__,
            torch=_installed("torch"),
            transformers=_installed("transformers"),
            device=_device_name(device),
            threads=threads,
            command=shlex.join(["specctl", *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class Document(Checked):
    """A file: `schema` names the form and its version, e.g. "specctl.report/1"."""

    schema_: str = Field(alias="schema")
    provenance: Provenance | None = None


def read_document(path: Path, model: type[Model]) -> Model:
    """A YAML or JSON file as a checked model.

    Raises UsageError naming the file, the key, what was expected, and the key that was probably meant.
    """
    try:
        return model.model_validate(read_mapping(path))
    except ValidationError as error:
        raise UsageError(f"{path}: {explain(error, model)}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file's keys and values, not checked any further."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        # JSON numbers like 1e-5 are strings to YAML, so each format gets its own reader.
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be parsed: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected keys and values, found {type(value).__name__ if value else 'nothing'}")
    return value


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a validation in one sentence."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = sorted(_keys(_model_at(model, fault["loc"][:-1])))
        meant = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        return f"key {where} is unknown" + (f"; did you mean {meant[0]}?" if meant else f" (known: {', '.join(known)})")
    if fault["type"] == "missing":
        return f"key {where} is missing"
    message = fault["msg"][:1].lower() + fault["msg"][1:]
    if not where:  # of several keys together, which the message names
        return message.removeprefix("value error, ")
    return f"{where} is {_brief(fault['input'])}: {message}"


def _model_at(model: type[BaseModel], loc: Iterable[int | str]) -> type[BaseModel]:
    """The model of the object at a place in the file."""
    for key in loc:
        for name, field in model.model_fields.items():
            if key == (field.alias or name):
                parts = (field.annotation, *getattr(field.annotation, "__args__", ()))
                models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
                model = models[0] if models else model
    return model


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"cpu: {_cpu_model()}, {os.cpu_count()} cores"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
