"""`specctl profile`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specctl.cli.options import force_option, integers, json_option, model_options, number, placement_options
from specctl.errors import UsageError
from specctl.options import ModelOptions, Offer

if TYPE_CHECKING:
    from specctl.profile.base import Base

FILE = click.Path(dir_okay=False, path_type=Path)
ENGINES = ("vllm", "sglang")


@click.command()
@click.option("--target", metavar="MODEL", help="The model to measure here, by directory or hub id.")
@click.option(
    "--draft",
    metavar="DRAFT|ngram|mtp",
    help="What drafts, as in bench; ngram has no passes to time. Without it only the target's steps are measured.",
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    help="Instead of --target: measure a running engine that speaks this API; `specctl serve` speaks vllm's.",
)
@click.option("--url", metavar="URL", help="With --engine: where it runs, like http://127.0.0.1:8000.")
@click.option("--model", metavar="NAME", help="With --engine: which of several served models.")
@click.option("--api-key-file", type=FILE, metavar="FILE", help="With --engine: the key to send, in a line.")
@click.option("--hardware", metavar="NAME", help="With --engine: what it runs on, which no engine tells.")
@click.option(
    "--steps",
    type=click.IntRange(4, 4096),
    metavar="N",
    help="With --engine: steps of each request that are timed a round; default 32.",
)
@click.option(
    "--acceptance-length",
    type=number(least=1),
    metavar="N",
    help="With --engine: the mean length it was started to accept (vLLM: rejection_sample_method synthetic, SGLang: "
    "SGLANG_SIMULATE_ACC_LEN), which is then checked.",
)
@click.option(
    "--merge",
    metavar="NAME|FILE",
    help="Put what is measured into this profile, a file or a shipped one, in place of its own cells.",
)
@click.option("--same-model", is_flag=True, help="With --merge: the models are the same but for their names.")
@click.option("--output", required=True, type=FILE, metavar="PROFILE.yaml", help="The profile.")
@click.option("--batches", type=integers(1), metavar="1,2,4,8", help="Sequences of a step; default 1,2,4,8.")
@click.option(
    "--contexts",
    type=integers(1),
    metavar="512,2048",
    help="Tokens before a step. Default: 512 and 2048, or those of --merge, as far as the model goes, else half of "
    "what it holds.",
)
@click.option(
    "--repeats", type=click.IntRange(min=3), metavar="N", help="Rounds of all passes; default 15, with --engine 5."
)
@placement_options
@force_option
@json_option
@model_options
def command(
    target: str | None,
    draft: str | None,
    url: str | None,
    model: str | None,
    api_key_file: Path | None,
    hardware: str | None,
    steps: int | None,
    acceptance_length: float | None,
    merge: str | None,
    same_model: bool,
    output: Path,
    batches: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
    repeats: int | None,
    offer: Offer,
    force: bool,
    as_json: bool,
    model_options: ModelOptions,
) -> None:
    """Measure what steps cost, over batches and contexts, for `specctl tune`. Every measurement takes its turn, round
    after round; medians are kept.

    With --target it is done here, pass by pass: plain steps, verification of 1 to 8 tokens, draft steps, prefill and
    the engine itself. With --engine and --url a running engine is measured from outside, by streaming: steps as a
    whole, at the draft length that it runs. A server without speculation gives plain steps, one with it those of its
    K; the second goes into the profile of the first with --merge.

    Use the machine, and the engine, for nothing else meanwhile.
    """
    of_engine = {
        "--url": url,
        "--model": model,
        "--api-key-file": api_key_file,
        "--hardware": hardware,
        "--steps": steps,
        "--acceptance-length": acceptance_length,
    }
    of_target = {"--target": target, "--draft": draft}
    _check(offer, of_target, of_engine, model_options)
    _check_merge(merge, same_model, offer)
    if offer.engine is None:
        assert target is not None
        from specctl.profile.command import Wishes, profile

        wishes = Wishes(output, batches, contexts, repeats, force, _base(merge, offer), same_model)
        profile(target, draft, model_options, wishes, as_json=as_json)
        return
    assert url is not None
    from specctl.profile.served.command import EngineWishes, profile_engine
    from specctl.profile.served.document import Said

    said = Said(hardware, offer.tp, offer.ep, offer.quantisation, offer.kv_dtype)
    profile_engine(
        EngineWishes(
            kind=offer.engine,
            url=url,
            output=output,
            said=said,
            model=model,
            key_file=api_key_file,
            batches=batches,
            contexts=contexts,
            repeats=repeats,
            steps=steps,
            forced=acceptance_length,
            force=force,
            base=_base(merge, offer),
            same_model=same_model,
        ),
        as_json=as_json,
    )


def _check(
    offer: Offer, of_target: Mapping[str, str | None], of_engine: Mapping[str, object], model_options: ModelOptions
) -> None:
    """It is a model or an engine, and what belongs to the other one is refused."""
    if offer.engine is None:
        for flag, value in of_engine.items():
            if value is not None:
                raise UsageError(f"{flag} is given without --engine, which it belongs to")
        if of_target["--target"] is None:
            raise UsageError("nothing to measure is named: a model with --target, or an engine with --engine and --url")
        return
    for flag, given in of_target.items():
        if given is not None:
            raise UsageError(f"--engine and {flag} are both given: the engine has its own models; leave one out")
    if model_options != ModelOptions():
        raise UsageError("--engine is given, so no model is run here; leave out --dtype, --device and their like")
    if of_engine["--url"] is None:
        raise UsageError(f"--engine {offer.engine} is given without --url, the address that it runs at")


def _check_merge(merge: str | None, same_model: bool, offer: Offer) -> None:
    if merge is not None:
        return
    if same_model:
        raise UsageError("--same-model is given without --merge, which it belongs to")
    facts = () if offer.engine is None else ("tp", "ep", "quantisation", "kv_dtype")
    for key, value in vars(offer).items():
        if value is not None and key not in ("engine", *facts):
            flag = f"--{key.replace('_', '-')}"
            raise UsageError(f"{flag} is given without --merge, whose constants it would be for")


def _base(merge: str | None, offer: Offer) -> Base | None:
    if merge is None:
        return None
    from specctl.profile.base import open_base

    return open_base(merge, offer)
