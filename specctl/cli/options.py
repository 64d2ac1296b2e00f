"""The options that commands share, collected into frozen values of strings and numbers. Nothing here loads torch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions, Offer
from specctl.sampling.params import Accept

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
ATTENTION = ("auto", "torch", "flashinfer")
WEIGHTS = ("bf16", "fp8", "fp8-block")
CACHES = ("bf16", "fp8")


def number(least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Callable[[Any], float]:
    """Reads a finite number; `above` is outside its bounds, `least` and `most` are inside."""

    def read(value: Any) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and least <= number <= most and number > above:
            return number
        bounds = {"above": above, "at least": least, "at most": most}
        said = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))
        raise click.BadParameter(f"{value!r} is no number {said}".rstrip() + ".")

    return read


def integers(least: int = 0) -> Callable[[Any], tuple[int, ...]]:
    """Reads whole numbers from `least` up, separated by commas."""

    def read(value: Any) -> tuple[int, ...]:
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch(r"[0-9]{1,18}", part) and int(part) >= least for part in parts):
            raise click.BadParameter(f"{value!r} is no list of integers from {least} up, like 1,2,3.")
        return tuple(int(part) for part in parts)

    return read


def device(value: str) -> str:
    """Reads auto, cpu, cuda or cuda:i. Whether the device is there is found out when it is used."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise click.BadParameter(f"{value!r} is no device, expected auto, cpu, cuda or cuda:i.")
    return value


def accept(value: str) -> Accept:
    """Reads exact, coupled, typical or threshold=T."""
    try:
        return Accept.parse(value)
    except UsageError as error:
        raise click.BadParameter(f"{error}.") from None


def model_options(function: Callable[..., Any]) -> Any:
    """Options of a command that runs a model; it is called with them as `model_options`."""
    positive = click.IntRange(min=1)
    return _collected(
        function,
        "model_options",
        ModelOptions,
        _option(
            "--dtype", type=click.Choice(DTYPES), default="auto", help="Numbers to compute in; auto: the checkpoint's."
        ),
        _option("--device", type=device, default="auto", metavar="auto|cpu|cuda[:i]", help="Where to run."),
        _option("--attention", type=click.Choice(ATTENTION), default="auto", help="Attention backend."),
        _option("--max-model-len", type=positive, metavar="N", help="Longest prompt and answer together, in tokens."),
        _option("--kv-memory", type=number(above=0), metavar="GiB", help="Memory for the KV cache."),
        _option("--threads", type=click.IntRange(1, 1024), metavar="N", help="CPU threads."),
    )


def offer_options(function: Callable[..., Any]) -> Any:
    """Options of a command that computes step times from constants; it is called with them as `offer`."""
    engine = _option("--engine", metavar="NAME", help="Whose kernels and overheads: vllm, sglang or trtllm.")
    return engine(placement_options(function))


def placement_options(function: Callable[..., Any]) -> Any:
    """The same without --engine, which the command has itself."""
    positive = click.IntRange(1, 4096)
    return _collected(
        function,
        "offer",
        Offer,
        _option(
            "--model-config",
            metavar="DIR|HUB ID",
            help="With a profile of constants: whose steps to compute. Only its config.json is read.",
        ),
        _option(
            "--draft-config",
            metavar="DIR|HUB ID|mtp|eagle3",
            help="Likewise, what drafts for it; default: something that has no passes to run, like ngram.",
        ),
        _option("--tp", type=positive, metavar="N", help="Devices that share every layer; default 1."),
        _option(
            "--ep", type=positive, metavar="N", help="Of these, over how many whole experts are spread; default 1."
        ),
        _option("--nodes", type=positive, metavar="N", help="Nodes they stand in; default: as few as hold them."),
        _option("--quantisation", type=click.Choice(WEIGHTS), help="Of the weights; default: the checkpoint's."),
        _option("--kv-dtype", type=click.Choice(CACHES), help="Of the KV cache; default bf16."),
    )


def decoding_options(batch: int = 1, many_drafts: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Options of a command that decodes; it is called with them as `decoding_options`. `batch`: the default of --batch;
    `many_drafts`: --draft may be repeated."""

    def decorate(function: Callable[..., Any]) -> Any:
        again = " May be repeated." if many_drafts else ""
        return _collected(
            function,
            "decoding_options",
            DecodingOptions,
            _option(
                "--draft",
                "drafts",
                multiple=many_drafts,
                callback=_as_tuple,
                metavar="DRAFT|ngram|mtp",
                help="What drafts: a model, an MTP layer or an EAGLE-3 head, by directory or hub id; mtp, the MTP "
                f"layer inside the target; or ngram, which looks in the text itself.{again}",
            ),
            _option(
                "--k",
                type=click.IntRange(min=0),
                metavar="N",
                help="Tokens a draft proposes, over the policy's; default: what it was trained for (an MTP layer: 1), "
                "else 3.",
            ),
            _option(
                "--policy",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                metavar="FILE",
                help="POLICY.yaml that gives k for each batch size and context.",
            ),
            _option(
                "--batch", type=click.IntRange(1, 65536), default=batch, metavar="N", help="Sequences run at a time."
            ),
            _option(
                "--accept",
                type=accept,
                metavar="METHOD",
                help="exact or coupled (lossless), typical or threshold=T (lossy). Default: exact, but coupled for a "
                "request with its own seed.",
            ),
            _option("--max-tokens", type=click.IntRange(min=1), default=128, metavar="N", help="Longest answer."),
            _option("--temperature", type=number(least=0), default=0.0, metavar="T", help="0: the likeliest token."),
            _option(
                "--top-k",
                type=click.IntRange(min=0),
                default=0,
                metavar="N",
                help="Sample from the N likeliest; 0: all.",
            ),
            _option(
                "--top-p",
                type=number(above=0, most=1),
                default=1.0,
                metavar="P",
                help="Sample from the likeliest that reach P.",
            ),
            _option(
                "--min-p",
                type=number(least=0, most=1),
                default=0.0,
                metavar="P",
                help="Drop tokens below P times the likeliest.",
            ),
            _option("--seed", type=click.IntRange(0, 2**63 - 1), metavar="N", help="Seed of the run."),
            _option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token, up to --max-tokens."),
        )

    return decorate


def prompt_options(function: Function) -> Function:
    """--prompts and --prompt-field, for `specctl.prompts.read_prompts`."""
    prompts = click.option(
        "--prompts",
        metavar="FILE",
        help="JSONL with one of messages, prompt and token_ids a line, and id, class and max_tokens if wished; - reads "
        "standard input.",
    )
    field = click.option(
        "--prompt-field", metavar="NAME", help="Read this field of a file of another form as the prompt."
    )
    return prompts(field(function))


def json_option(function: Function) -> Function:
    """--json, as `as_json`: one object on stdout, everything else on stderr."""
    option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
    return option(function)


def force_option(function: Function) -> Function:
    """--force, for specctl.output."""
    option = click.option("--force", is_flag=True, help="Replace an output that is there.")
    return option(function)


_Option = Callable[[Any], Any]


def _option(*names: str, **settings: Any) -> _Option:
    return click.option(*names, show_default=settings.get("default") not in (None, ()), **settings)


def _as_tuple(_ctx: click.Context, _parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)


def _collected(function: Any, name: str, into: type[Any], *options: _Option) -> Any:
    """`function` with the options, called with one `into` as `name` instead of their values."""

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        return function(*args, **{name: into(**{f.name: values.pop(f.name) for f in fields(into)})}, **values)

    for option in reversed(options):
        call = option(call)
    return call
