"""Passes: the time of a whole pass of a model on its devices, kernel by kernel, for many steps at once.

Legend: B sequences, R rows of each, C tokens of context, T = B * R; all of them arrays of one length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specctl.roofline import operators
from specctl.roofline.experts import distinct, fullest
from specctl.roofline.shape import Grouped, Latent, ModelShape
from specctl.schemas.roofline import AllReduce, Cache, Lane, Peaks, Weights

Array = np.ndarray

BYTES: dict[Weights, float] = {"bf16": 2, "fp8": 1, "fp8-block": 1}
CACHE_BYTES: dict[Cache, float] = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Placement:
    """tp: devices that share every layer. ep: of these, over how many whole experts are spread; tp / ep share each.
    nodes: that they stand in. weights, cache: as they are stored there."""

    tp: int = 1
    ep: int = 1
    nodes: int = 1
    weights: Weights = "bf16"
    cache: Cache = "bf16"


@dataclass(frozen=True)
class Product:
    """rows x inner times inner x out, `times` in a pass."""

    times: int
    out: float
    inner: float
    weights: Weights


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a pass, by what takes them. projections: products inside attention; products: all others, the
    head's among them."""

    projections: Array
    products: Array
    attention: Array
    experts: Array
    exchange: Array
    other: Array

    @property
    def total(self) -> Array:
        found: Array = self.projections + self.products + self.attention + self.experts + self.exchange + self.other
        return found


