"""specctl export of EAGLE-3 heads: in every layout the same head, with the command that serves it; or refused with the
reason, and then nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_eagle3
import torch
from conftest import Run
from exporting import export, refused
from fixtures import Make
from safetensors.torch import load_file, save_file
from test_eagle3_layouts import IDS_KEY, LLAMA3, changed, read
from tiny_eagle3 import IDS, LAYERS, TAPS
from torch import Tensor

from specctl.checkpoint import Checkpoint
from specctl.dialects import eagle3 as layouts
from specctl.digest import tensors_sha

NAMES = ("original", "vllm", "sglang", "speculators")


@pytest.fixture(scope="module")
def target(make: Make) -> Path:
    return make(tiny_eagle3.target)


@pytest.mark.parametrize("norm", tiny_eagle3.NORMS)
def test_norms_survive(run: Run, make: Make, target: Path, tmp_path: Path, norm: str) -> None:
    source = make(tiny_eagle3.head, of=target, norms=(norm,), ids=IDS)
    export(run, source, tmp_path / "speculators", "speculators", "--target", target)
    export(run, tmp_path / "speculators", tmp_path / "vllm", "vllm")
    assert read(source).view.head(LAYERS) == read(tmp_path / "vllm").view.head(LAYERS)
    if norm in ("norm_before_residual", "norm_before_fc"):
        assert f"SGLang has no code for {norm}" in refused(run, source, tmp_path / "sglang", "sglang")
    else:
        export(run, source, tmp_path / "sglang", "sglang")
    assert f"has no {norm}" in refused(run, source, tmp_path / "original", "original", "--target", target)


def test_the_table_of_ids(run: Run, make: Make, tmp_path: Path) -> None:
    """Ten ids, of which {9, 1, 7, 4} are drafted."""
    of = make(tiny_eagle3.target, vocab_size=10, eos_token_id=9, bos_token_id=0, pad_token_id=0)
    export(run, make(tiny_eagle3.head, of=of, ids=(1, 4, 7, 9)), tmp_path / "o", "vllm")
    config, tensors = tiny.read(tmp_path / "o")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [1, 3, 5, 6]
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == [1, 4, 7, 9]
    assert torch.equal(tensors["lm_head.weight"], tiny.read(of)[1]["lm_head.weight"][[1, 4, 7, 9]])
    assert config["draft_vocab_size"] == 4
    export(run, make(tiny_eagle3.head, of=of), tmp_path / "full", "vllm")
    assert not {"d2t", "t2d"} & tiny.read(tmp_path / "full")[1].keys()

    def beyond(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"][3] = 7

    def twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"][1] = 0

    source = make(tiny_eagle3.head, of=of, ids=(1, 4, 7, 9))
    assert "row 3 the target id 10" in refused(run, changed(tmp_path / "a", source, beyond), tmp_path / "x", "vllm")
    assert "row 1 the target id 1 after 1" in refused(
        run, changed(tmp_path / "b", source, twice), tmp_path / "x", "vllm"
    )


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("spelling", ["scaling", "parameters"])
def test_a_rotation_survives_in_both_spellings(run: Run, make: Make, tmp_path: Path, spelling: str, to: str) -> None:
    values = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    of = make(tiny_eagle3.target, **tiny.rope("llama3", spelling, theta=500000.0, **values))
    source = make(tiny_eagle3.head, of=of)
    report = export(run, source, tmp_path / "o", to, "--target", of)
    assert report["checked"]["largest_difference"] == 0
    config = Checkpoint(tmp_path / "o").config
    layer = config.get("transformer_layer_config", config)
    for key in ("rope_scaling", "rope_parameters"):
        assert (layer[key]["factor"], layer[key]["rope_theta"]) == (8.0, 500000.0)
    assert (layer["rope_theta"], layer["num_hidden_layers"], layer["max_position_embeddings"]) == (500000.0, 1, 256)


def test_taps_as_each_reader_counts_them(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target, taps=(1, 4, 6))
    export(run, source, tmp_path / "vllm", "vllm")
    export(run, source, tmp_path / "sglang", "sglang")
    vllm, sglang = (Checkpoint(tmp_path / to).config for to in ("vllm", "sglang"))
    assert vllm["eagle_config"][IDS_KEY] == vllm[IDS_KEY] == sglang[IDS_KEY] == [1, 4, 6]
    assert sglang["eagle_config"][IDS_KEY] == [0, 3, 5]
    assert "reads taps 1, 4, 6" in refused(run, source, tmp_path / "original", "original", "--target", target)


def test_taps_that_go_without_saying_need_the_target(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target, layout="original")
    assert "pass --target" in refused(run, source, tmp_path / "o", "vllm")
    export(run, source, tmp_path / "o", "vllm", "--target", target)
    assert Checkpoint(tmp_path / "o").config[IDS_KEY] == list(TAPS)
    source = make(tiny_eagle3.head, of=target)
    assert "--target" in refused(run, source, tmp_path / "p", "original")
    assert "--target" in refused(run, source, tmp_path / "p", "speculators")


def test_another_number_of_taps(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target, taps=(3, 6))
    for to in ("vllm", "sglang", "speculators"):
        report = export(run, source, tmp_path / to, to, "--target", target)
        assert report["checked"]["largest_difference"] == 0
        assert read(tmp_path / to).view.taps == (3, 6)


def test_an_embedding_that_is_the_targets(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target, embedding=True)
    assert "SGLang puts the target's embedding" in refused(run, source, tmp_path / "o", "sglang")
    export(run, source, tmp_path / "o", "sglang", "--target", target)
    assert "embed_tokens.weight" not in Checkpoint(tmp_path / "o")

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] += 1

    own = changed(tmp_path / "own", source, edit)
    assert "SGLang puts" in refused(run, own, tmp_path / "p", "sglang", "--target", target)
    export(run, own, tmp_path / "p", "vllm", "--target", target)
    assert "embed_tokens.weight" in Checkpoint(tmp_path / "p")


def test_a_head_of_another_target(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target)
    shallow = make(tiny.llama, seed=1, num_hidden_layers=4)
    said = refused(run, source, tmp_path / "o", "vllm", "--target", shallow)
    assert "reads tap 5, and the target has 4 layers" in said


def test_the_last_tap(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    """What leaves the last layer: vLLM has it, SGLang has not, and the original taps are others."""
    source = make(tiny_eagle3.head, of=target, taps=(2, 5, 8))
    for to in ("vllm", "speculators"):
        report = export(run, source, tmp_path / to, to, "--target", target)
        assert report["checked"]["largest_difference"] == 0
        assert Checkpoint(tmp_path / to).config[IDS_KEY] == [2, 5, 8]
    said = refused(run, source, tmp_path / "sglang", "sglang", "--target", target)
    assert "SGLang reads residuals where they enter a layer, and tap 8 is what leaves the last of 8" in said
    assert "reads taps 2, 5, 8" in refused(run, source, tmp_path / "original", "original", "--target", target)
    beyond = make(tiny_eagle3.head, of=target, taps=(2, 5, 9))
    said = refused(run, beyond, tmp_path / "o", "vllm", "--target", target)
    assert "reads tap 9, and the target has 8 layers" in said


def test_ids_that_sglang_counts_otherwise_for_deepseek(run: Run, make: Make, tmp_path: Path) -> None:
    """It adds one to them where the first is 1, and takes them as they are where it is not."""
    of = make(tiny.deepseek, seed=1, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4)
    like = make(tiny_eagle3.target)
    export(run, make(tiny_eagle3.head, of=like), tmp_path / "o", "sglang", "--target", of)
    assert Checkpoint(tmp_path / "o").config["eagle_config"][IDS_KEY] == [1, 3, 4]
    for taps in ((1, 4, 5), (3, 4, 6)):
        said = refused(run, make(tiny_eagle3.head, of=like, taps=taps), tmp_path / "p", "sglang", "--target", of)
        assert f"would take taps {', '.join(map(str, taps))} for others" in said


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_the_embedding_of_a_deepseek_target_is_no_tap_for_vllm(run: Run, make: Make, tmp_path: Path, to: str) -> None:
    """Nothing is added to the embedding yet where vLLM adds a residual to it; of a Llama it asks first."""
    of = make(tiny.deepseek, seed=1, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4)
    like = make(tiny_eagle3.target)
    head = make(tiny_eagle3.head, of=like, taps=(0, 4, 5))
    assert "vLLM does not run it: tap 0, the embedding" in refused(run, head, tmp_path / "o", to, "--target", of)
    export(run, head, tmp_path / "o", to, "--target", like)


def test_contradictions_are_errors(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target)
    two = changed(tmp_path / "two", source, lambda config, tensors: config.update(num_hidden_layers=2))
    assert "num_hidden_layers is 2, the tensors are those of 1 layer" in refused(run, two, tmp_path / "o", "vllm")

    def empty(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] = torch.zeros(0, 96)

    hollow = changed(tmp_path / "hollow", source, empty)
    assert "tensor fc.weight: has no elements" in refused(run, hollow, tmp_path / "o", "vllm")


def test_directories(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    done = run("export", source, out, "--to", "vllm")
    assert done.code == 2
    assert "exists" in done.err
    assert (out / "mine").read_text() == "mine"
    assert run("export", source, out, "--to", "vllm", "--force").code == 0
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "specctl.json",
        "RUN.md",
    }
    said = refused(run, tmp_path / "absent", tmp_path / "o", "vllm")
    assert "no such directory" in said
    assert "is no draft" in refused(run, broken(tmp_path / "b", source), tmp_path / "o", "vllm")


def broken(path: Path, of: Path) -> Path:
    config = {"model_type": "gemma", "vocab_size": 264}
    return tiny.write(path, config, {"some.weight": torch.ones(2)}, tokenizer=False)


# The reader check


def planted(monkeypatch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    ("to", "edit", "said"),
    [
        ("vllm", lambda c: c.update({IDS_KEY: [3, 5, 6], "eagle_config": None}), "comes to taps 3, 5, 6"),
        (
            "sglang",
            lambda c: c["eagle_config"].update({IDS_KEY: [2, 4, 5]}),
            "SGLang reads taps 3, 5, 6, the head 2, 4, 5",
        ),
        (
            "speculators",
            lambda c: c.pop("norm_before_residual"),
            "takes norm_before_residual for true, the head has false",
        ),
        (
            "vllm",
            lambda c: [each.update(norm_output=True) for each in (c, c["eagle_config"])],
            "takes norm_output for true, the head has false",
        ),
        (
            "vllm",
            lambda c: c.update(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
            "takes rope (theta) for 10000.0, the head has 500000.0",
        ),
        (
            "vllm",
            lambda c: c.update(max_position_embeddings=128),
            "takes max_position_embeddings for 128, the head has 256",
        ),
        ("vllm", lambda c: c.update(rms_norm_eps=1e-6), "takes rms_norm_eps for 1e-06, the head has 1e-05"),
        (
            "speculators",
            lambda c: c["transformer_layer_config"].pop("rms_norm_eps"),
            "vLLM does not load it: transformer_layer_config has no rms_norm_eps",
        ),
        ("sglang", lambda c: c.update(tie_word_embeddings=True), "SGLang passes over tensor lm_head.weight"),
        ("sglang", lambda c: c.update(draft_vocab_size=None), "lm_head.weight has 87 rows"),
    ],
)
def test_a_wrong_description_fails_and_leaves_nothing(
    run: Run, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, edit: Any, said: str
) -> None:
    """Whatever the writer of the layout got wrong."""
    of = make(tiny_eagle3.target, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    right = layouts.written

    def wrong(*arguments: Any) -> dict[str, Any]:
        config = json.loads(json.dumps(right(*arguments)))
        edit(config)
        return config

    monkeypatch.setattr(layouts, "written", wrong)
    source = make(tiny_eagle3.head, of=of, ids=IDS)
    assert said in refused(run, source, tmp_path / "o", to, "--target", of)


@pytest.mark.parametrize(
    ("to", "edit", "said"),
    [
        ("vllm", lambda t: t["norm.weight"].add_(1), "would read other numbers in tensor norm.weight"),
        ("vllm", lambda t: t["fc.weight"].copy_(t["fc.weight"].roll(32, 1)), "other numbers in tensor fc.weight"),
        ("vllm", lambda t: t["d2t"].add_(1), "t2d says id"),
        ("vllm", lambda t: (t["d2t"].add_(-1)[:1].zero_(), t.pop("t2d")), "take rows of the head for other token ids"),
        ("sglang", lambda t: t.pop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
        (
            "sglang",
            lambda t: t.update({"layers.0.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")}),
            "SGLang leaves parameter midlayer.hidden_norm.weight as it was made",
        ),
    ],
)
def test_wrong_tensors_fail_and_leave_nothing(
    run: Run, make: Make, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, edit: Any, said: str
) -> None:
    from specctl.export.job import Job

    right = Job.write

    def wrong(self: Job, directory: Path, progress: Any) -> None:
        right(self, directory, progress)
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")

    monkeypatch.setattr(Job, "write", wrong)
    source = make(tiny_eagle3.head, of=target, ids=IDS)
    assert said in refused(run, source, tmp_path / "o", to)


def test_logits_are_compared(
    run: Run, make: Make, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description may be right and the module that is made of it another one all the same."""
    from specctl.export import eagle3

    right, calls = eagle3._logits, []

    def wrong(stored: Any) -> Tensor:
        calls.append(stored)
        return right(stored) + (len(calls) - 1) * 1e-4

    monkeypatch.setattr(eagle3, "_logits", wrong)
    said = refused(run, make(tiny_eagle3.head, of=target), tmp_path / "o", "vllm")
    assert "logits of the head as vLLM reads it differ by 0.0001" in said


