"""specctl bench: what it reports is what was run, differing answers are found, and its arithmetic is right. Times are
never judged here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from conftest import Run
from fixtures import Make
from torch import Tensor

from specctl.bench import anatomy, passes
from specctl.bench.command import first_fault
from specctl.bench.compare import differences, first_difference, identical, must_agree, near_tie, speedup
from specctl.bench.contest import Tally, hold, turns
from specctl.bench.entrants import enter, label_drafts
from specctl.bench.options import BenchOptions
from specctl.bench.passes import BareModel, Costs, measure_passes
from specctl.bench.plots import draw
from specctl.bench.render import markdown
from specctl.bench.run import run_bench
from specctl.bench.runners import Answer, EngineRunner, Runner
from specctl.bench.steps import step_costs
from specctl.bench.work import Request, in_groups, read_work
from specctl.drafts import Draft
from specctl.engine import engine as engine_module
from specctl.engine.verify import Verdict, verify
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.pair import OpenedDraft, Target, build_engine, constant, open_draft, open_target
from specctl.prompts import Prompt
from specctl.sampling.batch import SamplingBatch
from specctl.sampling.params import Accept
from specctl.schemas.report import Report, read_report
from specctl.schemas.trace import read_trace

TEXTS = ("abcabcabc hello hello", "the cat the cat the", "12 21 12 21 12 21 12")
TOKENS = 24
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are timed to see that they run, not how fast."""
    for module, name, value in ((passes, "MIN_ROUNDS", 1), (passes, "MAX_ROUNDS", 2), (anatomy, "ROUNDS", 2)):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def model(make: Make) -> Path:
    return make(tiny.llama, seed=1, dtype=torch.float64)


@pytest.fixture
def near(make: Make, model: Path) -> Path:
    """A draft that is right part of the time."""
    return make(tiny.near, of=model)


@pytest.fixture
def circle(make: Make) -> Path:
    """A model that says abcd over and over."""
    rows = {ord(last): {ord(following): 0.75, ord("x"): 0.25} for last, following in ("ab", "bc", "cd", "da")}
    return make(tiny.table, rows=rows, dtype=torch.float64)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "class": "ab"[i % 2]} for i, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


Bench = Callable[..., Any]


@pytest.fixture
def bench(run: Run, model: Path, prompts: Path, tmp_path: Path) -> Bench:
    """bench("--draft", "ngram") is `specctl bench` on the tiny model and prompts, 24 tokens each, one repeat."""

    def command(*arguments: object) -> Any:
        given = [str(argument) for argument in arguments]
        defaults = {"--target": model, "--prompts": prompts, "--output": tmp_path / "R.json", "--repeats": 1}
        defaults |= {"--max-tokens": TOKENS, "--threads": 1}
        chosen = [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
        return run("bench", *chosen, *given)

    return command


@pytest.fixture
def target(model: Path) -> Target:
    return open_target(str(model), ModelOptions(threads=1))


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_sweep_of_two_drafts(bench: Bench, target: Target, near: Path, tmp_path: Path) -> None:
    ran = bench("--draft", "ngram", "--draft", near, "--sweep-k", "0,3", "--repeats", 2, "--ignore-eos")
    assert ran.code == 0, ran.err
    report = read_report(tmp_path / "R.json")
    label = near.name
    names = ["plain", "ngram k=0", "ngram k=3", f"{label} k=0", f"{label} k=3"]
    assert [run.name for run in report.runs] == names
    assert [run.k for run in report.runs] == [0, 0, 3, 0, 3]
    assert (report.work.n, report.work.max_tokens, report.work.temperature) == (3, TOKENS, 0)
    for run in report.runs:
        assert run.tokens == 3 * TOKENS
        assert len(run.seconds) == 2
        assert run.tok_s == pytest.approx(2 * run.tokens / sum(run.seconds))
        assert run.ttft_ms is not None
        assert run.tpot_ms is not None
    assert [(c.run, c.against) for c in report.comparisons] == [(name, "plain") for name in names[1:]]
    assert all(c.identical is True and not c.near_ties and c.ci95 is not None for c in report.comparisons)
    by_run = {c.run: c for c in report.comparisons}
    assert by_run["ngram k=0"].v is None
    assert by_run["ngram k=0"].implied is None
    assert (by_run["ngram k=3"].c, by_run["ngram k=3"].u) == (0, 0)
    drafted = by_run[f"{label} k=3"]
    assert drafted.c
    assert drafted.v
    assert drafted.u
    for name in (f"{label} k=3", "ngram k=3"):
        expected = by_hand(target, open_draft("ngram" if name.startswith("ngram") else str(near), target), 3)
        speculation = report.run(name).speculation
        assert speculation is not None
        counted = speculation.model_dump(exclude={"accept", "lossy"})
        assert counted == expected
    counters = report.run(f"{label} k=3").speculation
    assert counters is not None
    assert counters.mean_acceptance_length is not None
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    implied = counters.mean_acceptance_length / (drafted.v + 2 * drafted.c + drafted.u)
    assert drafted.implied == pytest.approx(implied)
    assert drafted.efficiency == pytest.approx(drafted.speedup / implied)
    assert report.run("ngram k=0").speculation is not None
    page = (tmp_path / "R.md").read_text()
    for name in names:
        assert name in ran.out
        assert name in page
    for picture in ("speedup", "acceptance", "step"):
        assert f"(R_plots/{picture}.png)" in page
        assert (tmp_path / "R_plots" / f"{picture}.png").read_bytes().startswith(PNG)


def by_hand(target: Target, draft: OpenedDraft, k: int) -> dict[str, Any]:
    """The counters of the prompts run one after the other."""
    engine = build_engine(target, draft, constant(k))
    params = DecodingOptions(max_tokens=TOKENS, ignore_eos=True).params()
    for text in TEXTS:
        engine.run([(target.encode(Prompt(id="1", prompt=text)), params)])
    return engine.stats.speculation.as_dict()


def test_json_is_the_report_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    ran = bench("--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == json.loads((tmp_path / "R.json").read_text())
    report = read_report(tmp_path / "R.json")
    assert [run.name for run in report.runs] == ["plain"]
    assert report.comparisons == []
    assert not list((tmp_path / "R_plots").iterdir())


def test_transformers_as_a_baseline(bench: Bench, near: Path, tmp_path: Path) -> None:
    """Its texts are ours, and it runs one prompt at a time beside our batch."""
    ran = bench("--draft", near, "--draft", "ngram", "--baseline", "transformers", "--batch", 2, "--k", 2)
    assert ran.code == 0, ran.err
    report = read_report(tmp_path / "R.json")
    assisted = [f"transformers assisted ({name}) k=2" for name in (near.name, "ngram")]
    assert [run.name for run in report.runs] == ["plain", f"{near.name} k=2", "ngram k=2", "transformers", *assisted]
    assert [run.batch for run in report.runs] == [2, 2, 2, 1, 1, 1]
    assert len({run.tokens for run in report.runs}) == 1
    for name in ("transformers", *assisted):
        run = report.run(name)
        assert run.speculation is None
        assert run.ttft_ms is not None
        assert run.ttft_ms.p50 > 0
    compared = {(c.run, c.against): c for c in report.comparisons}
    assert compared.keys() == {
        (f"{near.name} k=2", "plain"),
        ("ngram k=2", "plain"),
        ("plain", "transformers"),
        (assisted[0], "transformers"),
        (assisted[1], "transformers"),
        (f"{near.name} k=2", assisted[0]),
        ("ngram k=2", assisted[1]),
    }
    assert all(comparison.identical for comparison in compared.values())
    assert compared["plain", "transformers"].v is None
    assert "one prompt at a time" in (tmp_path / "R.md").read_text()


def test_differing_answers_fail(bench: Bench, near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that says the least likely token after a block is caught, and the report is there."""

    def careless(draft: Draft, scores_BMV: Tensor, sampling: SamplingBatch) -> Verdict:
        verdict = verify(draft, scores_BMV, sampling)
        token_BM = verdict.token_BM
        if draft.token_BK.shape[1]:
            at_B1 = verdict.num_accepted_B[:, None]
            token_BM = token_BM.scatter(1, at_B1, scores_BMV.argmin(-1).gather(1, at_B1))
        return Verdict(token_BM, verdict.num_accepted_B)

    monkeypatch.setattr(engine_module, "verify", careless)
    ran = bench("--draft", near, "--ignore-eos")
    assert ran.code == 1
    assert f"{near.name} k=3 and plain have to be the same and are not: prompt" in ran.err
    report = read_report(tmp_path / "R.json")
    (comparison,) = report.comparisons
    assert comparison.identical is False
    assert comparison.near_ties
    assert "DIFFERENT" in ran.out
    assert first_fault(report) is not None


def test_sampled_runs_are_not_compared_unless_coupled(bench: Bench, near: Path, tmp_path: Path) -> None:
    sampled = ("--draft", near, "--temperature", 1, "--seed", 5, "--force", "--ignore-eos", "--top-p", 0.95)
    for accept, expected in ((None, None), ("coupled", True), ("typical", None)):
        ran = bench(*sampled, *(() if accept is None else ("--accept", accept)))
        assert ran.code == 0, ran.err
        report = read_report(tmp_path / "R.json")
        (comparison,) = report.comparisons
        assert comparison.identical is expected
        assert report.work.seed == 5
        assert "exact" in ran.out or accept is not None or "not compared (sampled)" in ran.out
    assert "not compared (lossy)" in ran.out
    assert f"{near.name} k=3 (lossy)" in (tmp_path / "R.md").read_text()


def test_a_policy_chooses_the_length(bench: Bench, near: Path, tmp_path: Path) -> None:
    cells = [{"batch": [1, None], "context": [lo, hi], "k": k} for lo, hi, k in ((1, 20, 1), (21, None, 2))]
    policy = {"schema": "specctl.policy/1", "target": {}, "draft": {"kind": "llama"}, "accept": {"method": "exact"}}
    (tmp_path / "P.yaml").write_text(yaml.safe_dump(policy | {"k": cells}))
    ran = bench("--draft", near, "--policy", tmp_path / "P.yaml", "--trace", tmp_path / "T.json")
    assert ran.code == 0, ran.err
    assert "digest null" in ran.err
    report = read_report(tmp_path / "R.json")
    assert report.run(f"{near.name} policy").k is None
    (comparison,) = report.comparisons
    assert (comparison.c, comparison.v, comparison.implied, comparison.identical) == (None, None, None, True)
    assert read_trace(tmp_path / "T.json").k == 2


def test_a_trace_tells_what_became_of_every_draft(bench: Bench, near: Path, tmp_path: Path) -> None:
    ran = bench("--draft", near, "--sweep-k", "1,3", "--trace", tmp_path / "T.json", "--ignore-eos")
    assert ran.code == 0, ran.err
    trace = read_trace(tmp_path / "T.json")
    counters = read_report(tmp_path / "R.json").run(f"{near.name} k=3").speculation
    assert counters is not None
    assert (trace.k, trace.temperature) == (3, 0)
    assert [entry.class_ for entry in trace.classes] == ["a", "b"]
    assert [len(entry.requests) for entry in trace.classes] == [2, 1]
    assert sum(entry.num_drafts for entry in trace.classes) == counters.num_drafts
    for name in ("drafted_per_position", "accepted_per_position"):
        columns = zip(*(getattr(entry, name) for entry in trace.classes), strict=True)
        assert [sum(column) for column in columns] == getattr(counters, name)
    for entry in trace.classes:
        assert all(len(each) == 3 for each in entry.confidence)
        assert all(1 / tiny.VOCAB <= value <= 1 for each in entry.confidence for value in each)
        # At temperature 0 a token is accepted iff it is the target's own choice.
        accepted = Counter(next((i for i, place in enumerate(rank) if place > 1), 3) for rank in entry.rank)
        assert [accepted[j] for j in range(4)] == np.sum([r.histogram for r in entry.requests], axis=0).tolist()
        assert min(map(len, TEXTS)) <= entry.context <= max(map(len, TEXTS)) + TOKENS


def test_a_trace_of_a_draft_without_probabilities(bench: Bench, circle: Path, tmp_path: Path) -> None:
    """Prompt lookup is at first misled by the prompt, and then always right."""
    (tmp_path / "misleading.jsonl").write_text('{"prompt": "abdabda"}\n{"prompt": "bcabca"}\n')
    arguments = ("--target", circle, "--prompts", tmp_path / "misleading.jsonl", "--draft", "ngram", "--ignore-eos")
    assert bench(*arguments, "--trace", tmp_path / "T.json").code == 0
    (entry,) = read_trace(tmp_path / "T.json").classes
    assert entry.class_ == "all"
    assert entry.confidence == []
    assert entry.rank[0][0] > 1
    assert entry.rank[-1] == [1, 1, 1]
    (comparison,) = read_report(tmp_path / "R.json").comparisons
    counters = read_report(tmp_path / "R.json").run("ngram k=3").speculation
    assert counters is not None
    assert counters.num_drafts == entry.num_drafts == len(entry.rank)
    assert counters.drafted_per_position == entry.drafted_per_position
    assert counters.accepted_per_position == entry.accepted_per_position
    assert comparison.implied == pytest.approx((counters.mean_acceptance_length or 0) / (comparison.v or 0))


def test_anatomy_names_phases_and_parts(bench: Bench, near: Path, tmp_path: Path) -> None:
    ran = bench("--draft", near, "--anatomy")
    assert ran.code == 0, ran.err
    page = (tmp_path / "R.md").read_text()
    for text in (ran.out, page):
        for word in ("prefill", "catch up", "embedding", "attention", "4 rows"):
            assert word in text
    assert (tmp_path / "R_plots" / "phases.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", 4), "--batch 4 needs at least as many prompts, there are 3"),
        (("--limit", 4), "--limit 4"),
        (("--max-tokens", 250), "prompt 1: 21 tokens and an answer of 250"),
        (("--sweep-k", "1,2"), "--sweep-k is given but no --draft"),
        (("--k", 2), "--k is given but no --draft"),
        (("--accept", "coupled"), "--accept is given but no --draft"),
        (("--draft", "ngram", "--sweep-k", "1", "--k", 2), "--sweep-k and --k are both given"),
        (("--draft", "ngram", "--sweep-k", "1,1"), "names a length twice"),
        (("--draft", "ngram", "--sweep-k", "1,17"), "--sweep-k 17: ngram drafts at most 16"),
        (("--draft", "ngram", "--draft", "ngram"), "would be called ngram"),
        (("--trace", "T.json"), "--trace needs one draft"),
        (("--draft", "ngram", "--k", 0, "--trace", "T.json"), "--trace needs one draft"),
        (("--output", "R.txt"), "ends in .json"),
        (("--output", "R.json", "--trace", "R.json"), "is the report's file"),
    ],
)
def test_contradictions_are_refused(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    ran = bench(*arguments)
    assert ran.code == 2
    assert said in ran.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["R.json", "R.md", "R_plots", "T.json"])
def test_nothing_is_overwritten_unasked(bench: Bench, tmp_path: Path, name: str) -> None:
    """It is said before any model is opened."""
    (tmp_path / name).touch() if "." in name else (tmp_path / name).mkdir()
    ran = bench("--target", tmp_path / "no-model", "--trace", tmp_path / "T.json")
    assert ran.code == 2
    assert f"{tmp_path / name}: exists" in ran.err


def test_a_draft_may_not_take_the_name_of_another_run(make: Make, target: Target, tmp_path: Path) -> None:
    (tmp_path / "plain").symlink_to(make(tiny.llama, seed=2, dtype=torch.float64))
    draft = open_draft(str(tmp_path / "plain"), target)
    assert label_drafts([draft]) == {draft.name and "model": draft}  # the directory a link leads to gives the name
    renamed = replace(draft, name=str(tmp_path / "elsewhere" / "plain"))
    with pytest.raises(UsageError, match="called plain is another one"):
        label_drafts([renamed])


# -- the order and the clock -------------------------------------------------------------------------------------------


def test_every_turn_has_every_runner_and_the_order_turns() -> None:
    found = list(turns(num_repeats=2, num_groups=3, num_runners=4))
    assert [(turn.repeat, turn.group) for turn in found] == [(r, g) for r in range(2) for g in range(3)]
    assert all(sorted(turn.order) == [0, 1, 2, 3] for turn in found)
    assert [turn.order[0] for turn in found] == [0, 1, 2, 3, 0, 1]
    firsts = Counter(turn.order[0] for turn in turns(3, 8, 4))
    assert set(firsts.values()) == {6}


@dataclass
class Scripted:
    """A runner whose answers and scores are given beforehand. log: what it was asked, by whom it likes."""

    name: str
    answers: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    log: list[tuple[str, str, list[str], int]] = field(default_factory=list)
    k: int | None = 0
    batch: int = 1
    accept: Accept | None = field(default_factory=lambda: Accept("exact"))

    def warm_up(self, requests: list[Request]) -> None:
        self._note("warm-up", requests)

    def answer(self, requests: list[Request]) -> list[Answer]:
        self._note("answer", requests)
        return [Answer(self.answers[request.id], 0.1, 0.2, None) for request in requests]

    def scores_after(self, request: Request, answer: list[int]) -> Tensor:
        return torch.tensor(self.scores[tuple(answer)], dtype=torch.float64)

    def _note(self, what: str, requests: list[Request]) -> None:
        self.log.append((self.name, what, [r.id for r in requests], max(r.max_tokens for r in requests)))


def requests_of(count: int) -> list[Request]:
    return [Request(str(i), [1, 2], 100, i, "all") for i in range(count)]


def test_the_contest_keeps_to_the_order_and_forgets_the_warm_up() -> None:
    log: list[tuple[str, str, list[str], int]] = []
    groups = in_groups(requests_of(3), 2)
    runners = [Scripted(name, {"0": [1], "1": [2, 3], "2": [4, 5, 6]}, log=log) for name in "ab"]
    said: list[str] = []
    tallies = hold(runners, groups, 2, torch.device("cpu"), said.append)
    assert log[:2] == [("a", "warm-up", ["0", "1"], 16), ("b", "warm-up", ["0", "1"], 16)]
    asked = [(name, ids) for name, _, ids, _ in log[2:]]
    first, second = ["0", "1"], ["2"]
    one_repeat = [("a", first), ("b", first), ("b", second), ("a", second)]
    assert asked == one_repeat * 2
    for tally in tallies:
        assert tally.tokens.tolist() == [[3, 3], [3, 3]]
        assert tally.seconds.shape == (2, 2)
        assert (tally.seconds > 0).all()
        assert [[answer.token_ids for answer in repeat] for repeat in tally.answers] == [[[1], [2, 3], [4, 5, 6]]] * 2
    assert said[-1].startswith("100 %")


# -- comparing ---------------------------------------------------------------------------------------------------------


def tally_of(seconds: Any, tokens: Any = None, answers: list[list[list[int]]] | None = None) -> Tally:
    seconds = np.asarray(seconds, dtype=float)
    tokens = np.full(seconds.shape, 10) if tokens is None else np.asarray(tokens)
    given = [[Answer(ids, 0.0, 0.0, None) for ids in repeat] for repeat in answers or []]
    return Tally(seconds, tokens, given)


def test_speedup_is_paired() -> None:
    """Groups differ a hundredfold and the machine drifts, but one run always takes half of the other's time: the
    interval has no width. What is not paired is as wide as the noise."""
    random = np.random.default_rng(3)
    against = 10 ** random.uniform(-1, 1, size=(3, 20))
    exact = speedup(tally_of(against / 2), tally_of(against))
    assert exact.value == pytest.approx(2)
    assert exact.interval == pytest.approx((2, 2))
    noise = random.lognormal(sigma=0.3, size=against.shape)
    noisy = speedup(tally_of(against / 2 * noise), tally_of(against))
    assert noisy.interval is not None
    low, high = noisy.interval
    assert low < noisy.value < high
    assert high - low > 0.05
    assert speedup(tally_of(against / 2 * noise), tally_of(against)) == noisy


def test_speedup_of_unequal_work_is_in_tokens_a_second() -> None:
    measured = speedup(tally_of([[1.0, 1.0]], [[30, 10]]), tally_of([[2.0, 2.0]], [[10, 10]]))
    assert measured.value == pytest.approx((40 / 2) / (20 / 4))


def test_one_measurement_has_no_interval() -> None:
    assert speedup(tally_of([[1.0]]), tally_of([[2.0]])).interval is None


@pytest.mark.parametrize(
    ("mine", "theirs", "position"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [], None)],
)
def test_first_difference(mine: list[int], theirs: list[int], position: int | None) -> None:
    assert first_difference(mine, theirs) == position


def judged(
    mine: list[list[int]], theirs: list[int], scores: list[float], dtype: torch.dtype
) -> tuple[Any, bool | None]:
    """mine: by repeat. scores: of the reference after its first token."""
    reference = Scripted("plain", scores={(theirs[0],): scores})
    tallies = [
        tally_of(np.ones((len(mine), 1)), answers=[[ids] for ids in each]) for each in (mine, [theirs] * len(mine))
    ]
    found = differences(requests_of(1), *tallies, reference)
    return found, identical(found, near_tie(Scripted("run"), reference, dtype), dtype)


def test_a_near_tie_is_told_from_a_difference() -> None:
    tie, apart = [0.0, 5.0, 5.0009, 1.0], [0.0, 5.0, 5.0011, 1.0]
    found, same = judged([[2, 1, 0]], [2, 2, 3], tie, torch.float32)
    assert same is True
    (only,) = found
    assert (only.prompt, only.position) == ("0", 1)
    assert only.gap == pytest.approx(9e-4)
    assert judged([[2, 1, 0]], [2, 2, 3], apart, torch.float32)[1] is False
    assert judged([[2, 2, 3]], [2, 2, 3], apart, torch.float32) == ([], True)


def test_a_third_token_hides_behind_no_tie() -> None:
    """The best two are close, but the run said neither of them."""
    found, same = judged([[2, 3]], [2, 2], [0.0, 5.0, 5.0001, 1.0], torch.float32)
    assert same is False
    assert found[0].gap == pytest.approx(4.0001)


def test_an_answer_that_ends_early_is_no_tie() -> None:
    found, same = judged([[2]], [2, 2], [0.0, 5.0, 5.0, 1.0], torch.float32)
    assert same is False
    assert found[0].gap is None


def test_float64_has_no_ties_and_16_bits_are_not_judged() -> None:
    tie, apart = [0.0, 5.0, 5.0 + 1e-9, 1.0], [0.0, 5.0, 5.1, 1.0]
    assert judged([[2, 1]], [2, 2], tie, torch.float64)[1] is False
    assert judged([[2, 1]], [2, 2], apart, torch.bfloat16)[1] is None
    assert judged([[2, 2]], [2, 2], apart, torch.bfloat16)[1] is True
    elsewhere = Scripted("transformers", accept=None)
    assert near_tie(Scripted("run"), elsewhere, torch.float64) == 1e-3


def test_differences_are_told_once_and_the_widest_first() -> None:
    """The same difference in each repeat is one; another in a later repeat is another."""
    tallies = [
        tally_of(np.ones((3, 1)), answers=[[[2, 1], [2, 2]], [[2, 1], [2, 2]], [[2, 1], [2, 3]]]),
        tally_of(np.ones((3, 1)), answers=[[[2, 2], [2, 2]]] * 3),
    ]
    reference = Scripted("plain", scores={(2,): [0.0, 4.9999, 5.0, 1.0]})
    found = differences(requests_of(2), *tallies, reference)
    assert [(each.prompt, each.position) for each in found] == [("1", 1), ("0", 1)]
    assert [each.gap for each in found] == pytest.approx([4.0, 1e-4])


@pytest.mark.parametrize(
    ("temperature", "mine", "theirs", "expected"),
    [
        (0.0, "exact", "exact", True),
        (0.0, "exact", None, True),
        (0.0, "typical", "exact", False),
        (0.7, "exact", "exact", False),
        (0.7, "coupled", "coupled", True),
        (0.7, "coupled", None, False),
    ],
)
def test_who_must_agree(temperature: float, mine: str, theirs: str | None, expected: bool) -> None:
    runners = [Scripted(str(name), accept=None if name is None else Accept(name)) for name in (mine, theirs)]
    assert must_agree(runners[0], runners[1], temperature) is expected


# -- runners and passes ------------------------------------------------------------------------------------------------


def entered(
    target: Target, drafts: list[OpenedDraft], options: BenchOptions, decoding: DecodingOptions
) -> tuple[list[Runner], list[Request]]:
    requests = read_work(target, [Prompt(id=str(i), prompt=text) for i, text in enumerate(TEXTS)], decoding)
    runners = enter(target, label_drafts(drafts), requests, options, decoding, lambda sentence: None)
    return runners, requests


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_explain_every_token(target: Target, near: Path, temperature: float) -> None:
    """What is compared at a difference is what the run really chooses by: plain and speculative, greedy and coupled."""
    decoding = DecodingOptions(
        max_tokens=12, temperature=temperature, top_p=0.9 if temperature else 1.0, accept=Accept("coupled"), k=2
    )
    runners, requests = entered(target, [open_draft(str(near), target)], BenchOptions(), decoding)
    answers = [runner.answer(requests) for runner in runners]
    assert len({tuple(answer.token_ids) for answer in answers[0]}) == 3
    for runner, given in zip(runners, answers, strict=True):
        for request, answer in zip(requests, given, strict=True):
            for i, token in enumerate(answer.token_ids):
                assert int(runner.scores_after(request, answer.token_ids[:i]).argmax()) == token


def test_transformers_scores_are_ours(target: Target) -> None:
    options = BenchOptions(baselines=("transformers",))
    runners, requests = entered(target, [], options, DecodingOptions(max_tokens=4))
    ours, theirs = (runner.scores_after(requests[0], [5, 6]) for runner in runners)
    torch.testing.assert_close(ours, theirs)


def test_every_run_of_a_draft_shares_its_engine(target: Target, near: Path) -> None:
    options = BenchOptions(sweep_k=(0, 1, 4))
    runners, requests = entered(target, [open_draft(str(near), target)], options, DecodingOptions(max_tokens=20))
    plain, *swept = runners
    assert all(isinstance(runner, EngineRunner) for runner in runners)
    assert len({id(runner.engine) for runner in swept if isinstance(runner, EngineRunner)}) == 1
    texts = {tuple(tuple(a.token_ids) for a in runner.answer(requests)) for runner in (*swept, plain, *swept[::-1])}
    assert len(texts) == 1
    for runner in swept:
        assert isinstance(runner, EngineRunner)
        assert set(runner.stats.steps_by_k) <= set(range((runner.k or 0) + 1))
        assert max(runner.stats.steps_by_k) == runner.k


def test_times_of_tokens_are_of_the_request(target: Target, near: Path) -> None:
    runners, requests = entered(target, [open_draft(str(near), target)], BenchOptions(), DecodingOptions(batch=3))
    for runner in runners:
        for answer in runner.answer(requests):
            assert 0 < answer.first <= answer.last
            assert (answer.first == answer.last) == (len(answer.token_ids) == 1)


def test_bare_passes_leave_the_engine_as_it_was(target: Target, near: Path) -> None:
    draft = open_draft(str(near), target)
    runners, requests = entered(target, [draft], BenchOptions(), DecodingOptions(max_tokens=16))
    before = [answer.token_ids for answer in runners[1].answer(requests)]
    attn = draft.drafter.attn
    times = measure_passes(target, {"near": draft, "ngram": open_draft("ngram", target)}, [1, 3], batch=2, context=40)
    assert draft.drafter.attn is attn
    assert [answer.token_ids for answer in runners[1].answer(requests)] == before
    assert times.verify.keys() == {1, 3}
    costs = times.costs("near", 3)
    assert costs.c == pytest.approx(times.draft["near"] / times.plain)
    assert costs.v == pytest.approx(times.verify[3] / times.plain)
    assert costs.u == pytest.approx(times.catch_up["near", 3] / times.plain)
    assert min(costs.c, costs.v, costs.u) > 0
    assert (times.costs("ngram", 1).c, times.costs("ngram", 1).u) == (0, 0)


def test_a_bare_pass_is_the_model(target: Target) -> None:
    """Also for the second sequence of a batch, whose pages come after the first one's."""
    bare = BareModel.of_target(target, 40, batch=2)
    ids = target.encode(Prompt(id="1", prompt=TEXTS[0]))
    spans = [passes.Span(ids, 0, passes._pages(b, 40), b) for b in range(2)]
    batch = passes.Batch.pack(spans)
    both_BV = bare.run(batch, batch.last_row_B)
    alone_V = BareModel.of_target(target, len(ids)).logits_after(ids)
    torch.testing.assert_close(both_BV, torch.stack([alone_V, alone_V]))


def test_implied() -> None:
    costs = Costs(c=0.1, v=1.2, u=0.15)
    assert costs.implied(1, 1.8) == pytest.approx(1.8 / 1.35)
    assert costs.implied(4, 3.3) == pytest.approx(3.3 / (1.2 + 0.3 + 0.15))


# -- from a report -----------------------------------------------------------------------------------------------------


@pytest.fixture
def report(target: Target, near: Path) -> Report:
    drafts = [open_draft(str(near), target), open_draft("ngram", target)]
    wanted = [Prompt(id=str(i), prompt=text) for i, text in enumerate(TEXTS)]
    options = BenchOptions(repeats=2, sweep_k=(1, 3))
    return run_bench(target, drafts, wanted, options, DecodingOptions(max_tokens=16, ignore_eos=True))


def test_a_step_costs_what_the_run_took(report: Report) -> None:
    """Tokens over cost is the speed-up, and where every step drafts the rest is what efficiency lacks."""
    costs = step_costs(report)
    assert [cost.run for cost in costs] == [c.run for c in report.comparisons]
    for cost, comparison in zip(costs, report.comparisons, strict=True):
        assert cost.tokens / (cost.passes + cost.rest) == pytest.approx(comparison.speedup)
        assert cost.in_passes * (cost.passes + cost.rest) == pytest.approx(cost.passes)
        if comparison.c:
            assert cost.drafting == 1
            assert cost.in_passes == pytest.approx(comparison.efficiency, rel=0.1)
        else:
            assert cost.drafting < 1
            assert cost.draft == cost.catch_up == 0


def test_what_has_no_data_is_not_drawn(report: Report, tmp_path: Path) -> None:
    assert [path.name for path in draw(report, tmp_path)] == ["speedup.png", "acceptance.png", "step.png"]
    plain = report.model_copy(update={"runs": report.runs[:1], "comparisons": []})
    assert draw(plain, tmp_path) == []
    assert "| plain |" in markdown(plain)


def test_markdown_lists_first_differences(report: Report) -> None:
    value = report.model_dump(by_alias=True)
    value["comparisons"][0]["near_ties"] = [{"prompt": "gsm|7", "position": 12, "gap": 2.5e-4}]
    page = markdown(Report.model_validate(value))
    assert "the same but for 1 near-tie" in page
    assert "| gsm\\|7 | 12 | 2.5e-04 |" in page


def test_one_repeat_of_one_group_has_no_interval(target: Target) -> None:
    found = run_bench(
        target,
        [open_draft("ngram", target)],
        [Prompt(id="1", prompt=TEXTS[0])],
        BenchOptions(repeats=1),
        DecodingOptions(max_tokens=2, k=1),
    )
    (comparison,) = found.comparisons
    assert comparison.ci95 is None
    assert math.isfinite(comparison.speedup)


def test_a_run_that_drafted_nothing_says_so(make: Make, run: Run, tmp_path: Path) -> None:
    target = make(tiny.table, rows=tiny.chain("xABCDEFGH"))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    output = tmp_path / "r.json"
    arguments = ["--draft", target, "--prompts", prompts, "--max-tokens", 1, "--repeats", 1, "--output", output]
    ran = run("bench", "--target", target, *arguments)
    assert ran.code == 0
    assert "nothing was drafted, so its speed-up is chance" in ran.out
    assert "nothing was drafted, so its speed-up is chance" in output.with_suffix(".md").read_text()
