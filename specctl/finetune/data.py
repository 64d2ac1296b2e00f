"""The data of a fine-tuning run: rows of files or of the hub as examples to train and prompts held out for validation,
and an account of every row that is not used."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from specctl.errors import CheckpointError, RequestError, UsageError
from specctl.finetune.conversations import read_row
from specctl.finetune.progress import Bar
from specctl.finetune.rows import read_rows
from specctl.prompts import Prompt
from specctl.schemas.recipe import Recipe
from specctl.text.tokenizer import Tokenizer, eos_ids
from specctl.train.examples import Conversation, Example, PlainText, Row
from specctl.train.masking import Masker

Answers = Mapping[str, Sequence[int]]
Say = Callable[[str], None]

HELD_OUT, HELD_OUT_FROM = 0.05, 100  # the fraction when the recipe names none, and the rows from which on
MANY = 2000  # rows from which on it takes so long that one wants to see it
REASONS = 8  # that are told apart on the terminal; the report has them all


@dataclass(frozen=True)
class Request:
    """A prompt that the target is to answer. id: the row's and the turn's place, which no other request has."""

    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Skip:
    """A row that is not used, and why. line: where it stood in its file."""

    id: str
    line: int
    reason: str


@dataclass(frozen=True)
class DataSet:
    """kept: rows that are used, for training or held out; skips: the others. label_tokens: of the training examples.
    sha: of examples and held-out prompts. pending: prompts whose answers are still to be made; their examples have no
    labels."""

    train: list[Example]
    held_out: list[Prompt]
    skips: list[Skip]
    rows: int
    kept: int
    label_tokens: int
    sha: str
    pending: int = 0


def load_examples(
    recipe: Recipe,
    tokenizer: Tokenizer | None,
    regenerate: Callable[[list[Request]], Answers] | None = None,
    say: Say = lambda sentence: None,
) -> DataSet:
    """The recipe's data. regenerate: answers prompts when the recipe wants the target's answers; without it they stay
    pending.

    Raises UsageError for what cannot be read, and for a set with nothing in it to train.
    """
    if tokenizer is None:
        raise CheckpointError(f"{recipe.target}: has no tokenizer; copy the model's tokenizer files there")
    loader = _Loader(recipe, tokenizer)
    entries = loader.read(recipe.data.sources)
    if recipe.data.held_out is None:
        held_out, entries = loader.hold_out(entries)
    else:
        held_out = _prompts_of(recipe, tokenizer, recipe.data.held_out, say)
    examples = loader.answered(entries, regenerate) if recipe.data.regenerate else loader.examples(entries)
    data = loader.data_set(examples, held_out)
    _tell(data, loader.masker.notices + loader.notices, recipe, say)
    if not data.pending and not data.label_tokens:
        raise UsageError(_nothing(data, recipe))
    return data


@dataclass(frozen=True)
class _Entry:
    """place: among all rows read, from 1."""

    place: int
    line: int
    row: Row


class _Loader:
    """Rows on their way to examples. skips: those that fell out, and why."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.masker = Masker(tokenizer, _ends(tokenizer))
        self.notices: Counter[str] = Counter()
        self.skips: list[Skip] = []
        self.rows = 0
        self.pending = 0

    def read(self, sources: Iterable[str]) -> list[_Entry]:
        """Every row that has one of the forms in use. A row without an id gets its place among all, which does not
        change with blank lines."""
        entries = []
        chat = self.tokenizer.has_chat_template and self.recipe.data.completions == "chat"
        for source in sources:
            for raw in read_rows(source):
                self.rows += 1
                id = _identity(raw.values.get("id"), self.rows)
                try:
                    entries.append(_Entry(self.rows, raw.line, read_row(raw.values, id, chat=chat)))
                except RequestError as error:
                    self.skips.append(Skip(id, raw.line, _sayable(str(error))))
        return entries

    def hold_out(self, entries: list[_Entry]) -> tuple[list[Prompt], list[_Entry]]:
        """Prompts for validation, and the entries that are left. Entries with the same prompt stay together, and which
        are chosen depends on the prompts and the seed, not on their order."""
        fraction = self.recipe.data.held_out_fraction
        if fraction is None:
            fraction = HELD_OUT if len(entries) >= HELD_OUT_FROM else 0.0
        if not fraction:
            return [], entries
        asking = [entry for entry in entries if entry.row.asks]
        key = {entry.place: _key(self.recipe.seed, entry.row) for entry in asking}
        order = sorted(asking, key=lambda entry: key[entry.place])
        count = max(1, int(len(order) * fraction))
        while 0 < count < len(order) and key[order[count].place] == key[order[count - 1].place]:
            count += 1
        if count >= len(order):
            self.notices["nothing could be held out: too few different prompts"] += 1
            return [], entries
        prompts = {entry.place: entry for entry in order[:count]}
        found = [prompt for entry in order[:count] for prompt in self.tried(entry, self.prompts)]
        return found, [entry for entry in entries if entry.place not in prompts]

    def examples(self, entries: list[_Entry]) -> list[Example]:
        return [example for entry in _watched(entries) for example in self.tried(entry, self._masked)]

    def answered(self, entries: list[_Entry], regenerate: Callable[[list[Request]], Answers] | None) -> list[Example]:
        """Each answer is an example of its own, with the turns before it as the row has them, and the ids that the
        target gave. A text without a prompt stays as it is."""
        asked = {entry.place: self.tried(entry, self._requests) for entry in _watched(entries)}
        requests = [request for each in asked.values() for request in each]
        if regenerate is None:
            self.pending = len(requests)
        answers = {} if regenerate is None or not requests else regenerate(requests)
        examples = []
        for entry in entries:
            if not entry.row.asks:
                examples += self.tried(entry, self._masked)
            elif regenerate is None:
                examples += [Example.of(entry.row.id, request.ids, []) for request in asked[entry.place]]
            elif asked[entry.place]:
                examples += self.tried(entry, lambda entry: self._joined(entry, asked[entry.place], answers))
        return examples

    def data_set(self, examples: list[Example], held_out: list[Prompt]) -> DataSet:
        self.skips.sort(key=lambda skip: skip.line)
        return DataSet(
            train=examples,
            held_out=held_out,
            skips=self.skips,
            rows=self.rows,
            kept=self.rows - len(self.skips),
            label_tokens=sum(example.num_labels for example in examples),
            sha=_sha(examples, held_out),
            pending=self.pending,
        )

    def prompts(self, entry: _Entry) -> list[Prompt]:
        """What the row's last answer answers, or all of it when nobody has. Raises RequestError when it asks
        nothing."""
        ids = self._prompts(entry)[-1:]
        if not ids:
            raise RequestError("has no prompt in it")
        return [Prompt(entry.row.id, token_ids=tuple(ids[0][1]))]

    def tried(self, entry: _Entry, step: Callable[[_Entry], list[Any]]) -> list[Any]:
        try:
            return step(entry)
        except RequestError as error:
            self.skips.append(Skip(entry.row.id, entry.line, _sayable(str(error))))
            return []

    def _masked(self, entry: _Entry) -> list[Example]:
        row = entry.row
        if isinstance(row, Conversation):
            return self._fitted(self.masker.conversation(row))
        if row.text is None:
            raise RequestError("has no answer in it")
        return self._fitted([self.masker.plain(row)])

    def _fitted(self, examples: list[Example]) -> list[Example]:
        """What is left within max_length. Raises RequestError when there is no label in it."""
        limit = self.recipe.data.max_length
        if self.recipe.reads_hidden:
            examples = [example.without_first() for example in examples]
        kept = []
        for example in examples:
            if len(example.ids) <= limit:
                kept.append(example)
            elif self.recipe.data.on_long == "trim" and (short := example.trimmed(limit)).num_labels:
                self.notices[f"examples are cut to data.max_length {limit}"] += 1
                kept.append(short)
        kept = [example for example in kept if example.num_labels]
        if kept:
            return kept
        if all(len(example.ids) <= limit for example in examples):
            why = ": a head learns what follows an answer's first token" if self.recipe.reads_hidden else ""
            raise RequestError(f"has no token to train{why}")
        if self.recipe.data.on_long == "skip":
            raise RequestError(f"is longer than data.max_length {limit}")
        raise RequestError(f"has 0 trainable tokens in the first {limit} (data.max_length)")

    def _prompts(self, entry: _Entry) -> list[tuple[int, list[int]]]:
        """Turn and token ids of everything in the row that asks for an answer."""
        row = entry.row
        if isinstance(row, Conversation):
            return [(turn, self.masker.prompt(row.turns[:turn])) for turn in row.open_turns]
        return [] if row.prompt is None else [(0, self.tokenizer.encode(row.prompt))]

    def _requests(self, entry: _Entry) -> list[Request]:
        limit = self.recipe.data.max_length
        prompts = self._prompts(entry)
        fit = [Request(f"{entry.place}.{turn}", tuple(ids)) for turn, ids in prompts if 0 < len(ids) < limit]
        if not fit and entry.row.asks:
            raise RequestError(f"has a prompt that fills data.max_length {limit}" if prompts else "has no prompt in it")
        return fit

    def _joined(self, entry: _Entry, requests: list[Request], answers: Answers) -> list[Example]:
        examples = []
        for request in requests:
            answer = answers.get(request.id, ())
            if len(answer):
                ids = [*request.ids, *answer]
                examples.append(Example.of(entry.row.id, ids, [(len(request.ids), len(ids))]))
        if not examples:
            raise RequestError("was given no answer by the target")
        return self._fitted(examples)


