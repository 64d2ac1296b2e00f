"""The shared options: what they collect into, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from specctl.cli.options import decoding_options, integers, json_option, model_options, prompt_options
from specctl.options import DecodingOptions, ModelOptions
from specctl.sampling.params import Accept, SamplingParams


def parse(*arguments: str, batch: int = 1, many_drafts: bool = False) -> dict[str, Any]:
    """What a command with every shared option is called with."""
    called: dict[str, Any] = {}

    @click.command
    @prompt_options
    @json_option
    @decoding_options(batch=batch, many_drafts=many_drafts)
    @model_options
    def command(**values: Any) -> None:
        called.update(values)

    command.main(list(arguments), standalone_mode=False)
    return called


def decoding(*arguments: str, **settings: Any) -> DecodingOptions:
    options: DecodingOptions = parse(*arguments, **settings)["decoding_options"]
    return options


def refused(arguments: Sequence[str], *words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(*arguments)
    for word in words:
        assert word in caught.value.format_message()


def test_defaults_are_the_contract() -> None:
    values = parse()
    assert values["model_options"] == ModelOptions("auto", "auto", "auto", None, None, None)
    assert values["decoding_options"] == DecodingOptions()
    assert {key: values[key] for key in ("prompts", "prompt_field", "as_json")} == {
        "prompts": None,
        "prompt_field": None,
        "as_json": False,
    }
    assert decoding().batch == 1
    assert decoding(batch=32).batch == 32
    assert decoding().params() == SamplingParams()


def test_everything_set(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.touch()
    words = "--dtype bfloat16 --device cuda:1 --attention torch --max-model-len 512 --kv-memory 0.5 --threads 2"
    words += f" --draft ngram --k 0 --policy {policy} --batch 8 --accept threshold=0.5 --max-tokens 7 --temperature 0.7"
    words += " --top-k 40 --top-p 0.9 --min-p 0.05 --seed 3 --ignore-eos --prompts f.jsonl --prompt-field text --json"
    values = parse(*words.split())
    assert values["model_options"] == ModelOptions("bfloat16", "cuda:1", "torch", 512, 0.5, 2)
    accept = Accept("threshold", threshold=0.5)
    assert values["decoding_options"] == DecodingOptions(
        ("ngram",), 0, policy, 8, accept, 7, 0.7, 40, 0.9, 0.05, 3, ignore_eos=True
    )
    assert (values["prompts"], values["prompt_field"], values["as_json"]) == ("f.jsonl", "text", True)


def test_drafts() -> None:
    assert decoding().draft is None
    assert decoding("--draft", "out/draft").draft == "out/draft"
    assert decoding("--draft", "a", "--draft", "b").draft == "b"
    assert decoding("--draft", "a", "--draft", "b", many_drafts=True).drafts == ("a", "b")
    assert decoding(many_drafts=True).drafts == ()


def test_params() -> None:
    options = decoding("--max-tokens", "9", "--temperature", "1", "--seed", "5", "--accept", "typical")
    params = options.params(stop=("x",))
    assert (params.max_tokens, params.temperature, params.stop) == (9, 1.0, ("x",))
    assert params.accept == Accept("typical")
    assert params.seed is None, "the seed of a run is not a request's, which would select coupled acceptance"
    assert options.params(max_tokens=2).max_tokens == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dtype fp8", ["--dtype", "bfloat16"]),
        ("--device gpu", ["--device", "cuda:i"]),
        ("--device cuda:", ["--device"]),
        ("--attention flash", ["--attention", "flashinfer"]),
        ("--max-model-len 0", ["--max-model-len"]),
        ("--kv-memory 0", ["--kv-memory", "above 0"]),
        ("--kv-memory nan", ["--kv-memory", "nan"]),
        ("--kv-memory 4GiB", ["--kv-memory", "4GiB"]),
        ("--threads 0", ["--threads"]),
        ("--k -1", ["--k"]),
        ("--k many", ["--k"]),
        ("--policy absent.yaml", ["--policy", "absent.yaml"]),
        ("--batch 0", ["--batch"]),
        ("--accept sometimes", ["--accept", "typical"]),
        ("--accept threshold", ["--accept", "threshold=T"]),
        ("--accept threshold=1.5", ["--accept", "1.5"]),
        ("--accept threshold=nan", ["--accept", "nan"]),
        ("--accept exact=0.5", ["--accept"]),
        ("--max-tokens 0", ["--max-tokens"]),
        ("--temperature -0.1", ["--temperature", "at least 0"]),
        ("--temperature nan", ["--temperature"]),
        ("--temperature inf", ["--temperature"]),
        ("--top-k -1", ["--top-k"]),
        ("--top-p 0", ["--top-p", "above 0 and at most 1"]),
        ("--top-p 1.1", ["--top-p"]),
        ("--min-p 1.1", ["--min-p"]),
        ("--seed -1", ["--seed"]),
        ("--max-token 3", ["--max-token", "--max-tokens"]),
        ("--temprature 3", ["--temprature", "--temperature"]),
        ("--k", ["--k"]),
    ],
)
def test_refused(arguments: str, words: list[str]) -> None:
    refused(arguments.split(), *words)


def test_integers() -> None:
    assert integers()("0, 12,3") == (0, 12, 3)
    for text in ("", "1,,2", "1,-2", "1.0", "x", "9" * 20, "²"):
        with pytest.raises(click.BadParameter, match="1,2,3"):
            integers()(text)
    with pytest.raises(click.BadParameter, match="from 1 up"):
        integers(least=1)("1,0")
