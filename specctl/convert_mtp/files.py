"""Where a checkpoint's files are: in a directory, or on the hub, from where only those that are asked for are
fetched."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from specctl.checkpoint import INDEX, SINGLE, Checkpoint, weight_map
from specctl.errors import CapacityError, CheckpointError
from specctl.hub import hub_errors, hub_id

# Inside a directory that is changed in place: what is to replace its files, and the journal once that is complete.
STAGING, JOURNAL = ".specctl-mtp", "journal.json"


@dataclass(frozen=True)
class Files:
    """name: as the user wrote it. path: the directory; of a hub repository the part of it that is here. index: which
    file each tensor is in, None for a directory without an index, whose files are all taken. remote: repository and
    commit, None for a directory."""

    name: str
    path: Path
    index: dict[str, str] | None
    remote: tuple[str, str] | None = None

    @property
    def revision(self) -> str | None:
        return self.remote[1] if self.remote else None

    def size(self, file: str) -> int:
        """A file's bytes, asked of the hub when it is not here."""
        if (self.path / file).is_file() or self.remote is None:
            return _size(self.path / file)
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        repo, commit = self.remote
        with hub_errors(repo, commit):
            size = get_hf_file_metadata(hf_hub_url(repo, file, revision=commit)).size
        if size is None:
            raise CheckpointError(f"{self.name}: the hub does not say how long {file} is; fetch it by hand")
        return size

    def is_here(self, file: str) -> bool:
        return (self.path / file).is_file()

    def open(self, files: Collection[str] | None = None) -> Checkpoint:
        """The checkpoint, or these of its files, fetched if need be. Raises CapacityError when they do not fit."""
        if self.remote is not None and files is not None:
            self._fetch(sorted(files))
        return Checkpoint(self.path, files)

    def _fetch(self, files: list[str]) -> None:
        from huggingface_hub import constants, hf_hub_download

        assert self.remote is not None
        repo, commit = self.remote
        missing = {file: self.size(file) for file in files if not self.is_here(file)}
        check_disk(Path(constants.HF_HUB_CACHE), sum(missing.values()), "the shards to fetch")
        with hub_errors(repo, commit):
            for file in missing:
                hf_hub_download(repo, file, revision=commit)


@dataclass(frozen=True)
class PartOfIndex:
    """A directory in which some of the files are that its index names."""

    index: dict[str, str]
    present: list[str]
    absent: list[str]


def part_of_index(path: Path) -> PartOfIndex | None:
    """None when all of the files are there, or none of them, or there is no index."""
    if not (path / INDEX).exists():
        return None
    index = weight_map(path / INDEX)
    files = sorted(set(index.values()))
    present = [name for name in files if (path / name).is_file()]
    if not present or len(present) == len(files):
        return None
    return PartOfIndex(index, present, [name for name in files if name not in set(present)])


def find_files(model: str) -> Files:
    """The files of a directory or hub id. Of the hub, only config and index are fetched here.

    Raises CheckpointError when there is no such model or its index is wrong.
    """
    path = Path(model).expanduser()
    if not model or not path.exists():
        return _of_hub(model)
    if not path.is_dir():
        raise CheckpointError(f"{model}: is a file; expected a model directory or a hub id like org/name")
    refuse_unfinished(path)
    return Files(model, path, weight_map(path / INDEX) if (path / INDEX).exists() else None)


def refuse_unfinished(path: Path) -> None:
    """Raises CheckpointError for a directory in which files are just being replaced."""
    if (path / STAGING / JOURNAL).exists():
        raise CheckpointError(
            f"{path}: a run of convert-mtp --in-place was killed while it replaced files here; run it again, which "
            "finishes that first"
        )


def check_disk(place: Path, num_bytes: int, what: str) -> None:
    """Raises CapacityError when `num_bytes` do not fit where `place` is or will be."""
    at = place.expanduser().absolute()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    if num_bytes > free:
        raise CapacityError(
            f"{place}: {what} are {num_bytes} bytes and {free} are free; free some or name another disk"
        )


def _of_hub(model: str) -> Files:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repo, revision = hub_id(model)
    with hub_errors(repo, revision):
        try:
            config = Path(hf_hub_download(repo, "config.json", revision=revision))
        except EntryNotFoundError:
            raise CheckpointError(f"{model}: the hub repository has no config.json, expected a checkpoint") from None
    commit = config.parent.name  # a snapshot's directory is named so
    with hub_errors(repo, commit):
        try:
            index = Path(hf_hub_download(repo, INDEX, revision=commit))
        except EntryNotFoundError:
            hf_hub_download(repo, SINGLE, revision=commit)
            return Files(model, config.parent, None, (repo, commit))
    return Files(model, config.parent, weight_map(index), (repo, commit))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise CheckpointError(f"{path}: is in the index and not there; fetch the checkpoint again") from None