def _prompts_of(recipe: Recipe, tokenizer: Tokenizer, source: str, say: Say) -> list[Prompt]:
    """Every prompt of a held-out set."""
    loader = _Loader(recipe, tokenizer)
    entries = loader.read([source])
    prompts = [prompt for entry in entries for prompt in loader.tried(entry, loader.prompts)]
    if not prompts:
        reasons = "; ".join(_reasons(loader.skips)) or "it is empty"
        raise UsageError(f"{source}: has no prompt to hold out: {reasons}")
    if loader.skips:
        say(f"{source}: {len(loader.skips)} of {loader.rows} rows are no prompts: {'; '.join(_reasons(loader.skips))}")
    return prompts


def _ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a text, by the files beside the tokenizer; a directory may hold the tokenizer alone."""

    def read(name: str) -> dict[str, Any]:
        try:
            value = json.loads((tokenizer.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    return eos_ids(read("config.json"), read("generation_config.json"), tokenizer.eos_id)


def _identity(value: Any, place: int) -> str:
    named = isinstance(value, (int, str)) and not isinstance(value, bool) and value != ""
    return _sayable(str(value)) if named else str(place)


def _sayable(text: str) -> str:
    """Halves of surrogate pairs, which a row may hold and no file can, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _key(seed: int, row: Row) -> bytes:
    """The same for rows that ask the same."""
    asked: Any = row.prompt if isinstance(row, PlainText) else [[turn.role, turn.content] for turn in row.question]
    return hashlib.sha256(f"{seed}\0{json.dumps(asked)}".encode()).digest()


