"""What a running engine says of itself: which one it is, what it serves, whether it speculates. It sends no prompt."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import SpecctlError, UsageError
from specctl.profile.served.metrics import Metrics, scrape
from specctl.profile.served.wire import Wire, reason

KINDS = ("vllm", "sglang")
SPEAKS = {"vllm": ("vllm", "specctl"), "sglang": ("sglang",)}
"""Whose API an engine speaks: `specctl serve` speaks vLLM's."""

ALGORITHMS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "llama",
    "NGRAM": "ngram",
}
RUNNING = ("num_requests_running", "num_running_reqs")
PATIENCE = 5


@dataclass(frozen=True)
class Speculation:
    """longest: tokens of a block at most, where that is told. k: tokens of every block, where they are all alike and
    the engine does not count them. draft: its kind, where that is told."""

    longest: int | None = None
    k: int | None = None
    draft: str | None = None


@dataclass(frozen=True)
class Served:
    """A running engine. engine: vllm, sglang or specctl. model: by its served name. max_length: of a prompt and its
    answer. Of the rest None is what the engine does not tell. directory: of the model, if it is here."""

    wire: Wire
    engine: str
    model: str
    max_length: int
    version: str | None = None
    speculation: Speculation | None = None
    tp: int | None = None
    ep: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    directory: Path | None = None

    @property
    def config_sha(self) -> str | None:
        if self.directory is None:
            return None
        return hashlib.sha256((self.directory / "config.json").read_bytes()).hexdigest()

    @property
    def digest(self) -> str | None:
        """tensors_sha of weights that are here and that we can read."""
        if self.directory is None:
            return None
        from specctl.checkpoint import Checkpoint
        from specctl.digest import tensors_sha

        try:
            return tensors_sha(Checkpoint(self.directory))
        except SpecctlError:
            return None


def open_engine(kind: str, wire: Wire, model: str | None) -> Served:
    """kind: of KINDS. model: which of several served ones.

    Raises EngineUnreachable, and UsageError for another engine, an unknown model, or one that serves others meanwhile.
    """
    entry = _model(wire, model)
    metrics = _when_alone(wire)
    info = _server_info(wire) if kind == "sglang" or metrics.prefix == "sglang" else {}
    engine = _engine(kind, wire, metrics, info)
    max_length = entry.get("max_model_len") or info.get("context_length")
    if not isinstance(max_length, int):
        raise UsageError(f"{wire.url}/v1/models: does not tell the longest text of {entry['id']} (max_model_len)")
    directory = next((Path(str(name)) for name in (entry.get("root"), entry["id"]) if name and _is_model(name)), None)
    return Served(
        wire=wire,
        engine=engine,
        model=entry["id"],
        max_length=max_length,
        version=_version(wire, info),
        speculation=_speculation(engine, wire, metrics, info, entry),
        tp=_size(info.get("tp_size")),
        ep=_size(info.get("ep_size")),
        dtype="fp8" if info.get("quantization") == "fp8" else None,
        kv_dtype=_told(info.get("kv_cache_dtype")) or _told(*metrics.values("cache_dtype", "cache_config_info")[:1]),
        directory=directory,
    )


def _model(wire: Wire, wanted: str | None) -> dict[str, Any]:
    status, text = wire.get("/v1/models")
    if status in (401, 403):
        given = "the key in --api-key-file is not one of its keys" if wire.key else "it wants a key; --api-key-file"
        raise UsageError(f"{wire.url}: answers {status}: {given}")
    found = _json(text).get("data") if status == 200 else None
    if not isinstance(found, list) or not all(isinstance(each, dict) and "id" in each for each in found) or not found:
        said = f"answers {status}: {reason(text)}"
        raise UsageError(f"{wire.url}/v1/models: {said}; expected an OpenAI-compatible engine")
    names = [str(each["id"]) for each in found]
    if wanted is None and len(names) > 1:
        raise UsageError(f"{wire.url}: serves {', '.join(names)}; name one: --model NAME")
    if wanted is not None and wanted not in names:
        raise UsageError(f"--model {wanted}: {wire.url} serves {', '.join(names)}")
    entry: dict[str, Any] = found[0 if wanted is None else names.index(wanted)]
    return entry


