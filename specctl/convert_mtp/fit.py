"""Does an MTP layer fit a target? Sizes, rope, routing and vocabulary, compared before anything is written.

An engine builds the layer from the target's config alone, so what the layer was trained with has to be the same there:
a rope that differs changes no shape, and nothing but acceptance would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from specctl.convert_mtp.source import Source
from specctl.errors import CheckpointError, IncompatiblePair
from specctl.heads.mtp import MtpConfig
from specctl.rope import RopeConfig

# MtpConfig's fields by their keys in config.json; the number of layers is compared by itself.
_SIZES = {
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "experts": "n_routed_experts",
    "expert_width": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
}
# Keys that change what the same tensors compute, with what an absent one means in a DeepSeek-V3 config.
_MEANINGS: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_interleave": True,
}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def check_target(source: Source, config: Mapping[str, Any], where: str) -> None:
    """Raises IncompatiblePair naming the first key of the target's config that is not as the layer has it."""
    for key, ours, theirs in _differences(source, config, where):
        raise IncompatiblePair(f"{where}: {key} is {theirs}, the MTP layer of {source.where} has {ours}")


def _differences(source: Source, config: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any, Any]]:
    file = str(Path(where) / "config.json")
    mtp = MtpConfig.read(config, file)
    for field, key in _SIZES.items():
        if (ours := getattr(source.mtp, field)) != (theirs := getattr(mtp, field)):
            yield key, ours, theirs
    if source.num_layers is not None and mtp.num_layers != source.num_layers:
        yield "num_hidden_layers", source.num_layers, mtp.num_layers
    for key, default in _MEANINGS.items():
        ours, theirs = (default if c.get(key) is None else c[key] for c in (source.config, config))
        if ours != theirs:
            yield key, ours, theirs
    yield from _rope_differences(source, config, file)


def _rope_differences(source: Source, config: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any, Any]]:
    """Of both spellings, rope_scaling and rope_parameters. The length counts where the frequencies depend on it."""
    if all(source.config.get(key) == config.get(key) for key in _ROPE):
        return
    ours = asdict(_rope(source.config, str(Path(source.where) / "config.json")))
    theirs = asdict(_rope(config, where))
    for field in fields(RopeConfig):
        if field.name == "original_length" and ours["kind"] == "default":
            continue
        if ours[field.name] != theirs[field.name]:
            yield f"rope ({field.name})", ours[field.name], theirs[field.name]


def _rope(config: Mapping[str, Any], where: str) -> RopeConfig:
    """A DeepSeek config as it stands: its rotated part of a head is a dimension of its own, not a factor."""
    return RopeConfig.read({"max_position_embeddings": 163840} | _without_null(config), where)


def _without_null(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None and key != "partial_rotary_factor"}


def check_tokenizers(source: Source, target: Path) -> str | None:
    """Compare the vocabularies, token by token. Returns what the user should know where they cannot be compared.

    Raises IncompatiblePair naming the first token id that means different things.
    """
    ours, theirs = source.files.path, target
    for path in (ours, theirs):
        if not any((path / name).is_file() for name in _TOKENIZERS):
            return f"{path} has no tokenizer: its token ids are taken to be those of the other model"
    if any(_same_file(ours / name, theirs / name) for name in _TOKENIZERS):
        return None
    from specctl.text.tokenizer import Tokenizer
    from specctl.text.vocabulary import check_vocabularies

    try:
        tokenizers = Tokenizer(theirs), Tokenizer(ours)
    except CheckpointError as error:
        return f"the tokenizers are not compared: {error}"
    try:
        check_vocabularies(*tokenizers, source.mtp.vocab, source.mtp.vocab)
    except IncompatiblePair as error:
        what = str(error).replace("in the draft", f"in {ours}")
        raise IncompatiblePair(f"{theirs}: its tokenizer is not that of the MTP layer: {what}") from None
    return None


def _same_file(first: Path, second: Path) -> bool:
    """Whether both are there with the same bytes."""
    try:
        return first.stat().st_size == second.stat().st_size and first.read_bytes() == second.read_bytes()
    except OSError:
        return False
