"""What somebody makes of a directory with an EAGLE-3 head: which head it is to them, and what becomes of each tensor.

The layout's own account is such a view, and so is each engine's. Where two of them differ, an engine would run another
head than the one that is stored, mostly without a word: `differences` says in which way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specctl.dialects.eagle3.layer import described
from specctl.errors import CheckpointError
from specctl.heads.eagle3 import EMBEDDING, FUSE, INPUT_NORM, LAYER, Eagle3Head, original_taps
from specctl.heads.vocabulary import D2T, T2D
from specctl.models import ModelConfig
from specctl.shards import TensorInfo

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LM_HEAD, OUTPUT_NORM = "lm_head.weight", "norm.weight"
TABLES = (D2T, T2D)
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # left by old programs, computed from the config by all of them


@dataclass(frozen=True)
class View:
    """reader: whose it is. taps: None where the target's number of layers is needed to tell. num_taps: that fc joins.
    norms: the four of NORMS. tensors: of the file, to the parameter they fill. dropped: tensors that are passed over.
    loud: why the reader does not load it at all; notes: what people should know. last_tap: whether the reader has the
    residual that leaves the target's last layer."""

    reader: str
    layer: Mapping[str, Any] = field(repr=False)
    taps: tuple[int, ...] | None
    num_taps: int
    norms: Mapping[str, bool]
    target_hidden: int
    draft_vocab: int
    tensors: Mapping[str, str] = field(repr=False)
    dropped: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    last_tap: bool = True

    @property
    def own_embedding(self) -> bool:
        return EMBEDDING in self.tensors.values()

    @property
    def needs_layers(self) -> bool:
        """Whether the target's number of layers decides which residuals are read."""
        return self.taps is None

    def head(self, num_layers: int | None) -> Eagle3Head:
        """num_layers: of the target. Raises CheckpointError when it has too few for the taps that go without saying."""
        taps = self.taps
        if taps is None:
            assert num_layers is not None, "the target is needed to tell the taps"
            taps = original_taps(num_layers)
            if not is_rising(taps) or taps[0] < 0:
                raise CheckpointError(
                    f"no taps are given, which means {', '.join(map(str, taps))} for a target of {num_layers} layers, "
                    "expected rising numbers: the head is of another target"
                )
        return Eagle3Head(
            taps=taps,
            target_hidden=self.target_hidden,
            target_vocab=int(self.layer["vocab_size"]),
            draft_vocab=self.draft_vocab,
            own_embedding=self.own_embedding,
            layer=self.layer,
            **self.norms,
        )

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Every parameter that is filled from the directory, by our names, with its shape."""
        where = "config.json"
        config = ModelConfig.read(self.layer, where)
        return shapes(config, self.num_taps, self.target_hidden, self.draft_vocab, self.norms, self.own_embedding)


def shapes(
    config: ModelConfig,
    num_taps: int,
    target_hidden: int,
    draft_vocab: int,
    norms: Mapping[str, bool],
    own_embedding: bool,
) -> dict[str, tuple[int, ...]]:
    """The tensors of a head, by the names of the published heads."""
    width, inner, joined = config.hidden_size, config.intermediate_size, num_taps * target_hidden
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width)} if own_embedding else {}
    if norms["norm_before_fc"]:
        found[INPUT_NORM] = (joined,)
    if norms["fc_norm"]:
        found |= {f"fc_norm.{index}.weight": (target_hidden,) for index in range(num_taps)}
    found[FUSE] = (width, joined)
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, 2 * width, config.qkv_bias),
        ("self_attn.k_proj", kv, 2 * width, config.qkv_bias),
        ("self_attn.v_proj", kv, 2 * width, config.qkv_bias),
        ("self_attn.o_proj", width, q, config.o_bias),
        ("mlp.gate_proj", inner, width, config.mlp_bias),
        ("mlp.up_proj", inner, width, config.mlp_bias),
        ("mlp.down_proj", width, inner, config.mlp_bias),
    ):
        found[f"{LAYER}.{name}.weight"] = (rows, columns)
        if bias:
            found[f"{LAYER}.{name}.bias"] = (rows,)
    if config.qk_norm:
        found |= {f"{LAYER}.self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"{LAYER}.{name}.weight"] = (width,)
    return found | {OUTPUT_NORM: (width,), LM_HEAD: (draft_vocab, width)}


def sort_names(
    names: Iterable[str], prefixes: tuple[str, ...], known: Iterable[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Which parameter each tensor fills, and which tensors fill none. prefixes: of the decoder layer, as it may be
    called; known: the parameters there are, by our names. Tables of ids are neither."""
    filled, dropped, parameters = dict[str, str](), list[str](), set(known)
    for name in sorted(names):
        if name in TABLES or name.endswith(IGNORED_SUFFIX):
            continue
        prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), None)
        ours = name if prefix is None else f"{LAYER}{name.removeprefix(prefix)}"
        if ours in parameters and ours not in filled.values():
            filled[name] = ours
        else:
            dropped.append(name)
    return filled, tuple(dropped)


