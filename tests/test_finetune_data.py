"""`finetune --dry-run`: what becomes of data sets as they are found, through the command line. Nothing is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chat_templates as shapes
import pyarrow
import pytest
import tiny
from conftest import Ran, Run
from fixtures import Make
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from specctl.errors import RequestError
from specctl.finetune.conversations import read_row
from specctl.train.examples import Conversation, Row

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
HI_IDS = [tiny.BOS, tiny.START, *b"user\nhi", tiny.END, tiny.START, *b"assistant\nok", tiny.END]
HI_LABELS = [-100] * 21 + [*b"ok", tiny.END]
Talk = Callable[..., list[dict[str, Any]]]


def gpt(*turns: str, **more: Any) -> dict[str, Any]:
    """A ShareGPT row: human and gpt in turns."""
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": turn} for i, turn in enumerate(turns)], **more}


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Dry:
    """A dry run: what it said, wrote as --dump and reported."""

    def __init__(self, ran: Ran, directory: Path) -> None:
        self.ran = ran
        self.code, self.err = ran.code, ran.err
        if ran.code == 0:
            text = (directory / "dump.jsonl").read_text()
            self.dump: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
            self.report: dict[str, Any] = json.loads((directory / "report.json").read_text())
        for file in ("dump.jsonl", "report.json"):
            assert (directory / file).exists() == (ran.code == 0), "a run that fails writes nothing"
            (directory / file).unlink(missing_ok=True)

    @property
    def skips(self) -> dict[str, tuple[int, str]]:
        return {skip["id"]: (skip["line"], skip["reason"]) for skip in self.report["skips"]}

    def trained(self, number: int) -> bytes:
        """The bytes of an example's labels that are bytes."""
        return bytes(label for label in self.dump[number]["labels"] if 0 <= label < 256)


DryRun = Callable[..., Dry]


@pytest.fixture
def dry(run: Run, make: Make, tmp_path: Path) -> DryRun:
    def command(*data: object, tokenizer: Path | None = None, flags: Sequence[object] = ()) -> Dry:
        target = tokenizer or make(tiny.byte_tokenizer)
        named = [part for each in data for part in ("--data", each)]
        outputs = ["--dump", tmp_path / "dump.jsonl", "--report", tmp_path / "report.json"]
        return Dry(
            run("finetune", "--kind", "llama", "--target", target, *named, "--dry-run", *outputs, *flags), tmp_path
        )

    return command


# -- rows as they are found -------------------------------------------------------------------------------------------


def test_rows_that_others_trip_over(dry: DryRun, tmp_path: Path) -> None:
    """An answer nobody asked for, no turns, a system turn alone, two questions in a row."""
    rows = [
        {"id": "a", **gpt("Hello", "hi", "ok")},
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "system", "value": "be brief"}]},
        {"id": "d", **gpt("hi", "", "ok")},
        {"id": "e", **gpt("hi", "ok")},
    ]
    for turn, sender in zip(rows[0]["conversations"], ("gpt", "human", "gpt"), strict=True):
        turn["from"] = sender
    for turn, sender in zip(rows[3]["conversations"], ("human", "human", "gpt"), strict=True):
        turn["from"] = sender
    rows[3]["conversations"][1]["value"] = "there"
    found = dry(jsonl(tmp_path / "data.jsonl", rows))
    assert found.code == 0, found.err
    assert [each["id"] for each in found.dump] == ["a", "d", "e"]
    assert (found.dump[0]["ids"], found.dump[0]["labels"]) == (HI_IDS, HI_LABELS), "the leading answer is dropped"
    assert found.trained(1) == b"ok", "two questions in a row are kept where the template takes them"
    assert (found.dump[2]["ids"], found.dump[2]["labels"]) == (HI_IDS, HI_LABELS)
    assert found.skips == {"b": (2, "has no turns"), "c": (3, "has no answer in it")}
    assert (found.report["rows"], found.report["kept"], found.report["label_tokens"]) == (5, 3, 9)
    assert (found.report["loss"], found.report["lr"]) == ([], [])
    assert set(found.report) == {"rows", "kept", "skips", "label_tokens", "loss", "lr"}
    assert "5 rows, 3 kept" in found.err
    assert "has no turns (1, first at line 2)" in found.err

    found = dry(jsonl(tmp_path / "nothing.jsonl", rows[1:3]))
    assert found.code == 2
    assert "nothing.jsonl: no usable conversations, 0 trainable tokens in 2 rows: has no turns (1" in found.err


