"""RUN.md: the commands that serve an exported draft, what they were checked against, and what is known of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specctl.dialects.readers import READ
from specctl.errors import CheckpointError
from specctl.export.job import Job, Proof
from specctl.schemas.draft import Acceptance

METHODS = {"llama": "draft_model", "mtp": "mtp", "eagle3": "eagle3"}
ALGORITHMS = {"llama": "STANDALONE", "mtp": "NEXTN", "eagle3": "EAGLE3"}
UNKNOWN = "TARGET"


@dataclass(frozen=True)
class Served:
    """The target in a command. revision: of a hub repository, None for the newest, and for a directory."""

    name: str
    revision: str | None

    @property
    def flags(self) -> list[str]:
        return [] if self.revision is None else ["--revision", self.revision]


def commands(job: Job, output: Path) -> dict[str, str]:
    """By engine, the exact command."""
    said = job.source.named_target
    target = Served((said.name if said is not None else None) or UNKNOWN, said.revision if said is not None else None)
    draft = str(output.expanduser().resolve())
    if job.to == "speculators":
        return {"vllm": f"vllm serve {shlex.quote(draft)}"}
    found = {}
    if job.to != "sglang":
        found["vllm"] = _vllm(job, target, draft)
    if job.to != "vllm":
        found["sglang"] = _sglang(job, target, draft)
    return found


def _vllm(job: Job, target: Served, draft: str) -> str:
    spec: dict[str, Any] = {"method": METHODS[job.source.kind], "model": draft, "num_speculative_tokens": job.k}
    words = ["vllm", "serve", target.name, *target.flags, "--speculative-config", json.dumps(spec)]
    return shlex.join(words)


def _sglang(job: Job, target: Served, draft: str) -> str:
    """The number of tokens counts the one that the target gives."""
    flags = {
        "--speculative-algorithm": ALGORITHMS[job.source.kind],
        "--speculative-draft-model-path": draft,
        "--speculative-num-steps": str(job.k),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(job.k + 1),
    }
    words = ["python", "-m", "sglang.launch_server", "--model-path", target.name, *target.flags]
    return shlex.join([*words, *(word for pair in flags.items() for word in pair)])


def check_commands(job: Job, output: Path) -> None:
    """Raises CheckpointError for a command by which the engine would draft another number of tokens than the draft is
    asked for."""
    for engine, command in commands(job, output).items():
        if (found := drafted(engine, command)) not in (None, job.k):
            raise CheckpointError(
                f"{job.source.name}: by {command!r} {READ[engine]} drafts {found} tokens at a time, expected {job.k}"
            )


def drafted(engine: str, command: str) -> int | None:
    """How many tokens an engine drafts at a time that is started so; None where the draft's own config says it."""
    given = dict(pairwise(shlex.split(command)))
    if engine == "sglang":  # one token a step, and the target's own is among those it counts
        return min(int(given["--speculative-num-steps"]), int(given["--speculative-num-draft-tokens"]) - 1)
    spec = given.get("--speculative-config")
    return None if spec is None else int(json.loads(spec)["num_speculative_tokens"])


def render(job: Job, output: Path, proof: Proof) -> str:
    """The page."""
    return "\n".join(_lines(job, output, proof)) + "\n"


def _lines(job: Job, output: Path, proof: Proof) -> Iterator[str]:
    yield from (f"# A draft of kind {job.source.kind}, for {job.to}", "", f"Exported from `{job.source.name}`.", "")
    for engine, command in commands(job, output).items():
        yield from (f"## {READ[engine].split()[0]}", "", "```", command, "```", "")
    yield from _advice(job)
    yield from ("## Target", "", *_target(job), "")
    yield from ("## What was checked", "", f"Read again by the rules of {_rules(job)}: {proof.words}.", "")
    yield from _acceptance([] if job.source.said is None else job.source.said.acceptance or [])
    if job.notices:
        yield from ("## Notes", "", *(f"- {notice}" for notice in job.notices), "")


def _advice(job: Job) -> Iterator[str]:
    yield f"{job.k} tokens are drafted at a time; SGLang counts the target's own token too, so it is told {job.k + 1}."
    if job.source.kind == "mtp" and job.to == "vllm":
        yield (
            "vLLM builds the layer from the target's config.json, which has to name num_nextn_predict_layers, and "
            "reads zeros in place of the embedding at position 0, which nobody trained: it accepts a little less there."
        )
    if job.source.kind == "llama" and job.to == "vllm":
        yield "With tensor parallelism add `draft_tensor_parallel_size`, the target's own, to the config."
    yield ""


def _target(job: Job) -> Iterator[str]:
    said = job.source.named_target
    if said is None:
        yield f"Not known: put the model that the draft was made for in the place of {UNKNOWN}."
        return
    yield f"- name: `{said.name}`" + (f", revision `{said.revision}`" if said.revision else "")
    yield f"- tensors_sha: `{said.tensors_sha}`" if said.tensors_sha else f"- config_sha: `{said.config_sha}`"


def _rules(job: Job) -> str:
    if job.to == "original":
        return "the original EAGLE-3 program"
    return READ["sglang" if job.to == "sglang" else "vllm"]


def _acceptance(measured: list[Acceptance]) -> Iterator[str]:
    yield from ("## Acceptance", "")
    if not measured:
        yield from ("Nothing was measured: `specctl bench` does.", "")
        return
    yield from (
        "The engine of specctl, before the export. The mean length counts the token that the target gives itself.",
        "",
        "| prompts | temperature | K | mean length | accepted by position |",
        "| --- | --- | --- | --- | --- |",
    )
    for each in measured:
        rates = ", ".join(f"{rate:.3f}" for rate in each.accepted_per_position)
        yield f"| {each.class_} | {each.temperature:g} | {each.k} | {each.mean_acceptance_length:.2f} | {rates} |"
    yield ""
