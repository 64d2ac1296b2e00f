"""Examples, and what they are made of: a conversation, or a plain text with or without a prompt before it. It knows
nothing about files, templates or tokens' meanings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

IGNORED = -100  # the label of a token that is read and not trained, as everybody's trainers and torch's losses have it


@dataclass(frozen=True)
class Turn:
    """role: system, user or assistant. name: of who speaks. reasoning: an answer's, under the key that its template
    knows it by. trained: an answer that is to be learnt."""

    role: str
    content: str
    name: str | None = None
    reasoning: Mapping[str, str] = field(default_factory=dict)
    trained: bool = True

    @property
    def is_answer(self) -> bool:
        return self.role == "assistant" and self.trained and bool(self.content.strip())

    def as_dict(self) -> dict[str, str]:
        """What a chat template sees."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named, **self.reasoning}


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: tuple[Turn, ...]

    @property
    def open_turns(self) -> list[int]:
        """Where the target can be asked: in place of each answer that is to be learnt, and behind a last question."""
        asked = [index for index, turn in enumerate(self.turns) if turn.role == "assistant" and turn.trained]
        return [*asked, len(self.turns)] if self.turns and self.turns[-1].role == "user" else asked

    @property
    def question(self) -> tuple[Turn, ...]:
        """What the last of them answers, or all turns when nobody has."""
        return self.turns[: self.open_turns[-1]] if self.open_turns else ()

    @property
    def asks(self) -> bool:
        """Whether there is something in it to be answered."""
        return bool(self.open_turns)


@dataclass(frozen=True)
class PlainText:
    """prompt: read and not trained, None when all of the text is. text: None for a prompt without an answer."""

    id: str
    prompt: str | None
    text: str | None

    @property
    def asks(self) -> bool:
        """Whether there is something in it to be answered."""
        return self.prompt is not None


Row = Conversation | PlainText


@dataclass(frozen=True)
class Example:
    """id: of the row it was made of. labels: as long as ids; the id itself where it is trained, else IGNORED. A label
    belongs to its own token: that it is predicted from the token before is the loss's business, and so the first token,
    which has none before it, never has a label."""

    id: str
    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @classmethod
    def of(cls, id: str, ids: Sequence[int], trained: Iterable[tuple[int, int]]) -> Example:
        """trained: ranges [first, last) of tokens."""
        labels = [IGNORED] * len(ids)
        for first, last in trained:
            labels[first:last] = ids[first:last]
        labels[:1] = [IGNORED] * len(labels[:1])
        return cls(id, tuple(ids), tuple(labels))

    @property
    def num_labels(self) -> int:
        return sum(label != IGNORED for label in self.labels)

    @property
    def prompt(self) -> tuple[int, ...]:
        """What stands before the first trained token; of a text that is trained from its beginning on, the first
        half."""
        first = next((place for place, label in enumerate(self.labels) if label != IGNORED), 0)
        return self.ids[: first if first > 1 else len(self.ids) // 2]

    @property
    def runs(self) -> list[int]:
        """The lengths of what is trained without a gap."""
        return [len(list(run)) for trained, run in groupby(self.labels, lambda label: label != IGNORED) if trained]

    def without_first(self) -> Example:
        """As a draft is trained that reads hidden states: the first token of every answer is the target's own, which
        drafting begins behind."""
        before = (IGNORED, *self.labels)
        labels = [IGNORED if last == IGNORED else label for last, label in zip(before, self.labels, strict=False)]
        return replace(self, labels=tuple(labels))

    def trimmed(self, length: int) -> Example:
        return self if len(self.ids) <= length else Example(self.id, self.ids[:length], self.labels[:length])