def test_two_questions_in_a_row_by_a_template_that_refuses_them(dry: DryRun, tmp_path: Path) -> None:
    tokenizer = shapes.tokenizer(tmp_path / "strict", shapes.INSTRUCTIONS)
    rows = [{"id": "d", "messages": [HI[0], *HI]}, {"id": "e", "messages": HI}]
    found = dry(jsonl(tmp_path / "data.jsonl", rows), tokenizer=tokenizer)
    assert [each["id"] for each in found.dump] == ["e"]
    assert found.skips["d"] == (1, "messages is refused by the chat template: roles have to alternate, user first")


def test_the_same_content_in_other_bytes(dry: DryRun, tmp_path: Path) -> None:
    """A byte order mark, CRLF and blank lines change nothing, not even the names of rows without one."""
    rows = [gpt("hi", "ok"), gpt("é ", "a\r\nb\u2028c"), gpt("x", "y", "z", "w")]
    rows[1]["conversations"][1]["weight"] = 1
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    plain, other = tmp_path / "f1.jsonl", tmp_path / "f2.jsonl"
    plain.write_bytes(b"\n".join(lines) + b"\n")
    other.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([lines[0], b"", lines[1], lines[2], b"  ", b""]))
    joined = tmp_path / "f4.jsonl"
    joined.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\n\xef\xbb\xbf" + lines[1] + b"\n" + lines[2])
    first = dry(plain)
    assert [each["id"] for each in first.dump] == ["1", "2", "3"]
    assert first.trained(1) == "a\r\nb\u2028c".encode()
    for file in (other, joined):
        again = dry(file)
        assert again.dump == first.dump
        assert _digest(again.ran) == _digest(first.ran)

    broken = tmp_path / "f3.jsonl"
    broken.write_bytes(b"\n".join([*lines[:2], b'{"id":']))
    found = dry(broken)
    assert found.code == 2
    assert "f3.jsonl: line 3: is not JSON" in found.err


