"""specctl profile --merge: measured cells in place of others, each with its class, and what tune makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from conftest import Run
from fixtures import Make
from handmade import PROVENANCE, cell, profile, trace, write_json, write_yaml
from tuning import by_k, places, told

from specctl.errors import UsageError
from specctl.options import Offer
from specctl.profile.base import open_base
from specctl.profile.merge import gaps, merge
from specctl.profile.whole import whole
from specctl.roofline.reading import as_read
from specctl.schemas.profile import Profile, read_profile
from specctl.tune.costs import StepCosts

PARTS = profile(
    {1: [10.0, 11.0, 12.0, 13.0], 4: [12.0, 14.0, 16.0, 18.0]},
    {1: 2.0, 4: 3.0},
    draft_follow=[cell(b, q, 0.5 * q + b) for b in (1, 4) for q in (1, 2)],
    overheads_ms={"base": 0.5, "spec": 1.5, "per_draft_step": 0.25},
    drafter={"kind": "eagle3", "digest": None, "max_k": None},
    prefill=[{"tokens": 100, "target_ms": 30.0, "draft_ms": 2.0}],
)


def made(value: dict[str, Any]) -> Profile:
    return Profile.model_validate(value)


def measured(cells: dict[tuple[int, int], float], spread: float = 0.1, context: int = 1024, **changes: Any) -> Profile:
    """What a running engine shows: whole steps by batch and K."""
    value = profile({1: [1.0]}, **{"whole_steps": True} | changes)
    value["steps"] = [cell(batch, k + 1, ms, context, spread) for (batch, k), ms in cells.items()]
    value["sources"] = value.get("sources") or [{"numbers": "steps: measured", "what": "streams", "url": "http://x"}]
    return made(value)


def computed(shared: float = 0.1, spread: float = 0.125, **changes: Any) -> dict[str, Any]:
    rows = [[batch, 1024, 10.0 * batch, 11.0 * batch, 12.0 * batch] for batch in (1, 2, 4)]
    table = {"source": "interpolated", "spread": spread, "q": [1, 2, 3], "rows": rows}
    return profile({1: [1.0]}, **changes) | {"steps": table, "shared_spread": shared}


def by_place(found: Profile) -> dict[tuple[int, int], Any]:
    return {(each.batch, each.q - 1): each for each in found.steps}


# -- cells -------------------------------------------------------------------------------------------------------------


def test_cells_are_replaced_and_each_keeps_its_class() -> None:
    base = made(computed(shared=0.0))
    found, _ = merge(base, "B.yaml", measured({(1, 0): 12.0, (1, 2): 15.0, (4, 0): 44.0}))
    cells, before = by_place(found), by_place(base)
    assert {key: each.source for key, each in cells.items() if each.source == "measured"} == dict.fromkeys(
        [(1, 0), (1, 2), (4, 0)], "measured"
    )
    assert (cells[1, 0].ms, cells[1, 0].spread, cells[1, 2].ms, cells[4, 0].ms) == (12.0, 0.1, 15.0, 44.0)
    untouched = [key for key, each in cells.items() if each.source == "interpolated"]
    assert len(untouched) == 6
    assert all(cells[key] == before[key] for key in untouched)
    assert [source.numbers for source in found.sources] == ["all that no later source names", "steps: measured"]
    points = {each.point: (each.measured_ms, each.predicted_ms) for each in found.validated_against}
    assert points["step of batch 1, q 3, context 1024"] == (15.0, 12.0)
    assert len(points) == 3


def test_merging_again_replaces_again() -> None:
    once, _ = merge(made(computed(shared=0.0)), "B.yaml", measured({(1, 0): 12.0}))
    twice, _ = merge(once, "B.yaml", measured({(1, 0): 13.0, (1, 1): 14.0}))
    assert (by_place(twice)[1, 0].ms, by_place(twice)[1, 1].ms) == (13.0, 14.0)
    assert [each.measured_ms for each in twice.validated_against] == [12.0, 14.0]  # 12 was measured, too
    assert len(twice.sources) == 3


def test_a_profile_in_parts_is_merged_as_whole_steps() -> None:
    base = made(PARTS)
    found, _ = merge(base, "B.yaml", measured({(1, 0): 11.0, (1, 2): 25.0}))
    assert found.whole_steps
    cells = by_place(found)
    assert (cells[1, 0].ms, cells[1, 2].ms) == (11.0, 25.0)
    assert cells[4, 0].ms == 12.5
    assert cells[4, 2].ms == pytest.approx(16 + 1.5 + 2 * 0.25 + 3.0 + (0.5 * 2 + 4))
    assert [each.q for each in found.draft_follow] == [1, 1]  # what K = 0 costs a draft that has to follow
    assert [(each.target_ms, each.draft_ms) for each in found.prefill] == [(30.5, 2.0)]


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("drafts", [True, False])
def test_tune_takes_a_whole_step_for_what_its_parts_came_to(follow: bool, drafts: bool) -> None:
    value = PARTS | ({} if follow else {"draft_follow": []}) | ({} if drafts else {"draft": [], "draft_follow": []})
    parts, joined = (StepCosts(each, "P.yaml") for each in (made(value), whole(made(value), "P.yaml")))
    for batch in (1, 2, 4):
        one, other = (costs.at(batch, 1024, 3, 0) for costs in (parts, joined))
        assert other.plain_S.tolist() == pytest.approx(one.plain_S.tolist())
        assert other.without_S.tolist() == pytest.approx(one.without_S.tolist())
        for k in (1, 2, 3):
            assert other.drafting_S(k, k).tolist() == pytest.approx(one.drafting_S(k, k).tolist())


def test_whole_steps_without_a_draft_step_that_they_need() -> None:
    value = PARTS | {"draft": PARTS["draft"][:1], "draft_follow": []}
    with pytest.raises(UsageError, match=r"P\.yaml: has no draft step for batch 4, context 1024"):
        whole(made(value), "P.yaml")


def test_what_was_measured_in_parts_stays_in_parts() -> None:
    again = made(PARTS | {"steps": [cell(1, 1, 20.0)], "draft": [cell(1, 1, 5.0)], "overheads_ms": {
        "base": 1.0, "spec": 2.0, "per_draft_step": 0.0}})  # fmt: skip
    found, _ = merge(made(PARTS), "B.yaml", again)
    assert not found.whole_steps
    assert (by_place(found)[1, 0].ms, by_place(found)[1, 1].ms, found.draft[0].ms) == (20.0, 11.0, 5.0)
    assert (found.overheads_ms.base, found.overheads_ms.spec) == (1.0, 2.0)
    target_alone = made(profile({1: [20.0]}, overheads_ms={"base": 1.0, "spec": 9.0, "per_draft_step": 9.0}))
    found, _ = merge(made(PARTS), "B.yaml", target_alone)
    assert (found.overheads_ms.base, found.overheads_ms.spec) == (1.0, 1.5)  # the draft's are those of the draft


def test_the_error_that_computed_cells_share_is_taken_out() -> None:
    base = made(computed(shared=0.1, spread=0.125))
    found, notices = merge(base, "B.yaml", measured({(1, 0): 12.0, (1, 2): 14.4, (4, 0): 48.0}))
    cells = by_place(found)
    assert (cells[2, 0].ms, cells[2, 1].ms, cells[4, 2].ms) == pytest.approx((24.0, 26.4, 57.6))
    assert cells[2, 0].spread == pytest.approx(24 * (0.125**2 - 0.1**2) ** 0.5)
    assert cells[1, 0].ms == 12.0
    assert found.shared_spread == 0
    assert any("are multiplied by 1.200, which 3 measured ones show" in each for each in notices)
    uneven, _ = merge(base, "B.yaml", measured({(1, 0): 10.0, (4, 0): 60.0}))
    apart = by_place(uneven)[2, 0]
    assert apart.spread / apart.ms == pytest.approx(0.2867, abs=1e-3)  # log 1.5 over the root of 2


def test_a_place_that_a_computed_profile_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has no cells for batch 3, context 1024; it has --batches 1,2,4 and"):
        merge(made(computed()), "B.yaml", measured({(3, 0): 1.0}))
    own = measured({(1, 0): 10.0})
    found, notices = merge(own, "B.yaml", measured({(3, 0): 20.0}))
    assert sorted(by_place(found)) == [(1, 0), (3, 0)]
    assert any("batch 1 at 1024, batch 3 at 1024: has no step that drafts yet" in each for each in notices)


def test_what_keeps_tune_from_it_is_told() -> None:
    assert list(gaps(measured({(1, 0): 1.0, (1, 1): 2.0, (1, 4): 3.0}))) == []
    (said,) = gaps(measured({(1, 3): 1.0}))
    assert "has no plain step yet" in said
    (said,) = gaps(measured({(1, 0): 1.0, (1, 3): 2.0}))
    assert "K below 3 was not measured everywhere" in said
    assert list(gaps(made(PARTS))) == []


def test_prompts_keep_the_drafts_part() -> None:
    found, _ = merge(
        made(PARTS),
        "B.yaml",
        measured({(1, 0): 9.0}, prefill=[{"tokens": n, "target_ms": 40.0, "source": "measured"} for n in (100, 200)]),
    )
    assert [(each.tokens, each.target_ms, each.draft_ms, each.source) for each in found.prefill] == [
        (100, 40.0, 2.0, "measured"),
        (200, 40.0, None, "measured"),
    ]


# -- of what -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "found", "said"),
    [
        ({"hardware": "H100"}, {"hardware": "A100"}, "is of hardware 'H100', and what is measured is 'A100'"),
        ({"engine": "vllm"}, {"engine": "sglang"}, "is of the engine vllm, and what is measured is sglang"),
        ({"model": {"name": "llama-3.1-8b"}}, {"model": {"name": "org/Qwen3-8B"}}, "(name differs)"),
        ({"model": {"config_sha": "a"}}, {"model": {"config_sha": "b"}}, "(config_sha differs)"),
        ({"model": {"digest": "a"}}, {"model": {"digest": "b"}}, "(tensors_sha differs)"),
        ({"model": {"tp": 4}}, {"model": {"tp": 8}}, "is of tp 4, and what is measured has tp 8"),
        ({"model": {"dtype": "bf16"}}, {"model": {"dtype": "fp8"}}, "is of dtype bf16, and what is measured has dtype"),
        (
            {"drafter": {"kind": "mtp"}},
            {"drafter": {"kind": "ngram"}},
            "is of a draft of kind mtp, and what is measured",
        ),
    ],
)
def test_what_is_of_something_else_is_refused(base: dict[str, Any], found: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        merge(made(computed(**base)), "B.yaml", measured({(1, 0): 1.0}, **found))
    assert said in str(raised.value)
    assert str(raised.value).startswith("B.yaml: ")


@pytest.mark.parametrize(
    ("base", "found"),
    [
        ({"hardware": "NVIDIA H100 80GB HBM3 (SXM5)"}, {"hardware": "NVIDIA H100 80GB HBM3"}),
        ({"model": {"name": "llama-3.1-8b"}}, {"model": {"name": "meta-llama/Llama-3.1-8B-Instruct"}}),
        ({"model": {"name": "llama-3.x-70b"}}, {"model": {"name": "meta-llama/Llama-3.3-70B-Instruct"}}),
        ({"model": {"name": "a", "digest": "x"}}, {"model": {"name": "b", "digest": "x"}}),
        ({"model": {"dtype": "bf16"}}, {"model": {"dtype": "bfloat16"}}),
        ({"drafter": {"kind": "mtp"}}, {}),
    ],
)
def test_what_is_called_otherwise_is_the_same(base: dict[str, Any], found: dict[str, Any]) -> None:
    merge(made(computed(**base)), "B.yaml", measured({(1, 0): 1.0}, **found))


def test_the_user_may_say_that_models_are_the_same() -> None:
    base = made(computed(model={"name": "llama-3.1-8b"}))
    found = measured({(1, 0): 1.0}, model={"name": "bot", "digest": "x"})
    with pytest.raises(UsageError, match="say so with --same-model"):
        merge(base, "B.yaml", found)
    merged, _ = merge(base, "B.yaml", found, same_model=True)
    assert (merged.model.name, merged.model.digest) == ("llama-3.1-8b", "x")


# -- files and tune ----------------------------------------------------------------------------------------------------


def tuned(run: Run, tmp_path: Path, value: Profile, acceptance: object, *more: object) -> Any:
    file = write_yaml(tmp_path / "P.yaml", value.model_dump(mode="json", by_alias=True))
    return run("tune", "--profile", file, "--acceptance", acceptance, "--output", tmp_path / "Y.yaml", "--force", *more)


def test_tune_predicts_what_was_measured(run: Run, tmp_path: Path) -> None:
    """Where it was measured, whatever the profile had in parts before; and a trace of a draft with passes is taken."""
    found, _ = merge(made(PARTS), "B.yaml", measured({(1, 0): 11.0, (1, 2): 25.0}, spread=0.0))
    place = places(told(tuned(run, tmp_path, found, 0.9, "--json")))[1]
    assert (by_k(place)[0]["step_ms"], by_k(place)[2]["step_ms"]) == pytest.approx((11.0 + 1.5, 25.0))  # it follows
    drafter = {"kind": "llama", "digest": None, "max_k": None}
    whole_only = measured({(1, 0): 11.0, (1, 1): 12.0}, drafter=drafter)
    seen = write_json(tmp_path / "T.json", trace([[5, 5]], draft=drafter))
    ran = tuned(run, tmp_path, whole_only, seen)
    assert ran.code == 0, ran.err
    assert "drafting is taken to cost nothing" not in ran.err


def test_a_draft_shorter_than_any_that_was_measured_is_not_taken_for_cheap(run: Run, tmp_path: Path) -> None:
    """A step that drafts takes 8 ms more than a plain one, and 1 ms a token: K = 1 on the line from the plain step to
    K = 3 would be 4.33 ms cheaper than it is, and the best K."""
    found = measured({(1, 0): 10.0, (1, 3): 21.0, (1, 4): 22.0}, spread=0.0)
    ran = tuned(run, tmp_path, found, 0.55, "--json")
    value = told(ran)
    steps = {k: each["step_ms"] for k, each in by_k(places(value)[1]).items()}
    assert steps == pytest.approx({0: 10.0, 1: 21.0, 2: 21.0, 3: 21.0, 4: 22.0})
    assert places(value)[1]["k"] == 0
    assert any("K below 3 was not timed everywhere" in notice for notice in value["notices"])
    known = measured({(1, k): 10.0 if k == 0 else 18.0 + k for k in range(5)}, spread=0.0)
    value = told(tuned(run, tmp_path, known, 0.55, "--json"))
    assert not any("not timed everywhere" in notice for notice in value["notices"])


def test_what_drafting_costs_is_no_edge() -> None:
    """Blocks of two at batch 64 have 128 rows and cost 8 ms more than the plain step's 64; so they do at batch 32."""
    found = measured({(b, k): 10.0 if k == 0 else 18.0 + k for b in (32, 64) for k in (0, 1, 2, 3)}, spread=0.0)
    times = StepCosts(found, "P.yaml").at(40, 1024, 3, 0)
    assert times.target_SQ[0].tolist() == pytest.approx([10.0, 19.0, 20.0, 21.0])


