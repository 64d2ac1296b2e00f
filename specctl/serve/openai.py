"""OpenAI requests: the bodies of /v1/chat/completions and /v1/completions, checked in full and turned into a Request.

It knows nothing about HTTP, tokens or the engine. What is not implemented is refused by name, never ignored; a value
that asks for nothing (the API's own default) passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specctl.errors import RequestError
from specctl.sampling.params import SamplingParams
from specctl.serve.fields import Fields, refuse
from specctl.text.messages import Message, read_messages
from specctl.text.shown import shown

MAX_CHOICES = 128  # of one request, over all its prompts
MAX_STOPS = 16
MAX_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16  # the API's default; a chat goes on as far as the context

# The limit of temperature towards 0 is the argmax, and the quotients near it leave float32.
GREEDY_BELOW = 1e-5

_TEXT = ({"type": "text"},)
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "metadata": ({},),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": _TEXT,
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "echo": (False,),
    "suffix": ("",),
}

Prompt = str | tuple[int, ...] | tuple[Message, ...]


class ModelNotFound(RequestError):
    """Raised when a request names another model than the one served (HTTP 404)."""


@dataclass(frozen=True)
class Defaults:
    """What a request leaves open. max_tokens None: the API's own, 16 for a completion, the whole context for a chat."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One checked request. chat: which of the two endpoints it came to.

    prompts: each a text, token ids, or (chat, always one) a conversation. Choice j of prompt i has index i * n + j.
    max_tokens: None means as far as the context goes, which only the engine knows: see `sampling`. include_usage: in a
    last event; running_usage: in every event, of its own choice.
    """

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None
    params: SamplingParams = field(repr=False)
    stream: bool
    include_usage: bool
    running_usage: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def sampling(self, room: int) -> SamplingParams:
        """The parameters for a prompt after which `room` >= 1 tokens fit into the context."""
        return replace(self.params, max_tokens=room if self.max_tokens is None else self.max_tokens)


def parse_chat(body: Mapping[str, Any], served: str, defaults: Defaults | None = None) -> Request:
    """A body of /v1/chat/completions. Raises RequestError naming the parameter, ModelNotFound for another model."""
    fields, defaults = Fields(body), defaults or Defaults()
    model = _model(fields, served)
    messages = read_messages(fields.take("messages"))
    fields.unsupported(_UNSUPPORTED_CHAT)
    max_tokens = _chat_max_tokens(fields) or defaults.max_tokens
    logprobs = _chat_logprobs(fields)
    return _request(fields, defaults, True, model, (messages,), max_tokens, logprobs)


def parse_completion(body: Mapping[str, Any], served: str, defaults: Defaults | None = None) -> Request:
    """A body of /v1/completions. Raises RequestError naming the parameter, ModelNotFound for another model."""
    fields, defaults = Fields(body), defaults or Defaults()
    model = _model(fields, served)
    prompts = _prompts(fields.take("prompt"))
    fields.unsupported(_UNSUPPORTED_COMPLETION)
    max_tokens = fields.integer("max_tokens", defaults.max_tokens or COMPLETION_MAX_TOKENS, 1)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    return _request(fields, defaults, False, model, prompts, max_tokens, logprobs)


def _request(
    fields: Fields,
    defaults: Defaults,
    chat: bool,
    model: str,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
) -> Request:
    """The half that both endpoints share."""
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    if n * len(prompts) > MAX_CHOICES:
        refuse("n", n, f"which with {len(prompts)} prompts makes more than {MAX_CHOICES} choices; send fewer")
    fields.unsupported(_UNSUPPORTED)
    fields.string("user")  # a label for the caller's records, which changes nothing
    stream = fields.boolean("stream")
    include_usage, running_usage = _usage(fields.take("stream_options"), stream)
    request = Request(
        chat=chat,
        model=model,
        prompts=prompts,
        max_tokens=max_tokens,
        params=_sampling(fields, defaults, n, logprobs),
        stream=stream,
        include_usage=include_usage,
        running_usage=running_usage,
    )
    fields.done()
    return request


def _sampling(fields: Fields, defaults: Defaults, n: int, logprobs: int | None) -> SamplingParams:
    temperature = fields.number("temperature", defaults.temperature, 0)
    top_k = fields.integer("top_k", defaults.top_k, -1)
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(top_k, 0),  # the field writes "off" as 0 and as -1
        top_p=fields.number("top_p", defaults.top_p, 0, 1, above=True),
        min_p=fields.number("min_p", defaults.min_p, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1, 0, above=True),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        seed=fields.integer("seed", None, -(2**63), 2**63 - 1),
        n=n,
        stop=_stop(fields.take("stop")),
        include_stop=fields.boolean("include_stop_str_in_output"),
        ignore_eos=fields.boolean("ignore_eos", defaults.ignore_eos),
        logprobs=logprobs,
        k=_draft_length(fields.take("speculation")),
    )


def _model(fields: Fields, served: str) -> str:
    model = fields.string("model")
    if model is not None and model != served:
        raise ModelNotFound(f"model {shown(model)} is not served here; the model is {served!r}", "model")
    return served


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        refuse("prompt", value, "expected a string, a list of token ids, or a list of either")
    if _is_id(value[0]):
        return (_ids(value, "prompt"),)
    if len(value) > MAX_CHOICES:
        raise RequestError(f"prompt has {len(value)} prompts, expected at most {MAX_CHOICES}", "prompt")
    return tuple(p if isinstance(p, str) else _ids(p, f"prompt[{i}]") for i, p in enumerate(value))


def _ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where} is {shown(value)}, expected a string or a list of token ids", "prompt")
    for index, token_id in enumerate(value):
        if not _is_id(token_id):
            raise RequestError(f"{where}[{index}] is {shown(token_id)}, expected a token id", "prompt")
    return tuple(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        refuse("stop", value, "expected a non-empty string or a list of them")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, expected at most {MAX_STOPS}", "stop")
    return tuple(stops)


def _usage(value: object, stream: bool) -> tuple[bool, bool]:
    """Whether it is wanted in a last event, and whether in every one, which without the last is not offered."""
    if value is None:
        return False, False
    if not isinstance(value, dict) or not stream:
        refuse("stream_options", value, "expected an object, and only with stream true")
    fields = Fields(value, inside="stream_options")
    include = fields.boolean("include_usage")
    running = fields.boolean("continuous_usage_stats")
    fields.unsupported({"include_obfuscation": (False,)})
    fields.done()
    if running and not include:
        refuse("stream_options", value, "in which continuous_usage_stats needs include_usage true")
    return include, running


def _draft_length(value: object) -> int | None:
    """speculation: {"k": n}, the draft length of this request; 0 decodes it plainly."""
    if value is None:
        return None
    if not isinstance(value, dict):
        refuse("speculation", value, 'expected an object like {"k": 3}')
    fields = Fields(value, inside="speculation")
    k = fields.integer("k", None, 0)
    fields.done()
    return k


def _chat_max_tokens(fields: Fields) -> int | None:
    """max_completion_tokens, or max_tokens as it was called before."""
    older, newer = fields.integer("max_tokens", None, 1), fields.integer("max_completion_tokens", None, 1)
    if older is not None and newer is not None and older != newer:
        refuse("max_completion_tokens", newer, f"but max_tokens, its older name, is {older}; send one of them")
    return newer if older is None else older


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if top and not wanted:
        refuse("top_logprobs", top, "which needs logprobs true")
    return top if wanted else None
