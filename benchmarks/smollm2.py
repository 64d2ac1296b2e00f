"""How fast this machine decodes SmolLM2-135M, plainly and speculatively, against transformers. Run by `make bench`:

    python benchmarks/smollm2.py [--target MODEL] [--prompts FILE] [--output REPORT.json] [options of specctl bench]

Without --target it is the quickstart's model, without --prompts the quickstart's prompts. Everything is done by
`specctl bench`, interleaved, with repeats and the texts compared; the report carries its provenance.
"""

from __future__ import annotations

import sys
from pathlib import Path

import specctl
from specctl.cli.main import main

DEFAULTS = {
    "--draft": "ngram",
    "--sweep-k": "1,3,5",
    "--baseline": "transformers",
    "--max-tokens": "64",
    "--output": "bench-smollm2/REPORT.json",
}


def command(arguments: list[str]) -> list[str]:
    given = {argument for argument in arguments if argument.startswith("--")}
    defaults = dict(DEFAULTS)
    if "--target" not in given:
        from specctl.quickstart.model import small_model

        defaults["--target"] = str(small_model(lambda sentence: print(sentence, file=sys.stderr)))
    if "--prompts" not in given:
        defaults["--prompts"] = str(Path(specctl.__file__).parent / "quickstart" / "prompts.jsonl")
    chosen = [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
    return ["bench", *chosen, "--anatomy", "--force", *arguments]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
