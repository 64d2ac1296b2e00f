"""DeepSeekConfig: what a DeepSeek-V2, V3, R1 or V3.1 config.json says, checked; what cannot be told is refused by name.

An absent key means what it means to the model_type's published code and to transformers, where these agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specctl.errors import CheckpointError
from specctl.keys import Keys
from specctl.models.config import FOREIGN, CommonConfig, read_norm_eps
from specctl.models.quantised import read_scheme
from specctl.moe import Routing
from specctl.rope import RopeConfig


@dataclass(frozen=True)
class Generation:
    """What a model_type takes absent keys to mean."""

    scoring: Literal["softmax", "sigmoid"]
    methods: tuple[str, ...]
    q_rank: int | None = 1536
    first_dense: int = 0
    chosen: int | None = None
    groups: int = 1
    kept_groups: int = 1
    normalised: bool = False
    scale: float = 1.0


GENERATIONS = {
    "deepseek_v2": Generation(scoring="softmax", methods=("greedy", "group_limited_greedy")),
    "deepseek_v3": Generation(
        scoring="sigmoid",
        methods=("noaux_tc",),
        first_dense=3,
        chosen=8,
        groups=8,
        kept_groups=4,
        normalised=True,
        scale=2.5,
    ),
}
LOW_RANK_EPS = 1e-6
"""Of the norms inside attention, whatever rms_norm_eps is."""


@dataclass(frozen=True)
class DeepSeekConfig(CommonConfig):
    """q_rank: None for queries without a low rank. nope, rotated, value: widths of a head. interleaved: neighbours are
    rotated as pairs. first_dense: layers before it have a plain MLP. shared_inner: width of the shared experts
    together, 0 for none."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rotated: int
    value: int
    interleaved: bool
    first_dense: int
    expert_inner: int
    shared_inner: int
    routing: Routing

    @property
    def score_scale(self) -> float:
        return float(self.head_dim**-0.5) * self.rope.score_scale

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> DeepSeekConfig:
        """Read a config.json mapping. `where` names the file in errors.

        Raises CheckpointError naming the key for anything missing, malformed or not supported.
        """
        keys = Keys(config, where)
        generation = GENERATIONS[config["model_type"]]
        _refuse_unsupported(keys)
        nope, rotated = keys.integer("qk_nope_head_dim", 128), keys.integer("qk_rope_head_dim", 64)
        if rotated % 2:
            keys.refuse("qk_rope_head_dim", "expected an even number: pairs are rotated")
        inner = keys.integer("moe_intermediate_size")
        return cls(
            model_type=config["model_type"],
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=keys.integer("num_hidden_layers"),
            num_heads=keys.integer("num_attention_heads"),
            head_dim=nope + rotated,
            max_position=keys.integer("max_position_embeddings"),
            norm_eps=read_norm_eps(keys),
            tied=keys.boolean("tie_word_embeddings", False),
            rope=RopeConfig.read(config, where),
            q_rank=_q_rank(keys, generation),
            kv_rank=keys.integer("kv_lora_rank", 512),
            nope=nope,
            rotated=rotated,
            value=keys.integer("v_head_dim", 128),
            interleaved=keys.boolean("rope_interleave", True),
            first_dense=_count(keys, "first_k_dense_replace", generation.first_dense),
            expert_inner=inner,
            shared_inner=inner * _count(keys, "n_shared_experts", 0),
            routing=_routing(keys, generation),
        )


def _q_rank(keys: Keys, generation: Generation) -> int | None:
    """Null is not absent here: it means queries without a low rank."""
    if "q_lora_rank" in keys.values and keys.values["q_lora_rank"] is None:
        return None
    return keys.integer("q_lora_rank", generation.q_rank)


def _count(keys: Keys, key: str, default: int) -> int:
    return 0 if keys.values.get(key, default) == 0 else keys.integer(key, default)


def _routing(keys: Keys, generation: Generation) -> Routing:
    experts = keys.integer("n_routed_experts")
    chosen = keys.integer("num_experts_per_tok", generation.chosen)
    groups, kept = keys.integer("n_group", generation.groups), keys.integer("topk_group", generation.kept_groups)
    if keys.values.get("scoring_func") not in (None, generation.scoring):
        keys.refuse("scoring_func", f"which {keys.values['model_type']} does not have, expected {generation.scoring!r}")
    method = _method(keys, generation, groups, kept)
    if method == "greedy":
        groups = kept = 1
    group_best, size = 2 if method == "noaux_tc" else 1, experts // groups
    if experts % groups or kept > groups or chosen > size * kept or (kept < groups and size < group_best):
        raise CheckpointError(
            f"{keys.where}: num_experts_per_tok {chosen} of n_routed_experts {experts} cannot be chosen from "
            f"topk_group {kept} of n_group {groups} equal groups"
        )
    return Routing(
        experts=experts,
        chosen=chosen,
        scoring=generation.scoring,
        biased=method == "noaux_tc",
        groups=groups,
        kept_groups=kept,
        group_best=group_best,
        normalised=_normalised(keys, generation),
        scale=keys.number("routed_scaling_factor", generation.scale),
    )


def _method(keys: Keys, generation: Generation, groups: int, kept: int) -> str:
    """How experts are chosen. V3's has one way. V2's without the key is the plain one, unless the groups are there for
    the other: programs differ in which one they then use."""
    method = keys.values.get("topk_method")
    if method is None and len(generation.methods) > 1 and kept < groups:
        raise CheckpointError(
            f"{keys.where}: key topk_method is missing and n_group is {groups}, expected "
            f"{' or '.join(map(repr, generation.methods))}; the model's first config.json has it"
        )
    method = generation.methods[0] if method is None else method
    if method not in generation.methods:
        expected = " or ".join(map(repr, generation.methods))
        keys.refuse("topk_method", f"which {keys.values['model_type']} does not have, expected {expected}")
    return str(method)


def _normalised(keys: Keys, generation: Generation) -> bool:
    """V2's published code scales the weights or normalises them, other programs do both, or only scale."""
    normalised = keys.boolean("norm_topk_prob", generation.normalised)
    if normalised and generation.scoring == "softmax" and keys.number("routed_scaling_factor", 1.0) != 1.0:
        keys.refuse("norm_topk_prob", "which programs understand differently beside a routed_scaling_factor")
    return normalised


def _refuse_unsupported(keys: Keys) -> None:
    read_scheme(keys.values, keys.where)
    for key in ("attention_bias", "mlp_bias"):
        if keys.boolean(key, False):
            keys.refuse(key, "which is not supported for a DeepSeek model, expected false")
    if keys.integer("num_key_value_heads", keys.integer("num_attention_heads")) != keys.integer("num_attention_heads"):
        keys.refuse("num_key_value_heads", "expected num_attention_heads: latents are shared by all heads")
    if keys.integer("moe_layer_freq", 1) != 1:
        keys.refuse("moe_layer_freq", "expected 1: experts in some layers only are not supported")
    if keys.values.get("hidden_act", "silu") not in ("silu", "swish"):
        keys.refuse("hidden_act", "which is not supported, expected silu")
    for key in ("index_topk", "index_n_heads", "sliding_window", *FOREIGN):
        if keys.values.get(key) not in (None, 1):
            keys.refuse(key, "which models of this type do not have; is model_type right?")
