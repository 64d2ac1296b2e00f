"""specctl inspect: what it says is what is there, and nothing that could keep a model from running goes unsaid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import Ran, Run
from fixtures import Make
from safetensors.torch import save_file

from specctl import models
from specctl.checkpoint import LEGACY, SINGLE, Checkpoint
from specctl.errors import CheckpointError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def change_json(file: Path, **values: Any) -> None:
    found = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not tiny.ABSENT}))


@pytest.fixture
def copy(make: Make, tmp_path: Path) -> Path:
    """A tiny model of one's own, to break."""
    return Path(shutil.copytree(make(tiny.llama), tmp_path / "copy"))


def problems(ran: Ran) -> dict[str, str]:
    """What was found, to its severity."""
    return {problem["what"]: problem["severity"] for problem in json.loads(ran.out)["problems"]}


# -- what is there ----------------------------------------------------------------------------------------------------


def test_facts(run: Run, make: Make) -> None:
    path = make(tiny.llama, shards=2)
    ran = run("inspect", path, "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    config, tensors = tiny.read(path)
    assert found["path"] == str(path)
    assert found["servable"] is True
    assert found["model"] == {
        "family": "llama",
        "layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab_size": tiny.VOCAB,
        "context": config["max_position_embeddings"],
        "rope": "default",
        "rope_theta": 10000.0,
        "tied_head": False,
        "kv_bytes_per_token": 2 * 2 * 2 * 8 * 4,
        "latent": None,
        "experts": None,
        "experts_per_token": None,
    }
    parameters = sum(tensor.numel() for tensor in tensors.values())
    census = {"dtype": "float32", "tensors": len(tensors), "parameters": parameters, "bytes": 4 * parameters}
    assert found["weights"]["dtypes"] == [census]
    assert (found["weights"]["files"], found["weights"]["bytes"]) == (2, 4 * parameters)
    tokenizer = found["tokenizer"]
    assert (tokenizer["ids"], tokenizer["eos_id"], tokenizer["stop_ids"]) == (261, tiny.END, [tiny.END])
    assert tokenizer["special"]["eos_token"] == "<|end|>"
    assert tokenizer["chat_template"] is True
    assert problems(ran) == {"the vocabulary is padded: 264 rows for 261 token ids": "note"}


def test_text(run: Run, make: Make) -> None:
    ran = run("inspect", make(tiny.llama))
    assert ran.code == 0
    for words in ("family      llama", "2 of width 32", "float32: 21 tensors", "ends at     259", "can be served"):
        assert words in ran.out
    assert "-> nothing to do" in ran.out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family(run: Run, make: Make, family: str, tied: bool) -> None:
    """Whatever loads is servable, and is told as what it is."""
    path = make(tiny.llama, model_type=family, tie_word_embeddings=tied, dtype=torch.bfloat16)
    models.load(Checkpoint(path), torch.float32, torch.device("cpu"))
    ran = run("inspect", path, "--json")
    assert ran.code == 0
    model = json.loads(ran.out)["model"]
    assert (model["family"], model["tied_head"], model["kv_bytes_per_token"]) == (family, tied, 2 * 2 * 2 * 8 * 2)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("linear", {"factor": 2.0}, "linear x 2 from 256"),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64}, "yarn x 4 from 64"),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "llama3 x 8 from 64",
        ),
    ],
)
def test_rope(run: Run, make: Make, kind: str, values: dict[str, Any], said: str) -> None:
    path = make(tiny.llama, **tiny.rope(kind, theta=5e5, **values))
    model = json.loads(run("inspect", path, "--json").out)["model"]
    assert (model["rope"], model["rope_theta"]) == (said, 5e5)


