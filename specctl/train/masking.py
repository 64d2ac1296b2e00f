"""Masking: which tokens of a conversation the target said. Found by comparing what its template writes, so that it
works with any template; it knows none, and looks for no header in the text.

An answer begins where the prompt ends that a server would have sent for it, and ends with the first token that the
template puts behind it (the end of the turn). All of it is checked on the rendered text: where the template shows an
answer otherwise once the conversation goes on, as those do that drop earlier thinking, that answer gets an example of
its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specctl.errors import RequestError
from specctl.text.tokenizer import Encoded, Tokenizer
from specctl.train.examples import Conversation, Example, PlainText, Turn

REWRITTEN = "the chat template rewrites the turns before an answer once the answer is there"
OTHER_LEAD = "the chat template leads into an answer with other text than it writes before one"
NOTHING_LEFT = "the chat template shows nothing of an answer"
OTHER_PROMPT = (
    "the generation prompt of the chat template ends in text that is not before the answers it writes; they are "
    "trained as it writes them"
)
_STAND_IN = "Wq7 stands here"  # in place of an answer, to see what the template puts behind one


@dataclass(frozen=True)
class _Answer:
    """turn: its index. text: the conversation up to the answer, as the template writes it. lead: what is read before
    the answer, text[:start]. said: text up to the end of the turn. All as they are served."""

    turn: int
    text: str
    lead: str
    said: str


class Masker:
    """Rows to examples, by one tokenizer and its chat template. ends: further ids that end a text, of the target's
    config.

    notices: what was done otherwise than one would expect, and how often.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.notices: Counter[str] = Counter()
        self._ends = frozenset(ends)
        self._marks = tokenizer.added_ids | self._ends
        self._known: dict[int, int] = {}
        self._tails: dict[str, int] = {}

    def conversation(self, conversation: Conversation) -> list[Example]:
        """Examples of its answers: one, or several when the template shows some of them in their own place only. The
        last has the row's id, the others the number of the answer's turn behind it.

        Raises RequestError when no answer can be trained, saying why.
        """
        answers, faults = list[_Answer](), list[str]()
        for index, turn in enumerate(conversation.turns):
            if turn.is_answer:
                try:
                    answers.append(self._answer(conversation.turns[: index + 1]))
                except RequestError as error:
                    faults.append(str(error))
        if not answers:
            raise RequestError(faults[0] if faults else "has no answer in it")
        self.notices.update(faults)
        examples = list[Example]()
        while answers:
            last = answers[-1]
            here = {answer.turn for answer in answers if last.text.startswith(answer.said)}
            id = f"{conversation.id}#{last.turn}" if examples else conversation.id
            examples.append(self._example(id, last.text, [answer for answer in answers if answer.turn in here]))
            answers = [answer for answer in answers if answer.turn not in here]
        return examples[::-1]

    def plain(self, row: PlainText) -> Example:
        """A text is trained as it is; one with a prompt before it from the prompt's end on, and the end token with
        it."""
        assert row.text is not None
        if row.prompt is None:
            ids = self.tokenizer.encode(row.text)
            return Example.of(row.id, self._shared(ids), [(0, len(ids))])
        ids = self.tokenizer.encode(row.prompt)
        first = len(ids)
        whole = self.tokenizer.encode(row.prompt + row.text)
        if whole[:first] != ids:  # a token reaches over the border; a server would have cut it there
            first = _common(ids, whole) + 1
        if self.tokenizer.eos_id is not None and whole[-1] not in self._ends | {self.tokenizer.eos_id}:
            whole = [*whole, self.tokenizer.eos_id]
        return Example.of(row.id, self._shared(whole), [(first, len(whole))])

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """The token ids that a server would answer after these turns."""
        return self.tokenizer.encode_rendered(self._render(turns, True)).ids

    def _answer(self, turns: Sequence[Turn]) -> _Answer:
        lead, text = self._render(turns[:-1], True), self._render(turns, False)
        head, _, tail = self._render([*turns[:-1], replace(turns[-1], content=_STAND_IN)], False).rpartition(_STAND_IN)
        if not text.startswith(lead):
            lead = self._parting(turns, lead, text, head)
        said = text[: self._end(text, tail)]
        if len(said) <= len(lead):
            raise RequestError(NOTHING_LEFT)
        for key, reasoning in turns[-1].reasoning.items():
            if reasoning.strip() not in text[len(lead) :]:
                raise RequestError(f"the chat template does not show the {key} of an answer")
        return _Answer(len(turns) - 1, text, lead, said)

    def _parting(self, turns: Sequence[Turn], lead: str, text: str, head: str) -> str:
        """What stands before an answer when that is not the generation prompt: what the template writes before any."""
        before = self._render(turns[:-1], False)
        if not (text.startswith(before) and lead.startswith(before)):
            raise RequestError(REWRITTEN)
        if not (head.startswith(before) and text.startswith(head)):
            raise RequestError(OTHER_LEAD)
        self.notices[OTHER_PROMPT] += 1
        return head

    def _end(self, text: str, tail: str) -> int:
        """The character behind the end-of-turn token: the first mark in the tail, which the template puts behind any
        answer. All of the tail belongs to the answer when there is no mark in it."""
        if tail not in self._tails:
            whole = self.tokenizer.encode_rendered(tail)
            marks = zip(whole.ids, whole.ends, strict=True)
            self._tails[tail] = next((end for id, end in marks if id in self._marks), len(tail))
        return len(text) - len(tail) + self._tails[tail] if text.endswith(tail) else len(text)

    def _example(self, id: str, text: str, answers: Sequence[_Answer]) -> Example:
        whole = self.tokenizer.encode_rendered(text)
        return Example.of(id, self._shared(whole.ids), [self._range(whole, text, answer) for answer in answers])

    def _range(self, whole: Encoded, text: str, answer: _Answer) -> tuple[int, int]:
        """The answer's tokens. A token that reaches over its border is not the target's: it would have been cut
        there."""
        begin = len(answer.lead)
        first, alone = self._tokens_before(begin, whole, text)
        if first < alone:
            first = max(first + 1, sum(start < begin for start in whole.starts))
        return first, self._tokens_before(len(answer.said), whole, text)[0]

    def _tokens_before(self, at: int, whole: Encoded, text: str) -> tuple[int, int]:
        """How many tokens the text begins with that it also has when it ends at character `at`; and how many it has
        then. What comes before a mark does not depend on what comes after, so only that is encoded again."""
        mark = bisect_right(whole.ends, at) - 1
        while mark > 0 and whole.ids[mark] not in self._marks:
            mark -= 1
        mark = max(mark, 0)
        alone = self.tokenizer.encode_rendered(text[whole.starts[mark] if mark else 0 : at]).ids
        return mark + _common(alone, whole.ids[mark : mark + len(alone)]), mark + len(alone)

    def _render(self, turns: Sequence[Turn], add_generation_prompt: bool) -> str:
        return self.tokenizer.render([turn.as_dict() for turn in turns], add_generation_prompt)

    def _shared(self, ids: Sequence[int]) -> list[int]:
        """The same numbers as objects that all examples share: a quarter of the memory."""
        return [self._known.setdefault(id, id) for id in ids]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of ids that both begin with."""
    if list(second[: len(first)]) == list(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
