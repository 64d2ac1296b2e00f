"""A target, and a draft beside it, opened from what a command line names and checked against each other.

This is where names become modules: dtype and device are resolved, vocabularies compared, the KV budget divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from specctl.checkpoint import Checkpoint, dtype_of
from specctl.dialects import eagle3 as layouts
from specctl.digest import tensors_sha
from specctl.drafts import KINDS, Drafter, eagle3_checkpoint
from specctl.drafts.llama import LlamaDrafter
from specctl.drafts.mtp_checkpoint import Found, find_mtp, is_mtp_alone, load_mtp
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.engine import MAX_K, Engine, EngineOptions
from specctl.engine.scheduler import DraftLength, Policy
from specctl.errors import CapacityError, CheckpointError, IncompatiblePair, RequestError, UsageError
from specctl.hub import locate
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE
from specctl.models import ARCHITECTURES, CausalLM, load
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import Prompt
from specctl.sampling.params import Accept
from specctl.schemas.draft import recorded
from specctl.schemas.policy import Bound, BoundDraft, PolicyFile, check_bound, read_policy
from specctl.text.tokenizer import Tokenizer, eos_ids
from specctl.text.vocabulary import check_vocabularies, eos_warning

DEFAULT_K = 3
GIB = 2**30


@dataclass(frozen=True)
class Target:
    """A loaded target. name: as the user wrote it. max_length: the longest text it is run on here."""

    name: str
    checkpoint: Checkpoint
    model: CausalLM
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_length: int
    options: ModelOptions

    @property
    def dtype(self) -> torch.dtype:
        return self.model.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.model.norm.weight.device

    @property
    def num_threads(self) -> int | None:
        return torch.get_num_threads() if self.device.type == "cpu" else None

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids. Raises RequestError when it needs a tokenizer or a template that is not there."""
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if self.tokenizer is None:
            raise RequestError(f"is text, and {self.name} has no tokenizer; give token_ids", "prompt")
        if prompt.messages is not None:
            return self.tokenizer.chat(prompt.messages)
        assert prompt.prompt is not None
        return self.tokenizer.encode(prompt.prompt)


@dataclass(frozen=True)
class OpenedDraft:
    """A draft fit for one target. checkpoint: None for a draft without weights. notices: what the user should know.
    limited: why it drafts no more than it does, if there is a reason."""

    name: str
    drafter: Drafter
    checkpoint: Checkpoint | None = None
    notices: list[str] = field(default_factory=list)
    limited: str | None = None

    @property
    def limit(self) -> int:
        """The longest block."""
        return min(MAX_K, self.drafter.max_k or MAX_K)

    @property
    def default_k(self) -> int:
        return self.drafter.depth or DEFAULT_K

    def check_k(self, flag: str, k: int) -> None:
        """Raises UsageError for a block that is too long for it."""
        if k > self.limit:
            why = "" if self.limited is None else f": it {self.limited}"
            raise UsageError(f"{flag} {k}: {self.name} drafts at most {self.limit} tokens{why}")


