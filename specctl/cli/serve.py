"""`specctl serve`."""

from __future__ import annotations

from pathlib import Path

import click

from specctl.cli.main import State
from specctl.cli.options import decoding_options, model_options, number
from specctl.errors import UsageError
from specctl.options import DecodingOptions, ModelOptions
from specctl.prompts import read_prompts


@click.command()
@click.option("--target", required=True, metavar="MODEL", help="The model, by directory or hub id.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: any free one.")
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keys of which a client must send one, one a line.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Answers that may wait besides the --batch that run; a request that comes while there is room is taken whole.",
)
@click.option("--verify", metavar="FILE", help="Prove the speed-up on these prompts (JSONL) before the port opens.")
@click.option("--prompt-field", metavar="NAME", help="Read this field of a --verify file of another form.")
@click.option("--min-speedup", type=number(above=0), metavar="X", help="What --verify must find, else exit 1.")
@click.option("--fallback", type=click.Choice(("plain",)), help="Serve without the draft when --verify fails.")
@decoding_options(batch=32)
@model_options
def command(
    target: str,
    host: str,
    port: int,
    api_key_file: Path | None,
    max_queue: int,
    verify: str | None,
    prompt_field: str | None,
    min_speedup: float | None,
    fallback: str | None,
    decoding_options: DecodingOptions,
    model_options: ModelOptions,
) -> None:
    """Serve over an OpenAI-compatible API. Decoding options are the defaults of what a request leaves open.

    On SIGTERM or Ctrl-C nobody is taken in any more, and answers under way have 30 seconds to end; a second signal ends
    the server at once. /health and /metrics ask for no key.
    """
    for flag, value in (("--min-speedup", min_speedup), ("--fallback", fallback), ("--prompt-field", prompt_field)):
        if verify is None and value is not None:
            raise UsageError(f"{flag} is given without --verify, which it belongs to")
    prompts = None if verify is None else read_prompts(verify, prompt_field)
    debug = click.get_current_context().ensure_object(State).debug

    from specctl.serve.server import ServeOptions, serve

    options = ServeOptions(host, port, api_key_file, max_queue, prompts, min_speedup, fallback == "plain", debug)
    serve(target, model_options, decoding_options, options)
