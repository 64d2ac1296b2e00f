"""specctl validate on tiny pairs: right ones pass again and again, and every fault that is planted fails by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import Ran, Run
from fixtures import Make
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.drafts.llama import LlamaDrafter
from specctl.engine import engine as engine_module
from specctl.engine import verify as verify_module
from specctl.engine.verify import Verdict, verify
from specctl.sampling.batch import SamplingBatch
from specctl.validate import distribution

TEXTS = ("abcabc", "the cat the", "12 21 12", "a b a b", "so it is")
TOKENS = 8
EXACT = "compatible: {}\ngreedy_exact: {prompts: 2}\ndistribution: {samples: 200}\ndraft_cache: {}\n"
SAMPLED = "distribution: {samples: 500}"

# Next-token tables for what takes many tokens to see: q is likely where p is not.
START = 5
P = {
    0: [0.50, 0.30, 0.15, 0.05, 0.00],
    1: [0.05, 0.05, 0.10, 0.20, 0.60],
    2: [0.30, 0.25, 0.00, 0.20, 0.25],
    3: [0.90, 0.04, 0.03, 0.02, 0.01],
    4: [0.10, 0.20, 0.30, 0.40, 0.00],
    START: [0.30, 0.10, 0.25, 0.15, 0.20],
}
Q = {last: row[::-1] for last, row in P.items()}


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny.llama, seed=1, dtype=torch.float64)


@pytest.fixture(scope="module")
def near(make: Make, target: Path) -> Path:
    """A draft that is right most of the time."""
    return make(tiny.near, of=target, noise=0.03)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


Validate = Callable[..., Ran]


@pytest.fixture
def validate(run: Run, target: Path, near: Path, prompts: Path, tmp_path: Path) -> Validate:
    """validate(gates, flags...) on the tiny pair; the report is report.json."""

    def command(gates: str, *arguments: object) -> Ran:
        (tmp_path / "gates.yaml").write_text(gates)
        given = [str(argument) for argument in arguments]
        defaults: dict[str, object] = {"--target": target, "--draft": near, "--prompts": prompts, "--threads": 1}
        defaults |= {"--max-tokens": TOKENS, "--gates": tmp_path / "gates.yaml", "--report": tmp_path / "report.json"}
        chosen = [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
        return run("validate", *chosen, "--force", *given)

    return command


@pytest.fixture
def tables(validate: Validate, make: Make, tmp_path: Path) -> Validate:
    """The same on a pair of tables, sampled; text is transparent there, so that the exact distribution is known."""
    start = tmp_path / "start.jsonl"
    start.write_text(json.dumps({"token_ids": [START]}) + "\n")
    paths = []
    for rows in (P, Q):
        full = {last: dict(enumerate(row)) for last, row in rows.items()}
        paths.append(
            make(tiny.table, rows=full, vocab=6, max_position_embeddings=128, tokenizer=False, dtype=torch.float64)
        )

    def command(gates: str, *arguments: object) -> Ran:
        defaults = ["--target", paths[0], "--prompts", start, "--batch", 1]
        draft = [] if "--draft" in arguments else ["--draft", paths[1]]
        return validate(gates, *defaults, *draft, *arguments)

    return command


def gate(tmp_path: Path, name: str) -> dict[str, Any]:
    gates = json.loads((tmp_path / "report.json").read_text())["gates"]
    return next(gate for gate in gates if gate["name"] == name)


def statuses(tmp_path: Path) -> dict[str, str]:
    return {gate["name"]: gate["status"] for gate in json.loads((tmp_path / "report.json").read_text())["gates"]}


# -- right pairs -------------------------------------------------------------------------------------------------------


def clean(validate: Validate, make: Make, tmp_path: Path, number: int) -> None:
    """One of the many ways in which a pair can be run that is as it should be."""
    rng = random.Random(number)
    target = make(tiny.llama, seed=number % 5, dtype=rng.choice([torch.float64, torch.float32]), num_hidden_layers=1)
    draft = make(tiny.near, of=target, noise=rng.choice([0.02, 0.2])) if number % 3 else target
    flags: list[object] = ["--target", target, "--draft", draft, "--k", rng.choice([1, 3, 5]), "--seed", number]
    flags += rng.choice([[], ["--batch", 3], ["--accept", "coupled"], ["--accept", "exact"]])
    flags += rng.choice(
        [[], ["--temperature", 1], ["--temperature", 0.7, "--top-p", 0.9], ["--temperature", 1, "--top-k", 20]]
    )
    ran = validate(EXACT + "acceptance_length: {min: 1.05}\n", *flags)
    assert ran.code == 0, (number, ran.out, ran.err)
    assert set(statuses(tmp_path).values()) == {"pass"}


def test_clean_pairs_pass(validate: Validate, make: Make, tmp_path: Path) -> None:
    for number in range(3):
        clean(validate, make, tmp_path, number)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_clean_runs_without_a_false_alarm(validate: Validate, make: Make, tmp_path: Path) -> None:
    for number in range(100):
        clean(validate, make, tmp_path, number)


def test_every_gate_says_what_it_measured_and_against_what(validate: Validate, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    everything = EXACT + (
        "acceptance_length: {min: 1.2, k: 3}\nacceptance_rate: {min: 0.1, k: 2}\n"
        "latency: {ttft_p95_ms: 1e6, tpot_p95_ms: 1e6}\nspeedup: {min: 1e-6, bound: lower}\n"
    )
    ran = validate(everything, "--report", base)
    assert ran.code == 0, ran.out + ran.err
    for said in (
        "drafts for",
        "tensors of",
        "the greedy answers of 5 prompts are those of plain decoding",
        "total variation",
        "the largest difference",
        "near k=3: ",
        "k=2: 0.",
        "ttft_p95_ms of",
        "expected the lower end at 1e-06 or above",
    ):
        assert said.replace("near", "model") in ran.out
    report = json.loads(base.read_text())
    assert [run["name"] for run in report["runs"]] == ["plain", "model k=3"]
    assert len(report["runs"][1]["seconds"]) == 3
    assert report["comparisons"][0]["v"] > 0
    assert [run["name"] for run in report["also"][0]["runs"]] == ["plain", "model k=2"]
    assert report["work"]["n"] == len(TEXTS)
    again = validate("regression: {}\nspeedup: {min: 1e-6}\n", "--baseline", base)
    assert again.code == 0, again.out
    assert gate(tmp_path, "regression")["checks"][0]["measured"] == report["gates"][4]["checks"][0]["measured"]


def test_sampled_prompts_are_decoded_greedily_for_the_greedy_gate(validate: Validate, tmp_path: Path) -> None:
    ran = validate("greedy_exact: {prompts: 2}\nacceptance_rate: {min: 0.01}\n", "--temperature", 1, "--batch", 3)
    assert ran.code == 0, ran.out + ran.err
    assert "the greedy answers of 2 prompts" in ran.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["work"]["temperature"], report["also"][0]["work"]["temperature"]) == (1.0, 0.0)


@pytest.mark.parametrize(("count", "batch"), [(5, 2), (4, 2), (1, 1)])
def test_every_prompt_is_used_once_however_they_divide(
    validate: Validate, tmp_path: Path, count: int, batch: int
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"prompt": TEXTS[i]}) + "\n" for i in range(count)))
    ran = validate("greedy_exact: {}", "--prompts", path, "--batch", batch, "--ignore-eos")
    assert ran.code == 0, ran.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["work"]["n"] == count
    assert [run["tokens"] for run in report["runs"]] == [count * TOKENS] * 2


def test_fewer_prompts_than_a_batch_are_an_error(validate: Validate, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a"}\n')
    ran = validate(EXACT, "--prompts", path, "--batch", 2)
    assert ran.code == 2
    assert "--batch 2 needs at least as many prompts, there are 1" in ran.err
    path.write_text("\n")
    ran = validate(EXACT, "--prompts", path)
    assert ran.code == 2
    assert "has no prompt in it" in ran.err


def test_prompt_lookup(validate: Validate, make: Make, tmp_path: Path) -> None:
    """It has no cache of keys, but what it knows of a text can be wrong, too."""
    rows = {ord(last): {ord(following): 0.75, ord("x"): 0.25} for last, following in ("ab", "bc", "cd", "da", "xa")}
    circle = make(tiny.table, rows=rows, dtype=torch.float64)
    ran = validate(EXACT, "--target", circle, "--draft", "ngram")
    assert ran.code == 0, ran.out + ran.err
    assert "comparisons of what ngram proposes, all the same" in ran.out


def test_what_never_drafts_is_no_data(validate: Validate, tmp_path: Path) -> None:
    ran = validate(EXACT + "acceptance_rate: {min: 0}\n", "--k", 0)
    assert ran.code == 1
    found = statuses(tmp_path)
    assert found.pop("compatible") == "pass"
    assert set(found.values()) == {"no-data"}


def test_a_report_of_bench_is_judged(run: Run, validate: Validate, target: Path, near: Path, tmp_path: Path) -> None:
    """As bench wrote it, by the gates that are shipped for that, and by what it was before."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    flags = ["--target", target, "--draft", near, "--prompts", prompts, "--max-tokens", TOKENS, "--repeats", 2]
    assert run("bench", *flags, "--output", output).code == 0
    gates = tmp_path / "mine.yaml"
    gates.write_text("greedy_exact: {}\nacceptance_length: {min: 1.1, k: 3}\nspeedup: {min: 0.001}\nregression: {}\n")
    ran = run("validate", "--results", output, "--gates", gates, "--baseline", output)
    assert ran.code == 0, ran.out + ran.err
    ran = validate("regression: {}", "--baseline", output)
    assert ran.code == 0, ran.out + ran.err
    assert "a change of +0.0%" in ran.out


