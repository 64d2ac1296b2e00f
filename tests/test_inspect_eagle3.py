"""specctl inspect of EAGLE-3 heads: the layout by name, what is wrong, and what each engine would misread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import tiny_mtp
from conftest import Run
from fixtures import Make
from test_eagle3_layouts import changed
from tiny_eagle3 import IDS, TAPS

from specctl.convert_mtp.facts import config_sha


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target)


def inspected(run: Run, path: Path, code: int = 0) -> dict[str, Any]:
    ran = run("inspect", path, "--json")
    assert ran.code == code, ran.out
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize("layout", ["original", "vllm", "sglang", "speculators"])
def test_layouts_are_named(run: Run, make: Make, target: Path, layout: Any) -> None:
    path = make(tiny_eagle3.head, of=target, layout=layout, ids=IDS)
    found = inspected(run, path)
    assert (found["servable"], found["model"], found["mtp"]) == (False, None, None)
    head = found["eagle3"]
    assert (head["layout"], head["num_taps"]) == (layout, 3)
    assert head["taps"] == (None if layout == "original" else list(TAPS))
    assert (head["draft_vocab"], head["vocab_size"], head["context"]) == (len(IDS), 264, 256)
    assert head["k"] == (3 if layout == "speculators" else None)
    text = run("inspect", path).out
    assert f"layout {layout}" in text
    assert "drafts for its target" in text


def test_what_engines_would_misread(run: Run, make: Make, target: Path) -> None:
    path = make(tiny_eagle3.head, of=target, norms=("norm_before_residual",))
    warnings = [each["what"] for each in inspected(run, path)["problems"] if each["severity"] == "warning"]
    assert warnings == [
        "SGLang reads taps 3, 5, 6, the head 2, 4, 5",
        "SGLang takes norm_before_residual for false, the head has true",
    ]


def test_a_norm_that_means_two_things(run: Run, make: Make, target: Path) -> None:
    problems = inspected(run, make(tiny_eagle3.head, of=target, norms=("norm_output",)))["problems"]
    assert any(each["severity"] == "note" and "norm_output is true" in each["what"] for each in problems)


def test_what_differs_from_its_target(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    """Which specctl.json names: a context or a rotation of its own is told, another target is an error."""
    short = make(tiny_eagle3.head, of=target, max_position_embeddings=128)
    done = run("export", short, tmp_path / "short", "--to", "vllm", "--target", target)
    assert done.code == 0
    assert "has a context of 128, the target one of 256" in done.err
    warnings = [each["what"] for each in inspected(run, tmp_path / "short")["problems"]]
    assert any("has a context of 128, the target one of 256" in what for what in warnings)


def test_what_is_wrong_with_it(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    of = make(tiny_eagle3.head, of=target, ids=IDS)
    path = changed(tmp_path / "a", of, lambda config, tensors: tensors.pop("d2t"))
    found = inspected(run, path, 2)
    assert found["eagle3"] is None
    assert any("d2t is missing" in each["what"] for each in found["problems"])
    path = changed(tmp_path / "b", of, lambda config, tensors: config.update(num_hidden_layers=2))
    assert "num_hidden_layers is 2, the tensors are those of 1 layer" in run("inspect", path).out


def test_a_reduced_mtp_layer(run: Run, make: Make, tmp_path: Path) -> None:
    base = make(tiny.llama, seed=1, num_hidden_layers=1)
    alone = make(tiny_mtp.mtp, of=base, alone="deepseek")
    found = inspected(run, make(tiny_mtp.reduced, of=alone, ids=IDS))
    assert any(f"it scores {len(IDS)} of 264 token ids" in each["what"] for each in found["problems"])
    path = changed(tmp_path / "lost", alone, lambda config, tensors: config.update(draft_vocab_size=80))
    assert "d2t is missing, and the layer has 80 of 264 token ids" in run("inspect", path).out


def test_what_engines_would_misread_beside_a_deepseek_target(run: Run, make: Make, tmp_path: Path) -> None:
    """SGLang adds one to ids of such a target only where the first is 1; vLLM has no residual beside its embedding."""
    of = make(tiny.deepseek, seed=1, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4)
    like = make(tiny_eagle3.target)

    def warned(engine: str, taps: tuple[int, ...], target: Path, layout: Any) -> list[str]:
        name = "-".join(map(str, (*taps, target.name, layout)))
        head = changed(tmp_path / name, make(tiny_eagle3.head, of=like, taps=taps, layout=layout), lambda *both: None)
        about = {"name": str(target), "revision": None, "config_sha": config_sha(target), "tensors_sha": None}
        (head / "specctl.json").write_text(json.dumps({"target": about}))
        return [each["what"] for each in inspected(run, head)["problems"] if each["what"].startswith(engine)]

    assert warned("SGLang", (2, 4, 5), of, "sglang") == warned("SGLang", (3, 4, 6), like, "sglang") == []
    assert warned("SGLang", (3, 4, 6), of, "sglang") == ["SGLang reads taps 2, 3, 5, the head 3, 4, 6"]
    for layout in ("vllm", "speculators"):
        (said,) = warned("vLLM", (0, 4, 5), of, layout)
        assert "tap 0, the embedding, has no residual beside it yet" in said
        assert warned("vLLM", (0, 4, 5), like, layout) == []


def test_the_last_tap(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    """What leaves the last layer is a tap like others, which one engine does not have."""
    source = make(tiny_eagle3.head, of=target, taps=(2, 5, 8))
    assert run("export", source, tmp_path / "o", "--to", "vllm", "--target", target).code == 0
    found = inspected(run, tmp_path / "o")
    assert found["eagle3"]["taps"] == [2, 5, 8]
    warnings = [each["what"] for each in found["problems"] if each["severity"] == "warning"]
    assert "SGLang has no tap 8, what leaves the last of 8 layers" in warnings
    assert not any("vLLM" in what for what in warnings)
    beyond = make(tiny_eagle3.head, of=target, layout="speculators", taps=(2, 5, 9))
    assert "reads tap 9, and the target has 8 layers" in run("inspect", beyond).out
