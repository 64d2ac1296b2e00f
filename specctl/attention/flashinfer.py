"""Paged attention by FlashInfer's kernels on an NVIDIA GPU; the only file that imports flashinfer, and only when used.

It knows FlashInfer's two-step protocol (plan on the host, run on the device) and its traps. It knows nothing about
models or sequences; what the numbers have to be is said by attention.torch. Written for FlashInfer 0.6.18 to 0.7.
Legend: T rows, B sequences, P pages, S slots of a page, N query heads, G key-value heads, H head dim; for latents E is
as in attention.latent.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from specctl.attention.latent import LatentRows
from specctl.errors import MissingDependency, UsageError
from specctl.kv.batch import Batch
from specctl.kv.cache import KVCache, LayerKV

# What FlashInfer's FA2 kernels are made for; anything else fails while they are compiled, minutes later and by a
# compiler's message.
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
# The same for MLA: numbers of a latent and of a rotated key.
LATENT_WIDTHS = (512, 64)
# Turing has neither bfloat16 nor the shared memory for the smallest query tiles, which _split() counts on.
MIN_CAPABILITY = (8, 0)

# Scratch for the parts of contexts that are cut up; one for all wrappers of a cache, which run one after another.
WORKSPACE_BYTES = 128 * 2**20
# Contexts are cut into parts of this many tokens, so that one sequence keeps more than a few multiprocessors busy.
SPLIT_TOKENS = 256
# The sizes of FlashInfer's query tiles, in rows * N / G. More than the largest is prefill, which fills the GPU uncut.
TILES = (16, 64, 128)

# MLA tiles have 64 rows * N, or 128 where a sequence has more than 64 on average. When N does not divide that, the row
# in which a tile ends can lose the last key that it sees: 0.7 does not plan such a pass, older versions say nothing.
LATENT_TILES = (64, 128)
# A plan has room for 16384 pieces of work and does not look whether it is enough. Besides the tiles there is a piece
# more for every multiprocessor at most.
MOST_TILES = 16384 - 1024

_workspaces: WeakKeyDictionary[KVCache, Tensor] = WeakKeyDictionary()


def problem() -> str | None:
    """Why FlashInfer cannot be used on this machine, in one sentence; None when it can.

    FlashInfer is imported, which takes seconds, only when it is installed and there is a GPU to use it on.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'specctl[cuda]')"
    if not torch.cuda.is_available():
        return "FlashInfer needs a CUDA device, and torch sees none"
    if (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        return "FlashInfer is used from compute capability {}.{} on, and this GPU has {}.{}".format(
            *MIN_CAPABILITY, *capability
        )
    try:
        _load()
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"FlashInfer is installed but its import fails ({reason}); install the one for torch {torch.__version__}"
    return None


def refusal(cache: KVCache, owner: str) -> str | None:
    """Why FlashInfer has no kernel for `owner`'s layers, in one sentence with the remedy; None when it has."""
    kinds = {(layer.shapes, layer.dtype) for layer in cache.layers if layer.owner == owner}
    assert kinds, f"the cache has no layers of {owner}"
    if len(kinds) > 1:
        return f"FlashInfer plans for layers of one shape and dtype, and the {owner}'s differ; use --attention torch"
    ((shapes, dtype),) = kinds
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"FlashInfer has no kernels for {name}; use --attention torch or --dtype bfloat16"
    if len(shapes) == 1:
        serves = shapes[0] == (sum(LATENT_WIDTHS),)
        served = f"{_latents(*LATENT_WIDTHS)} a token"
    else:
        serves = len(shapes) == 2 and shapes[0] == shapes[1] and shapes[0][-1] in HEAD_DIMS
        served = f"keys and values of head dim {', '.join(map(str, HEAD_DIMS))}"
    if serves:
        return None
    kept = " and ".join(str(list(shape)) for shape in shapes)
    return f"FlashInfer has kernels for {served}, and the {owner}'s layers keep {kept} a token; use --attention torch"


def _latents(latent: int, rotated: int) -> str:
    return f"latents of {latent} and rotated keys of {rotated} numbers"


class FlashInferAttention:
    """`AttentionBackend` by FlashInfer's paged wrappers, reading the cache's pages where they lie.

    module: stands in for FlashInfer; None imports it.
    Raises MissingDependency when FlashInfer cannot be used on this machine, UsageError for a device, a dtype, a head
    dim or latents it does not serve.
    """

    def __init__(self, cache: KVCache, owner: str, device: torch.device, module: Any = None) -> None:
        if module is None:
            module = _usable(device)
        if why := refusal(cache, owner):
            raise UsageError(f"--attention flashinfer: {why}")
        self._cache = cache
        self._owner = owner
        layer = next(layer for layer in cache.layers if layer.owner == owner)
        kernels = _LatentKernels if len(layer.shapes) == 1 else _PagedKernels
        self._kernels: _Kernels = kernels(module, _workspace(cache, device), layer, device)
        self._scores: tuple[int, float] | None = None  # N and the scale: the cache does not know, the first queries do
        self._batch: Batch | None = None
        self._planned = False

    def plan(self, batch: Batch) -> None:
        assert batch.parent_T is None, "token trees need a tree mask"
        self._batch = batch
        self._planned = self._scores is not None
        if self._scores is not None:
            self._kernels.plan(batch, *self._scores)

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        return self._attend(layer, q_TNH, (k_TGH, v_TGH), q_TNH.shape[-1] ** -0.5)

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        """In the absorbed form for any number of rows, as the kernels have no other."""
        widths = (rows.up.rank, rows.kept_TE.shape[1] - rows.up.rank)
        if widths != LATENT_WIDTHS:  # the cache knows their sum only
            raise UsageError(
                f"--attention flashinfer: FlashInfer has kernels for {_latents(*LATENT_WIDTHS)} a token, and the "
                f"{self._owner} has {_latents(*widths)}; use --attention torch"
            )
        return rows.up.values(self._attend(layer, rows.up.absorb(rows.q_TNH), (rows.kept_TE,), rows.scale))

    def _attend(self, layer: int, queries: Tensor, new: tuple[Tensor, ...], scale: float) -> Tensor:
        assert self._batch is not None, "plan() comes first"
        kept = self._cache.layer(self._owner, layer)
        for tensor, rows in zip(kept, new, strict=True):
            tensor.flatten(0, 1).index_copy_(0, self._batch.slot_T, rows)
        scores = (queries.shape[1], scale)
        if not self._planned:
            self._kernels.plan(self._batch, *scores)
            self._scores, self._planned = scores, True
        assert scores == self._scores, "one plan serves all layers of a pass"
        return self._kernels.run(queries, kept)


class _Kernels(Protocol):
    """FlashInfer's wrappers for one kind of layer."""

    def plan(self, batch: Batch, heads: int, scale: float) -> None:
        """Plan for `batch`. Every tensor here is on the host: one on the device would be waited for."""

    def run(self, queries: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """Attend from the planned rows' queries to a layer of the cache."""


class _PagedKernels:
    """Keys and values. A pass of one row a sequence goes to the decode wrapper, any other (prefill, catch-up,
    verification) to the prefill wrapper. Both are pinned to the FA2 kernels on tensor cores: rows are then computed by
    one compiled module whether they decode or are verified, for every N / G (the CUDA-core decode kernels know a few
    ratios only)."""

    def __init__(self, module: Any, workspace: Tensor, layer: LayerKV, device: torch.device) -> None:
        self._dtype = layer.dtype
        self._groups, self._head_dim = layer.shapes[0]
        prefill, decode = module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper
        self._prefill = _Alternating(lambda: prefill(workspace, "NHD", backend="fa2"), device)
        self._decode = _Alternating(lambda: decode(workspace, "NHD", use_tensor_cores=True, backend="fa2"), device)
        self._takes_uniform_q_len = "uniform_q_len" in inspect.signature(prefill.plan).parameters  # from 0.7 on
        self._planned: Any = None

    def plan(self, batch: Batch, heads: int, scale: float) -> None:
        rows_B = batch.qo_indptr.diff()
        longest = int(rows_B.max())
        pages = (batch.kv_indptr, batch.kv_indices, (batch.kv_len - 1) % batch.page_size + 1)
        geometry = (heads, self._groups, self._head_dim, batch.page_size)
        # Unsaid, q_data_type is float16 whatever the queries are.
        options = {"q_data_type": self._dtype, "kv_data_type": self._dtype, "sm_scale": scale}
        options |= self._split(batch, longest, heads)
        if longest == 1:
            self._planned = self._decode.plan(*pages, *geometry, **options)
            return
        if self._takes_uniform_q_len and bool((rows_B == longest).all()):
            options["uniform_q_len"] = longest
        self._planned = self._prefill.plan(batch.qo_indptr, *pages, *geometry, causal=True, **options)

    def run(self, queries: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        out_TNH: Tensor = self._planned.run(queries.contiguous(), kept)
        return out_TNH

    def _split(self, batch: Batch, longest: int, heads: int) -> dict[str, Any]:
        """How contexts are cut up, as options of plan().

        Left to itself FlashInfer cuts by how full the GPU is, so the same row is summed in another order beside other
        rows, and with many heads its parts overflow the workspace. Here the cuts depend on the sequence alone, and are
        not made when the parts of the whole batch would not fit (then there are rows enough to fill the GPU without).
        """
        packed_rows = longest * heads // self._groups
        tile = next((tile for tile in TILES if packed_rows <= tile), None)
        if tile is not None:
            pages = max(1, SPLIT_TOKENS // batch.page_size)
            parts = sum(-(-num_pages // pages) for num_pages in batch.kv_indptr.diff().tolist())
            # A part leaves an output and a log-sum in float32 for every row and head of its tiles (0.7 needs less).
            if parts * tile * heads * (self._head_dim + 1) * 4 <= WORKSPACE_BYTES:
                return {"fixed_split_size": pages}
        return {"disable_split_kv": True}


class _LatentKernels:
    """Latents. There is one wrapper for prefill, decoding and verification, again pinned to FA2.

    Where it cuts contexts it does not let us say, and it cuts by how full the GPU is: beside other rows the same row is
    summed in another order. Queries get heads of zeros up to a number that divides the tiles.
    """

    def __init__(self, module: Any, workspace: Tensor, layer: LayerKV, device: torch.device) -> None:
        self._dtype = layer.dtype
        wrapper = module.BatchMLAPagedAttentionWrapper
        self._wrappers = _Alternating(lambda: wrapper(workspace, backend="fa2"), device)
        # From 0.7 on a batch is described by an object, and latent and rotated key may be one tensor.
        new = "metadata" in inspect.signature(wrapper.plan).parameters
        self._describe: Any = module.mla.MLAPlanMetadata.csr if new else None
        self._heads = 0  # as planned
        self._planned: Any = None

    def plan(self, batch: Batch, heads: int, scale: float) -> None:
        self._heads = min(max(LATENT_TILES), 1 << (heads - 1).bit_length())
        self._check_size(batch)
        tables = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_len)
        options = {
            "num_heads": self._heads,
            "head_dim_ckv": LATENT_WIDTHS[0],
            "head_dim_kpe": LATENT_WIDTHS[1],
            "page_size": batch.page_size,
            "causal": True,
            "sm_scale": scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        if self._describe is None:
            self._planned = self._wrappers.plan(*tables, **options)
        else:
            self._planned = self._wrappers.plan(metadata=self._describe(*tables), **options)

    def run(self, queries: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        heads = queries.shape[1]
        if missing := -heads % self._heads:
            queries = F.pad(queries, (0, 0, 0, missing))
        parts = [self._run(q_TNE, kept[0]) for q_TNE in torch.split(queries, self._heads, dim=1)]
        out_TNC = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out_TNC[:, :heads]

    def _run(self, q_TNE: Tensor, kept_PSE: Tensor) -> Tensor:
        if self._describe is None:
            (q_nope, q_pe), (ckv, kpe) = (torch.split(x, list(LATENT_WIDTHS), dim=-1) for x in (q_TNE, kept_PSE))
            out_TNC: Tensor = self._planned.run(q_nope, q_pe, ckv, kpe)
        else:
            out_TNC = self._planned.run(query=q_TNE, kv_cache=kept_PSE)
        return out_TNC

    def _check_size(self, batch: Batch) -> None:
        rows_B = batch.qo_indptr.diff() * self._heads
        small, large = LATENT_TILES
        tile = large if int(rows_B.sum()) // len(rows_B) > small else small
        if int((-(-rows_B // tile)).sum()) > MOST_TILES:
            raise UsageError(
                f"--attention flashinfer: a pass of {int(batch.qo_indptr[-1])} rows is more than FlashInfer's MLA "
                "kernels plan for; use --attention torch"
            )


class _Alternating:
    """Two wrappers of one kind, planned in turn.

    plan() writes a schedule to pinned memory of its wrapper and only starts its copy to the device. To plan a wrapper
    again before that copy ran would change what is copied, so a second one takes turns with it, and the event after
    the copy is waited for: with two, it has nearly always happened.
    """

    def __init__(self, make: Callable[[], Any], device: torch.device) -> None:
        self._device = device
        self._runtime: Any = torch.get_device_module(device)
        self._turns = [(make(), self._runtime.Event()) for _ in range(2)]

    def plan(self, *args: Any, **options: Any) -> Any:
        """Plan the wrapper whose turn it is, and return it."""
        wrapper, copied = self._turns[0]
        self._turns.reverse()
        copied.synchronize()
        wrapper.plan(*args, **options)
        copied.record(self._runtime.current_stream(self._device))
        return wrapper


def _usable(device: torch.device) -> Any:
    if why := problem():
        raise MissingDependency(f"--attention flashinfer: {why}; use --attention torch to do without")
    if device.type != "cuda":
        raise UsageError(f"--attention flashinfer needs --device cuda, not {device.type}; use --attention torch")
    return _load()


def _load() -> Any:
    return importlib.import_module("flashinfer")


def _workspace(cache: KVCache, device: torch.device) -> Tensor:
    """The one float workspace of a cache's wrappers, zeroed as FlashInfer asks for on first use."""
    if cache not in _workspaces:
        _workspaces[cache] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[cache]
