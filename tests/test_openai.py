"""OpenAI requests: what is accepted, what it means, and what is refused by which name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from specctl.errors import RequestError
from specctl.sampling.params import SamplingParams
from specctl.serve.fields import read_body
from specctl.serve.openai import Defaults, ModelNotFound, Request, parse_chat, parse_completion
from specctl.text.messages import Message

HI = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> Request:
    return parse_chat({"messages": HI, **body}, "tiny")


def completion(**body: Any) -> Request:
    return parse_completion({"prompt": "x", **body}, "tiny")


BOTH = pytest.mark.parametrize("parse", [chat, completion])


# Bodies


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"not json", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"messages": [', "not valid JSON"),
        (b'"x"', "'x', expected a JSON object"),
        (b"[1, 2]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "prompt has half a surrogate pair"),
        (b'{"messages": [{"content": "\\uDE00"}]}', "messages has half a surrogate pair"),
        (b'{"\\ud800": 1}', r"\? has half a surrogate pair"),
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        read_body(raw)
    assert len(str(caught.value)) < 250


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert read_body(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\N{GRINNING FACE}"}
    assert read_body('{"prompt": "é"}'.encode()) == {"prompt": "é"}


# Meanings


def test_a_chat_that_asks_for_nothing_special() -> None:
    request = chat()
    assert request == Request(
        chat=True,
        model="tiny",
        prompts=((Message("user", "hi"),),),
        max_tokens=None,
        params=SamplingParams(temperature=1.0),
        stream=False,
        include_usage=False,
    )
    assert request.sampling(room=40).max_tokens == 40


def test_a_completion_that_asks_for_nothing_special() -> None:
    request = completion()
    assert (request.chat, request.prompts, request.max_tokens) == (False, ("x",), 16)
    assert request.sampling(room=5).max_tokens == 16, "whether it fits is the engine's to say"


def test_the_server_may_have_other_defaults() -> None:
    defaults = Defaults(temperature=0.0, top_k=5, top_p=0.9, min_p=0.1, max_tokens=128, ignore_eos=True)
    for request in (
        parse_chat({"messages": HI}, "tiny", defaults),
        parse_completion({"prompt": "x"}, "tiny", defaults),
    ):
        expected = SamplingParams(temperature=0.0, top_k=5, top_p=0.9, min_p=0.1, ignore_eos=True)
        assert (request.params, request.max_tokens) == (expected, 128)
    sent = {"messages": HI, "temperature": 1, "top_k": 0, "max_tokens": 3, "ignore_eos": False}
    request = parse_chat(sent, "tiny", defaults)
    assert (request.params.temperature, request.params.top_k, request.max_tokens) == (1.0, 0, 3)
    assert not request.params.ignore_eos


@BOTH
def test_every_parameter_of_sampling_arrives(parse: Any) -> None:
    request = parse(
        model="tiny",
        n=3,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.05,
        seed=-5,
        stop=["a", "b"],
        presence_penalty=-1,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        ignore_eos=True,
        include_stop_str_in_output=True,
        speculation={"k": 2},
        user="somebody",
        stream=True,
        stream_options={"include_usage": True},
    )
    assert request.sampling(room=99) == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        seed=-5,
        n=3,
        stop=("a", "b"),
        include_stop=True,
        ignore_eos=True,
        k=2,
    )
    assert (request.stream, request.include_usage, request.num_choices) == (True, True, 3)


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        ({"stop": "end"}, "stop", ("end",)),
        ({"stop": []}, "stop", ()),
        ({"stop": None}, "stop", ()),
        ({"stop": ["x"] * 16}, "stop", ("x",) * 16),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-6}, "temperature", 0.0),
        ({"temperature": 1e-300}, "temperature", 0.0),
        ({"temperature": 5}, "temperature", 5.0),
        ({"temperature": None}, "temperature", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 3.0}, "top_k", 3),
        ({"seed": None}, "seed", None),
        ({"seed": 0}, "seed", 0),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"speculation": {"k": 0}}, "k", 0),
        ({"speculation": {"k": None}}, "k", None),
        ({"speculation": {}}, "k", None),
        ({"n": None}, "n", 1),
    ],
)
@BOTH
def test_values_and_what_they_mean(parse: Any, body: dict[str, Any], name: str, value: object) -> None:
    assert getattr(parse(**body).params, name) == value


def test_logprobs_of_both_endpoints() -> None:
    assert chat().params.logprobs is None
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert completion().params.logprobs is None
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=5).params.logprobs == 5


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).max_tokens == 3
    assert chat(max_tokens=4, max_completion_tokens=None).max_tokens == 4


def test_content_parts_are_the_same_request() -> None:
    assert chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == chat()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ("x",)),
        ("", ("",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_one_prompt_or_several_as_text_or_ids(prompt: object, prompts: tuple[object, ...]) -> None:
    assert completion(prompt=prompt, n=2).prompts == prompts
    assert completion(prompt=prompt, n=2).num_choices == 2 * len(prompts)


# Refusals

ANYWHERE = [
    *[({"n": value}, "n") for value in (0, -1, 129, 1.5, "2", True)],
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "5", True, [5], float("inf"))],
    *[({"temperature": value}, "temperature") for value in (-1, -1e-9, float("nan"), float("inf"), 10**400, "1", True)],
    *[({"top_p": value}, "top_p") for value in (0, -0.1, 1.01, float("nan"), "0.5", False)],
    *[({"top_k": value}, "top_k") for value in (-2, 1.5, "4", True)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 1.1, True)],
    *[({"seed": value}, "seed") for value in (2**63, -(2**63) - 1, 1.5, "1", True)],
    *[({"stop": value}, "stop") for value in ("", [""], ["a", ""], [1], 5, {"a": 1}, ["x"] * 17, True)],
    *[({"presence_penalty": value}, "presence_penalty") for value in (2.1, -2.1, "0", True)],
    *[({"frequency_penalty": value}, "frequency_penalty") for value in (2.1, -2.1, float("nan"))],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, float("inf"))],
    *[({"stream": value}, "stream") for value in (1, "true", [])],
    *[({"ignore_eos": value}, "ignore_eos") for value in (1, "true")],
    *[({"include_stop_str_in_output": value}, "include_stop_str_in_output") for value in (0, "no")],
    *[({"user": value}, "user") for value in (5, {"id": 5})],
    *[({"speculation": value}, "speculation") for value in (3, [3], {"k": -1}, {"k": True}, {"k": 1.5}, {"kk": 1})],
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": True}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": 1}}, "stream_options"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"model": "other"}, "model"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"logit_bias": {"50": -100}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"store": True}, "store"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"stop_token_ids": [5]}, "stop_token_ids"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"echo": True}, "echo"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"accept": "typical"}, "accept"),
    ({"": 1}, ""),
]
CHAT_ONLY = [
    *[({"messages": value}, "messages") for value in ("x", [], None, {}, [1], [{"role": "user"}])],
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"prompt": "x"}, "prompt"),
    ({"suffix": ""}, "suffix"),
]
COMPLETION_ONLY = [
    *[({"prompt": value}, "prompt") for value in (None, 5, [], [[]], {"a": 1}, True, [True], [1, "a"], ["a", 1])],
    *[({"prompt": value}, "prompt") for value in ([-1], [1.0], [2**31], [[1], [None]], ["a", []], ["a"] * 129)],
    *[({"logprobs": value}, "logprobs") for value in (-1, 21, True, "2")],
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": HI}, "messages"),
    ({"add_special_tokens": False}, "add_special_tokens"),
]
CASES = [(parse, body, param) for parse in (chat, completion) for body, param in ANYWHERE]
CASES += [(chat, *case) for case in CHAT_ONLY] + [(completion, *case) for case in COMPLETION_ONLY]


@pytest.mark.parametrize(("parse", "body", "param"), CASES)
def test_what_is_wrong_or_not_implemented_is_refused_by_name(parse: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="'other' is not served here; the model is 'tiny'"):
        chat(model="other")


def test_a_misspelt_parameter_gets_a_hint() -> None:
    with pytest.raises(RequestError, match=r"'temprature' is not a known parameter; did you mean temperature\?"):
        chat(temprature=0.5)
    with pytest.raises(RequestError, match=r"speculation: 'kk' is not a known parameter; did you mean k\?"):
        chat(speculation={"kk": 1})


def test_a_long_value_is_echoed_in_part() -> None:
    with pytest.raises(RequestError) as caught:
        completion(temperature="9" * 10_000)
    assert 20 < len(str(caught.value)) < 200
    with pytest.raises(RequestError) as caught:
        completion(**{"z" * 10_000: 1})
    assert len(str(caught.value)) < 200
    assert len(caught.value.param or "") <= 100


HARMLESS: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "length_penalty": 1.0,
    "logit_bias": {},
    "metadata": {},
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "skip_special_tokens": True,
    "stop_token_ids": [],
    "store": False,
    "stream": False,
    "top_p": 1,
    "use_beam_search": False,
    "user": "x",
}
HARMLESS_CHAT: dict[str, Any] = {
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}


def test_values_that_ask_for_nothing_pass() -> None:
    assert chat(**HARMLESS, **HARMLESS_CHAT) == chat()
    assert completion(**HARMLESS, suffix="") == completion()
    assert chat(**dict.fromkeys([*HARMLESS, *HARMLESS_CHAT, "audio"])) == chat(), "null is absent"


def test_an_unknown_parameter_is_refused_even_when_it_is_null() -> None:
    with pytest.raises(RequestError, match="'temperature_' is not a known parameter; did you mean temperature"):
        chat(temperature_=None)


def test_what_is_too_large_is_told_both_bounds() -> None:
    with pytest.raises(RequestError, match=f"from {-(2**63)} to {2**63 - 1}"):
        chat(seed=2**70)
    with pytest.raises(RequestError, match=r"of at least 1$"):
        chat(max_tokens=0)


def test_stream_options_that_ask_for_nothing_pass() -> None:
    for options in ({}, {"include_usage": False}, {"include_usage": None, "include_obfuscation": False}):
        assert not chat(stream=True, stream_options=options).include_usage


def test_reading_a_request_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, specctl.serve.answers; print(json.dumps([m in sys.modules for m in ('torch', 'transformers')]))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [False, False]
