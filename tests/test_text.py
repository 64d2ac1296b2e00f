"""The tokenizer: plain prompts, chats, EOS ids, what a token reads as, and whether two vocabularies agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import spelled
import tiny
from transformers import AutoTokenizer

from specctl.errors import CheckpointError, IncompatiblePair, RequestError
from specctl.text.messages import Message, read_messages
from specctl.text.tokenizer import Tokenizer, eos_ids
from specctl.text.vocabulary import check_vocabularies, eos_warning

HI = [{"role": "user", "content": "hi"}]
HI_IDS = [tiny.BOS, tiny.START, *b"user\nhi", tiny.END, tiny.START, *b"assistant\n"]
NO_BOS = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def byte(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.byte_tokenizer(tmp_path_factory.mktemp("byte") / "model"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(spelled.sentencepiece(tmp_path_factory.mktemp("sp") / "model"))


# Plain prompts


@pytest.mark.parametrize("text", ["", "x", "a é \N{GRINNING FACE}", "<s>x", " <|end|> y", "line\n\n  indented"])
@pytest.mark.parametrize("bos_post", [False, True])
def test_a_plain_prompt_is_what_transformers_makes_of_it(tmp_path: Path, text: str, bos_post: bool) -> None:
    path = tiny.byte_tokenizer(tmp_path / "model", bos_post=bos_post)
    ids = Tokenizer(path).encode(text)
    assert ids == AutoTokenizer.from_pretrained(str(path))(text).input_ids
    assert (ids[:1] == [tiny.BOS]) == (bos_post or text.startswith("<s>"))


def test_a_prompt_is_not_cut_short_or_filled_up(tmp_path: Path) -> None:
    path = tiny.byte_tokenizer(tmp_path / "model")
    file = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    file["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    file["padding"] |= {"pad_id": 260, "pad_type_id": 0, "pad_token": "<pad>"}
    (path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    assert Tokenizer(path).encode("hello") == list(b"hello")


def test_half_a_surrogate_pair_is_refused_and_named(byte: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte.encode("a\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte.chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.param == "messages"


def test_one_thread_encodes_while_others_decode(byte: Tokenizer) -> None:
    def encode(_: int) -> bool:
        return byte.encode("hello" * 50) == list(b"hello" * 50)

    def decode(_: int) -> bool:
        return byte.decode(list(b"hello" * 50)) == "hello" * 50

    with ThreadPoolExecutor(4) as pool:
        results = [pool.map(step, range(300)) for step in (encode, decode, encode, decode)]
        assert all(all(result) for result in results)


def test_sizes_and_special_ids(byte: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert (len(byte), byte.bos_id, byte.eos_id) == (261, tiny.BOS, tiny.END)
    assert byte.vocab()["<|end|>"] == tiny.END
    assert len(byte.vocab()) == len(byte)
    assert (sentencepiece.bos_id, sentencepiece.eos_id) == (1, 2)


def test_decoding_may_keep_special_tokens(byte: Tokenizer) -> None:
    ids = [tiny.BOS, *b"hi", tiny.END, 263]
    assert byte.decode(ids) == "hi"
    assert byte.decode(ids, skip_special_tokens=False) == "<s>hi<|end|>"


# What cannot be loaded


def _drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _put(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_drop("tokenizer.json"), "tokenizer.json is missing"),
        (_put("tokenizer.json", '{"version":'), "cannot be read"),
        (_put("tokenizer.json", '{"version": "1.0"}'), "cannot be read"),
        (_put("tokenizer_config.json", "{"), "cannot be read"),
        (_put("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'), "running code"),
    ],
)
def test_missing_and_broken_files_are_named(tmp_path: Path, change: Callable[[Path], object], sentence: str) -> None:
    path = tiny.byte_tokenizer(tmp_path / "model")
    change(path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Tokenizer(tmp_path / "nowhere")


def test_a_decoder_that_is_half_byte_level_is_refused(tmp_path: Path) -> None:
    path = tiny.byte_tokenizer(tmp_path / "model")
    file = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    file["decoder"] = {"type": "Sequence", "decoders": [file["decoder"], {"type": "Fuse"}]}
    (path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    with pytest.raises(CheckpointError, match="ByteLevel, Fuse"):
        Tokenizer(path)


# Chats


@pytest.mark.parametrize("bos_post", [False, True])
def test_the_template_alone_writes_special_tokens(tmp_path: Path, bos_post: bool) -> None:
    tokenizer = Tokenizer(tiny.byte_tokenizer(tmp_path / "model", bos_post=bos_post))
    assert tokenizer.chat(HI) == HI_IDS
    assert len(HI_IDS) == 21
    training = tokenizer.chat([*HI, {"role": "assistant", "content": "ok"}], add_generation_prompt=False)
    assert training == [*HI_IDS, *b"ok", tiny.END]


@pytest.mark.parametrize("bos_post", [False, True])
def test_a_template_without_bos_gets_none(tmp_path: Path, bos_post: bool) -> None:
    tokenizer = Tokenizer(tiny.byte_tokenizer(tmp_path / "model", bos_post=bos_post, chat_template=NO_BOS))
    assert tokenizer.chat(HI) == [tiny.START, *b"user\nhi", tiny.END]


def test_only_a_leading_bos_is_collapsed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.byte_tokenizer(tmp_path / "m", chat_template="<s><s>{{ messages[0]['content'] }}"))
    assert tokenizer.chat([{"role": "user", "content": "x<s><s>y"}]) == [tiny.BOS, 120, tiny.BOS, tiny.BOS, 121]


def test_text_parts_are_joined(byte: Tokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert byte.chat([{"role": "user", "content": parts}]) == HI_IDS


def test_developer_is_the_system_role(byte: Tokenizer) -> None:
    assert read_messages([{"role": "developer", "content": "x"}]) == (Message("system", "x"),)


def test_a_message_of_an_answer_can_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": [], "function_call": None}
    assert read_messages([*HI, answer]) == (Message("user", "hi"), Message("assistant", "ok"))
    assert read_messages(read_messages(HI)) == (Message("user", "hi"),)


def test_a_name_reaches_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name or '-' }}:{{ m.content }};{% endfor %}"
    tokenizer = Tokenizer(tiny.byte_tokenizer(tmp_path / "m", chat_template=template))
    ids = tokenizer.chat([{"role": "user", "content": "x", "name": "Ann"}, {"role": "user", "content": "y"}])
    assert tokenizer.decode(ids) == "Ann:x;-:y;"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("x", "expected a list of at least one message"),
        ([], "expected a list of at least one message"),
        (None, "expected a list of at least one message"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([{"content": "hi"}], r"messages\[0\].role is None"),
        ([{"role": "function_call", "content": "{}"}], "role is 'function_call'"),
        ([{"role": "tool", "content": "4", "tool_call_id": "1"}], "role is 'tool'"),
        ([{"role": ["user"], "content": "4"}], "role is "),
        ([*HI, {"role": "assistant", "content": None}], r"messages\[1\].content is None"),
        ([{"role": "user"}], "content is None"),
        ([{"role": "user", "content": 5}], "content is 5"),
        ([{"role": "user", "content": []}], "content is \\[\\]"),
        ([{"role": "user", "content": ["hi"]}], r"content\[0\] is 'hi'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'; only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is None"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "cache": {}}]}], "'cache'"),
        ([{"role": "user", "content": "x", "name": 3}], "name is 3"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "'tool_calls'"),
    ],
)
def test_malformed_conversations_are_refused(byte: Tokenizer, messages: object, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        byte.chat(messages)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refused by the chat template"),
        ("{% for %}", "refused by the chat template"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("", "has no chat template"),
        (None, "has no chat template"),
        ("{# says nothing #}", "empty prompt"),
    ],
)
def test_what_the_template_refuses_is_the_request_s_fault(tmp_path: Path, template: str | None, sentence: str) -> None:
    tokenizer = Tokenizer(tiny.byte_tokenizer(tmp_path / "model", chat_template=template))
    with pytest.raises(RequestError, match=sentence) as caught:
        tokenizer.chat(HI)
    assert caught.value.param == "messages"


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    path = tiny.byte_tokenizer(tmp_path / "model", chat_template=None)
    config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "plain"}]
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}), encoding="utf-8")
    assert Tokenizer(path).chat(HI) == list(b"plain")


# EOS ids


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_eos", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [257, 259]}, 5, (257, 259)),
        ({"eos_token_id": [1, 2, 1]}, {}, 5, (1, 2)),
        ({"eos_token_id": 1}, {"eos_token_id": 0}, 5, (0,)),
        ({"eos_token_id": 1}, {"eos_token_id": None}, 5, (1,)),
        ({"eos_token_id": 1}, None, 5, (1,)),
        ({"eos_token_id": None}, {"eos_token_id": []}, 5, (5,)),
        ({}, None, None, ()),
    ],
)
def test_which_ids_end_a_text(
    config: dict[str, Any], generation: dict[str, Any] | None, tokenizer_eos: int | None, expected: tuple[int, ...]
) -> None:
    assert eos_ids(config, generation, tokenizer_eos) == expected


@pytest.mark.parametrize("value", ["259", True, -1, 2.0, [259, None], {"id": 1}])
def test_eos_must_be_ids(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        eos_ids({"eos_token_id": 1}, {"eos_token_id": value})


# Single tokens


def test_what_a_token_reads_as(byte: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert [byte.token_bytes(i) for i in (97, 0xF0, tiny.END, 263)] == [b"a", b"\xf0", b"<|end|>", b""]
    assert [byte.token_text(i) for i in (97, 0xF0)] == ["a", "\N{REPLACEMENT CHARACTER}"]
    vocab = sentencepiece.vocab()
    expected = {"▁hi": b" hi", "hi": b"hi", "▁": b" ", "▁▁": b"  ", "<0xF0>": b"\xf0", "é": "é".encode()}
    expected |= {"</s>": b"</s>", "<note>": b"<note>"}
    assert {token: sentencepiece.token_bytes(vocab[token]) for token in expected} == expected


# Vocabularies


def test_equal_vocabularies_share_their_tokens_and_no_padding(byte: Tokenizer) -> None:
    assert check_vocabularies(byte, byte, 264, 272) == 261
    assert check_vocabularies(byte, byte, 264, 200) == 200


def test_swapped_ids_are_named(byte: Tokenizer, tmp_path: Path) -> None:
    swapped = Tokenizer(tiny.byte_tokenizer(tmp_path / "model", swap=(97, 98)))
    with pytest.raises(IncompatiblePair, match=r"token 97 is 'a' \(98 in the draft\) in the target and 'b'"):
        check_vocabularies(byte, swapped, 264, 264)
    assert check_vocabularies(byte, swapped, 264, 97) == 97, "the draft has no row for what differs"


def _with_added(path: Path, added: dict[int, str | None]) -> Tokenizer:
    """The byte tokenizer with its added tokens at other ids; None takes one away."""
    tiny.byte_tokenizer(path)
    file = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {token["id"]: token for token in file["added_tokens"]}
    model = tokens[tiny.PAD]
    for token_id, content in added.items():
        tokens.pop(token_id, None)
        if content is not None:
            tokens[token_id] = {**model, "id": token_id, "content": content}
    file["added_tokens"] = [tokens[i] for i in sorted(tokens)]
    file["model"]["vocab"] |= {token["content"]: i for i, token in tokens.items()}
    (path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    return Tokenizer(path)


@pytest.mark.parametrize(
    ("target", "draft", "shared"),
    [
        ({261: "<tool>", 262: "<more>"}, {}, 261),
        ({}, {261: "<tool>"}, 261),
        ({261: "<tool>"}, {261: None, 262: "<tool>"}, 261),
        ({258: None}, {}, 261),
        ({}, {257: None}, 261),
        ({260: None, 263: "<x>"}, {263: "<x>"}, 264),
    ],
)
def test_tokens_that_only_one_has_are_no_difference(
    tmp_path: Path, target: dict[int, str | None], draft: dict[int, str | None], shared: int
) -> None:
    pair = _with_added(tmp_path / "target", target), _with_added(tmp_path / "draft", draft)
    assert check_vocabularies(*pair, 264, 264) == shared


@pytest.mark.parametrize(
    ("target", "draft", "named"),
    [
        ({257: "<other>"}, {}, "token 257 is '<other>' in the target and '</s>' in the draft"),
        ({261: "<x>", 262: "<y>"}, {261: "<y>", 262: "<x>"}, "token 261 is '<x>' .262 in the draft."),
        ({261: "<x>", 263: "<z>"}, {262: "<x>", 263: "<z>"}, "token 261 is '<x>' .262 in the draft. .* unused"),
    ],
)
def test_tokens_that_moved_or_changed_are_a_difference(
    tmp_path: Path, target: dict[int, str | None], draft: dict[int, str | None], named: str
) -> None:
    pair = _with_added(tmp_path / "target", target), _with_added(tmp_path / "draft", draft)
    with pytest.raises(IncompatiblePair, match=named):
        check_vocabularies(*pair, 264, 264)


def test_tokenizers_of_two_kinds_do_not_pair(byte: Tokenizer, sentencepiece: Tokenizer) -> None:
    with pytest.raises(IncompatiblePair, match="token 0 is"):
        check_vocabularies(byte, sentencepiece, 264, 300)


def test_another_eos_is_a_warning() -> None:
    assert eos_warning([259, 257], (257, 259)) is None
    assert "[257]" in (eos_warning((259,), (257,)) or "")