def test_the_same_conversation_in_other_forms(dry: DryRun, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    rows = [
        {"id": 7, **gpt("hi", "ok")},
        {"id": "x7", "messages": HI},
        {"conversations": [{"role": "user", "content": parts}, HI[1]]},
        {"id": 8, "conversations": [*gpt("hi")["conversations"], {"from": "function_call", "value": "{}"}]},
        {"id": "p", "prompt": "hi", "completion": "ok"},
        {"prompt": HI[:1], "completion": HI[1:]},
        {"conversation": [{"role": "human", "text": "hi"}, {"role": "model", "value": "ok"}], "id": None},
        {"messages": HI, "prompt": "passed over", "text": "as well", "score": 0.5},
        {"messages": [{**turn, "name": None, "tool_calls": None, "ts": 3} for turn in HI], "tools": []},
    ]
    found = dry(jsonl(tmp_path / "mix.jsonl", rows))
    assert [each["id"] for each in found.dump] == ["7", "x7", "3", "p", "6", "7", "8", "9"]
    for each in found.dump:
        assert (each["ids"], each["labels"]) == (HI_IDS, HI_LABELS)
    line, reason = found.skips["8"]
    assert line == 4
    assert "'function_call'" in reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "has tool_calls"),
        ({"messages": [HI[0], {"role": "assistant", "content": None}]}, "has no answer in it"),
        ({"messages": [HI[0], {"role": "assistant", "content": "  \n"}]}, "has no answer in it"),
        ({"messages": [HI[0], {**HI[1], "weight": 0}]}, "has no answer in it"),
        ({"messages": [*HI, {"role": "tool", "content": "3", "tool_call_id": "1"}]}, "role 'tool', which is not"),
        ({"messages": [{"role": "user"}, HI[1]]}, "has a user turn without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, HI[1]]}, "'image_url'"),
        ({"messages": [{"role": "user", "content": 3}, HI[1]]}, "content is 3"),
        ({"messages": [{"content": "hi"}, HI[1]]}, "role None"),
        ({"messages": [HI[0]], "tools": [{"type": "function"}]}, "has tools"),
        ({"messages": ["hi"]}, "has 'hi' where a turn should be"),
        ({"messages": "hi"}, "has 'hi' where a list of turns should be"),
        ({"messages": [HI[0]]}, "has no answer in it"),
        ({"messages": [HI[1]]}, "has no answer in it"),
        ({"prompt": "hi"}, "has no answer in it"),
        ({"prompt": "hi", "completion": " "}, "has an empty completion"),
        ({"prompt": 3, "completion": "ok"}, "has 3 as prompt, expected a string"),
        ({"text": ""}, "has an empty text"),
        ({"instruction": "hi", "output": "ok"}, "it has 'instruction', 'output'"),
        ({}, "it has no keys"),
        ({"messages": [{"role": "user", "content": "\ud83d"}, HI[1]]}, "half a surrogate pair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_are_skipped(dry: DryRun, tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    """And counted, with the line and the reason; the row behind them is not harmed."""
    found = dry(jsonl(tmp_path / "data.jsonl", [row, {"id": "good", "messages": HI}]))
    assert found.code == 0, found.err
    assert [each["ids"] for each in found.dump] == [HI_IDS]
    assert found.skips["1"][0] == 1
    assert reason in found.skips["1"][1]
    assert (found.report["rows"], found.report["kept"]) == (2, 1)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "hi", "user", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "from", "content", "value", "type", "text", "weight", "x"]), inner)
    ),
    max_leaves=8,
)
_KEYS = st.sampled_from(["messages", "conversations", "prompt", "completion", "text", "id", "tools", "instruction"])


@settings(max_examples=400)
@given(row=st.dictionaries(_KEYS, _JSON, max_size=4), chat=st.booleans())
def test_whatever_a_row_holds(row: dict[str, Any], chat: bool) -> None:
    """It is a conversation, a text, or one sentence about why not."""
    found: Row | str
    try:
        found = read_row(row, "1", chat=chat)
    except RequestError as error:
        found = str(error)
    if isinstance(found, str):
        assert "\n" not in found
        assert len(found) < 400
    elif isinstance(found, Conversation):
        assert {turn.role for turn in found.turns} <= {"system", "user", "assistant"}
        assert not found.turns or found.turns[-1].role != "assistant" or "user" in {turn.role for turn in found.turns}
    else:
        assert found.text is not None or found.prompt is not None


def test_names_that_no_file_can_hold(dry: DryRun, tmp_path: Path) -> None:
    """Half a surrogate pair in an id; ids that are no names; and a reason that quotes the row."""
    template = "{{ raise_exception('not ' + messages[0].content) }}"
    rows = [{"id": "\ud83d", "messages": []}, {"id": [3], "messages": HI}, {"id": True, "messages": HI}]
    found = dry(jsonl(tmp_path / "data.jsonl", rows))
    assert found.skips == {"\\ud83d": (1, "has no turns")}
    assert [each["id"] for each in found.dump] == ["2", "3"]
    tokenizer = tiny.byte_tokenizer(tmp_path / "refuses", chat_template=template)
    rows = [{"messages": [{"role": "user", "content": "\ud83d"}, HI[1]]}, {"text": "abc"}]
    found = dry(jsonl(tmp_path / "data.jsonl", rows), tokenizer=tokenizer)
    assert found.skips["1"][1] == "messages is refused by the chat template: not \\ud83d"


def test_conversations_to_the_last_answer(dry: DryRun, tmp_path: Path) -> None:
    """What comes behind it teaches nothing; a system turn before it is read, an answer before the first question is
    not."""
    system = {"role": "developer", "content": "S"}
    rows = [
        {"messages": [*HI, HI[0]]},
        {"messages": [system, {"role": "assistant", "content": "Welcome"}, *HI]},
        {"prompt": HI, "completion": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ]
    found = dry(jsonl(tmp_path / "data.jsonl", rows))
    assert found.dump[0]["ids"] == HI_IDS
    assert found.dump[1]["ids"] == [tiny.BOS, tiny.START, *b"system\nS", tiny.END, *HI_IDS[1:]]
    assert [found.trained(number) for number in range(3)] == [b"ok", b"ok", b"y"], "a prompt's answers are read only"


def test_texts(dry: DryRun, tmp_path: Path) -> None:
    """Plain text is trained from its second token on. Prompt and completion are plain where the target has no template,
    or where it is wished."""
    bare = tiny.byte_tokenizer(tmp_path / "bare", chat_template=None, bos_post=True)
    rows = [{"text": "abc"}, {"prompt": "a", "completion": "b"}, {"messages": HI}]
    found = dry(jsonl(tmp_path / "data.jsonl", rows), tokenizer=bare)
    assert found.dump[0] == {"id": "1", "ids": [tiny.BOS, *b"abc"], "labels": [-100, *b"abc"]}
    assert found.dump[1] == {"id": "2", "ids": [tiny.BOS, *b"ab", tiny.END], "labels": [-100, -100, 98, tiny.END]}
    assert "bare has no chat template" in found.skips["3"][1]
    found = dry(tmp_path / "data.jsonl", flags=["--set", "data.completions=plain"])
    assert found.dump[1] == {"id": "2", "ids": [*b"ab", tiny.END], "labels": [-100, 98, tiny.END]}
    assert found.dump[2]["ids"] == HI_IDS


def test_bos_of_the_template_alone(dry: DryRun, tmp_path: Path) -> None:
    """A tokenizer that writes a BOS by itself does not double the template's, nor add one to a template without."""
    rows = jsonl(tmp_path / "data.jsonl", [{"messages": HI}])
    found = dry(rows, tokenizer=tiny.byte_tokenizer(tmp_path / "bos", bos_post=True))
    assert found.dump[0]["ids"] == HI_IDS
    twice = tiny.byte_tokenizer(tmp_path / "twice", chat_template="{{ bos_token }}" + tiny.TEMPLATE)
    assert dry(rows, tokenizer=twice).dump[0]["ids"] == HI_IDS
    without = tiny.TEMPLATE.replace("{{ bos_token }}", "")
    found = dry(rows, tokenizer=tiny.byte_tokenizer(tmp_path / "without", bos_post=True, chat_template=without))
    assert found.dump[0]["ids"] == HI_IDS[1:]


def test_examples_read_what_is_served(dry: DryRun, make: Make, tmp_path: Path) -> None:
    from specctl.text.tokenizer import Tokenizer

    tokenizer = make(tiny.byte_tokenizer, bos_post=True)
    found = dry(jsonl(tmp_path / "data.jsonl", [{"messages": HI}]), tokenizer=tokenizer)
    prompt = Tokenizer(tokenizer).chat(HI[:1])
    assert len(prompt) == 21
    assert found.dump[0]["ids"][:21] == prompt


def test_the_targets_own_end_of_turn(dry: DryRun, tmp_path: Path) -> None:
    """A token that ends texts by generation_config.json and that the tokenizer does not call special."""
    template = tiny.TEMPLATE.replace("<|end|>", "~\n")
    tokenizer = tiny.byte_tokenizer(tmp_path / "tilde", chat_template=template)
    rows = jsonl(tmp_path / "data.jsonl", [{"messages": HI}])
    assert dry(rows, tokenizer=tokenizer).trained(0) == b"ok~\n"
    (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord("~")]}))
    assert dry(rows, tokenizer=tokenizer).trained(0) == b"ok~"


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_examples_that_are_too_long(dry: DryRun, tmp_path: Path) -> None:
    """Cut where a label is left; skipped where none is; a set of nothing else is an error."""
    long = {"id": "long", **gpt("u" * 200, "ok")}
    rows = [long, {"id": "cut", **gpt("hi", "o" * 100)}, {"id": "short", **gpt("hi", "ok")}]
    data = jsonl(tmp_path / "data.jsonl", rows)
    found = dry(data, flags=["--max-length", 64])
    assert [each["id"] for each in found.dump] == ["cut", "short"]
    assert len(found.dump[0]["ids"]) == 64
    assert found.trained(0) == b"o" * 43
    assert found.skips["long"] == (1, "has 0 trainable tokens in the first 64 (data.max_length)")
    assert "cut to data.max_length 64 (1)" in found.err
    found = dry(data, flags=["--set", "data.on_long=skip", "--set", "data.max_length=64"])
    assert [each["id"] for each in found.dump] == ["short"]
    assert found.skips["cut"] == (2, "is longer than data.max_length 64")

    found = dry(jsonl(tmp_path / "only.jsonl", [long]), flags=["--max-length", 64])
    assert found.code == 2
    assert "only.jsonl: no usable conversations, 0 trainable tokens in 1 rows" in found.err
    assert "max_length" in found.err


