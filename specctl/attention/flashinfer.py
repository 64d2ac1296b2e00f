"""Paged attention by FlashInfer's kernels on an NVIDIA GPU; the only file that imports flashinfer, and only when used.

It knows FlashInfer's two-step protocol (plan on the host, run on the device) and its traps. It knows nothing about
models or sequences; what the numbers have to be is said by attention.torch. Written for FlashInfer 0.6.18 to 0.7.
Legend: T rows, B sequences, N query heads, G key-value heads, H head dim.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specctl.attention.latent import LatentRows
from specctl.errors import MissingDependency, UsageError
from specctl.kv.batch import Batch
from specctl.kv.cache import KVCache

# What FlashInfer's FA2 kernels are made for; anything else fails while they are compiled, minutes later and by a
# compiler's message.
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
# Turing has neither bfloat16 nor the shared memory for the smallest query tiles, which _split() counts on.
MIN_CAPABILITY = (8, 0)

# Scratch for the parts of contexts that are cut up; one for all wrappers of a cache, which run one after another.
WORKSPACE_BYTES = 128 * 2**20
# Contexts are cut into parts of this many tokens, so that one sequence keeps more than a few multiprocessors busy.
SPLIT_TOKENS = 256
# The sizes of FlashInfer's query tiles, in rows * N / G. More than the largest is prefill, which fills the GPU uncut.
TILES = (16, 64, 128)

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
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][-1] not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        return (
            f"FlashInfer has kernels for keys and values of head dim {dims}, and the {owner}'s layers keep "
            f"{' and '.join(str(list(shape)) for shape in shapes)} a token; use --attention torch"
        )
    return None


class FlashInferAttention:
    """`AttentionBackend` by FlashInfer's paged wrappers, reading the cache's pages where they lie.

    module: stands in for FlashInfer; None imports it.
    Raises MissingDependency when FlashInfer cannot be used on this machine, UsageError for a device, a dtype or a
    head dim it does not serve.

    A pass of one row a sequence goes to the decode wrapper, any other (prefill, catch-up, verification) to the prefill
    wrapper. Both are pinned to the FA2 kernels on tensor cores: rows are then computed by one compiled module whether
    they decode or are verified, for every N / G (the CUDA-core decode kernels know a few ratios only).
    """

    def __init__(self, cache: KVCache, owner: str, device: torch.device, module: Any = None) -> None:
        if module is None:
            module = _usable(device)
        if why := refusal(cache, owner):
            raise UsageError(f"--attention flashinfer: {why}")
        self._cache = cache
        self._owner = owner
        layer = next(layer for layer in cache.layers if layer.owner == owner)
        self._dtype = layer.dtype
        self._groups, self._head_dim = layer.shapes[0]
        self._heads = 0  # N is not the cache's to know: the first queries tell
        self._batch: Batch | None = None
        self._planned: Any = None

        workspace = _workspace(cache, device)
        prefill, decode = module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper
        self._prefill = _Alternating(lambda: prefill(workspace, "NHD", backend="fa2"), device)
        self._decode = _Alternating(lambda: decode(workspace, "NHD", use_tensor_cores=True, backend="fa2"), device)
        self._takes_uniform_q_len = "uniform_q_len" in inspect.signature(prefill.plan).parameters  # from 0.7 on

    def plan(self, batch: Batch) -> None:
        assert batch.parent_T is None, "token trees need a tree mask"
        self._batch = batch
        self._planned = self._plan(batch) if self._heads else None

    def attend(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        assert self._batch is not None, "plan() comes first"
        k_cache, v_cache = self._cache.layer(self._owner, layer)
        k_cache.flatten(0, 1).index_copy_(0, self._batch.slot_T, k_TGH)
        v_cache.flatten(0, 1).index_copy_(0, self._batch.slot_T, v_TGH)
        if self._planned is None:
            self._heads = q_TNH.shape[1]
            self._planned = self._plan(self._batch)
        out_TNH: Tensor = self._planned.run(q_TNH.contiguous(), (k_cache, v_cache))
        return out_TNH

    def attend_latent(self, layer: int, rows: LatentRows) -> Tensor:
        raise AssertionError("layers that keep latents are refused")

    def _plan(self, batch: Batch) -> Any:
        """The wrapper planned for `batch`. Every tensor here is on the host: one on the device would be waited for."""
        rows_B = batch.qo_indptr.diff()
        longest = int(rows_B.max())
        pages = (batch.kv_indptr, batch.kv_indices, (batch.kv_len - 1) % batch.page_size + 1)
        geometry = (self._heads, self._groups, self._head_dim, batch.page_size)
        # Unsaid, q_data_type is float16 whatever the queries are.
        options = {"q_data_type": self._dtype, "kv_data_type": self._dtype, "sm_scale": self._head_dim**-0.5}
        options |= self._split(batch, longest)
        if longest == 1:
            return self._decode.plan(*pages, *geometry, **options)
        if self._takes_uniform_q_len and bool((rows_B == longest).all()):
            options["uniform_q_len"] = longest
        return self._prefill.plan(batch.qo_indptr, *pages, *geometry, causal=True, **options)

    def _split(self, batch: Batch, longest: int) -> dict[str, Any]:
        """How contexts are cut up, as options of plan().

        Left to itself FlashInfer cuts by how full the GPU is, so the same row is summed in another order beside other
        rows, and with many heads its parts overflow the workspace. Here the cuts depend on the sequence alone, and are
        not made when the parts of the whole batch would not fit (then there are rows enough to fill the GPU without).
        """
        packed_rows = longest * self._heads // self._groups
        tile = next((tile for tile in TILES if packed_rows <= tile), None)
        if tile is not None:
            pages = max(1, SPLIT_TOKENS // batch.page_size)
            parts = sum(-(-num_pages // pages) for num_pages in batch.kv_indptr.diff().tolist())
            # A part leaves an output and a log-sum in float32 for every row and head of its tiles (0.7 needs less).
            if parts * tile * self._heads * (self._head_dim + 1) * 4 <= WORKSPACE_BYTES:
                return {"fixed_split_size": pages}
        return {"disable_split_kv": True}


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
