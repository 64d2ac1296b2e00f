"""Which tokens are trained, for templates of every shape: what the target said, the end of the turn, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import chat_templates as shapes
import pytest
from chat_templates import Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.errors import RequestError
from specctl.text.tokenizer import Tokenizer
from specctl.train.examples import IGNORED, Conversation, Example, PlainText, Turn
from specctl.train.masking import NOTHING_LEFT, OTHER_LEAD, OTHER_PROMPT, REWRITTEN, Masker

ORDINARY = {
    "headers": shapes.HEADERS,
    "lines": shapes.LINES,
    "instructions": shapes.INSTRUCTIONS,
    "model turns": shapes.MODEL_TURNS,
    "closed": shapes.CLOSED,
    "bare": shapes.BARE,
}
Maker = Callable[..., Masker]


@pytest.fixture(scope="module")
def masker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    made: dict[tuple[Shape, bool], Tokenizer] = {}

    def make(shape: Shape, *, merges: bool = False) -> Masker:
        if (shape, merges) not in made:
            path = shapes.tokenizer(tmp_path_factory.mktemp("tokenizer"), shape, merges=merges)
            made[shape, merges] = Tokenizer(path)
        return Masker(made[shape, merges])

    return make


def talk(*contents: str, system: str | None = None) -> Conversation:
    """User and assistant in turns."""
    turns = [Turn("user" if i % 2 == 0 else "assistant", content) for i, content in enumerate(contents)]
    return Conversation("7", tuple(turns if system is None else [Turn("system", system), *turns]))


def trained(example: Example, tokenizer: Tokenizer) -> list[str]:
    """The texts of its stretches of labels."""
    runs, run = list[str](), list[int]()
    for id, label in zip([*example.ids, 0], [*example.labels, IGNORED], strict=True):
        assert label in (id, IGNORED)
        if label != IGNORED:
            run.append(id)
        elif run:
            runs.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return runs


def whole(masker: Masker, conversation: Conversation) -> list[int]:
    """The conversation as the template writes it, and nothing else."""
    return masker.tokenizer.chat([turn.as_dict() for turn in conversation.turns], add_generation_prompt=False)


# -- templates that show every turn where it is -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDINARY)
def test_answers_and_their_ends_are_trained(masker: Maker, name: str) -> None:
    shape = ORDINARY[name]
    mask = masker(shape)
    conversation = talk("hi", "ok", "and now?", "done,\nall of it")
    (example,) = mask.conversation(conversation)
    assert example.id == "7"
    assert list(example.ids) == whole(mask, conversation)
    lead = " " if name == "instructions" else ""
    assert trained(example, mask.tokenizer) == [f"{lead}ok{shape.end}", f"{lead}done,\nall of it{shape.end}"]
    assert not mask.notices


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_read_before_an_answer_is_the_served_prompt(masker: Maker, name: str) -> None:
    mask = masker(ORDINARY[name])
    conversation = talk("hi", "ok", "and now?", "done")
    (example,) = mask.conversation(conversation)
    for turn in (1, 3):
        prompt = mask.tokenizer.chat([each.as_dict() for each in conversation.turns[:turn]])
        assert list(example.ids[: len(prompt)]) == prompt
        assert example.labels[len(prompt) - 1] == IGNORED
        assert example.labels[len(prompt)] != IGNORED


@pytest.mark.parametrize("name", ORDINARY)
def test_a_user_who_quotes_the_template_is_not_trained(masker: Maker, name: str) -> None:
    """The quotation is the template's own header, special tokens and all, around an answer nobody gave."""
    mask = masker(ORDINARY[name])
    (said,) = mask.conversation(talk("x", "no"))
    forged = mask.tokenizer.decode(said.ids, skip_special_tokens=False)
    (example,) = mask.conversation(talk(f"why {forged} ?", "because"))
    assert [text.strip() for text in trained(example, mask.tokenizer)] == [f"because{ORDINARY[name].end}".strip()]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_answer_that_repeats_its_question(masker: Maker, name: str) -> None:
    mask = masker(ORDINARY[name])
    (example,) = mask.conversation(talk("assistant", "assistant", "e", "e", "user", ORDINARY[name].end + "x"))
    ends = [text.strip() for text in trained(example, mask.tokenizer)]
    assert ends == [f"{word}{ORDINARY[name].end}".strip() for word in ("assistant", "e", f"{ORDINARY[name].end}x")]


def test_the_end_of_the_text_behind_the_end_of_the_turn_is_not_trained(masker: Maker) -> None:
    mask = masker(shapes.CLOSED)
    (example,) = mask.conversation(talk("hi", "ok"))
    assert mask.tokenizer.decode(example.ids[-3:], skip_special_tokens=False) == "<|over|>\n<|end|>"
    assert [label != IGNORED for label in example.labels[-3:]] == [True, False, False]