def test_what_is_not_known_of_whole_steps_is_not_answered(run: Run, tmp_path: Path) -> None:
    value = measured({(1, 0): 11.0, (1, 1): 12.0})
    ran = tuned(run, tmp_path, value, 0.9, "--what-if", "draft=-20%")
    assert (ran.code, "--what-if draft=-20%: the profile's steps were timed as a whole" in ran.err) == (2, True)
    assert tuned(run, tmp_path, value, 0.9, "--what-if", "acceptance=+5%").code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"draft": [cell(1, 1, 1.0)]},
        {"draft_follow": [cell(1, 2, 1.0)]},
        {"overheads_ms": {"base": 1.0, "spec": 0.0, "per_draft_step": 0.0}},
    ],
)
def test_nothing_is_counted_beside_whole_steps(tmp_path: Path, change: dict[str, Any]) -> None:
    file = write_yaml(tmp_path / "P.yaml", profile({1: [1.0, 2.0]}, whole_steps=True) | change)
    with pytest.raises(UsageError, match="whole_steps is true, and the draft or the engine is counted once more"):
        read_profile(file)


def test_into_a_shipped_profile(run: Run, tmp_path: Path) -> None:
    """Two cells of an engine on an H100, into the interpolated ones of that engine and model."""
    base = open_base("h100-sxm-llama-3.1-8b-bf16-tp1-vllm-eagle3", Offer(engine="vllm"))
    found = measured(
        {(1, 0): 7.4, (1, 3): 9.9},
        context=4096,
        hardware=base.profile.hardware.name,
        engine={"name": "vllm", "version": "0.32.0"},
        model={"name": "meta-llama/Llama-3.1-8B-Instruct"},
    )
    merged, notices = merge(base.profile, base.where, found)
    assert any("are multiplied by" in each for each in notices)
    kinds = {each.source for each in merged.steps}
    assert kinds == {"interpolated", "measured"}
    assert len(merged.steps) == len(base.profile.steps)
    assert len([each for each in merged.steps if each.source == "measured"]) == 2
    assert merged.engine.version == "0.32.0"
    assert merged.engine.graphs == base.profile.engine.graphs
    times = StepCosts(as_read(merged), "P.yaml").at(1, 4096, 3, 0)
    assert times.plain_S.tolist() == pytest.approx([7.4], abs=0.21)  # within two of its own standard errors
    assert times.drafting_S(3, 3).tolist() == pytest.approx([9.9], abs=0.21)
    assert tuned(run, tmp_path, merged, 0.8).code == 0