def _sha(examples: Iterable[Example], held_out: Iterable[Prompt]) -> str:
    total = hashlib.sha256()
    for example in examples:
        total.update(f"{example.id}\0{len(example.ids)}\0".encode())
        total.update(array("q", example.ids).tobytes() + array("q", example.labels).tobytes())
    total.update(b"held out")
    for prompt in held_out:
        total.update(f"{prompt.token_ids}\0".encode())
    return total.hexdigest()


def _watched(entries: list[_Entry]) -> Iterator[_Entry]:
    with Bar("rows", len(entries), "rows") if len(entries) >= MANY else nullcontext() as bar:
        for entry in entries:
            yield entry
            if bar is not None:
                bar.add(1)


def _tell(data: DataSet, notices: Counter[str], recipe: Recipe, say: Say) -> None:
    tokens = sum(len(example.ids) for example in data.train)
    say(
        f"data: {data.rows} rows, {data.kept} kept ({len(data.held_out)} prompts held out), {len(data.skips)} skipped; "
        f"{len(data.train)} examples, {data.label_tokens} of {tokens} tokens trained"
    )
    for reason in _reasons(data.skips):
        say(f"skipped: {reason}")
    for notice, count in notices.most_common(REASONS):
        say(f"note: {notice} ({count})")
    if data.pending:
        say(f"note: {data.pending} answers are still to be made by {recipe.target}; until then nothing has labels")


def _reasons(skips: Sequence[Skip]) -> list[str]:
    counted = Counter(skip.reason for skip in skips).most_common()
    said = [f"{reason} ({count}, first at line {_line(skips, reason)})" for reason, count in counted[:REASONS]]
    rest = sum(count for _, count in counted[REASONS:])
    return [*said, f"other reasons ({rest})"] if rest else said


def _line(skips: Sequence[Skip], reason: str) -> int:
    return next(skip.line for skip in skips if skip.reason == reason)


def _nothing(data: DataSet, recipe: Recipe) -> str:
    where = ", ".join(recipe.data.sources)
    if not data.rows:
        return f"{where}: has no rows in it; expected messages, conversations, prompt and completion, or text in each"
    why = "; ".join(_reasons(data.skips)) or "all of it is held out"
    return f"{where}: no usable conversations, 0 trainable tokens in {data.rows} rows: {why}"