def _engine(kind: str, wire: Wire, metrics: Metrics, info: dict[str, Any]) -> str:
    found = metrics.prefix or ("sglang" if "model_path" in info else None)
    if found is None:
        hint = "was it started with --disable-log-stats?" if kind == "vllm" else "is this an SGLang server?"
        raise UsageError(
            f"--engine {kind}: {wire.url}/metrics has no counters of an engine, so whether it drafts is not known; "
            f"{hint}"
        )
    if found not in SPEAKS[kind]:
        right = next(name for name, speakers in SPEAKS.items() if found in speakers)
        raise UsageError(f"--engine {kind}: the engine at {wire.url} is {found}; pass --engine {right}")
    if len(metrics.values("engine")) > 1:
        raise UsageError(
            f"{wire.url}: is {len(metrics.values('engine'))} engines in data parallel, among which it divides a batch; "
            "profile one of them"
        )
    return found


def _when_alone(wire: Wire) -> Metrics:
    """What the engine shows when nobody uses it; somebody may be about to leave."""
    for _ in range(PATIENCE):
        metrics = scrape(wire)
        busy = sum(metrics.totals.get(name, 0.0) for name in RUNNING)
        if not busy:
            return metrics
        time.sleep(0.2)
    raise UsageError(f"{wire.url}: is running {busy:.0f} requests of others; profile an engine that nobody uses")


def _speculation(
    engine: str, wire: Wire, metrics: Metrics, info: dict[str, Any], entry: dict[str, Any]
) -> Speculation | None:
    """None: it does not."""
    if engine == "sglang":
        return _of_sglang(wire, info)
    if engine == "specctl" and not metrics.totals.get("speculation_enabled"):
        return None
    if "spec_decode_num_drafts_total" not in metrics.totals:
        return None
    if engine == "vllm":
        return Speculation(longest=len(metrics.values("position", "spec_decode_num_accepted_tokens_per_pos_total")))
    lengths = [float(each) for each in metrics.values("le", "spec_decode_k_bucket") if each != "+Inf"]
    draft = entry.get("draft")
    return Speculation(longest=int(max(lengths, default=0)) or None, draft=draft if draft in ("ngram", "mtp") else None)


def _of_sglang(wire: Wire, info: dict[str, Any]) -> Speculation | None:
    algorithm = info.get("speculative_algorithm")
    if not algorithm:
        return None
    if info.get("speculative_adaptive"):
        raise UsageError(f"{wire.url}: changes its draft length by itself; start it without --speculative-adaptive")
    top, tokens = info.get("speculative_eagle_topk") or 1, info.get("speculative_num_draft_tokens")
    if top != 1:
        raise UsageError(
            f"{wire.url}: drafts trees (--speculative-eagle-topk {top}), and a policy is about chains; start it with 1"
        )
    if not isinstance(tokens, int) or tokens < 2:
        raise UsageError(f"{wire.url}: speculates and does not tell speculative_num_draft_tokens")
    return Speculation(tokens - 1, tokens - 1, ALGORITHMS.get(str(algorithm).upper()))


def _server_info(wire: Wire) -> dict[str, Any]:
    for path in ("/get_server_info", "/server_info"):
        status, text = wire.get(path)
        if status == 200 and (found := _json(text)):
            return found
    return {}


def _version(wire: Wire, info: dict[str, Any]) -> str | None:
    if isinstance(info.get("version"), str):
        return str(info["version"])
    status, text = wire.get("/version")
    version = _json(text).get("version") if status == 200 else None
    return version if isinstance(version, str) else None


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_model(name: Any) -> bool:
    return (Path(str(name)) / "config.json").is_file()


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 1 else None


def _told(value: Any = None) -> str | None:
    return None if value in (None, "", "auto", "None") else str(value)
