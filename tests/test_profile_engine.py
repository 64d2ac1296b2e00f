"""specctl profile --engine: a running engine measured from outside. Our own server is a real one; what other engines
say is by hand, and how long anything took is never judged: steps are told from planted moments."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Run
from engine_standin import Standin, running, sglang, vllm
from fixtures import Make
from serving import Launcher, Server

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.profile.served.engine import Served, Speculation
from specctl.profile.served.meter import Meter, Sizes, Spot
from specctl.profile.served.metrics import Metrics
from specctl.profile.served.run import _reading
from specctl.profile.served.steps import Round, read_round, window
from specctl.profile.served.streams import Stream, prompt
from specctl.profile.served.wire import Wire, reason
from specctl.roofline.reading import as_read
from specctl.schemas.policy import read_policy
from specctl.schemas.profile import Profile, read_profile

SMALL = ("--batches", "1", "--contexts", "60", "--repeats", 3, "--steps", 8)


def run_engine(run: Run, tmp_path: Path, url: str, *more: object, engine: str = "vllm", name: str = "P.yaml") -> Any:
    return run("profile", "--engine", engine, "--url", url, "--output", tmp_path / name, *SMALL, *more)


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


# -- our own server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(make: Make) -> Path:
    return make(tiny.llama, seed=1)


@pytest.fixture(scope="module")
def plain(launcher: Launcher, model: Path) -> Iterator[Server]:
    with launcher.serve(model) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(launcher: Launcher, make: Make, model: Path) -> Iterator[Server]:
    with launcher.serve(model, "--draft", make(tiny.near, of=model), "--k", 2) as server:
        yield server


def test_an_engine_without_a_draft_gives_plain_steps(run: Run, tmp_path: Path, plain: Server, model: Path) -> None:
    ran = run_engine(run, tmp_path, address(plain), "--batches", "1,3", "--hardware", "an abacus")
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "P.yaml")
    assert [cell.place for cell in found.steps] == [(1, 1, 60), (3, 1, 60)]
    assert {cell.source for cell in found.steps} == {"measured"}
    assert all(cell.ms > 0 for cell in found.steps)
    assert found.whole_steps
    assert (found.draft, found.draft_follow) == ([], [])
    assert [cell.tokens for cell in found.prefill] == [32, 60, 128]
    assert {(cell.source, cell.draft_ms) for cell in found.prefill} == {("measured", None)}
    assert (found.engine.name, found.hardware.name) == ("specctl", "an abacus")
    assert found.model.digest == tensors_sha(Checkpoint(model))
    assert found.provenance is not None
    assert found.provenance.device == "an abacus"
    (source,) = found.sources
    assert source.numbers == "steps: q 1 at batch 1, 3, context 60"
    assert source.url == address(plain)
    assert "speaks the API of vllm and is specctl" in ran.err
    assert "has no step that drafts yet" in ran.err
    assert ran.out.splitlines()[0].split() == ["batch", "context", "K=0"]


def test_two_runs_make_a_profile_that_tune_reads(
    run: Run, tmp_path: Path, plain: Server, drafting: Server, model: Path
) -> None:
    first = run_engine(run, tmp_path, address(plain), "--batches", "1,2")
    assert first.code == 0, first.err
    assert "does not tell its hardware" in first.err
    merged = run_engine(
        run, tmp_path, f"{address(drafting)}/v1/", "--batches", "1,2", "--merge", tmp_path / "P.yaml", name="Q.yaml"
    )
    assert merged.code == 0, merged.err
    found, before = read_profile(tmp_path / "Q.yaml"), read_profile(tmp_path / "P.yaml")
    assert [cell.place for cell in found.steps] == [(1, 1, 60), (1, 3, 60), (2, 1, 60), (2, 3, 60)]
    assert [cell.ms for cell in found.steps if cell.q == 1] == [cell.ms for cell in before.steps]
    assert [source.numbers for source in found.sources] == [
        "steps: q 1 at batch 1, 2, context 60",
        "steps: q 3 at batch 1, 2, context 60",
    ]
    assert "tokens a step on average" in found.sources[1].what
    assert [cell.target_ms for cell in found.prefill] == [cell.target_ms for cell in before.prefill]
    assert all(cell.draft_ms is not None for cell in found.prefill)  # what the same prompts take longer with a draft
    assert "K below 2 was not measured everywhere" in merged.err
    arguments = ("--acceptance", 0.9, "--output", tmp_path / "Y.yaml", "--json")
    tuned = run("tune", "--profile", tmp_path / "Q.yaml", *arguments)
    assert tuned.code == 0, tuned.err
    place = json.loads(tuned.out)["places"][0]
    steps = {candidate["k"]: candidate["step_ms"] for candidate in place["candidates"]}
    by_q = {cell.q: cell.ms for cell in as_read(found).steps if cell.batch == 1}  # noise may have made it fall
    assert (steps[0], steps[2]) == pytest.approx((by_q[1], by_q[3]), rel=1e-3)
    assert read_policy(tmp_path / "Y.yaml").target.digest == tensors_sha(Checkpoint(model))
    assert "drafting is taken to cost nothing" not in tuned.err


def test_an_engine_that_speculates_and_drafts_nothing_has_no_cells(
    run: Run, tmp_path: Path, launcher: Launcher, make: Make, model: Path
) -> None:
    with launcher.serve(model, "--draft", make(tiny.near, of=model), "--k", 0) as server:
        ran = run_engine(run, tmp_path, address(server))
    assert ran.code == 2
    assert "batch 1, context 60: nothing was drafted, though the engine speculates" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_looks_things_up(run: Run, tmp_path: Path, launcher: Launcher, make: Make) -> None:
    """Its text goes round in circles of four tokens, and before that there is nothing to find."""
    model = make(tiny.table, rows={i: {40 + (i + 1) % 4: 1.0} for i in range(256)})
    with launcher.serve(model, "--draft", "ngram", "--k", 3) as server:
        ran = run_engine(run, tmp_path, address(server), "--batches", "1,2")
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "P.yaml")
    assert [cell.place for cell in found.steps] == [(1, 4, 60), (2, 4, 60)]
    assert found.drafter is not None
    assert found.drafter.kind == "ngram"


def test_a_batch_that_the_engine_does_not_run_is_named(
    run: Run, tmp_path: Path, launcher: Launcher, model: Path
) -> None:
    with launcher.serve(model, "--batch", 1) as server:
        ran = run_engine(run, tmp_path, address(server), "--batches", "2", "--contexts", 20)
    assert ran.code == 2
    assert "never decoded 2 requests of context 20 at a time for 8 steps; it runs fewer sequences" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_sent(run: Run, tmp_path: Path, launcher: Launcher, model: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the engine\nsesame\n")
    (tmp_path / "wrong").write_text("mustard\n")
    with launcher.serve(model, "--api-key-file", keys) as server:
        for more, said in (((), "it wants a key; --api-key-file"), (("--api-key-file", tmp_path / "wrong"), "not one")):
            ran = run_engine(run, tmp_path, address(server), *more)
            assert (ran.code, said in ran.err) == (2, True), ran.err
        ran = run_engine(run, tmp_path, address(server), "--api-key-file", keys)
    assert ran.code == 0, ran.err
    assert "sesame" not in (tmp_path / "P.yaml").read_text()


def test_every_event_counts_its_tokens_if_asked(drafting: Server) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0, "ignore_eos": True, "model": drafting.model}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = drafting.events("/v1/completions", {**body, "n": 1, "stream_options": options})
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == sorted(set(totals))  # an event for every step, also where it makes no text final
    assert totals[-1] == last["usage"]["completion_tokens"] == 9
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}
    *events, _ = drafting.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert {event["usage"] for event in events} == {None}


# -- what engines say --------------------------------------------------------------------------------------------------


def test_a_vllm_that_speculates(run: Run, tmp_path: Path) -> None:
    with running(vllm(k=3, accepted=1)) as engine:
        ran = run_engine(run, tmp_path, engine.url, "--acceptance-length", 2, "--tp", 2, "--json")
    assert ran.code == 0, ran.err
    found = Profile.model_validate(json.loads(ran.out))
    assert [cell.place for cell in found.steps] == [(1, 4, 60)]
    assert (found.engine.name, found.engine.version, found.model.name) == ("vllm", "0.32.0", "acme/model")
    assert (found.model.tp, found.model.kv_dtype, found.prefill) == (2, None, [])
    assert "2.00 tokens a step on average, as the engine was told to" in found.sources[0].what
    assert "has no plain step yet, so tune cannot use it" in ran.err
    sent = engine.bodies[-1]
    assert (sent["ignore_eos"], sent["temperature"], sent["model"]) == (True, 0, "acme/model")
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert len({tuple(each["prompt"][:8]) for each in engine.bodies}) == len(engine.bodies)  # no prefix in common


def test_an_sglang_tells_its_draft_length(run: Run, tmp_path: Path) -> None:
    info = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 5, "speculative_eagle_topk": 1}
    with running(sglang(info, block=2, ends="\r\n\r\n")) as engine:
        ran = run_engine(run, tmp_path, engine.url, engine="sglang")
    assert ran.code == 0, ran.err
    found = read_profile(tmp_path / "P.yaml")
    assert [cell.place for cell in found.steps] == [(1, 5, 60)]
    assert found.drafter is not None
    assert (found.drafter.kind, found.engine.version) == ("eagle3", "0.5.14")
    assert (found.model.tp, found.model.dtype) == (4, "fp8")


@pytest.mark.parametrize(
    ("standin", "engine", "said"),
    [
        (lambda: vllm(), "sglang", "--engine sglang: the engine at http"),
        (lambda: sglang(), "vllm", "is sglang; pass --engine sglang"),
        (lambda: sglang(metrics=False), "vllm", "so whether it drafts is not known; was it started"),
        (lambda: vllm(engines=2), "vllm", "is 2 engines in data parallel"),
        (lambda: vllm(busy=3), "vllm", "is running 3 requests of others"),
        (lambda: vllm(counts=False), "vllm", "its stream does not tell how many tokens an event has"),
        (lambda: vllm(refuses=(400, {"error": {"message": "not like that"}})), "vllm", "answers 400: not like that"),
        (lambda: vllm(refuses=(500, "oh\nno")), "vllm", "answers 500: oh no"),
        (lambda: vllm(breaks={"error": {"message": "out of cards"}}), "vllm", "broke off an answer: out of cards"),
        (lambda: vllm(breaks={"object": "error", "message": "flat"}), "vllm", "broke off an answer: flat"),
        (lambda: Standin({}), "vllm", "/v1/models: answers 404: Not Found; expected an OpenAI-compatible engine"),
        (
            lambda: sglang({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}),
            "sglang",
            "drafts trees (--speculative-eagle-topk 4), and a policy is about chains",
        ),
        (
            lambda: sglang({"speculative_algorithm": "EAGLE3", "speculative_adaptive": True}),
            "sglang",
            "changes its draft length by itself",
        ),
    ],
)
def test_what_an_engine_does_not_do_is_named(run: Run, tmp_path: Path, standin: Any, engine: str, said: str) -> None:
    with running(standin()) as found:
        ran = run_engine(run, tmp_path, found.url, engine=engine)
    assert (ran.code, said in ran.err) == (2, True), ran.err
    assert len([line for line in ran.err.splitlines() if line.startswith("Error")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_accept_as_told(run: Run, tmp_path: Path) -> None:
    with running(vllm(k=3, accepted=1)) as engine:
        ran = run_engine(run, tmp_path, engine.url, "--acceptance-length", 3)
    assert ran.code == 2
    assert "--acceptance-length 3" in ran.err
    assert "gave 2.00 tokens a step" in ran.err
    with running(vllm()) as engine:
        ran = run_engine(run, tmp_path, engine.url, "--acceptance-length", 3)
    assert "does not speculate; leave it out" in ran.err


def test_a_model_of_several_has_to_be_named(run: Run, tmp_path: Path) -> None:
    engine = vllm()
    engine.pages["/v1/models"] = {"data": [{"id": name, "max_model_len": 512} for name in ("one", "two")]}
    with running(engine):
        assert "serves one, two; name one: --model NAME" in run_engine(run, tmp_path, engine.url).err
        ran = run_engine(run, tmp_path, engine.url, "--model", "three")
        assert (ran.code, "--model three: " in ran.err, "serves one, two" in ran.err) == (2, True, True)
        assert run_engine(run, tmp_path, engine.url, "--model", "two").code == 0
    assert {body["model"] for body in engine.bodies} == {"two"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--contexts", "4096"), "--contexts 4096: http"),
        (("--contexts", "4096"), "holds texts of 4096 tokens, so with 8 steps around it the longest context is 4091"),
        (("--contexts", "60,60"), "--contexts 60,60: names one twice"),
        (("--batches", "1,1"), "--batches 1,1: names one twice"),
        (("--output", "P.json"), "ends in .yaml"),
        (("--steps", "2"), "--steps"),
        (("--target", "m"), "--engine and --target are both given"),
        (("--draft", "ngram"), "--engine and --draft are both given"),
        (("--dtype", "float32"), "--engine is given, so no model is run here"),
        (("--same-model",), "--same-model is given without --merge"),
        (("--model-config", "m"), "--model-config is given without --merge"),
        (("--api-key-file", "nowhere"), "--api-key-file nowhere: cannot be read"),
        (("--merge", "h100-sxn"), "nearest: h100-sxm"),
        (("--merge", "h100-sxm"), "has constants and no cells; name whose steps to compute with --model-config"),
    ],
)
def test_wrong_flags_are_one_sentence(run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    with running(vllm()) as engine:
        ran = run_engine(run, tmp_path, engine.url, *arguments)
    assert (ran.code, said in ran.err) == (2, True), ran.err
    assert engine.bodies == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to measure is named: a model with --target, or an engine with --engine and --url"),
        (("--engine", "vllm"), "--engine vllm is given without --url"),
        (("--engine", "tensorrt", "--url", "http://x"), "'tensorrt' is not one of 'vllm', 'sglang'"),
        (("--url", "http://x"), "--url is given without --engine"),
        (("--target", "m", "--hardware", "x"), "--hardware is given without --engine"),
        (("--target", "m", "--steps", "8"), "--steps is given without --engine"),
        (("--target", "m", "--tp", "2"), "--tp is given without --merge"),
        (("--engine", "vllm", "--url", "127.0.0.1:8000"), "--url 127.0.0.1:8000: expected the address of a server"),
        (("--engine", "vllm", "--url", "http://a:b"), "--url http://a:b: expected the address of a server"),
        (("--engine", "vllm", "--url", "http://x?y=1"), "expected the address of a server"),
    ],
)
def test_flags_that_miss_each_other(run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    ran = run("profile", *arguments, "--output", tmp_path / "P.yaml")
    assert (ran.code, said in ran.err) == (2, True), ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_not_there(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ran = run_engine(run, tmp_path, f"http://127.0.0.1:{port}")
    assert ran.code == 3
    assert f"http://127.0.0.1:{port}: cannot be reached" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_what_an_error_says() -> None:
    assert reason('{"error": {"message": "a\\nb", "type": "x"}}') == "a b"
    assert reason('{"error": "plain"}') == "plain"
    assert reason("[1]") == "[1]"
    assert len(reason("x" * 1000)) < 400


# -- from events to steps ----------------------------------------------------------------------------------------------

NOWHERE = Wire.to("http://127.0.0.1:9")
PLAIN = Served(NOWHERE, "vllm", "m", 4096)
SPECULATING = Served(NOWHERE, "vllm", "m", 4096, speculation=Speculation(longest=3))


def stream(first: float, gap: float, events: int, tokens: int = 1) -> Stream:
    """The first token by itself, then `tokens` an event."""
    moments = tuple(first + gap * i for i in range(events))
    return Stream(0.0, moments, tuple(1 + tokens * i for i in range(events)))


def counters(drafts: float = 0, tokens: float = 0, preemptions: float = 0) -> Metrics:
    return Metrics(
        "vllm",
        {
            "spec_decode_num_drafts_total": drafts,
            "spec_decode_num_draft_tokens_total": tokens,
            "num_preemptions_total": preemptions,
        },
    )


def test_only_the_time_in_which_all_were_decoding_counts() -> None:
    early, late = stream(0.0, 0.5, 11), stream(2.0, 0.5, 11)
    found = window([early, late])
    assert found is not None
    assert (found.seconds, found.events, found.lead) == (6.0, 12, 5)
    assert found.made == (8 + 4) / 2  # from 5 to 11 tokens, and from 1 to 7
    assert window([stream(0.0, 0.5, 3), stream(9.0, 0.5, 3)]) is None


def test_without_a_draft_a_step_is_a_token_however_events_are_cut() -> None:
    whole, joined = stream(0.0, 0.5, 9), Stream(0.0, (0.0, 1.0, 2.0, 4.0), (1, 3, 5, 9))
    for each in (whole, joined):
        found = read_round(PLAIN, [each], counters(), counters())
        assert found is not None
        assert (found.ms, found.k, found.per_step) == (500, 0, 1)


def test_with_a_draft_a_step_is_an_event_of_any_number_of_tokens() -> None:
    found = read_round(SPECULATING, [stream(0.0, 0.5, 9, 3)], counters(10, 30), counters(18, 54))
    assert found is not None
    assert (found.ms, found.steps, found.k, found.per_step) == (500, 7, 3, 3)  # the last block may be cut


def test_two_steps_in_an_event_are_told_by_the_counters() -> None:
    joined = Stream(0.0, (0.0, 1.0, 2.0, 3.0, 4.0), (1, 5, 9, 13, 17))
    found = read_round(SPECULATING, [joined], counters(), counters(8, 24))
    assert found is not None
    assert (found.ms, found.steps, found.k, found.per_step) == (500, 6, 3, 2)


def test_a_draft_that_looks_things_up_counts_once_it_finds_them() -> None:
    """Six plain steps, the last of which is drafted for in vain, then eight blocks of three tokens."""
    tokens = (1, 2, 3, 4, 5, 6, 7, *(7 + 3 * i for i in range(1, 9)), 32)
    moments = (*(0.1 * i for i in range(7)), *(0.6 + 0.5 * i for i in range(1, 9)), 5.0)
    found = read_round(SPECULATING, [Stream(0.0, moments, tokens)], counters(), counters(10, 29))
    assert found is not None
    assert (found.ms, found.k, found.steps, found.per_step, found.lead) == (pytest.approx(500), 3, 8, 3, 7)
    scattered = Stream(0.0, tuple(0.5 * i for i in range(9)), (1, 2, 5, 6, 9, 10, 13, 14, 17))
    found = read_round(SPECULATING, [scattered], counters(), counters(4, 12))
    assert found is not None
    assert (found.k, found.why) == (None, "only 50% of steps had a block")


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (counters(0, 0), "nothing was drafted"),
        (counters(4, 12), "only 50% of steps had a block"),
        (counters(8, 20), "blocks were of different lengths, 2.50 tokens on average"),
        (counters(8, 24, 1), "the engine had no room for all of them"),
    ],
)
def test_steps_that_are_of_several_kinds_are_no_cell(after: Metrics, why: str) -> None:
    found = read_round(SPECULATING, [stream(0.0, 0.5, 9)], counters(), after)
    assert found is not None
    assert found.k is None
    assert why in found.why


def test_sizes_follow_from_what_a_round_showed() -> None:
    """The second round has the wanted steps in its window, around the wanted context."""
    meter = Meter(PLAIN, steps=20)
    shown = Round(ms=1.0, steps=9.0, k=0, why="", lead=11, made=15.5, per_step=1.0)
    sizes = meter._next(Spot(4, 100), Sizes(90, 20), shown)
    assert sizes.answer == 11 + 21 + 1
    assert sizes.prompt + 11 + 22 / 2 == pytest.approx(100, abs=0.5)
    assert meter._next(Spot(4, 100), Sizes(90, 20), None) == Sizes(90, 40)
    assert meter._fitting(Sizes(4090, 30)).answer == 6


def test_a_cell_is_of_the_rounds_that_can_be_told_if_they_are_most() -> None:
    def shown(k: int | None, ms: float = 5.0) -> Round:
        return Round(ms=ms, steps=8.0, k=k, why="" if k is not None else "it rained", lead=1, made=4.0, per_step=1.0)

    notices: list[str] = []
    reading = _reading(Spot(1, 60), [shown(3, 4.0), None, shown(3, 6.0), shown(None, 99.0), shown(3)], notices)
    assert reading is not None
    assert (reading.k, reading.timing.ms, notices) == (3, 5.0, [])
    assert _reading(Spot(1, 60), [shown(3), shown(None), None, shown(3)], notices) is None
    assert _reading(Spot(2, 60), [None, None, shown(0)], notices) is None
    assert _reading(Spot(3, 60), [shown(3), shown(2), shown(3)], notices) is None
    assert notices == [
        "batch 1, context 60: it rained, so it has no cell",
        "batch 2, context 60: its requests did not all decode, so it has no cell",
        "batch 3, context 60: drafted 2 and 3 tokens in turn, so it has no cell",
    ]


def test_prompts_have_no_beginning_in_common_and_say_the_same_over_and_over() -> None:
    source = random.Random(0)
    one, other = prompt(100, source), prompt(100, source)
    assert len(one) == 100
    assert one[:32] == one[32:64]
    assert one[:3] != other[:3]
    assert len(prompt(5, source)) == 5