def open_target(name: str, options: ModelOptions) -> Target:
    """Load a target. Raises CheckpointError, UsageError for a --max-model-len it cannot have, CapacityError for a
    device that is not there."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    checkpoint = Checkpoint(locate(name))
    device = resolve_device(options.device)
    model = load(checkpoint, resolve_dtype(options.dtype, checkpoint, device), device)
    limit = model.config.max_length
    if options.max_model_len is not None and options.max_model_len > limit:
        raise UsageError(f"--max-model-len {options.max_model_len}: {name} has a context of {limit} tokens")
    tokenizer = Tokenizer(checkpoint.path) if has_tokenizer(checkpoint.path) else None
    ids = eos_ids(checkpoint.config, checkpoint.generation_config, None if tokenizer is None else tokenizer.eos_id)
    return Target(
        name, checkpoint, model, tokenizer, frozenset(ids), min(limit, options.max_model_len or limit), options
    )


def open_draft(name: str, target: Target) -> OpenedDraft:
    """Load what --draft names and check that it can draft for `target`.

    Raises CheckpointError for what is no draft, IncompatiblePair naming the first token that differs.
    """
    if name == "ngram":
        return OpenedDraft(name, NgramDrafter())
    if name == "mtp":
        try:
            found = find_mtp(target.checkpoint)
        except CheckpointError as error:
            raise IncompatiblePair(f"--draft mtp: {error}") from None
        return _open_mtp(name, found, target)
    checkpoint = Checkpoint(locate(name))
    if is_mtp_alone(checkpoint.names()):
        return _open_mtp(name, find_mtp(checkpoint), target)
    if layouts.is_eagle3(checkpoint):
        return _open_eagle3(name, checkpoint, target)
    if checkpoint.config.get("model_type") not in ARCHITECTURES:
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: model_type {checkpoint.config.get('model_type')!r} is no draft this "
            f"version can run (kinds: {', '.join(KINDS)}; model types: {', '.join(ARCHITECTURES)})"
        )
    return _open_model(name, checkpoint, target)


def _open_mtp(name: str, found: Found, target: Target) -> OpenedDraft:
    notices: list[str] = []
    if found.checkpoint is not target.checkpoint and has_tokenizer(found.checkpoint.path):
        _, notices = _compare_tokenizers(name, found.checkpoint, target)
    alone = None if found.checkpoint is target.checkpoint else recorded(found.checkpoint.path)
    depth = None if alone is None else alone.depth
    drafter = load_mtp(found, target.model, target.checkpoint, target.device, depth=depth)
    limited = None
    if found.count > 1:
        limited = f"has {found.count} MTP layers, and what a chain over several of them is to read is not known"
        notices.append(f"{name} {limited}: the first one drafts, one token a step")
    return OpenedDraft(name, drafter, found.checkpoint, notices, limited)


def _open_eagle3(name: str, checkpoint: Checkpoint, target: Target) -> OpenedDraft:
    notices: list[str] = []
    if has_tokenizer(checkpoint.path):
        _, notices = _compare_tokenizers(name, checkpoint, target)
    config = target.model.config
    said = recorded(checkpoint.path)
    found = layouts.read(checkpoint, None if said is None else said.taps, config.num_layers)
    stored = stored_head(found, config.num_layers)
    notices += [f"{name}: {note}" for note in found.view.notes]
    notices += eagle3_checkpoint.notices(stored.head, config, name)
    depth = found.k if said is None or said.depth is None else said.depth
    drafter = eagle3_checkpoint.load_eagle3(stored, target.model, target.checkpoint, target.device, depth=depth)
    return OpenedDraft(name, drafter, checkpoint, notices)


def stored_head(found: layouts.Stored, num_layers: int | None) -> eagle3_checkpoint.Stored:
    """A head whose layout was read, for the drafts to build. num_layers: of its target."""
    names = {ours: name for name, ours in found.view.tensors.items()}
    return eagle3_checkpoint.Stored(found.checkpoint, found.view.head(num_layers), names, found.ids())


def _open_model(name: str, checkpoint: Checkpoint, target: Target) -> OpenedDraft:
    notices: list[str] = []
    draft_rows, target_rows = checkpoint.config.get("vocab_size"), target.model.config.vocab_size
    shared = min(draft_rows, target_rows) if isinstance(draft_rows, int) else target_rows
    if target.tokenizer is not None and has_tokenizer(checkpoint.path):
        shared, notices = _compare_tokenizers(name, checkpoint, target)
    elif draft_rows != target_rows:
        raise IncompatiblePair(
            f"{name}: has a vocabulary of {draft_rows} and {target.name} one of {target_rows}, and without both "
            "tokenizers it cannot be told which tokens they share; add the tokenizer files"
        )
    else:
        notices.append(f"{name}: has no tokenizer to compare; its token ids are taken to be the target's")
    model = load(checkpoint, target.dtype, target.device)
    return OpenedDraft(name, LlamaDrafter(model, shared), checkpoint, notices)


def _compare_tokenizers(name: str, checkpoint: Checkpoint, target: Target) -> tuple[int, list[str]]:
    """How many ids mean the same to both; notices."""
    target_rows = target.model.config.vocab_size
    if target.tokenizer is None:
        return target_rows, []
    draft_rows = checkpoint.config.get("vocab_size")
    tokenizer = Tokenizer(checkpoint.path)
    shared = min(draft_rows, target_rows) if isinstance(draft_rows, int) else target_rows
    shared = check_vocabularies(target.tokenizer, tokenizer, target_rows, shared)
    in_force = eos_ids(checkpoint.config, checkpoint.generation_config, tokenizer.eos_id)
    in_config = eos_ids(checkpoint.config), eos_ids(target.checkpoint.config)
    # Other programs read config.json alone, so a difference there is told even when another file overrules it.
    warning = eos_warning(target.eos_ids, in_force) or eos_warning(in_config[1], in_config[0])
    return shared, [f"{name}: {warning}"] if warning else []


def open_policy(decoding: DecodingOptions, target: Target, draft: OpenedDraft | None) -> tuple[Policy, Accept | None]:
    """The policy in force and the acceptance it names: --k over POLICY.yaml over the draft's own depth, or 3."""
    if draft is None:
        for flag, value in (("--k", decoding.k), ("--policy", decoding.policy), ("--accept", decoding.accept)):
            if value:
                raise UsageError(f"{flag} is given but no --draft; name a draft, or ngram")
        return constant(0), None
    if decoding.k is not None:
        draft.check_k("--k", decoding.k)
    if decoding.policy is None:
        return constant(effective_k(decoding, draft) or 0), decoding.accept
    file = read_policy(decoding.policy)
    shas = [None if c is None else tensors_sha(c) for c in (draft.checkpoint, target.checkpoint)]
    draft.notices.extend(check_bound(file, decoding.policy, draft.drafter.kind, *shas))
    draft.check_k(f"{decoding.policy}: k", file.max_k)
    accept = decoding.accept
    if accept is None and file.accept.method != "exact":  # exact is the default, which leaves seeded requests coupled
        accept = file.accept.as_accept()
    return (_from_file(file) if decoding.k is None else constant(decoding.k)), accept