def test_constants_and_a_config_are_a_base(make: Make) -> None:
    base = open_base("h100-sxm", Offer(model_config=str(make(tiny.llama, seed=1)), engine="vllm"))
    assert {each.source for each in base.profile.steps} == {"roofline"}
    with pytest.raises(UsageError, match="name whose steps to compute with --model-config"):
        open_base("h100-sxm", Offer(engine="vllm"))
    with pytest.raises(UsageError, match=r"--model-config: .* has steps of its own model"):
        open_base("h100-sxm-llama-3.1-8b-bf16-tp1-vllm-eagle3", Offer(model_config="x"))


def test_what_is_measured_here_goes_into_a_profile_too(run: Run, tmp_path: Path, make: Make) -> None:
    target = make(tiny.llama, seed=1)
    fixed = ("--batches", "1", "--contexts", "20", "--repeats", 3, "--threads", 1)
    assert run("profile", "--target", target, *fixed, "--output", tmp_path / "A.yaml").code == 0
    value = yaml.safe_load((tmp_path / "A.yaml").read_text())
    value["steps"] = [each | {"source": "roofline", "ms": 1000.0} for each in value["steps"]]
    base = write_yaml(tmp_path / "B.yaml", value | {"provenance": PROVENANCE})
    again = ("profile", "--target", target, *fixed, "--merge", base, "--output", tmp_path / "C.yaml", "--json")
    ran = run(*again)
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "C.yaml")
    assert json.loads(ran.out)["steps"][0]["source"] == "measured"
    assert [each.place for each in found.steps] == [(1, q, 20) for q in range(1, 10)]
    assert all(each.source == "measured" and each.ms < 1000 for each in found.steps)
    assert len(found.validated_against) == 9
    assert found.sources[0].what.endswith("by hand on by hand")
    other = write_yaml(tmp_path / "D.yaml", value | {"hardware": "another machine"})
    ran = run(*again[:-3], "--output", tmp_path / "E.yaml", "--merge", other)
    assert (ran.code, "is of hardware 'another machine'" in ran.err) == (2, True)
    assert not (tmp_path / "E.yaml").exists()
