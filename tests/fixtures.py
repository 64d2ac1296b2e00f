"""Fixtures that any test may use. tests/conftest.py imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from serving import Launcher

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(tiny.llama, seed=1) writes that checkpoint once a run and returns its directory. Do not write into it."""
    made: dict[str, Path] = {}

    def write(function: Callable[..., Path], **arguments: Any) -> Path:
        key = repr((function.__module__, function.__name__, sorted(arguments.items())))
        if key not in made:
            made[key] = function(tmp_path_factory.mktemp(function.__name__) / "model", **arguments)
        return made[key]

    return write


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts servers; see tests/serving.py."""
    from serving import Launcher

    launcher = Launcher(tmp_path_factory.mktemp("servers"))
    yield launcher
    launcher.close()
