"""The MTP layer of DeepSeek-V3, R1 and V3.1: every tensor it has, with shape and role, from config.json alone.

Names here are without the layer's prefix. Which file a tensor is in, and what an engine makes of it, is not known here.

The layer reads the embedding of token i + 1 and the target's hidden state of position i after the target's last norm:
eh_proj takes [enorm(embedding) ; hnorm(hidden)], the embedding in the first columns. What shared_head.norm gives goes
to the head, and back into the layer when more than one token is drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specctl.keys import Keys

EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"
# The target's own tensors that these two are copies of.
SHARED = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
BIAS_LEAF = "e_score_correction_bias"
BIAS = f"mlp.gate.{BIAS_LEAF}"
SCALE = "_scale_inv"
# What tells this layer from the layers of the target.
MARKS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
MAX_LAYERS = 64  # of the MTP kind; no checkpoint has more than a few

# plain: kept in bfloat16; matrix: may be FP8 with a scale; bias: float32; copy: plain, and may be absent.
Role = Literal["plain", "matrix", "bias", "copy"]

HEAD_FACTS: dict[str, Any] = {
    "reads": "final",
    "taps": [],
    "norms": {"embedding": "enorm", "hidden": "hnorm", "output": "shared_head.norm", "order": "embedding, hidden"},
    "vocabulary": None,
    "feedback": "after the output norm",
}


@dataclass(frozen=True)
class Expected:
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True)
class MtpConfig:
    """The sizes of a DeepSeek layer. num_layers: of the target, so the MTP layers are num_layers and on. count: how
    many MTP layers the config claims, 0 when it names none."""

    num_layers: int
    count: int
    hidden: int
    vocab: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    experts: int
    expert_width: int
    shared_experts: int

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> MtpConfig:
        """Read a config.json mapping. `where` names the file in errors. Raises CheckpointError naming the key."""
        keys = Keys(config, where)
        if keys.boolean("attention_bias", False):
            keys.refuse("attention_bias", "which is not supported for a DeepSeek layer, expected false")
        _check_method(keys)
        return cls(
            num_layers=keys.integer("num_hidden_layers"),
            count=claimed_layers(keys),
            hidden=keys.integer("hidden_size"),
            vocab=keys.integer("vocab_size"),
            heads=keys.integer("num_attention_heads"),
            q_rank=keys.integer("q_lora_rank") if "q_lora_rank" in keys else None,
            kv_rank=keys.integer("kv_lora_rank"),
            nope=keys.integer("qk_nope_head_dim"),
            rope=keys.integer("qk_rope_head_dim"),
            value=keys.integer("v_head_dim"),
            experts=keys.integer("n_routed_experts"),
            expert_width=keys.integer("moe_intermediate_size"),
            shared_experts=keys.integer("n_shared_experts") if config.get("n_shared_experts") not in (None, 0) else 0,
        )

    def tensors(self) -> dict[str, Expected]:
        """Every tensor of one MTP layer, without scales. Experts are the bulk: compare `experts` with what is there
        before asking, for a config may claim any number."""
        hidden = self.hidden
        found = {
            EMBEDDING: Expected((self.vocab, hidden), "copy"),
            "enorm.weight": Expected((hidden,), "plain"),
            "hnorm.weight": Expected((hidden,), "plain"),
            "eh_proj.weight": Expected((hidden, 2 * hidden), "plain"),
            "shared_head.norm.weight": Expected((hidden,), "plain"),
            HEAD: Expected((self.vocab, hidden), "copy"),
            "input_layernorm.weight": Expected((hidden,), "plain"),
            "post_attention_layernorm.weight": Expected((hidden,), "plain"),
        }
        return found | self._attention() | self._experts()

    def _attention(self) -> dict[str, Expected]:
        p, hidden, rows = "self_attn.", self.hidden, self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            query = {f"{p}q_proj.weight": Expected((rows, hidden), "matrix")}
        else:
            query = {
                f"{p}q_a_proj.weight": Expected((self.q_rank, hidden), "matrix"),
                f"{p}q_a_layernorm.weight": Expected((self.q_rank,), "plain"),
                f"{p}q_b_proj.weight": Expected((rows, self.q_rank), "matrix"),
            }
        return query | {
            f"{p}kv_a_proj_with_mqa.weight": Expected((self.kv_rank + self.rope, hidden), "matrix"),
            f"{p}kv_a_layernorm.weight": Expected((self.kv_rank,), "plain"),
            f"{p}kv_b_proj.weight": Expected((self.heads * (self.nope + self.value), self.kv_rank), "matrix"),
            f"{p}o_proj.weight": Expected((hidden, self.heads * self.value), "matrix"),
        }

    def _experts(self) -> dict[str, Expected]:
        hidden, width = self.hidden, self.expert_width
        found = {"mlp.gate.weight": Expected((self.experts, hidden), "plain")}
        found[BIAS] = Expected((self.experts,), "bias")
        kinds = [(f"mlp.experts.{index}", width) for index in range(self.experts)]
        if self.shared_experts:
            kinds.append(("mlp.shared_experts", width * self.shared_experts))
        for name, inner in kinds:
            found[f"{name}.gate_proj.weight"] = Expected((inner, hidden), "matrix")
            found[f"{name}.up_proj.weight"] = Expected((inner, hidden), "matrix")
            found[f"{name}.down_proj.weight"] = Expected((hidden, inner), "matrix")
        return found


def names_in_target(config: Mapping[str, Any], where: str, names: Collection[str]) -> set[str]:
    """Those of a target's tensors that are of the MTP layers its config claims, whatever the architecture."""
    keys = Keys(config, where)
    numbers = range(count) if (count := claimed_layers(keys)) else ()
    first = keys.integer("num_hidden_layers")
    prefixes = tuple(f"model.layers.{first + index}." for index in numbers)
    return {name for name in names if name.startswith(prefixes)}


def claimed_layers(keys: Keys) -> int:
    """num_nextn_predict_layers, 0 when it is absent."""
    if keys.values.get("num_nextn_predict_layers") in (None, 0):
        return 0
    count = keys.integer("num_nextn_predict_layers")
    if count > MAX_LAYERS:
        keys.refuse("num_nextn_predict_layers", f"expected at most {MAX_LAYERS}")
    return count


def scale_of(name: str) -> str:
    """The name of a weight's scales."""
    return name + SCALE


def _check_method(keys: Keys) -> None:
    """How experts are chosen decides whether there is a bias. transformers 5 leaves the key out when it saves."""
    if keys.values.get("topk_method") not in (None, "noaux_tc"):
        keys.refuse("topk_method", "which a DeepSeek-V3 layer does not have, expected 'noaux_tc'")