@dataclass(frozen=True)
class Passes:
    """entry: products (out, inner) before the layers, of a draft that reads hidden states. wide: its layers read two
    hidden states."""

    shape: ModelShape
    place: Placement
    lane: Lane
    peaks: Peaks
    entry: tuple[tuple[int, int], ...] = ()
    wide: bool = False

    def step(self, batch: Array, rows: Array, context: Array) -> Parts:
        """Every row goes through the head, as decoding and verification need it."""
        batch, rows, context = (np.asarray(each, dtype=float) for each in (batch, rows, context))
        tokens = batch * rows
        return self._parts(tokens, tokens, self._decode_attention(batch, rows, context))

    def prompts(self, tokens: Array, each: Array) -> Parts:
        """Prompts of `each` tokens, `tokens` in all, nothing of them cached; only last rows go through the head."""
        tokens, each = np.asarray(tokens, dtype=float), np.asarray(each, dtype=float)
        return self._parts(tokens, np.maximum(1.0, tokens / each), self._prompt_attention(tokens, each))

    def mixed(self, prompt: Array, batch: Array, context: Array) -> Parts:
        """A prompt beside one row of each of `batch` sequences."""
        prompt, batch, context = (np.asarray(value, dtype=float) for value in (prompt, batch, context))
        attention = self._prompt_attention(prompt, prompt) + self._decode_attention(batch, np.ones(1), context)
        return self._parts(prompt + batch, 1 + batch, attention)

    def _parts(self, tokens: Array, headed: Array, attention_us: Array) -> Parts:
        projections = self._sum(tokens, self._projections)
        layers = self.shape.layers
        elementwise = operators.elementwise_us(tokens, self.shape.hidden, self.lane.elementwise, self.peaks)
        return Parts(
            projections=projections / 1e3,
            products=self._sum(tokens, self._products) / 1e3 + self.ends(tokens, headed),
            attention=layers * attention_us / 1e3,
            experts=self.shape.sparse_layers * self._experts(tokens) / 1e3,
            exchange=layers * 2 * self._all_reduce(tokens) / 1e3,
            other=layers * elementwise / 1e3,
        )

    def ends(self, tokens: Array, headed: Array) -> Array:
        """Milliseconds of what is in no layer: a draft's entry over all rows, which every device has whole, and the
        head over some."""
        entry = [Product(1, out, inner, "bf16") for out, inner in self.entry]
        head = Product(1, self.shape.head_vocab / self.place.tp, self.shape.hidden, "bf16")
        found: Array = (self._sum(tokens, entry) + self._sum(headed, [head])) / 1e3
        return found

    def _sum(self, rows: Array, products: list[Product]) -> Array:
        total = np.zeros_like(rows)
        for each in products:
            total = total + self._product(rows, each)
        return total

    def _product(self, rows: Array, each: Product) -> Array:
        kind = self.lane.products[each.weights]
        bytes_each = BYTES[each.weights]
        return each.times * operators.product_us(rows, each.out, each.inner, bytes_each, kind, self.peaks)

    @cached_property
    def _products(self) -> list[Product]:
        shape, tp, weights = self.shape, self.place.tp, self.place.weights
        h = shape.hidden
        found: list[Product] = []
        if shape.dense_layers:
            found.append(Product(shape.dense_layers, 2 * shape.inner / tp, h, weights))
            found.append(Product(shape.dense_layers, h, shape.inner / tp, weights))
        if shape.experts is not None and shape.sparse_layers:
            found.append(Product(shape.sparse_layers, shape.experts.count, h, "bf16"))
            if shape.experts.shared_inner:
                found.append(Product(shape.sparse_layers, 2 * shape.experts.shared_inner / tp, h, weights))
                found.append(Product(shape.sparse_layers, h, shape.experts.shared_inner / tp, weights))
        return found

    @cached_property
    def _projections(self) -> list[Product]:
        layers, read = self.shape.layers, self.shape.hidden * (2 if self.wide else 1)
        attention, tp, weights, h = self.shape.attention, self.place.tp, self.place.weights, self.shape.hidden
        if isinstance(attention, Grouped):
            width = attention.heads * attention.head_dim / tp
            kv_width = max(1.0, attention.kv_heads / tp) * attention.head_dim
            return [Product(layers, width + 2 * kv_width, read, weights), Product(layers, h, width, weights)]
        heads = attention.heads / tp
        kept, head = attention.kv_rank + attention.rotated, attention.nope + attention.rotated
        if attention.q_rank is None:
            queries = [Product(layers, heads * head, h, weights), Product(layers, kept, h, weights)]
        else:
            queries = [
                Product(layers, attention.q_rank + kept, h, weights),
                Product(layers, heads * head, attention.q_rank, weights),
            ]
        return [
            *queries,
            Product(layers, heads * attention.nope, attention.kv_rank, "bf16"),
            Product(layers, heads * attention.value, attention.kv_rank, "bf16"),
            Product(layers, h, heads * attention.value, weights),
        ]

    def _decode_attention(self, batch: Array, rows: Array, context: Array) -> Array:
        attention, cache = self.shape.attention, CACHE_BYTES[self.place.cache]
        if isinstance(attention, Latent):
            sizes = (math.ceil(attention.heads / self.place.tp), attention.kv_rank, attention.rotated)
            kind = self.lane.latent
            return operators.latent_attention_us(batch, rows, context, sizes, cache, kind, self.peaks)
        sizes = (
            math.ceil(attention.heads / self.place.tp),
            max(1, attention.kv_heads // self.place.tp),
            attention.head_dim,
        )
        kind = self.lane.attention[self.place.cache]
        return operators.decode_attention_us(batch, rows, context, sizes, cache, kind, self.peaks)

    def _prompt_attention(self, tokens: Array, each: Array) -> Array:
        attention = self.shape.attention
        if isinstance(attention, Latent):
            width, kind = attention.nope + attention.rotated + attention.value, self.lane.latent
        else:
            width, kind = 2 * attention.head_dim, self.lane.attention[self.place.cache]
        heads = math.ceil(attention.heads / self.place.tp)
        return operators.prompt_attention_us(tokens, each, heads, width, kind, self.peaks)

    def _experts(self, tokens: Array) -> Array:
        experts = self.shape.experts
        if experts is None:
            return np.zeros_like(tokens)
        ep = self.place.ep
        hit = fullest(tokens, experts, ep)
        rows = tokens * experts.chosen * hit / distinct(tokens, experts)
        inner = experts.inner / (self.place.tp / ep)
        weights = 3 * self.shape.hidden * inner
        whole = self.lane.whole_experts if ep == self.place.tp > 1 else None
        bytes_each, kind = BYTES[self.place.weights], whole or self.lane.experts
        return operators.experts_us(hit, rows, weights, bytes_each, kind, self.peaks, self.shape.hidden)

    def _all_reduce(self, tokens: Array) -> Array:
        if self.place.tp == 1:
            return np.zeros_like(tokens)
        across = self.lane.across_us if self.place.nodes > 1 else 0.0
        near = math.ceil(self.place.tp / self.place.nodes)
        inside = np.zeros_like(tokens)
        if near > 1:
            inside = operators.all_reduce_us(tokens, self.shape.hidden, self._group(near))
        found: Array = across + inside
        return found

    def _group(self, devices: int) -> AllReduce:
        """The smallest group that is large enough."""
        kinds = sorted(self.lane.all_reduce, key=lambda kind: kind.devices)
        return next((kind for kind in kinds if kind.devices >= devices), kinds[-1])