def identify(target: Target, draft: OpenedDraft) -> tuple[Bound, BoundDraft]:
    """What a file names that holds for this pair alone, by digest."""
    digest = None if draft.checkpoint is None else tensors_sha(draft.checkpoint)
    drafter = BoundDraft(kind=draft.drafter.kind, digest=digest, max_k=draft.drafter.max_k)
    return Bound(name=target.name, digest=tensors_sha(target.checkpoint)), drafter


def effective_k(decoding: DecodingOptions, draft: OpenedDraft | None) -> int | None:
    """The draft length in force; None when it is a policy's to say."""
    if draft is None:
        return 0
    if decoding.k is None:
        return draft.default_k if decoding.policy is None else None
    return decoding.k


def constant(k: int) -> Policy:
    return lambda batch, context: DraftLength(k)


def _from_file(file: PolicyFile) -> Policy:
    def policy(batch: int, context: float) -> DraftLength:
        cell = file.lookup(batch, context)
        return DraftLength(cell.k, cell.confidence, detach=file.at_k0 == "detach")

    return policy


def build_engine(
    target: Target,
    draft: OpenedDraft | None = None,
    policy: Policy | None = None,
    *,
    max_sequences: int = 1,
    accept: Accept | None = None,
    seed: int = 0,
    ignore_tokenizer: bool = False,
    announce: Callable[[str], None] = lambda sentence: None,
) -> Engine:
    """An engine over a loaded pair, its KV cache as large as --kv-memory says or the batch can use.

    Raises CapacityError when not even one text of --max-model-len fits a given --kv-memory.
    """
    drafter = None if draft is None else draft.drafter
    layers = target.model.kv_layers("target") + ([] if drafter is None else drafter.kv_layers)
    page_bytes = KVCache.bytes_per_page(layers)
    options = EngineOptions(
        num_pages=2,
        max_length=target.max_length,
        max_sequences=max_sequences,
        attention=target.options.attention,
        accept=accept,
        eos_ids=target.eos_ids,
        seed=seed,
    )
    options = _divide_memory(options, target, page_bytes, announce)
    tokenizer = None if ignore_tokenizer else target.tokenizer
    return Engine(target.model, options, drafter, policy or constant(0), tokenizer)


def _divide_memory(
    options: EngineOptions, target: Target, page_bytes: int, announce: Callable[[str], None]
) -> EngineOptions:
    """Options with the number of pages, and with a shorter context when memory holds no longer one."""
    wanted = options.max_sequences * -(-(target.max_length + MAX_K + 2) // PAGE_SIZE) + 1
    if target.options.kv_memory is not None:
        affordable = int(target.options.kv_memory * GIB) // page_bytes
    else:
        share = 0.5 if target.device.type == "cpu" else 0.9  # of a CPU's memory others want something too
        affordable = int(free_memory(target.device) * share) // page_bytes
    num_pages = min(wanted, affordable)
    holds = (num_pages - 1) * PAGE_SIZE
    if holds >= target.max_length:
        return replace(options, num_pages=num_pages)
    if holds < PAGE_SIZE or target.options.max_model_len is not None:
        raise CapacityError(
            f"--kv-memory: {max(affordable, 0) * page_bytes / GIB:.3g} GiB hold {max(holds, 0)} tokens of KV cache, "
            f"one text may have {target.max_length}; give more, or a smaller --max-model-len"
        )
    announce(f"the KV cache holds {holds} tokens: the context is cut from {target.max_length} to that")
    return replace(options, num_pages=num_pages, max_length=holds)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: of the device, or of the machine (Linux; elsewhere 4 GiB are assumed)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 4 * GIB


def has_tokenizer(path: Path) -> bool:
    return any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def resolve_device(name: str) -> torch.device:
    """auto: CUDA when there is one. Raises CapacityError when the device named is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise CapacityError(f"--device {name}: this machine has {torch.cuda.device_count()} usable CUDA devices")
    return device


def resolve_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own on CUDA; on a CPU float32 for 16-bit weights, which few CPUs compute with fast."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    dtype = dtype_of(checkpoint.config, str(checkpoint.path / "config.json"))
    return torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype
