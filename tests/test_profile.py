"""specctl profile: every cell of the grid is measured, none is made up, and the file says what it is of. How long a
pass took is never judged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from conftest import Run
from fixtures import Make
from handmade import cell, profile, write_yaml

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.drafts import Draft, OneHot
from specctl.drafts.ngram import NgramDrafter
from specctl.engine.scheduler import DraftLength
from specctl.errors import UsageError
from specctl.kv.batch import Batch, Span
from specctl.options import ModelOptions
from specctl.pair import open_draft, open_target
from specctl.profile import overheads
from specctl.profile.clockwork import time_all
from specctl.profile.grid import choose_grid
from specctl.profile.overheads import FullBlocks, _fit, _Leftover
from specctl.profile.passes import Passes, Place, places
from specctl.profile.timing import timing_of, timings_of
from specctl.sampling.batch import SamplingBatch, SequenceState
from specctl.sampling.params import Accept, SamplingParams
from specctl.schemas.profile import Profile, read_profile


@pytest.fixture
def model(make: Make) -> Path:
    return make(tiny.llama, seed=1)


@pytest.fixture
def near(make: Make, model: Path) -> Path:
    return make(tiny.near, of=model)


def run_profile(run: Run, tmp_path: Path, target: Path, *more: object) -> Any:
    defaults = ("--batches", "1,2", "--contexts", "20,60", "--repeats", 3, "--threads", 1)
    return run("profile", "--target", target, "--output", tmp_path / "P.yaml", *defaults, *more)


def places_of(cells: Any) -> set[tuple[int, int, int]]:
    return {each.place for each in cells}


def asked(num_sequences: int) -> SamplingBatch:
    return SamplingBatch([SequenceState(SamplingParams(), 0, [0], [], Accept())] * num_sequences)


# -- the command -------------------------------------------------------------------------------------------------------


def test_every_cell_of_the_grid_is_measured(run: Run, model: Path, near: Path, tmp_path: Path) -> None:
    ran = run_profile(run, tmp_path, model, "--draft", near)
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "P.yaml")
    grid = {(b, c) for b in (1, 2) for c in (20, 60)}
    assert places_of(found.steps) == {(b, q, c) for b, c in grid for q in range(1, 10)}
    assert places_of(found.draft) == {(b, 1, c) for b, c in grid}
    assert places_of(found.draft_follow) == {(b, 2, c) for b, c in grid}  # two rows after every block
    assert [each.tokens for each in found.prefill] == [32, 64, 128]  # those a context of 256 holds
    assert all(each.draft_ms is not None and each.draft_ms > 0 for each in found.prefill)
    cells = [*found.steps, *found.draft, *found.draft_follow]
    assert {each.source for each in cells} == {"measured"}
    assert all(each.ms > 0 for each in cells)
    assert any(each.spread > 0 for each in cells)
    assert found.overheads_ms.tree is None  # nothing of that kind was run


def test_a_profile_says_what_it_is_of(run: Run, model: Path, near: Path, tmp_path: Path) -> None:
    ran = run_profile(run, tmp_path, model, "--draft", near, "--json")
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "P.yaml")
    assert found.model.digest == tensors_sha(Checkpoint(model))
    assert found.drafter is not None
    assert (found.drafter.kind, found.drafter.digest) == ("llama", tensors_sha(Checkpoint(near)))
    assert (found.model.dtype, found.model.tp, found.engine.name) == ("float32", 1, "specctl")
    assert found.provenance is not None
    assert found.provenance.threads == found.hardware.threads == 1
    assert Profile.model_validate(json.loads(ran.out)).steps[0].place == found.steps[0].place


def test_the_file_has_a_cell_a_line(run: Run, model: Path, tmp_path: Path) -> None:
    assert run_profile(run, tmp_path, model, "--contexts", 20, "--batches", 1).code == 0
    lines = (tmp_path / "P.yaml").read_text().splitlines()
    assert sum(line.startswith("- {batch: 1, q: ") for line in lines) == 9


@pytest.mark.parametrize("draft", [(), ("--draft", "ngram")])
def test_without_passes_of_a_draft_none_are_made_up(run: Run, model: Path, tmp_path: Path, draft: Any) -> None:
    ran = run_profile(run, tmp_path, model, *draft, "--contexts", 20)
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "P.yaml")
    assert (found.draft, found.draft_follow) == ([], [])
    assert {each.draft_ms for each in found.prefill} == {None}
    assert (found.drafter is None) == (not draft)
    table = ran.out.splitlines()
    assert table[0].split()[:4] == ["batch", "context", "plain", "ms"]
    assert [line.split()[:2] for line in table[1:3]] == [["1", "20"], ["2", "20"]]


def test_contexts_that_nobody_named_fit_the_model(run: Run, model: Path, tmp_path: Path) -> None:
    """512 and 2048 do not fit into 256."""
    target = open_target(str(model), ModelOptions())
    assert choose_grid(target, None, (1,), None).contexts == ((256 - 9) // 2,)
    assert choose_grid(target, None, (4, 1), (30,)).batches == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--contexts", "248"), "the longest that fits into the context is 247"),
        (("--contexts", "20,20"), "--contexts 20,20: names one twice"),
        (("--batches", "2,2"), "--batches 2,2: names one twice"),
        (("--batches", "0"), "no list of integers from 1"),
        (("--output", "P.json"), "ends in .yaml"),
        (("--repeats", "2"), "--repeats"),
        (("--max-model-len", "9"), "too short to be profiled"),
    ],
)
def test_what_cannot_be_profiled_is_named(
    run: Run, model: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    ran = run_profile(run, tmp_path, model, *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert not (tmp_path / "P.yaml").exists()


def test_too_little_memory_is_told_before_anything_runs(run: Run, model: Path, tmp_path: Path) -> None:
    ran = run_profile(run, tmp_path, model, "--kv-memory", 1e-5)
    assert ran.code == 3
    assert "--batches 2 with --contexts 60 needs a KV cache" in ran.err


def test_a_profile_is_not_replaced(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "P.yaml").write_text("mine")
    ran = run_profile(run, tmp_path, model)
    assert ran.code == 2
    assert "--force" in ran.err
    assert (tmp_path / "P.yaml").read_text() == "mine"


# -- what is timed -----------------------------------------------------------------------------------------------------


def test_a_pass_has_the_rows_of_its_place(model: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target(str(model), ModelOptions(threads=1))
    draft = open_draft(str(near), target)
    before = draft.drafter.attn
    with Passes.over(target, draft, 80, 3) as passes, torch.inference_mode():
        for kind, q, starts in (("steps", 5, 39), ("draft", 1, 39), ("draft_follow", 2, 39), ("prefill_draft", 7, 0)):
            seen: list[Batch] = []
            model_of = draft.drafter.model if kind.startswith(("draft", "prefill")) else target.model  # type: ignore[attr-defined]
            hook = model_of.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
            passes.at(Place(kind, 1 if "prefill" in kind else 3, q, 1 if "prefill" in kind else 40))()  # type: ignore[arg-type]
            hook.remove()
            (batch,) = seen
            assert {(len(span.tokens), span.start) for span in batch.spans} == {(q, starts)}
            assert batch.num_sequences == (1 if "prefill" in kind else 3)
    assert draft.drafter.attn is before


def test_rounds_take_turns_and_each_begins_further_on() -> None:
    ran: list[str] = []
    runs = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    found = time_all(runs, 3, torch.device("cpu"), lambda sentence: None)
    assert "".join(ran) == "abc" + "abc" + "bca" + "cab"
    assert set(found) == {"a", "b", "c"}


def test_the_spread_is_the_error_of_the_median() -> None:
    values = np.random.default_rng(0).normal(10, 1, 401).tolist()
    found = timing_of(values)
    assert found.ms == pytest.approx(10, abs=0.2)
    medians = [np.median(np.random.default_rng(seed).normal(10, 1, 401)) for seed in range(1, 400)]
    assert found.spread == pytest.approx(float(np.std(medians)), rel=0.15)
    assert timing_of([3.0, 3.0, 3.0]).spread == 0


def test_a_busy_machine_slows_neighbours_alike_and_is_divided_out() -> None:
    """Every second stretch of the log takes twice as long; each pass besides has noise of its own."""
    random, true = np.random.default_rng(0), {key: 10.0 + key for key in range(20)}
    order = [key for _ in range(15) for key in true]
    quiet = [true[key] * random.normal(1, 0.01) for key in order]
    log = [(key, ms * (2 if index // 60 % 2 else 1)) for index, (key, ms) in enumerate(zip(order, quiet, strict=True))]
    found = timings_of(log)
    level = found[0].ms / true[0]
    for key, ms in true.items():
        assert found[key].ms / ms == pytest.approx(level, rel=0.02)
        assert found[key].spread / found[key].ms < 0.02
        assert timing_of([each for other, each in log if other == key]).spread / found[key].ms > 0.1


def test_one_thing_alone_keeps_its_own_noise() -> None:
    log = [("a", ms) for ms in np.random.default_rng(0).normal(10, 1, 50).tolist()]
    assert timings_of(log)["a"] == timing_of([ms for _, ms in log])


def test_a_full_block_is_made_up_where_nothing_is_proposed() -> None:
    drafter = FullBlocks(NgramDrafter())
    assert drafter.kind == "ngram"
    batch = Batch.pack([Span((0,), 4, [1], 0), Span((0,), 4, [2], 1)])
    carry = drafter.new_carry(2)
    for lane in (0, 1):
        drafter.catch_up(Batch.pack([Span((5, 6, 7, 8), 0, [1 + lane], lane)]), None, carry)
    draft = drafter.draft(batch, carry, [3, 3], asked(2))
    assert draft.length == [3, 3]
    assert draft.token_BK.shape == (2, 3)
    assert isinstance(draft.q, OneHot)
    drafter.attn = None  # what the engine sets on it, it sets on the drafter inside
    assert drafter.inner.attn is None


def test_what_is_left_of_a_step_is_divided() -> None:
    """Planted: 2 ms for a step, 0.5 more for each time the draft runs."""
    exact = [_Leftover(k, 2 + 0.5 * k) for k in (1, 5, 1, 5)]
    assert _fit(exact) == pytest.approx((2, 0.5))
    assert _fit([_Leftover(1, 3.0), _Leftover(5, 1.0)]) == pytest.approx((2.0, 0.0))  # it cannot fall
    assert _fit([_Leftover(1, -3.0), _Leftover(5, 5.0)])[0] == 0
    assert _fit([_Leftover(1, -3.0), _Leftover(5, -3.0)]) == (0, 0)
    assert _fit([_Leftover(1, 2.0)]) == (2.0, 0.0)


def test_the_engines_part_is_what_its_passes_do_not_take(
    model: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that counts: planted times of engine steps and passes, and the difference comes out."""
    target = open_target(str(model), ModelOptions(threads=1))
    draft = open_draft(str(near), target)
    steps: list[int] = []

    def engine_step(engine: Any, dial: Any, k: int, device: Any) -> float:
        dial.policy = lambda batch, context: DraftLength(k)
        engine.step()
        steps.append(k)
        return 100.0 + (2 + 0.5 * k if k else 1.0)

    monkeypatch.setattr(overheads, "_step", engine_step)
    monkeypatch.setattr(overheads._Inside, "time", lambda self, k, context: 100.0)
    grid = choose_grid(target, draft, (1, 3), (20,))
    found = overheads.measure_overheads(target, draft, grid, 3, lambda sentence: None)
    assert (found.base, found.spec, found.per_draft_step) == pytest.approx((1.0, 2.0, 0.5))
    assert len(steps) == 2 * 3 * 4  # batches 1 and 3, lengths 0, 1, 5, three rounds and one to warm up


@pytest.mark.parametrize("kind", ["llama", "ngram"])
def test_passes_are_timed_inside_the_steps_each_once(
    model: Path, near: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that a pass of any kind moves on by 1, and nothing else."""
    target = open_target(str(model), ModelOptions(threads=1))
    draft = open_draft("ngram" if kind == "ngram" else str(near), target)
    engine, dial = overheads._engine(target, draft, 2, 60)
    clock = [0.0]
    monkeypatch.setattr(overheads.time, "perf_counter", lambda: clock[0])

    def moves(run: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any, **more: Any) -> Any:
            clock[0] += 1
            return run(*args, **more)

        return moved

    passes = [target.model] if kind == "ngram" else [target.model, draft.drafter.model]  # type: ignore[attr-defined]
    for each in passes:
        monkeypatch.setattr(each, "forward", moves(each.forward))
    inside = overheads._Inside(engine, draft)
    lag = 0
    for k in (1, 4, 0, 2):
        overheads._step(engine, dial, k, target.device)
        draft_passes = k + lag if kind == "llama" else 0  # k - 1 steps, the catching up, and that of what K = 0 left
        assert inside.time(k, 20) == 1000 * (1 + draft_passes)
        lag = int(k == 0)
    inside.close()
    overheads._step(engine, dial, 1, target.device)
    assert inside.time(1, 20) == 0


def test_on_a_device_engine_steps_are_timed_beside_the_passes_they_are_made_of(
    model: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_target(str(model), ModelOptions(threads=1))
    draft = open_draft(str(near), target)
    asked: list[Place] = []
    real = Passes.at
    monkeypatch.setattr(Passes, "at", lambda self, place: (asked.append(place), real(self, place))[1])
    monkeypatch.setattr(overheads, "_times_inside", lambda target: False)
    list(overheads._leftovers(target, draft, 2, (0, 5), 3))
    kinds = [[place.kind for place in asked if place.context == context] for context in {p.context for p in asked}]
    full = ["steps", "draft", "draft_follow"]
    assert all(set(each) <= set(full) for each in kinds)
    assert {place.q for place in asked if place.kind == "steps"} == {1, 6}
    assert {place.batch for place in asked} == {2}


# -- the file ----------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["steps"][1].update(ms=-1.0), "steps.1.ms is -1.0"),
        (lambda p: p["steps"][1].update(ms=0), "steps.1.ms is 0"),
        (lambda p: p["steps"][0].update(ms=float("nan")), "steps.0.ms is nan"),
        (lambda p: p["steps"][0].update(ms="1,5"), "steps.0.ms is '1,5'"),
        (lambda p: p["steps"].append(cell(8, 1, 12.5)), "steps lists batch 8, q 1, context 1024 twice: 9 and 12.5 ms"),
        (lambda p: p["draft"].append(cell(8, 1, 2.0)), "draft lists batch 8, q 1, context 1024 twice"),
        (
            lambda p: p.update(prefill=[{"tokens": 5, "target_ms": t} for t in (1.0, 2.0)]),
            "prefill lists tokens 5 twice",
        ),
        (lambda p: p["steps"][0].update(batches=1), "steps.0.batches is unknown; did you mean batch?"),
        (lambda p: p["overheads_ms"].update(specs=1), "overheads_ms.specs is unknown; did you mean spec?"),
        (lambda p: p["overheads_ms"].pop("base"), "key overheads_ms.base is missing"),
        (lambda p: p["steps"][0].pop("source"), "key steps.0.source is missing"),
        (lambda p: p["steps"][0].update(source="guessed"), "steps.0.source is 'guessed'"),
        (lambda p: p["steps"][0].pop("q"), "key steps.0.q is missing"),
        (lambda p: p.update(steps=[]), "steps is []"),
        (lambda p: p.update(schema="specctl.profile/2"), "expected 'specctl.profile/1'"),
        (lambda p: p["steps"][0].update(batch=0), "steps.0.batch is 0"),
        (lambda p: p["steps"][0].update(batch=True), "steps.0.batch is True"),
    ],
)
def test_what_no_profile_can_say_is_named(tmp_path: Path, change: Change, said: str) -> None:
    value = copy.deepcopy(profile({1: [10, 11], 8: [9, 12]}, {1: 1.0, 8: 2.0}))
    change(value)
    with pytest.raises(UsageError, match=r"P\.yaml: ") as error:
        read_profile(write_yaml(tmp_path / "P.yaml", value))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_by_hand(tmp_path: Path) -> None:
    """Hardware and engine may be mere names; a draft cell needs no q."""
    value = profile({1: [10, 11]}, hardware="H100", engine="vllm", provenance=None)
    value["draft"] = [{"batch": 1, "context": 5, "ms": 1.0, "source": "roofline"}]
    found = read_profile(write_yaml(tmp_path / "P.yaml", value))
    assert (found.hardware.name, found.engine.name) == ("H100", "vllm")
    assert (found.draft[0].q, found.draft[0].spread) == (1, 0)


def test_the_file_is_what_the_schema_says(run: Run, model: Path, tmp_path: Path) -> None:
    """Written values survive reading, to the digits that are written."""
    assert run_profile(run, tmp_path, model, "--contexts", 20, "--batches", 1).code == 0
    found = read_profile(tmp_path / "P.yaml")
    assert found.model_dump(mode="json", by_alias=True) == yaml.safe_load((tmp_path / "P.yaml").read_text())


def test_a_draft_that_reads_too_little_is_not_asked_for_more(model: Path, near: Path) -> None:
    """With a longest length of its own, no longer verification is timed; nor contexts that it cannot hold."""
    target = open_target(str(model), ModelOptions())
    draft = open_draft(str(near), target)
    draft.drafter.max_k, draft.drafter.max_length = 2, 100
    grid = choose_grid(target, draft, (1,), None)
    assert grid.rows == (1, 2, 3)
    assert max(grid.contexts) + 3 <= 100
    with Passes.over(target, draft, grid.num_tokens, 1) as passes:
        assert {place.q for place in places(grid, passes) if place.kind == "steps"} == {1, 2, 3}


def test_blocks_that_are_full_are_left_as_they_are() -> None:
    class Sure(NgramDrafter):
        def draft(self, batch: Batch, carry: Any, k: list[int], sampling: SamplingBatch) -> Draft:
            return Draft(torch.full((1, 2), 7), [2], OneHot())

    draft = FullBlocks(Sure()).draft(Batch.pack([Span((0,), 4, [1], 0)]), None, [2], asked(1))
    assert draft.token_BK.tolist() == [[7, 7]]
