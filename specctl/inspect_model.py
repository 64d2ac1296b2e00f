"""What a model directory holds, and what keeps it from being served. Headers and configs are read, no model is filled.

An "error" keeps the model from running; a "warning" lets it run, but not as its owner may expect; a "note" is for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from specctl import models
from specctl.checkpoint import INDEX, LEGACY, Checkpoint, dtype_of
from specctl.convert_mtp.files import PartOfIndex, part_of_index, refuse_unfinished
from specctl.convert_mtp.inspection import MtpFacts, inspect_mtp
from specctl.dialects.eagle3 import is_eagle3
from specctl.errors import CheckpointError, RequestError
from specctl.export.inspection import Eagle3Facts, inspect_eagle3
from specctl.fp8 import E4M3
from specctl.models import CommonConfig
from specctl.models.quantised import PLAIN, Weights
from specctl.pair import has_tokenizer
from specctl.shards import TensorInfo
from specctl.text.tokenizer import Tokenizer, eos_ids

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Problem:
    """One thing found, and what to do about it."""

    severity: Severity
    what: str
    remedy: str


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says. kv_bytes_per_token: at the dtype most of the weights are in, or at the config's when these
    are quantised. latent: numbers that a token keeps in a layer for all heads, None for keys and values."""

    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    rope: str
    rope_theta: float
    tied_head: bool
    kv_bytes_per_token: int
    latent: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None