# -- planted faults ----------------------------------------------------------------------------------------------------


def fails(ran: Ran, name: str, *said: str) -> None:
    assert ran.code == 1, ran.out + ran.err
    assert f"{name} (fail)" in ran.err
    assert "-> " in ran.out
    for words in said:
        assert words in ran.out


def test_tables_pass(tables: Validate) -> None:
    ran = tables(SAMPLED)
    assert ran.code == 0, ran.out
    assert "exact: 512 tokens at temperature 1: total variation 0.0" in ran.out
    assert "coupled: 512 tokens" in ran.out


def test_a_biased_rejection(tables: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token drawn from p in place of the residual: no greedy text shows it."""
    monkeypatch.setattr(verify_module, "_proposal_distribution", lambda draft, slot, like: torch.zeros_like(like))
    ran = tables("greedy_exact: {}\n" + SAMPLED, "--accept", "exact")
    fails(ran, "distribution", "plain sampling does not (", "the fault is in speculation")
    assert "greedy_exact (fail)" not in ran.err


@pytest.mark.parametrize("accept", ["typical", "threshold=0.02"])
def test_lossy_acceptance(tables: Validate, accept: str) -> None:
    """By what it is, however few tokens there were to see it."""
    ran = tables("distribution: {samples: 200}", "--accept", accept)
    fails(ran, "distribution", f"{accept}: 224 tokens", f"{accept} acceptance is lossy")


def test_an_acceptance_that_only_claims_to_be_exact(tables: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is likely enough is accepted, as a lossy rule does: no text at temperature 0 shows it."""
    monkeypatch.setattr(verify_module, "_proposal_probability", lambda draft, index, vocab: torch.full((1, 1), 0.1))
    ran = tables("greedy_exact: {}\n" + SAMPLED, "--accept", "exact")
    fails(ran, "distribution", "exact: 512 tokens", "the fault is in speculation")
    assert "greedy_exact (fail)" not in ran.err


def of_the_engine(wrong: Callable[[SamplingBatch, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processing for draft and target alike, but not for the finished text that the reference scores."""
    right = SamplingBatch.scores

    def scores(self: SamplingBatch, logits: Tensor, *more: Any) -> Tensor:
        return wrong(self, logits) if self.states[0].output else right(self, logits, *more)

    monkeypatch.setattr(SamplingBatch, "scores", scores)


def test_a_sampler_that_forgets_its_temperature(tables: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_engine(lambda self, logits: logits.clone(), monkeypatch)
    ran = tables(SAMPLED, "--temperature", 0.6, "--accept", "exact")
    fails(ran, "distribution", "plain sampling deviates too", "the fault is in sampling")


def test_tokens_that_are_ruled_out(tables: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_engine(lambda self, logits: logits.clone(), monkeypatch)
    fails(
        tables(SAMPLED, "--top-k", 2, "--accept", "exact"),
        "distribution",
        "tokens were sampled that the target's distribution rules out",
    )


def test_a_wrong_acceptance(validate: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(draft: Any, scores: Tensor, sampling: Any) -> Verdict:
        verdict = verify(draft, scores, sampling)
        count = torch.full_like(verdict.num_accepted_B, draft.token_BK.shape[1])
        return Verdict(torch.cat((draft.token_BK, scores[:, -1:].argmax(-1)), dim=1), count)

    monkeypatch.setattr(engine_module, "verify", all_of_it)
    fails(validate("greedy_exact: {}"), "greedy_exact", "leave plain decoding's, the farthest at prompt 'p")


def test_another_tokenizer(validate: Validate, make: Make, near: Path, tmp_path: Path) -> None:
    swapped = tmp_path / "swapped"
    tiny.write(swapped, *tiny.read(near), tokenizer=False)
    tiny.byte_tokenizer(swapped, swap=(ord("a"), ord("b")))
    ran = validate(EXACT, "--draft", swapped)
    fails(ran, "compatible", "opens: ", "'a'", "use the draft, policy and tokenizer that were made for this target")
    assert statuses(tmp_path) == {
        "compatible": "fail",
        "greedy_exact": "no-data",
        "distribution": "no-data",
        "draft_cache": "no-data",
    }
    assert "not run: the pair is not compatible" in ran.out
    ran = validate("greedy_exact: {}", "--draft", swapped)  # without the gate it is an error like everywhere
    assert ran.code == 2
    assert "'a'" in ran.err


@pytest.mark.parametrize("whose", ["target", "draft"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number(validate: Validate, near: Path, tmp_path: Path, whose: str, value: float) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    config, tensors = tiny.read(near)
    tensors[name][3, 5] = value
    spoilt = tiny.write(tmp_path / "spoilt", config, tensors)
    ran = validate(EXACT, f"--{whose}", spoilt)
    fails(ran, "compatible", f"{whose} weights: tensor {name} of {spoilt} holds NaN or infinity (1 of 21 tensors do)")
    ran = validate("draft_cache: {}", f"--{whose}", spoilt)
    assert ran.code == 2
    assert name in ran.err


def test_scores_that_overflow(validate: Validate, near: Path, tmp_path: Path) -> None:
    config, tensors = tiny.read(near)
    tensors["lm_head.weight"] *= 1.7e308 / tensors["lm_head.weight"].abs().max()
    ran = validate(EXACT, "--target", tiny.write(tmp_path / "huge", config, tensors))
    fails(
        ran, "compatible", "the target's scores after prompt p0 are not all numbers: try another --dtype than float64"
    )


def test_layers_in_another_order(validate: Validate, near: Path, tmp_path: Path) -> None:
    """The text stays right; acceptance tells, against a limit and against what it was."""
    base, gates = tmp_path / "base.json", "greedy_exact: {}\nacceptance_length: {min: 1.5}\n"
    assert validate(gates, "--report", base).code == 0
    swapped = tiny.few_layers(tmp_path / "swapped", of=near, layers=[1, 0])
    ran = validate(gates, "--draft", swapped, "--baseline", base)
    fails(ran, "acceptance_length", "expected at least 1.5", "weights are those that were trained")
    assert statuses(tmp_path) == {"greedy_exact": "pass", "acceptance_length": "fail", "regression": "fail"}


def facts(path: Path, **target: Any) -> None:
    origin = {
        "specctl": "1",
        "torch": "2",
        "transformers": "5",
        "device": "cpu",
        "threads": 1,
        "command": "",
        "date": "",
    }
    names = {"name": "the target", "revision": None, "config_sha": None, "tensors_sha": None, **target}
    value = {"schema": "specctl.draft/1", "provenance": origin, "kind": "llama", "head": None, "target": names}
    (path / "specctl.json").write_text(json.dumps(value))


def test_a_draft_of_another_target(validate: Validate, near: Path, target: Path, tmp_path: Path) -> None:
    """Its specctl.json says which it was made for; a target whose layers changed places has another digest."""
    draft = tiny.write(tmp_path / "draft", *tiny.read(near))
    facts(draft, tensors_sha=tensors_sha(Checkpoint(target)))
    assert validate("compatible: {}", "--draft", draft).code == 0
    swapped = tiny.few_layers(tmp_path / "swapped", of=target, layers=[1, 0])
    ran = validate("compatible: {}", "--draft", draft, "--target", swapped)
    fails(ran, "compatible", "names the target with tensors_sha", f"{swapped} has ")
    facts(draft, config_sha="0" * 64)
    fails(validate("compatible: {}", "--draft", draft), "compatible", "names the target with config_sha 000000000000")
    (draft / "specctl.json").write_text("{}")
    fails(validate("compatible: {}", "--draft", draft), "compatible", "key provenance is missing")


def policy(path: Path, draft: Path | None, kind: str = "llama") -> Path:
    digest = "null" if draft is None else tensors_sha(Checkpoint(draft))
    path.write_text(
        "schema: specctl.policy/1\ntarget: {digest: null}\naccept: {method: exact}\n"
        f"draft: {{kind: {kind}, digest: {digest}}}\nk: [{{batch: [1, null], context: [1, null], k: 2}}]\n"
    )
    return path


def test_a_policy_of_another_draft(validate: Validate, near: Path, target: Path, tmp_path: Path) -> None:
    mine, other = policy(tmp_path / "mine.yaml", near), policy(tmp_path / "other.yaml", target)
    ran = validate("compatible: {}\nacceptance_length: {min: 1}", "--policy", mine)
    assert ran.code == 0, ran.out
    assert "model policy: " in ran.out
    fails(validate("compatible: {}", "--policy", other), "compatible", f"policy: {other}: was made for a draft with")
    assert validate("draft_cache: {}", "--policy", other).code == 2
    kind = policy(tmp_path / "kind.yaml", None, "ngram")
    fails(validate("compatible: {}", "--policy", kind), "compatible", "is a policy for a draft of kind ngram")
    (tmp_path / "broken.yaml").write_text("k: 3")
    assert validate("compatible: {}", "--policy", tmp_path / "broken.yaml").code == 2


def test_a_broken_draft_cache(validate: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last accepted token of a whole block is never run over: nothing but acceptance falls."""
    monkeypatch.setattr(LlamaDrafter, "window", 1)
    ran = validate("greedy_exact: {}\ndraft_cache: {}")
    fails(ran, "draft_cache", "the largest difference", "expected at most 1e-09")
    assert "greedy_exact (fail)" not in ran.err


def test_a_cache_that_is_no_number(validate: Validate, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LlamaDrafter.catch_up

    def wrong(self: LlamaDrafter, rows: Any, hidden: Any, carry: Tensor) -> None:
        right(self, rows, hidden, carry)
        engines_own = len(carry) > 1
        if engines_own:
            self.attn._layer(0)[0].fill_(float("nan"))  # type: ignore[union-attr]

    monkeypatch.setattr(LlamaDrafter, "catch_up", wrong)
    fails(validate("draft_cache: {}"), "draft_cache", "the largest difference nan")


def test_atol_is_the_limit(validate: Validate, make: Make, tmp_path: Path) -> None:
    single = make(tiny.llama, seed=1)
    assert validate("draft_cache: {atol: 1e-3}", "--target", single, "--draft", single).code == 0
    fails(validate("draft_cache: {atol: 0}", "--target", single, "--draft", single), "draft_cache", "at most 0")


@pytest.mark.parametrize(("what", "code"), [("no such place", 2), ("a file", 2)])
def test_what_is_no_draft_at_all(validate: Validate, tmp_path: Path, what: str, code: int) -> None:
    path = tmp_path / "there"
    if what == "a file":
        path.write_text("x")
    assert validate(EXACT, "--draft", path).code == code
    assert validate(EXACT, "--target", path).code == code


# -- the test of a distribution ----------------------------------------------------------------------------------------


def test_chi_square_against_its_table() -> None:
    """16.919 is the 5 % point at 9 degrees of freedom."""
    even = np.full(10, 100)
    assert distribution.chi_square(even) == pytest.approx(1)
    shift = np.sqrt(16.919 * 100 / 2)
    assert distribution.chi_square(even + np.array([shift, -shift] + [0] * 8)) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(("bias", "detected"), [(0.0, False), (0.12, True)])
def test_places_that_are_not_uniform_are_found(bias: float, detected: bool) -> None:
    rng = np.random.default_rng(1)
    u = rng.random(4000)
    u = np.where(rng.random(4000) < bias, u * 0.5, u)
    fit = distribution.judge_fit(distribution.Sample(u.tolist(), [0] * len(u)))
    assert (fit.p < 1e-6) == detected
    assert fit.interval[0] <= max(0.0, bias / 2) + 0.02
    assert fit.interval[1] >= bias / 2 - 0.02


def test_a_small_drift_is_told_from_chance() -> None:
    """By the bound: 2 exp(-s^2 / 2(v + s / 3))."""
    sample = distribution.Sample(np.linspace(0, 0.9999, 1000).tolist(), [0] * 1000)
    sample.drifts = np.array([[60.0, 30.0], [0.0, 0.0]])
    assert distribution.judge_fit(sample).p == pytest.approx(2 * 2 * np.exp(-3600 / 2 / 50))
    sample.drifts = np.array([[3.0, 30.0], [0.0, 30.0]])
    assert distribution.judge_fit(sample).p == 1


def test_drifts_are_deviations_from_the_mean_under_p() -> None:
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.1, 0.3, 0.6]))
    found = np.stack([distribution._drifts(p, q, token) for token in range(3)])
    assert found[:, :, 0].T @ p.numpy() == pytest.approx([0, 0])
    assert (found[:, :, 0] ** 2).T @ p.numpy() == pytest.approx(found[0, :, 1])
    assert found[:, 0, 0] == pytest.approx(np.array([0.2, 1, 1]) - 0.6)


def test_times_are_taken_only_where_a_gate_asks(validate: Validate, tmp_path: Path) -> None:
    assert validate("acceptance_rate: {min: 0.01}").code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["runs"][1]["seconds"]) == 1
    assert report["comparisons"][0]["v"] is None