def test_a_thought_that_is_too_long_does_not_cost_the_other_answers(dry: DryRun, tmp_path: Path) -> None:
    tokenizer = shapes.tokenizer(tmp_path / "thinking", shapes.THINKING)
    row = {"id": "t", **gpt("a" * 40, "<think>hm</think>b", "c", "<think>so</think>d")}
    whole = dry(jsonl(tmp_path / "data.jsonl", [row]), tokenizer=tokenizer)
    assert [each["id"] for each in whole.dump] == ["t#1", "t"]
    limit = len(whole.dump[0]["ids"])
    assert limit < len(whole.dump[1]["ids"])
    found = dry(
        tmp_path / "data.jsonl", tokenizer=tokenizer, flags=["--max-length", limit, "--set", "data.on_long=skip"]
    )
    assert found.dump == whole.dump[:1]
    assert (found.report["kept"], found.report["skips"]) == (1, [])


# -- files ------------------------------------------------------------------------------------------------------------


def test_json_files(dry: DryRun, tmp_path: Path) -> None:
    """A list, one object, or one object a line."""
    rows = [{"messages": HI}, {"messages": []}, {"messages": HI}]
    listed = tmp_path / "list.json"
    listed.write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    found = dry(listed)
    assert [each["ids"] for each in found.dump] == [HI_IDS, HI_IDS]
    lines = listed.read_text().splitlines()
    assert lines[found.skips["2"][0]].strip() == '"messages": []', "the line is that of the object's brace"
    lined = jsonl(tmp_path / "lines.json", rows)
    assert dry(lined).skips["2"][0] == 2
    single = tmp_path / "single.json"
    single.write_text(json.dumps(rows[0], indent=1))
    assert [each["ids"] for each in dry(single).dump] == [HI_IDS]
    compact = tmp_path / "compact.json"
    compact.write_text(json.dumps(rows, separators=(",", ":")))
    assert dry(compact).skips["2"][0] == 1