def test_dynamic_rope_is_short(run: Run, copy: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 100}
    change_json(copy / "config.json", rope_parameters=rope)
    ran = run("inspect", copy, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["model"]["context"] == 100
    assert problems(ran)["dynamic rope is run up to 100 of 256 positions only"] == "note"


# -- what keeps it from running ---------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        _, tensors = tiny.read(path)
        del tensors[name]
        save_file(tensors, path / SINGLE)

    return change


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        _, tensors = tiny.read(path)
        save_file({**tensors, name: tensor}, path / SINGLE)

    return change


def with_config(**values: Any) -> Callable[[Path], None]:
    return lambda path: change_json(path / "config.json", **values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), ["1 tensor is missing: model.layers.1.mlp.up_proj.weight"]),
        (without("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings"]),
        (
            with_tensor("model.layers.7.x.weight", torch.ones(2)),
            ["not part of a llama model", "model.layers.7.x.weight"],
        ),
        (with_tensor("model.norm.weight", torch.ones(3)), ["model.norm.weight has shape [3]", "expects [32]"]),
        (
            with_tensor("model.norm.weight", torch.ones(32, dtype=torch.int8)),
            ["stored as int8: model.norm.weight", "not quantised"],
        ),
        (with_config(num_hidden_layers=10**9), ["num_hidden_layers is 1000000000", "21 tensors"]),
        (with_config(intermediate_size=2**62), ["no machine can hold"]),
        (with_config(intermediate_size=128), ["model.layers.0.mlp.down_proj.weight", "[32, 64]", "[32, 128]"]),
        (with_config(model_type="deepseek_v3"), ["deepseek_v3"]),
        (with_config(model_type="mistral", sliding_window=128), ["sliding_window"]),
        (with_config(num_local_experts=4), ["num_local_experts"]),
        (with_config(quantization_config={"quant_method": "awq"}), ["quantization_config", "awq"]),
        (with_config(hidden_size=tiny.ABSENT), ["hidden_size"]),
        (with_config(eos_token_id="</s>"), ["eos_token_id"]),
        (with_config(tie_word_embeddings=True), ["lm_head.weight differs from model.embed_tokens.weight"]),
        (lambda path: (path / "config.json").unlink(), ["config.json", "no such file"]),
        (lambda path: (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:-1]), [SINGLE, "cut short"]),
    ],
)
def test_not_servable(run: Run, copy: Path, change: Callable[[Path], Any], words: list[str]) -> None:
    if "eos_token_id" in words:
        change_json(copy / "generation_config.json", eos_token_id=tiny.ABSENT)
    change(copy)
    ran = run("inspect", copy)
    assert ran.code == 2
    assert ran.out.endswith("cannot be served\n")
    for word in words:
        assert word in ran.out
    assert "\nerror: " in ran.out
    assert "\n  -> " in ran.out
    found = json.loads(run("inspect", copy, "--json").out)
    assert found["servable"] is False
    if "eos_token_id" not in words:
        with pytest.raises(CheckpointError):
            models.load(Checkpoint(copy), torch.float32, torch.device("cpu"))


def test_a_tokenizer_that_cannot_be_read(run: Run, copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    ran = run("inspect", copy)
    assert ran.code == 2
    assert "error: " in ran.out
    assert "tokenizer.json" in ran.out
    assert run("generate", "--target", copy, "--token-ids", "5,6").code == 2


def test_what_can_be_told_is_told(run: Run, copy: Path) -> None:
    """An architecture that is not supported still has weights and a tokenizer."""
    change_json(copy / "config.json", model_type="new")
    found = json.loads(run("inspect", copy, "--json").out)
    assert found["model"] is None
    assert found["weights"]["tensors"] == 21
    assert found["tokenizer"]["ids"] == 261


def test_no_directory(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path / "absent")
    assert (ran.code, ran.out) == (2, "")
    assert "absent: no such directory" in ran.err


# -- what its owner should know ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "severity", "what"),
    [
        (lambda path: (path / "chat_template.jinja").unlink(), "warning", "no chat template"),
        (lambda path: (path / "tokenizer.json").unlink(), "warning", "tokenizer.json is missing"),
        (lambda path: (path / "chat_template.jinja").write_text("{{ x"), "warning", "unexpected end of template"),
        (
            lambda path: change_json(path / "generation_config.json", eos_token_id=[257]),
            "warning",
            "own end of text is 259, but an answer ends at 257 only",
        ),
        (
            lambda path: change_json(path / "generation_config.json", eos_token_id=[257, 259]),
            "note",
            "259 in config.json and 257, 259 in generation_config.json",
        ),
        (with_config(bos_token_id=300), "note", "padded"),
    ],
)
def test_servable_with_a_word(run: Run, copy: Path, change: Callable[[Path], Any], severity: str, what: str) -> None:
    change(copy)
    ran = run("inspect", copy, "--json")
    assert ran.code == 0
    assert [found for said, found in problems(ran).items() if what in said] == [severity]


def test_no_end_of_text_anywhere(run: Run, copy: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        change_json(copy / name, eos_token_id=tiny.ABSENT)
    change_json(copy / "tokenizer_config.json", eos_token=tiny.ABSENT)
    ran = run("inspect", copy, "--json")
    assert ran.code == 0
    assert [said for said in problems(ran) if "no file names an end-of-text token" in said]


def test_more_ids_than_rows(run: Run, tmp_path: Path) -> None:
    tiny.llama(tmp_path / "short", vocab_size=200)
    ran = run("inspect", tmp_path / "short", "--json")
    assert problems(ran)["the tokenizer has ids up to 260, the model has rows for 200"] == "warning"


def test_a_head_stored_twice(run: Run, make: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(make(tiny.llama, tie_word_embeddings=True), tmp_path / "copy"))
    _, tensors = tiny.read(path)
    with_tensor("lm_head.weight", tensors["model.embed_tokens.weight"].clone())(path)
    ran = run("inspect", path, "--json")
    assert ran.code == 0
    assert [severity for said, severity in problems(ran).items() if said.startswith("lm_head.weight is stored")] == [
        "note"
    ]


def test_legacy_weights(run: Run, copy: Path) -> None:
    _, tensors = tiny.read(copy)
    torch.save(tensors, copy / LEGACY)
    (copy / SINGLE).unlink()
    ran = run("inspect", copy, "--json")
    assert ran.code == 0
    assert [severity for said, severity in problems(ran).items() if LEGACY in said] == ["warning"]