def is_rising(taps: Iterable[int]) -> bool:
    found = list(taps)
    return sorted(set(found)) == found


def faults(view: View, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Where config and tensors contradict each other, one sentence each."""
    wanted = view.parameters
    stored = {ours: name for name, ours in view.tensors.items()}
    for name in view.dropped:
        yield f"tensor {name} is not part of the EAGLE-3 head that config.json describes"
    for ours, shape in wanted.items():
        if ours not in stored:
            yield f"tensor {ours} is missing"
        elif infos[stored[ours]].shape != shape:
            yield _misshapen(view, ours, stored[ours], infos[stored[ours]].shape, shape)
    reduced = view.draft_vocab != view.layer["vocab_size"]
    if reduced and D2T not in infos:
        yield (
            f"{D2T} is missing, and the head has rows for {view.draft_vocab} of {view.layer['vocab_size']} token ids: "
            "without it nobody knows which"
        )


def differences(own: View, other: View, num_layers: int | None) -> Iterator[str]:
    """In what `other` is not the head that is stored, one sentence each, the first of them the worst. num_layers: of
    the target, if it is known."""
    if other.loud:
        yield f"{other.reader} does not load it: {other.loud[0]}"
        return
    yield from _other_taps(own, other, num_layers)
    yield from _other_numbers(own, other)
    for name, ours in own.tensors.items():
        if name in other.dropped or other.tensors.get(name, ours) != ours:
            yield f"{other.reader} passes over tensor {name}"
    for ours in other.parameters:
        if ours not in other.tensors.values():
            yield f"{other.reader} leaves parameter {ours} as it was made: nothing fills it"


def _other_numbers(own: View, other: View) -> Iterator[str]:
    """In what the head is described otherwise."""
    mine, theirs = _described(own), _described(other)
    for key, value in mine.items():
        if theirs.get(key) != value:
            yield f"{other.reader} takes {key} for {_word(theirs.get(key))}, the head has {_word(value)}"
    if (limit := other.layer["max_position_embeddings"]) < (length := own.layer["max_position_embeddings"]):
        yield f"{other.reader} takes max_position_embeddings for {limit}, the head has {length}"


def _described(view: View) -> dict[str, Any]:
    sizes = {
        "target_hidden_size": view.target_hidden,
        "draft_vocab_size": view.draft_vocab,
        "the number of taps": view.num_taps,
    }
    return dict(view.norms) | described(view.layer, "config.json") | sizes


def _other_taps(own: View, other: View, num_layers: int | None) -> Iterator[str]:
    if not other.last_tap and num_layers is not None and own.taps is not None and own.taps[-1] >= num_layers:
        yield f"{other.reader} has no tap {own.taps[-1]}, what leaves the last of {num_layers} layers"
    if own.taps == other.taps:
        return
    if num_layers is None and (own.needs_layers or other.needs_layers):
        taps = "the original three" if other.taps is None else ", ".join(map(str, other.taps))
        held = "the original three" if own.taps is None else ", ".join(map(str, own.taps))
        yield f"{other.reader} reads taps {taps}, the head {held}"
        return
    mine, theirs = (view.taps or original_taps(num_layers or 0) for view in (own, other))
    if mine != theirs:
        yield f"{other.reader} reads taps {', '.join(map(str, theirs))}, the head {', '.join(map(str, mine))}"


def _misshapen(view: View, ours: str, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """By what people get wrong."""
    if ours == FUSE and len(shape) == 2 and shape[0] == expected[0]:
        return (
            f"tensor {name} has {shape[1]} columns, {view.num_taps} taps of a target {view.target_hidden} wide are "
            f"{expected[1]}"
        )
    if ours == LM_HEAD and len(shape) == 2 and shape[1] == expected[1]:
        return f"tensor {name} has {shape[0]} rows, draft_vocab_size is {expected[0]}"
    return f"tensor {name} has shape {list(shape)}, config.json expects {list(expected)}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