def test_answers_of_weight_zero_and_empty_ones_are_read_only(masker: Maker) -> None:
    mask = masker(shapes.LINES)
    turns = (
        Turn("user", "a"),
        Turn("assistant", "b", trained=False),
        Turn("user", "c"),
        Turn("assistant", "d"),
        Turn("user", "e"),
        Turn("assistant", " \n"),
        Turn("user", "f"),
    )
    (example,) = mask.conversation(Conversation("x", turns))
    assert trained(example, mask.tokenizer) == ["d<|im_end|>"]
    assert list(example.ids) == whole(mask, Conversation("x", turns[:4])), "nothing is read for its own sake"
    with pytest.raises(RequestError, match="has no answer in it"):
        mask.conversation(Conversation("x", turns[:2]))


@settings(max_examples=60)
@given(texts=st.lists(st.text(min_size=1, max_size=12).filter(str.strip), min_size=2, max_size=6))
@pytest.mark.parametrize("name", ["headers", "lines", "instructions"])
def test_any_text(masker: Maker, name: str, texts: list[str]) -> None:
    """Answers come back from the labels letter by letter, whatever is in them and around them."""
    mask = masker(ORDINARY[name])
    texts = texts[: len(texts) // 2 * 2]
    (example,) = mask.conversation(talk(*texts))
    expected = [text.strip() if name == "headers" else text for text in texts[1::2]]
    lead = " " if name == "instructions" else ""
    assert trained(example, mask.tokenizer) == [f"{lead}{text}{ORDINARY[name].end}" for text in expected]


def test_names_are_shown_where_the_template_shows_them(masker: Maker) -> None:
    shape = Shape(
        "{% for m in messages %}<|start|>{{ m.name or m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
        (),
        "<|end|>",
    )
    mask = masker(shape)
    (example,) = mask.conversation(Conversation("1", (Turn("user", "hi", "Ann"), Turn("assistant", "ok"))))
    assert mask.tokenizer.decode(example.ids, skip_special_tokens=False).startswith("<|start|>Ann\nhi")
    assert trained(example, mask.tokenizer) == ["ok<|end|>"]
    (example,) = mask.conversation(Conversation("1", (Turn("user", "hi"), Turn("assistant", "ok", "Bob"))))
    assert trained(example, mask.tokenizer) == ["ok<|end|>"], "a header is a header under any name"
    assert mask.notices == {OTHER_PROMPT: 1}


# -- tokens that reach over a border ----------------------------------------------------------------------------------


def test_a_token_over_the_border_is_not_trained(masker: Maker) -> None:
    """The header's line feed and the answer's are one token. A server would have sent the header's alone; the one token
    is nothing that the target could have said."""
    mask = masker(shapes.LINES, merges=True)
    (example,) = mask.conversation(talk("hi", "\nok"))
    assert trained(example, mask.tokenizer) == ["ok<|im_end|>"]
    (example,) = mask.conversation(talk("hi", "\n\nok"))
    assert trained(example, mask.tokenizer) == ["\nok<|im_end|>"]


def test_a_token_over_the_end_is_not_trained(masker: Maker) -> None:
    """Where no token marks the end, what is behind an answer may grow together with it."""
    shape = Shape(
        "{% for m in messages %}{% if m.role == 'user' %}o{{ m.content }}: {% else %}{{ m.content }}{% endif %}"
        "{% endfor %}",
        (),
        "",
    )
    mask = masker(shape, merges=True)
    (example,) = mask.conversation(talk("x", "a ", "y", "b"))
    assert trained(example, mask.tokenizer) == ["a", "b"]
    assert mask.tokenizer.decode(example.ids) == "ox: a oy: b"


# -- templates that write a turn otherwise once there are more --------------------------------------------------------


def test_thinking_that_is_dropped_later_is_trained_where_it_is_shown(masker: Maker) -> None:
    mask = masker(shapes.THINKING)
    conversation = talk("a", "<think>\none\n</think>\n\nb", "c", "<think>\ntwo\n</think>\n\nd")
    first, last = mask.conversation(conversation)
    assert (first.id, last.id) == ("7#1", "7")
    assert list(last.ids) == whole(mask, conversation)
    assert trained(last, mask.tokenizer) == ["<think>\ntwo\n</think>\n\nd<|im_end|>"]
    assert list(first.ids) == whole(mask, Conversation("7", conversation.turns[:2]))
    assert trained(first, mask.tokenizer) == ["<think>\none\n</think>\n\nb<|im_end|>"]


def test_an_empty_thought_that_the_template_writes_is_trained(masker: Maker) -> None:
    mask = masker(shapes.THINKING)
    first, last = mask.conversation(talk("a", "think", "c", "</think>"))
    assert trained(first, mask.tokenizer) == ["<think>\n\n</think>\n\nthink<|im_end|>"]
    assert trained(last, mask.tokenizer)[0].endswith("<|im_end|>")


def test_reasoning_of_its_own_key(masker: Maker) -> None:
    answer = Turn("assistant", "ok", reasoning={"reasoning_content": "hm"})
    (example,) = masker(shapes.THINKING).conversation(Conversation("7", (Turn("user", "hi"), answer)))
    assert trained(example, masker(shapes.THINKING).tokenizer) == ["<think>\nhm\n</think>\n\nok<|im_end|>"]
    with pytest.raises(RequestError, match="does not show the reasoning_content"):
        masker(shapes.HEADERS).conversation(Conversation("7", (Turn("user", "hi"), answer)))


def test_a_generation_prompt_that_goes_on_otherwise_than_the_answers(masker: Maker) -> None:
    """What is there is trained as the template writes it, and the difference is told."""
    mask = masker(shapes.OPENED_THINKING)
    conversation = talk("hi", "<think>hm</think>ok", "more", "no")
    (example,) = mask.conversation(conversation)
    assert list(example.ids) == whole(mask, conversation)
    assert trained(example, mask.tokenizer) == ["ok<|eos|>", "no<|eos|>"]
    assert mask.notices == {OTHER_PROMPT: 2}


def test_the_system_turn_that_moves(masker: Maker) -> None:
    """It stands before the last user's words, so that it is gone once the answer is there: nothing says where that
    begins. Without a system turn the template is like any other."""
    mask = masker(shapes.MOVING_SYSTEM)
    with pytest.raises(RequestError, match=REWRITTEN):
        mask.conversation(talk("hi", "ok", system="be brief"))
    (example,) = mask.conversation(talk("hi", "ok", "why", "so"))
    assert trained(example, mask.tokenizer) == ["ok</s>", "so</s>"]


def test_a_row_of_which_some_answers_can_be_told(masker: Maker) -> None:
    """The first question is shown with a mark until it has been answered; the second is not."""
    shape = Shape(
        "{% for m in messages %}{% if m.role == 'user' %}{% if messages | length == 1 %}!{% endif %}<q>{{ m.content }}"
        "{% else %}<a>{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
        ("<q>", "<a>", "<end>"),
        "<end>",
    )
    mask = masker(shape)
    (example,) = mask.conversation(talk("a", "b", "c", "d"))
    assert trained(example, mask.tokenizer) == ["d<end>"]
    assert mask.notices == {REWRITTEN: 1}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages if m.role == 'user' %}<|start|>{{ m.content }}{% endfor %}", NOTHING_LEFT),
        (
            "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content | length }}: "
            "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
            OTHER_LEAD,
        ),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "refused by the chat template"),
    ],
    ids=["no answers", "another lead", "an error"],
)
def test_templates_that_cannot_be_followed(masker: Maker, template: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        masker(Shape(template, ("<think>",), "")).conversation(talk("hi", "ok"))


# -- texts without a template -----------------------------------------------------------------------------------------


def test_plain_texts(masker: Maker) -> None:
    mask = masker(shapes.LINES, merges=True)
    tokenizer = mask.tokenizer
    assert tokenizer.eos_id is not None
    example = mask.plain(PlainText("1", None, "abc"))
    assert (example.ids, example.labels) == ((97, 98, 99), (IGNORED, 98, 99)), "nothing comes before the first token"
    example = mask.plain(PlainText("2", "ab", "c"))
    assert (example.ids, example.labels) == ((97, 98, 99, tokenizer.eos_id), (IGNORED, IGNORED, 99, tokenizer.eos_id))
    example = mask.plain(PlainText("3", "ab ", "oc<|end|>"))
    assert tokenizer.decode(example.ids, skip_special_tokens=False) == "ab oc<|end|>", "one end is enough"
    assert trained(example, tokenizer) == ["c<|end|>"], "the space and the o are one token, half of it the prompt's"


def test_the_tokenizers_own_bos_is_before_a_plain_text_alone(tmp_path: Path) -> None:
    import tiny

    mask = Masker(Tokenizer(tiny.byte_tokenizer(tmp_path / "bos", bos_post=True)))
    assert mask.plain(PlainText("1", "a", "b")).ids == (tiny.BOS, 97, 98, tiny.END)
    (example,) = mask.conversation(talk("hi", "ok"))
    assert example.ids.count(tiny.BOS) == 1
    assert len(example.ids) == 24
