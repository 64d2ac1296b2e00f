"""Text while it is made: decoding piece by piece, stop strings, and the two together for one choice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import spelled
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specctl.errors import RequestError
from specctl.text.output import TextOutput
from specctl.text.stops import StopStrings
from specctl.text.stream import StreamDecoder
from specctl.text.tokenizer import Tokenizer

GRIN = "\N{GRINNING FACE}"
KINDS = {
    "byte": tiny.byte_tokenizer,
    "sentencepiece": spelled.sentencepiece,
    "metaspace": partial(spelled.sentencepiece, metaspace=True),
    "words": spelled.words,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(tmp_path_factory.mktemp(kind) / "model") for kind, write in KINDS.items()}


@pytest.fixture(scope="module")
def tokenizers(paths: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(path) for kind, path in paths.items()}


@pytest.fixture(scope="module")
def byte(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte"]


# Decoding

UTF8 = st.sampled_from([*f"é{GRIN}€".encode(), 0x80, 0xED, 0xA0, 0xC0, 0xFF, 0x20, 0x41])


def _ids(draw: st.DrawFn, kind: str, size: int) -> list[int]:
    """Ids of one tokenizer, with a liking for bytes of multi-byte characters, and some that it does not have."""
    offset = spelled.FIRST_BYTE if kind in ("sentencepiece", "metaspace") else 0
    common = st.integers(min(spelled.FIRST_WORD, size - 1), size - 1)
    return draw(
        st.lists(st.one_of(st.integers(0, size + 2), common, UTF8.map(lambda byte: byte + offset)), max_size=14)
    )


@st.composite
def _streams(draw: st.DrawFn) -> tuple[str, list[int], list[int], bool]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    ids = _ids(draw, kind, {"byte": 264, "words": 6}.get(kind, spelled.FIRST_WORD + len(spelled.WORDS) + 2))
    return kind, ids, draw(st.lists(st.integers(0, 14), max_size=4)), draw(st.booleans())


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[str, object]:
    return {kind: AutoTokenizer.from_pretrained(str(path)) for kind, path in paths.items()}


@settings(max_examples=400, deadline=None)
@given(stream=_streams())
def test_pieces_put_together_are_the_text_of_all_ids(
    tokenizers: dict[str, Tokenizer], references: dict[str, object], stream: tuple[str, list[int], list[int], bool]
) -> None:
    kind, ids, cuts, skip = stream
    decoder = StreamDecoder(tokenizers[kind], skip_special_tokens=skip)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    pieces = [decoder.push(ids[a:b]) for a, b in pairwise(edges)] + [decoder.flush()]
    whole = references[kind].decode(ids, skip_special_tokens=skip)  # type: ignore[attr-defined]
    assert "".join(pieces) == whole
    assert tokenizers[kind].decode(ids, skip_special_tokens=skip) == whole


def test_half_a_character_waits_for_its_end(byte: Tokenizer) -> None:
    decoder = StreamDecoder(byte)
    assert [decoder.push([b]) for b in f"a{GRIN}b".encode()] == ["a", "", "", "", GRIN, "b"]
    assert decoder.push([0xF0, 0x9F]) == ""
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_never_make_a_character_do_not_pile_up(byte: Tokenizer) -> None:
    decoder = StreamDecoder(byte)
    assert [decoder.push([0x80]) for _ in range(50)] == ["\N{REPLACEMENT CHARACTER}"] * 50


def test_a_leading_space_is_dropped_once_and_only_at_the_start(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    decoder = StreamDecoder(tokenizer)
    ids = [1, *(tokenizer.vocab()[token] for token in ("▁hi", "▁hi", "▁", "▁é"))]
    assert [decoder.push([i]) for i in ids] == ["", "hi", " hi", " ", " é"]


def test_fallback_bytes_come_with_the_token_that_ends_them(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    decoder = StreamDecoder(tokenizer)
    ids = [*(spelled.FIRST_BYTE + byte for byte in GRIN.encode()), tokenizer.vocab()["▁a"]]
    assert [decoder.push([i]) for i in ids] == ["", "", "", "", f"{GRIN} a"]
    assert [decoder.push(ids[:2]), decoder.flush()] == ["", "\N{REPLACEMENT CHARACTER}" * 2]


# Stop strings


def _reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - max(map(len, complete))], True
    return text, False


def _feed(stops: StopStrings, pieces: Sequence[str]) -> list[str]:
    shown = []
    for piece in pieces:
        shown.append(stops.push(piece))
        if stops.stopped:
            return shown
    return [*shown, stops.flush()]


LETTERS = st.text(alphabet="ab\N{GRINNING FACE}", max_size=12)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text(alphabet="ab\N{GRINNING FACE}", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_any_cut_of_any_text_shows_the_same(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include)
    shown = _feed(matcher, pieces)
    assert ("".join(shown), matcher.stopped) == _reference("".join(pieces), stops, include)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3))
def test_no_more_is_held_back_than_a_stop_string_could_need(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, shown = StopStrings(stops), "", ""
    for piece in pieces:
        seen, shown = seen + piece, shown + matcher.push(piece)
        if matcher.stopped:
            return
        begun = [n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert shown == seen[: len(seen) - max(begun, default=0)]


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        (["DEF"], ["A", "B", "C", "", "", ""]),
        (["DEX"], ["A", "B", "C", "", "", "DEF", "G", "H", ""]),
        (["H", "GH"], ["A", "B", "C", "D", "E", "F", "", ""]),
        (["BCDX", "CD"], ["A", "", "", "B"]),
        (["Z"], [*"ABCDEFGH", ""]),
        ([], [*"ABCDEFGH", ""]),
    ],
)
def test_what_is_shown_when(stops: list[str], shown: list[str]) -> None:
    assert _feed(StopStrings(stops), "ABCDEFGH") == shown


def test_a_prefix_that_overlaps_itself() -> None:
    assert _feed(StopStrings(["aab"]), ["aa", "ab", "c"]) == ["", "a"]


def test_the_stop_string_may_be_included_without_any_delay() -> None:
    assert _feed(StopStrings(["DEF"], include_stop=True), ["ABCD", "EFG"]) == ["ABCD", "EF"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


# One choice


def _run(output: TextOutput, ids: Sequence[int]) -> tuple[list[str], list[int]]:
    """What a caller does: it pushes until a stop string is complete, else finishes. The shown texts, the kept ids."""
    shown, kept = [], []
    for token_id in ids:
        text, stopped = output.push(token_id)
        shown.append(text)
        kept.append(token_id)
        if stopped:
            break
    shown.append(output.finish())
    assert output.text == "".join(shown)
    return shown, kept


def test_the_token_that_completes_a_stop_string_is_the_last(byte: Tokenizer) -> None:
    output = TextOutput(byte, ["DEF"])
    shown, kept = _run(output, b"ABCDEFGH")
    assert (shown, bytes(kept), output.stopped) == (["A", "B", "C", "", "", "", ""], b"ABCDEF", True)
    output = TextOutput(byte, ["DEF"], include_stop=True)
    assert ("".join(_run(output, b"ABCDEFGH")[0]), output.stopped) == ("ABCDEF", True)


def test_a_stop_string_that_never_completes_is_shown_at_the_end(byte: Tokenizer) -> None:
    output = TextOutput(byte, ["DEX"])
    assert _run(output, b"ABCDE")[0] == ["A", "B", "C", "", "", "DE"]
    assert not output.stopped


def test_the_end_of_sequence_is_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    byte = tokenizers["byte"]
    ids = [*b"AB", tiny.END]
    assert "".join(_run(TextOutput(byte, eos_ids=(257, tiny.END), skip_special_tokens=False), ids)[0]) == "AB"
    assert "".join(_run(TextOutput(byte, skip_special_tokens=False), ids)[0]) == "AB<|end|>"
    assert "".join(_run(TextOutput(byte), ids)[0]) == "AB"
    plain = tokenizers["sentencepiece"].vocab()
    text = _run(TextOutput(tokenizers["sentencepiece"], eos_ids={plain["<note>"]}), [plain["hi"], plain["<note>"]])[0]
    assert "".join(text) == "hi"


def test_a_stop_string_in_the_middle_of_a_token(tokenizers: dict[str, Tokenizer]) -> None:
    vocab = tokenizers["sentencepiece"].vocab()
    output = TextOutput(tokenizers["sentencepiece"], ["el"])
    shown, kept = _run(output, [vocab["▁hi"], vocab["hel"], vocab["o"]])
    assert (shown, len(kept)) == (["hi", "h", ""], 2)


def test_a_stop_string_that_only_the_end_reveals(byte: Tokenizer, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    output = TextOutput(tokenizer, [GRIN])
    ids = [tokenizer.vocab()["hi"], *(spelled.FIRST_BYTE + b for b in GRIN.encode())]
    assert "".join(_run(output, ids)[0]) == "hi"
    assert output.stopped


def test_the_next_token_s_place_in_the_text(byte: Tokenizer) -> None:
    output = TextOutput(byte, ["xyz"])
    offsets = []
    for token_id in [tiny.START, *f"a{GRIN}xb".encode()]:
        offsets.append(output.decoded_length)
        output.push(token_id)
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3]