# What goes along


def test_run_md_and_specctl_json(run: Run, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(tiny_eagle3.head, of=target, layout="speculators", ids=IDS, tokenizer=True)
    out = tmp_path / "out"
    report = export(run, source, out, "sglang", "--target", target)
    command = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {out} --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4"
    )
    assert report["commands"] == {"sglang": command}
    page = (out / "RUN.md").read_text()
    assert command in page
    assert tensors_sha(Checkpoint(target)) in page
    assert "SGLang 0.5.23" in page
    facts = json.loads((out / "specctl.json").read_text())
    assert (facts["kind"], facts["head"]["taps"], facts["head"]["vocabulary"]) == (
        "eagle3",
        list(TAPS),
        {"size": len(IDS), "of": 264},
    )
    assert facts["target"]["tensors_sha"] == tensors_sha(Checkpoint(target))
    assert (out / "tokenizer.json").exists()
    facts["acceptance"] = [
        {
            "class": "all",
            "temperature": 0.0,
            "k": 3,
            "accepted_per_position": [0.75, 0.5, 0.25],
            "mean_acceptance_length": 2.5,
        }
    ]
    facts["recipe"] = {"loss": {"steps": 5}}
    (out / "specctl.json").write_text(json.dumps(facts))
    report = export(run, out, tmp_path / "vllm", "vllm")
    spec = json.dumps({"method": "eagle3", "model": str(tmp_path / "vllm"), "num_speculative_tokens": 5})
    assert report["commands"] == {"vllm": f"vllm serve {target} --speculative-config '{spec}'"}
    page = (tmp_path / "vllm" / "RUN.md").read_text()
    assert "| all | 0 | 3 | 2.50 | 0.750, 0.500, 0.250 |" in page
    again = json.loads((tmp_path / "vllm" / "specctl.json").read_text())
    assert again["acceptance"] == facts["acceptance"]
    assert again["recipe"]["loss"] == {"steps": 5}
    assert again["recipe"]["export"] == {"source": str(out), "to": "vllm"}
    report = export(run, out, tmp_path / "speculators", "speculators")
    assert report["commands"] == {"vllm": f"vllm serve {tmp_path / 'speculators'}"}
    about = Checkpoint(tmp_path / "speculators").config["speculators_config"]
    assert about["verifier"] == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert about["proposal_methods"][0]["speculative_tokens"] == 5
