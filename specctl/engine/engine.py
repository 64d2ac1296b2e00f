"""Engine: steps a target and its draft together. It knows the drafter by its interface only and gets K from a callable.

A decode-only step: the draft proposes from what was carried over, the target scores the proposals in one pass, verify()
keeps a prefix and decides one more token, and the draft runs over what was committed so that it can propose again. The
draft's side of all this is in drafting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specctl import attention
from specctl.drafts import Draft, Drafter
from specctl.engine.decision import Decision
from specctl.engine.drafting import Drafting
from specctl.engine.logprobs import logprobs_of
from specctl.engine.output import Output
from specctl.engine.scheduler import DecodeStep, DraftLength, Policy, PrefillStep, Scheduler
from specctl.engine.sequence import Logprob, Sequence, Status
from specctl.engine.stats import EngineStats
from specctl.engine.verify import Verdict, verify
from specctl.errors import CapacityError, NumericalError, RequestError
from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache
from specctl.kv.pages import PAGE_SIZE, PageTable
from specctl.models import CausalLM, Hidden
from specctl.sampling.batch import SamplingBatch
from specctl.sampling.noise import make_key
from specctl.sampling.params import MAX_K as MAX_K
from specctl.sampling.params import Accept, SamplingParams
from specctl.text.output import TextOutput
from specctl.text.tokenizer import Tokenizer

Observer = Callable[[list[Sequence], Draft, Tensor, Verdict], None]
"""Shown every decision before it is committed: sequences, their drafts, processed scores [B, M, V], the verdict."""


@dataclass(frozen=True)
class EngineOptions:
    """num_pages: KV pages, one of them scratch. max_length: longest text in tokens (prompt and output).
    chunk: prompt tokens of a prefill step. seed: of the run; unseeded requests derive their noise from it."""

    num_pages: int
    max_length: int
    max_sequences: int = 32
    chunk: int = 512
    attention: str = "auto"
    accept: Accept | None = None
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    check_pages: bool = False


def no_speculation(batch: int, context: float) -> DraftLength:
    return DraftLength(0)


class Engine:
    """`add` requests, `step` until `has_work` is False. One thread at a time.

    tokenizer: needed for text and stop strings; without it outputs carry ids only.
    """

    def __init__(
        self,
        target: CausalLM,
        options: EngineOptions,
        drafter: Drafter | None = None,
        policy: Policy = no_speculation,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.options = options
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.observer: Observer | None = None
        self.max_k = 0 if drafter is None else min(MAX_K, drafter.max_k or MAX_K)
        self.device = target.model.norm.weight.device
        layers = target.kv_layers("target") + ([] if drafter is None else drafter.kv_layers)
        self.cache = KVCache(layers, options.num_pages, PAGE_SIZE, self.device)
        self._attn = attention.choose(options.attention, self.cache, "target", self.device)
        self.scheduler = Scheduler(
            PageTable(options.num_pages, PAGE_SIZE),
            max_sequences=options.max_sequences,
            max_length=options.max_length,
            chunk=options.chunk,
            policy=policy,
            max_k=self.max_k,
            draft_max_length=None if drafter is None else drafter.max_length,
            draft_lags=drafter is None or not drafter.reads_hidden,
        )
        self._drafting = Drafting(
            drafter,
            self.cache,
            backend=options.attention,
            num_lanes=options.max_sequences,
            chunk=options.chunk,
            max_length=self.scheduler.draft_max_length,
            timed=lambda phase: self.stats.timed(phase),
        )
        self._requests: dict[int, list[Sequence]] = {}
        self._num_requests = 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, token_ids: list[int], params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError naming the parameter, CapacityError when it can never
        fit."""
        self._check_request(token_ids, params)
        request_id = self._num_requests
        self._num_requests += 1
        accept = params.accept or self.options.accept or params.acceptance
        choices = []
        for choice in range(params.n):
            # A seeded request's noise is its own; an unseeded one's is the run's, told apart by its number.
            words = (0, params.seed, choice) if params.seed is not None else (1, self.options.seed, request_id, choice)
            text = None
            if self.tokenizer is not None:
                ends = frozenset[int]() if params.ignore_eos else self.options.eos_ids
                text = TextOutput(self.tokenizer, params.stop, params.include_stop, ends)
            sequence = Sequence(request_id, choice, params, accept, list(token_ids), make_key(*words), text)
            self.scheduler.add(sequence)
            choices.append(sequence)
        self._requests[request_id] = choices
        self.stats.prompt_tokens += len(token_ids)
        return request_id

    def choices(self, request_id: int) -> list[Sequence]:
        """The sequences of a request that is not finished yet; whoever keeps them sees them fill."""
        return self._requests[request_id]

    def abort(self, request_id: int) -> None:
        """Drop a request in whatever state it is; unknown or finished ids are left alone."""
        for sequence in self._requests.pop(request_id, []):
            if not sequence.finished:
                state = sequence.status.value
                self.stats.aborts[state] = self.stats.aborts.get(state, 0) + 1
                sequence.finish_reason = "abort"
                self._retire(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def carry(self) -> Any:
        """What the draft carries over, by lane; for those who check it."""
        return self._drafting.carry

    @property
    def cache_usage(self) -> float:
        table = self.scheduler.table
        return 1 - table.num_free / table.num_usable

    # -- stepping ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step of the batch; one Output for every choice that got tokens.

        Raises NumericalError when the target's logits are no numbers for some requests: these are ended, and nothing
        has changed for the others, whose step is taken again.
        """
        with self.stats.timed("host"):
            step = self.scheduler.schedule()
            self.stats.preemptions = self.scheduler.preemptions
            if isinstance(step, PrefillStep):
                outputs = self._prefill(step)
            elif isinstance(step, DecodeStep):
                outputs = self._decode(step)
            else:
                outputs = []
            if self.options.check_pages:
                self.scheduler.check()
        return outputs

    def run(self, requests: Iterable[tuple[list[int], SamplingParams]]) -> list[list[Sequence]]:
        """Run requests to their ends; their choices, in the order given."""
        choices = [self.choices(self.add(token_ids, params)) for token_ids, params in requests]
        while self.has_work:
            self.step()
        return choices

    def _prefill(self, step: PrefillStep) -> list[Output]:
        """Prompt chunks, and one plain token for each rider. A finished prompt is sampled at once; the draft runs over
        the same rows and the new token, and what it would say next is carried over."""
        self.stats.prefill_steps += 1
        rows = [(s, s.cached, stop) for s, stop in step.chunks] + [(s, s.cached, len(s)) for s in step.riders]
        with self.stats.timed("prefill"):
            batch = self._pack(rows)
            hidden = self._run_target(batch)
        complete = [(i, s) for i, (s, _, stop) in enumerate(rows) if stop == len(s)]
        sequences = [s for _, s in complete]
        row_R = batch.last_row_B[[i for i, _ in complete]]
        if complete:
            with self.stats.timed("prefill"):
                logits_BMV = self.target.logits(hidden.final_TD[row_R])[:, None]
            self._check_numbers(sequences, logits_BMV)
        for sequence, _, stop in rows:
            sequence.cached = stop
        next_T, draft, decision = self._next_tokens(rows), self._drafting.nothing(len(sequences)), None
        if complete:
            for sequence in sequences:
                sequence.status = Status.DECODING
            decision = self._decide(sequences, draft, logits_BMV, self._sampling(sequences))
            next_T[row_R] = decision.verdict.token_BM[:, 0]
        following = self._drafting.follow(batch, [s for s, _, _ in rows], hidden, next_T, batch.last_row_B)
        outputs = [] if decision is None else self._settle(sequences, draft, logits_BMV, decision)
        _followed(following)
        if not self._drafting.reads_hidden:
            # The riders are left behind, for one chunk later.
            self._drafting.catch_up([s for s, _ in step.chunks if not s.finished and self.scheduler.wants_draft(s)])
        return outputs

    def _decode(self, step: DecodeStep) -> list[Output]:
        sequences = step.sequences
        sampling = self._sampling(sequences, step.min_confidence)
        draft = self._drafting.propose(step, sampling)
        num_slots = draft.token_BK.shape[1]
        self.stats.steps_by_k[num_slots] = self.stats.steps_by_k.get(num_slots, 0) + 1
        with self.stats.timed("verify"):
            batch = self._pack_blocks(sequences, draft)
            hidden = self._run_target(batch)
            logits_BMV = self.target.logits(hidden.final_TD).view(len(sequences), num_slots + 1, -1)
        self._check_numbers(sequences, logits_BMV)
        decision = self._decide(sequences, draft, logits_BMV, sampling)
        following = self._drafting.follow_block(batch, sequences, hidden, decision.verdict)
        self._drafting.look_ahead(step, sampling, decision.verdict, following)
        outputs = self._settle(sequences, draft, logits_BMV, decision)
        _followed(following)
        self._drafting.after_block(step)
        return outputs

    def _decide(self, sequences: list[Sequence], draft: Draft, logits_BMV: Tensor, sampling: SamplingBatch) -> Decision:
        """What is accepted and what comes after it; nothing waits for it to be known here."""
        with self.stats.timed("sample"):
            scores_BMV = sampling.scores(logits_BMV, draft.token_BK)
            verdict = verify(draft, scores_BMV, sampling)
            if self.observer is not None:
                self.observer(sequences, draft, scores_BMV, verdict)
            return Decision(verdict)

    def _settle(self, sequences: list[Sequence], draft: Draft, logits_BMV: Tensor, decision: Decision) -> list[Output]:
        """Commit what was decided, and report it."""
        with self.stats.timed("sample"):
            tokens, accepted = decision.read()
            wanted = [s.params.logprobs for s in sequences]
            logprobs = logprobs_of(logits_BMV, decision.verdict.token_BM, wanted)
        outputs = []
        for b, sequence in enumerate(sequences):
            for counters in (sequence.counters, self.stats.speculation):
                counters.add_block(draft.length[b], accepted[b])
            sequence.cached = len(sequence) + accepted[b]
            outputs.append(self._commit(sequence, tokens[b][: accepted[b] + 1], logprobs[b]))
        return outputs

    def _commit(self, sequence: Sequence, tokens: list[int], logprobs: list[Logprob]) -> Output:
        """Append decided tokens up to the first end among them: EOS, a stop string, max_tokens, the context."""
        offsets: list[int] = []
        text = ""
        for token in tokens:
            sequence.output.append(token)
            offsets.append(0 if sequence.text is None else sequence.text.decoded_length)
            stopped = False
            if sequence.text is not None:
                piece, stopped = sequence.text.push(token)
                text += piece
            if stopped or (token in self.options.eos_ids and not sequence.params.ignore_eos):
                sequence.finish_reason = "stop"
            elif len(sequence.output) == sequence.params.max_tokens or len(sequence) == self.options.max_length:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                break
        kept = len(offsets)
        sequence.logprobs.extend(logprobs[:kept])
        for counters in (sequence.counters, self.stats.speculation):
            counters.emitted_tokens += kept
        if sequence.finish_reason is not None:
            if sequence.text is not None:
                text += sequence.text.finish()
                if sequence.text.stopped:  # what was held back may complete a stop string; stop beats length
                    sequence.finish_reason = "stop"
            self._retire(sequence)
        else:
            self.scheduler.table.truncate(sequence.pages, len(sequence))
        return Output(
            sequence.request_id,
            sequence.choice,
            tuple(tokens[:kept]),
            tuple(offsets),
            text,
            tuple(logprobs[:kept]),
            sequence.finish_reason,
            sequence.counters,
        )

    def _retire(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        self.scheduler.release(sequence)
        choices = self._requests.get(sequence.request_id)
        if choices is not None and all(s.finished for s in choices):
            del self._requests[sequence.request_id]

    # -- passes -----------------------------------------------------------------------------------------------------

    def _pack(self, rows: list[tuple[Sequence, int, int]]) -> Batch:
        return Batch.pack([s.span(start, stop) for s, start, stop in rows], PAGE_SIZE, self.device)

    def _pack_blocks(self, sequences: list[Sequence], draft: Draft) -> Batch:
        """The newest token of each sequence and its proposals: K + 1 uniform rows."""
        num_rows = draft.token_BK.shape[1] + 1
        spans = [Span((s.tokens(len(s) - 1, len(s))) * num_rows, len(s) - 1, s.pages, s.lane) for s in sequences]
        newest_B1 = torch.tensor([[span.tokens[0]] for span in spans], device=self.device)
        token_T = torch.cat((newest_B1, draft.token_BK), dim=1).flatten()
        return Batch.pack(spans, PAGE_SIZE, self.device, token_T=token_T)

    def _next_tokens(self, rows: list[tuple[Sequence, int, int]]) -> Tensor:
        """[T], on the device: the token after each row's. 0 after a newest one: nobody has decided yet."""
        tokens: list[int] = []
        for sequence, start, stop in rows:
            following = sequence.tokens(start + 1, stop + 1)
            tokens += following + [0] * (stop - start - len(following))
        return torch.tensor(tokens).to(self.device)

    def _run_target(self, batch: Batch) -> Hidden:
        self._attn.plan(batch)
        hidden: Hidden = self.target(batch, self._attn, self._drafting.taps)
        return hidden

    # -- small parts ------------------------------------------------------------------------------------------------

    def _sampling(self, sequences: list[Sequence], min_confidence: float | None = None) -> SamplingBatch:
        return SamplingBatch([s.sampling_state() for s in sequences], self.device, min_confidence)

    def _check_numbers(self, sequences: list[Sequence], logits_BMV: Tensor) -> None:
        """End requests whose logits are NaN or infinite: nothing can be chosen by them."""
        finite_B = logits_BMV.amax(-1).isfinite().all(-1)  # the largest is NaN where any is
        if bool(finite_B.all()):
            return
        at_fault = [s for s, finite in zip(sequences, finite_B.tolist(), strict=True) if not finite]
        for sequence in at_fault:
            self.abort(sequence.request_id)
        raise NumericalError(
            f"the target's logits are NaN or infinite after {len(at_fault[0])} tokens; look for such numbers in its "
            "weights, or compute in a wider --dtype",
            frozenset(s.request_id for s in at_fault),
        )

    def _check_request(self, token_ids: list[int], params: SamplingParams) -> None:
        limit = self.options.max_length
        vocab = self.target.config.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty, expected at least one token", "prompt")
        if bad := [i for i in token_ids if not 0 <= i < vocab]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {vocab}", "prompt")
        if len(token_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, the context holds {limit} including at least one new token",
                "prompt",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none", "stop")
        if params.k is not None and params.k > self.max_k:
            raise RequestError(f"k is {params.k}, this engine drafts at most {self.max_k} tokens", "k")
        table = self.scheduler.table
        needed = table.pages_for(min(len(token_ids) + params.max_tokens + self.max_k + 1, limit))
        if needed > table.num_usable:
            raise CapacityError(
                f"the request may need {needed} KV pages and there are {table.num_usable}; "
                "lower max_tokens or give more --kv-memory"
            )


def _followed(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if not sequence.finished:
            sequence.draft_cached = sequence.cached