@dataclass(frozen=True)
class Census:
    """The tensors of one dtype."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class WeightFacts:
    files: int
    tensors: int
    parameters: int
    bytes: int
    dtypes: tuple[Census, ...]


@dataclass(frozen=True)
class TokenizerFacts:
    """ids: one more than the greatest token id. special: role to token. stop_ids: what ends an answer; eos_id: what the
    tokenizer itself takes to end a text."""

    kind: str
    ids: int
    special: dict[str, str]
    chat_template: bool
    eos_id: int | None
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Inspection:
    """Parts that could not be read are None, and a problem says why."""

    path: Path
    model: ModelFacts | None
    weights: WeightFacts | None
    tokenizer: TokenizerFacts | None
    problems: tuple[Problem, ...]
    mtp: MtpFacts | None = None
    eagle3: Eagle3Facts | None = None

    @property
    def servable(self) -> bool:
        return self.model is not None and self.sound

    @property
    def sound(self) -> bool:
        """Nothing is wrong with it, whether it can be served here or not."""
        return all(problem.severity != "error" for problem in self.problems)


def inspect_model(path: Path) -> Inspection:
    """Look a directory over. Nothing about the directory raises: what is wrong with it becomes a problem."""
    try:
        refuse_unfinished(path)
        part = part_of_index(path)
        checkpoint = Checkpoint(path, None if part is None else part.present)
    except CheckpointError as error:
        problem = Problem("error", str(error), "give a directory with config.json and safetensors that are whole")
        return Inspection(path, None, None, None, (problem,))
    problems: list[Problem] = []
    weights = _weights(checkpoint, problems)
    if part is None and is_eagle3(checkpoint):
        facts, findings = inspect_eagle3(checkpoint)
        problems += [Problem(*finding) for finding in findings]
        if facts is not None:
            problems.append(
                Problem("note", "an EAGLE-3 head without a target", "draft with it, for the target it is of")
            )
        tokenizer = _tokenizer(checkpoint, None, problems) if has_tokenizer(path) else None
        return Inspection(path, None, weights, tokenizer, tuple(problems), None, facts)
    mtp = inspect_mtp(checkpoint, None if part is None else part.index)
    problems += [Problem(*finding) for finding in (mtp.findings if mtp is not None else ())]
    if part is not None:
        problems.append(_partial(part, mtp))
    config = _config(checkpoint, problems, mtp, part is not None)
    model = None
    if config is not None:
        faults = _check_tensors(checkpoint, config)
        if mtp is not None and mtp.convertible and faults:  # of use for its MTP layer
            problems += [replace(fault, severity="warning") for fault in faults]
        else:
            model = _model(config, checkpoint, weights)
            problems += faults
        if config.max_length < config.max_position:
            what = f"dynamic rope is run up to {config.max_length} of {config.max_position} positions only"
            problems.append(Problem("note", what, "give the checkpoint yarn or llama3 scaling for longer texts"))
    tokenizer = _tokenizer(checkpoint, config, problems)
    once = {problem.what: problem for problem in reversed(problems)}
    return Inspection(path, model, weights, tokenizer, tuple(reversed(once.values())), mtp)


def _partial(part: PartOfIndex, mtp: MtpFacts | None) -> Problem:
    """Of a DeepSeek checkpoint the files with the MTP layer are enough to convert it."""
    number = len(part.absent)
    what = f"{number} of {number + len(part.present)} files that {INDEX} names are not there: {_few(part.absent)}"
    if mtp is not None and mtp.convertible:
        return Problem("warning", what, "fetch them to serve the model; its MTP layer can be converted without them")
    return Problem("error", what, "fetch the checkpoint again")


def _config(
    checkpoint: Checkpoint, problems: list[Problem], mtp: MtpFacts | None, partial: bool
) -> CommonConfig | None:
    """None where there is no whole target to look at, which is no problem when an MTP layer is whole."""
    is_source = mtp is not None and mtp.convertible
    if mtp is not None and mtp.whole and mtp.role == "MTP head":
        problems.append(Problem("note", "an MTP layer without a target", "draft with it, for the target it is of"))
        return None
    if is_source and partial:
        return None
    try:
        return models.read_config(checkpoint.config, str(checkpoint.path / "config.json"))
    except CheckpointError as error:
        if is_source:
            remedy = "take its MTP layer out with specctl convert-mtp, to draft in another engine"
            problems.append(Problem("note", str(error), remedy))
            return None
        problems.append(Problem("error", str(error), "use a checkpoint of a supported kind, or set the key right"))
        return None


def _model(config: CommonConfig, checkpoint: Checkpoint, weights: WeightFacts) -> ModelFacts:
    main = getattr(torch, max(weights.dtypes, key=lambda census: census.bytes).dtype)
    if main not in PLAIN:
        main = dtype_of(checkpoint.config, str(checkpoint.path / "config.json"))
    rope = config.rope
    scaled = f" x {rope.factor:g} from {rope.original_length}" if rope.kind in ("linear", "yarn", "llama3") else ""
    kept = models.ARCHITECTURES[config.model_type].kv_layer(config, "target", main)
    own = _of_deepseek(config) if isinstance(config, models.DeepSeekConfig) else {}
    return ModelFacts(
        family=config.model_type,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads if isinstance(config, models.ModelConfig) else config.num_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context=config.max_length,
        rope=rope.kind + scaled,
        rope_theta=rope.theta,
        tied_head=config.tied,
        kv_bytes_per_token=config.num_layers * kept.bytes_per_slot,
        **own,
    )


def _of_deepseek(config: models.DeepSeekConfig) -> dict[str, int]:
    routing = config.routing
    return {
        "latent": config.kv_rank + config.rotated,
        "experts": routing.experts,
        "experts_per_token": routing.chosen,
    }


def _weights(checkpoint: Checkpoint, problems: list[Problem]) -> WeightFacts:
    by_dtype: dict[torch.dtype, list[TensorInfo]] = defaultdict(list)
    for name in checkpoint.names():
        by_dtype[checkpoint.dtype(name)].append(checkpoint.info(name))
    census = tuple(
        Census(
            _name(dtype), len(found), sum(info.num_parameters for info in found), sum(info.num_bytes for info in found)
        )
        for dtype, found in sorted(by_dtype.items(), key=lambda item: -sum(info.num_bytes for info in item[1]))
    )
    if any(file.name == LEGACY for file in checkpoint.files):
        what = f"the weights are a pickle ({LEGACY}), read by the weights-only reader"
        problems.append(Problem("warning", what, "save it again as safetensors"))
    return WeightFacts(
        files=len(checkpoint.files),
        tensors=sum(part.tensors for part in census),
        parameters=sum(part.parameters for part in census),
        bytes=sum(part.bytes for part in census),
        dtypes=census,
    )


def _check_tensors(checkpoint: Checkpoint, config: CommonConfig) -> list[Problem]:
    """Compare the headers with a skeleton of the model: names and shapes on the meta device, no numbers."""
    problems: list[Problem] = []
    try:
        skeleton = models.skeleton(checkpoint, config)
        found, weights = models.weight_names(checkpoint), Weights(checkpoint)
    except CheckpointError as error:
        return [Problem("error", str(error), "put the checkpoint's own config.json beside its weights")]
    expected = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    if config.tied and models.HEAD in found:
        found.discard(models.HEAD)
        _check_tied(checkpoint, problems)
    missing = sorted(expected.keys() - found)
    surplus = sorted(found - expected.keys())
    both = sorted(expected.keys() & found)
    own = f"a {config.model_type} model of {config.num_layers} layers"
    if missing:
        remedy = "fetch the checkpoint again, or save it with all its tensors"
        if missing == [models.HEAD]:
            remedy = "set tie_word_embeddings to true if the head is the embedding, else save the head too"
        problems.append(Problem("error", f"{_count(missing, 'tensor')} missing: {_few(missing)}", remedy))
    if surplus:
        what = f"{_count(surplus, 'tensor')} not part of {own}: {_few(surplus)}"
        problems.append(
            Problem("error", what, "use a checkpoint of the plain model, or the config that goes with this one")
        )
    for name in [name for name in both if checkpoint.shape(name) != expected[name]][:3]:
        what = f"tensor {name} has shape {list(checkpoint.shape(name))}, config.json expects {list(expected[name])}"
        problems.append(Problem("error", what, "put the checkpoint's own config.json beside its weights"))
    return problems + _check_numbers(checkpoint, weights, both)


def _check_numbers(checkpoint: Checkpoint, weights: Weights, names: list[str]) -> list[Problem]:
    packed = [name for name in names if checkpoint.dtype(name) not in (*PLAIN, E4M3)]
    faults = [fault for name in names if name not in packed and (fault := weights.fault(name))]
    problems = [Problem("error", fault, "use the checkpoint that was not quantised") for fault in faults[:3]]
    if packed:
        what = f"{_count(packed, 'tensor')} stored as {_name(checkpoint.dtype(packed[0]))}: {_few(packed)}"
        problems.append(Problem("error", what, "use the checkpoint that was not quantised"))
    return problems


def _check_tied(checkpoint: Checkpoint, problems: list[Problem]) -> None:
    if models.EMBEDDING not in checkpoint:
        return
    if torch.equal(checkpoint.tensor(models.HEAD), checkpoint.tensor(models.EMBEDDING)):
        what = f"{models.HEAD} is stored although it is the embedding (tie_word_embeddings)"
        problems.append(Problem("note", what, "nothing to do: it is read once"))
    else:
        what = f"tie_word_embeddings is true but {models.HEAD} differs from {models.EMBEDDING}"
        problems.append(Problem("error", what, f"set it to false, or save the checkpoint without {models.HEAD}"))


def _tokenizer(checkpoint: Checkpoint, config: CommonConfig | None, problems: list[Problem]) -> TokenizerFacts | None:
    try:
        eos_ids(checkpoint.config, checkpoint.generation_config)
        eos_ids(checkpoint.config)
    except CheckpointError as error:
        problems.append(Problem("error", str(error), "set it to a token id, or to a list of them"))
        return None
    try:
        tokenizer = Tokenizer(checkpoint.path)
    except CheckpointError as error:
        if has_tokenizer(checkpoint.path):
            problems.append(Problem("error", str(error), "mend or replace the tokenizer's files"))
        else:
            problems.append(Problem("warning", str(error), "add them; until then prompts are token ids only"))
        return None
    facts = TokenizerFacts(
        kind=tokenizer.kind,
        ids=max(tokenizer.vocab().values(), default=-1) + 1,
        special=tokenizer.special_tokens,
        chat_template=tokenizer.has_chat_template,
        eos_id=tokenizer.eos_id,
        stop_ids=eos_ids(checkpoint.config, checkpoint.generation_config, tokenizer.eos_id),
    )
    _check_template(tokenizer, problems)
    _check_tokenizer(facts, eos_ids(checkpoint.config), config, problems)
    return facts


def _check_template(tokenizer: Tokenizer, problems: list[Problem]) -> None:
    if not tokenizer.has_chat_template:
        what = "the tokenizer has no chat template, so prompts cannot be given as messages"
        problems.append(Problem("warning", what, "put chat_template.jinja beside the tokenizer, or give plain prompts"))
        return
    try:
        tokenizer.chat([{"role": "user", "content": "Hello"}])
    except RequestError as error:
        problems.append(Problem("warning", f"a question of one message: {error}", "mend the chat template"))


def _check_tokenizer(
    facts: TokenizerFacts, by_config: tuple[int, ...], config: CommonConfig | None, problems: list[Problem]
) -> None:
    if not facts.stop_ids:
        what = "no file names an end-of-text token, so every answer runs to its longest length"
        problems.append(Problem("warning", what, "set eos_token_id in generation_config.json"))
    elif facts.eos_id is not None and facts.eos_id not in facts.stop_ids:
        what = f"the tokenizer's own end of text is {facts.eos_id}, but an answer ends at {_ids(facts.stop_ids)} only"
        problems.append(Problem("warning", what, f"list {facts.eos_id} in eos_token_id of generation_config.json"))
    if by_config and set(by_config) != set(facts.stop_ids):
        what = f"eos_token_id is {_ids(by_config)} in config.json and {_ids(facts.stop_ids)} in generation_config.json"
        problems.append(
            Problem("note", what, "generation_config.json is followed; give both the same ids if that is wrong")
        )
    if config is not None and facts.ids > config.vocab_size:
        what = f"the tokenizer has ids up to {facts.ids - 1}, the model has rows for {config.vocab_size}"
        problems.append(
            Problem("warning", what, "a prompt with an id beyond the rows is refused; use the model's own tokenizer")
        )
    if config is not None and facts.ids < config.vocab_size:
        what = f"the vocabulary is padded: {config.vocab_size} rows for {facts.ids} token ids"
        problems.append(
            Problem("note", what, "nothing to do: target and draft are compared over the ids that both have")
        )


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun} is" if len(names) == 1 else f"{len(names)} {noun}s are"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