def test_parquet(dry: DryRun, tmp_path: Path) -> None:
    """Its columns hold a null for every key that some other row has."""
    rows = [
        {"id": "a", "messages": HI, "text": None},
        {"id": "b", "messages": [{**HI[0], "name": "Ann"}, {**HI[1], "weight": 0}], "text": None},
        {"id": "c", "messages": None, "text": "abc"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    found = dry(tmp_path / "data.parquet")
    assert [each["id"] for each in found.dump] == ["a", "c"]
    assert found.skips == {"b": (2, "has no answer in it")}
    assert found.dump[0]["ids"] == HI_IDS
    assert found.dump[-1]["ids"] == list(b"abc")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    found = dry(tmp_path / "broken.parquet")
    assert found.code == 2
    assert "broken.parquet: cannot be read as parquet" in found.err


def test_several_files_are_one_set(dry: DryRun, tmp_path: Path) -> None:
    first = jsonl(tmp_path / "one.jsonl", [{"messages": HI}])
    second = jsonl(tmp_path / "two.jsonl", [{"messages": []}, {"messages": HI}])
    found = dry(first, second)
    assert [each["id"] for each in found.dump] == ["1", "3"]
    assert found.skips == {"2": (1, "has no turns")}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.jsonl", b"", "data.jsonl: has no rows in it"),
        ("data.json", b"[]", "data.json: has no rows in it"),
        ("data.json", b"", "data.json: line 1: is not JSON"),
        ("data.json", b'[{"text": "a"},\n{"text": ]', "data.json: line 2: is not JSON"),
        ("data.json", b"3", "data.json: expected a JSON object, found 3"),
        ("data.json", b'[{"text": "a"},\n 3]', "data.json: line 2: expected a JSON object, found 3"),
        ("data.jsonl", b'{"text": "a"}\n[1]\n', "data.jsonl: line 2: expected a JSON object"),
        ("data.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "data.jsonl: line 2: is not UTF-8"),
        ("data.jsonl", '{"text": "a"}'.encode("utf-16"), "data.jsonl: line 1: is not UTF-8"),
        ("data.jsonl", b'{"text": ' + b"[" * 100_000, "data.jsonl: line 1: is not JSON"),
        ("data.csv", b"text\na\n", "expected a file that ends in .jsonl, .json, .parquet"),
    ],
    ids=str,
)
def test_files_that_cannot_be_read(dry: DryRun, tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    found = dry(tmp_path / name)
    assert found.code == 2
    assert said in found.err
    assert "Traceback" not in found.err


def test_files_that_are_not_there(dry: DryRun, tmp_path: Path) -> None:
    found = dry(tmp_path / "absent.jsonl")
    assert (found.code, "absent.jsonl: cannot be read: No such file" in found.err) == (2, True)
    assert "is a directory; name files in it" in dry(tmp_path).err
    assert "org/absent:train" not in dry("org/absent.jsonl").err, "the name of a file is no hub data set"


def test_a_hub_data_set_that_cannot_be_had(dry: DryRun) -> None:
    found = dry("org/absent:test")
    assert found.code == 2
    assert "org/absent: no such file, and the hub data set org/absent:test cannot be had" in found.err
    assert len(found.err.splitlines()) == 1


def test_what_a_package_is_missing_for(dry: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"")
    found = dry(tmp_path / "data.parquet")
    assert found.code == 3
    assert "needs the package pyarrow, which is not installed; pip install 'specctl[data]'" in found.err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert dry("org/set").code == 3


# -- what is held out -------------------------------------------------------------------------------------------------


def test_rows_held_out_for_validation(dry: DryRun, tmp_path: Path) -> None:
    """From 100 rows on, a twentieth; none of them is trained on, nor is a row with the same prompt."""
    rows = [{"id": f"{number}", **gpt(f"question {number // 2}", f"answer {number}")} for number in range(120)]
    data = jsonl(tmp_path / "data.jsonl", rows)
    found = dry(data)
    kept = {int(each["id"]) // 2 for each in found.dump}
    assert len(found.dump) == 114
    assert len(kept) == 57, "rows with one prompt stay together"
    assert (found.report["rows"], found.report["kept"], found.report["skips"]) == (120, 120, [])
    assert "(6 prompts held out)" in found.err
    assert dry(data).dump == found.dump
    assert dry(data, flags=["--seed", 1]).dump != found.dump
    assert len(dry(data, flags=["--set", "data.held_out_fraction=0"]).dump) == 120
    assert len(dry(jsonl(tmp_path / "few.jsonl", rows[:99])).dump) == 99
    assert len(dry(tmp_path / "few.jsonl", flags=["--set", "data.held_out_fraction=0.1"]).dump) in (89, 90)
    same = jsonl(tmp_path / "same.jsonl", [gpt("hi", "ok"), gpt("hi", "no")])
    found = dry(same, flags=["--set", "data.held_out_fraction=0.5"])
    assert len(found.dump) == 2
    assert "nothing could be held out" in found.err


def test_a_file_of_prompts_held_out(dry: DryRun, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "data.jsonl", [gpt("hi", "ok")])
    prompts = jsonl(tmp_path / "held.jsonl", [{"messages": HI[:1]}, gpt("a", "b", "c", "d"), {"messages": []}])
    found = dry(data, flags=["--set", f"data.held_out={prompts}"])
    assert len(found.dump) == 1
    assert "(2 prompts held out)" in found.err
    assert "held.jsonl: 1 of 3 rows are no prompts: has no turns" in found.err
    jsonl(prompts, [{"text": "no prompt"}])
    found = dry(data, flags=["--set", f"data.held_out={prompts}"])
    assert found.code == 2
    assert "held.jsonl: has no prompt to hold out: has no prompt in it" in found.err


# -- answers that are still to be made --------------------------------------------------------------------------------


def test_prompts_to_be_answered_anew(dry: DryRun, tmp_path: Path) -> None:
    """A dry run shows the prompts; rows without an answer are as good as others."""
    rows = [gpt("hi", "ok"), {"messages": HI[:1]}, {"prompt": "hi"}, {"text": "abc"}, gpt("a", "b", "c", "d"), {}]
    found = dry(jsonl(tmp_path / "data.jsonl", rows), flags=["--set", "data.regenerate={}"])
    assert found.code == 0, found.err
    prompts = [each["ids"] for each in found.dump]
    assert prompts[:3] == [HI_IDS[:21]] * 3
    assert found.trained(3) == b"bc"
    assert len(prompts) == 6
    assert found.report["label_tokens"] == 2
    assert "5 answers are still to be made" in found.err
    assert (found.report["kept"], len(found.report["skips"])) == (5, 1)


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_show_mask(run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = jsonl(tmp_path / "data.jsonl", [gpt("hi\x1b[31m", "ok"), gpt("x", "y"), gpt("z", "w")])
    command = ["finetune", "--kind", "llama", "--target", make(tiny.byte_tokenizer), "--data", data, "--show-mask", 2]
    ran = run(*command)
    assert ran.code == 0, ran.err
    assert "<|start|>assistant\n⟦ok<|end|>⟧" in ran.out
    assert "⟦y<|end|>⟧" in ran.out
    assert "⟦w<|end|>⟧" not in ran.out
    assert "\x1b" not in ran.out, "no terminal, no colours, and none that a data set brings along"
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = run(*command)
    assert "\x1b[2m<s><|start|>user\nhi\N{REPLACEMENT CHARACTER}[31m<|end|>" in ran.out
    assert "\x1b[1;32mok<|end|>\x1b[0m" in ran.out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*command).out
    assert run(*command, "--json").code == 2


def test_flags_that_do_not_go_together(run: Run, make: Make, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "data.jsonl", [gpt("hi", "ok")])
    base = ["finetune", "--kind", "llama", "--target", make(tiny.byte_tokenizer), "--data", data]
    assert "--dump goes with --dry-run" in run(*base, "--output", tmp_path / "o", "--dump", tmp_path / "d").err
    assert "--resume goes on with training" in run(*base, "--dry-run", "--resume").err
    there = tmp_path / "report.json"
    there.write_text("mine")
    ran = run(*base, "--dry-run", "--report", there)
    assert (ran.code, there.read_text()) == (2, "mine")
    assert run(*base, "--dry-run", "--report", there, "--force").code == 0
    assert json.loads(there.read_text())["rows"] == 1
    ran = run(*base, "--dry-run", "--json")
    assert json.loads(ran.out)["kept"] == 1
    ran = run("finetune", "--kind", "llama", "--target", tmp_path, "--data", data, "--dry-run")
    assert (ran.code, "has no tokenizer" in ran.err) == (2, True)


def _digest(ran: Ran) -> str:
    return next(line.split()[1] for line in ran.out.splitlines() if line.startswith("digest"))
