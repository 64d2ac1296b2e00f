"""MODEL on a command line -> a local directory. It knows where models are, nothing about what is in them.

Of a hub repository only data is fetched: configs, tokenizers, chat templates and safetensors; never code or pickles.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specctl.errors import CapacityError, CheckpointError, SpecctlError

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def locate(model: str, *, weights: bool = True) -> Path:
    """The directory of `model`: a local directory, or a hub id `org/name[@revision]`, fetched when it is not yet here;
    without its weights when they are not wanted.

    Raises CheckpointError when there is no such directory and none can be had; CapacityError when the disk is full.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if model and path.exists():
        raise CheckpointError(f"{model}: is a file; expected a model directory or a hub id like org/name")
    repo, revision = hub_id(model)
    with hub_errors(repo, revision):
        from huggingface_hub import snapshot_download

        ignored = ["*/*"] if weights else ["*/*", "*.safetensors"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(WANTED), ignore_patterns=ignored))


def hub_id(model: str) -> tuple[str, str | None]:
    """Repository and revision of `org/name[@revision]`. Raises CheckpointError for what is written otherwise."""
    found = _HUB_ID.fullmatch(model)
    if found is None or ".." in model:
        raise CheckpointError(f"{model}: no such directory; expected a model directory or a hub id like org/name")
    return found["repo"], found["revision"]


def identity(model: str, path: Path) -> tuple[str, str | None]:
    """What files call a model that was found in `path`, so that it is found from anywhere: an absolute path, or a
    repository and its commit; the revision asked for where the directory does not tell the commit."""
    if Path(model).expanduser().is_dir():
        return str(path.expanduser().resolve()), None
    repo, revision = hub_id(model)
    return repo, path.name if path.parent.name == "snapshots" else revision


@contextmanager
def hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """What the hub's client raises in the block, as a sentence of ours."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except GatedRepoError:
        raise CheckpointError(f"{name}: access to this hub repository has to be asked for and a token set") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name}: the hub repository {repo} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{name}: neither a local directory nor a repository on the hub") from None
    except SpecctlError:
        raise
    except Exception as error:  # noqa: BLE001 - the client's transport errors share no base class
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise CapacityError(f"{name}: no disk space left for the download; free some or set HF_HOME") from None
        raise CheckpointError(
            f"{name}: no such directory, not among the models already fetched, and the hub does not answer "
            f"({type(error).__name__}); give a local directory or connect and try again"
        ) from None
