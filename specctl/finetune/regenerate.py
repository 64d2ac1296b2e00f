"""Answers by the target itself: what a draft has to learn to say. Decoded by the engine, kept as they come.

Requests are decoded in groups that always hold the same ones, and noise is keyed on the request, so that a run that was
interrupted ends up with the answers of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.finetune.data import Request
from specctl.finetune.decoding import make_engine
from specctl.finetune.progress import Bar
from specctl.finetune.states import Harvest
from specctl.pair import Target
from specctl.sampling.params import SamplingParams
from specctl.schemas.recipe import Regenerate

Answers = Mapping[str, Sequence[int]]

GROUP = 4  # times the batch: few sequences are left waiting for the longest


@dataclass(frozen=True)
class Regenerator:
    """file: where answers are kept. identity: of the target. seed: of the run. harvest: keeps what the target leaves in
    its rows."""

    target: Target
    settings: Regenerate
    file: Path
    identity: str
    seed: int
    say: Callable[[str], None]
    harvest: Harvest | None = None

    def __call__(self, requests: list[Request]) -> Answers:
        """The answer to every request, by its id; an empty one where the prompt leaves no room for any."""
        known = _Store(self.file, self._digest(requests))
        answers = known.read()
        if answers:
            self.say(f"{len(answers)} of {len(requests)} answers are there already ({self.file})")
        size = GROUP * self.settings.batch
        with Bar("answers", len(requests), "answers", done=len(answers)) as bar:
            for first in range(0, len(requests), size):
                group = requests[first : first + size]
                if all(request.id in answers for request in group):
                    continue
                found = self._answer(group, bar)
                known.add(found)
                answers |= found
        return answers

    def _answer(self, group: list[Request], bar: Bar) -> dict[str, list[int]]:
        limit = self.target.max_length
        fit = [request for request in group if 0 < len(request.ids) < limit]
        if not fit:
            bar.add(len(group))
            return {request.id: [] for request in group}
        longest = max(len(request.ids) for request in fit) + self.settings.max_tokens
        harvester = None if self.harvest is None else self.harvest.harvester
        engine = make_engine(self.target, longest, self.settings.batch, drafter=harvester)
        sequences = {}
        for request in fit:
            params = SamplingParams(
                max_tokens=self.settings.max_tokens,
                temperature=self.settings.temperature,
                top_p=self.settings.top_p,
                seed=self._noise(request),
            )
            sequences[request.id] = engine.choices(engine.add(list(request.ids), params))[0]
        bar.add(len(group) - len(fit))
        while engine.has_work:
            outputs = engine.step()
            bar.add(sum(output.finish_reason is not None for output in outputs), sum(len(o.token_ids) for o in outputs))
        if self.harvest is not None:
            for request in fit:
                self.harvest.keep(request, sequences[request.id].output)
            self.harvest.flush()
        return {request.id: sequences[request.id].output if request.id in sequences else [] for request in group}

    def _noise(self, request: Request) -> int:
        word = hashlib.sha256(f"{self.seed}\0{request.id}".encode()).digest()[:7]
        return int.from_bytes(word, "big")

    def _digest(self, requests: Sequence[Request]) -> str:
        """Of everything the answers depend on."""
        total = hashlib.sha256(json.dumps([self.identity, self.settings.model_dump(), self.seed]).encode())
        total.update(f"{self.target.dtype} {self.target.max_length}".encode())
        for request in requests:
            total.update(json.dumps([request.id, request.ids]).encode() + b"\n")
        return total.hexdigest()


class _Store:
    """A JSONL file: the digest, then a line [id, token ids] an answer."""

    def __init__(self, file: Path, digest: str) -> None:
        self._file = file
        self._digest = digest

    def read(self) -> dict[str, list[int]]:
        """What is there for this digest. A last line that was not finished is cut off; what is there for another digest
        is begun anew."""
        head = json.dumps({"digest": self._digest}) + "\n"
        lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        if not lines or lines[0].decode("utf-8", "replace") != head:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(head, encoding="utf-8")
            return {}
        answers: dict[str, list[int]] = {}
        length = len(lines[0])
        for line in lines[1:]:
            entry = _parse(line)
            if entry is None:
                break
            answers[entry[0]] = entry[1]
            length += len(line)
        os.truncate(self._file, length)
        return answers

    def add(self, answers: Mapping[str, Sequence[int]]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([key, list(ids)]) + "\n" for key, ids in answers.items())
            file.flush()
            os.fsync(file.fileno())


def _parse(line: bytes) -> tuple[str, list[int]] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else None
