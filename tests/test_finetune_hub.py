"""Hub data sets, read by the library made for them from a hub on this machine, in a process with a cache of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tiny
from fixtures import Make
from local_data_hub import local_data_hub

ROWS = {
    "train": [{"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]}],
    "test": [
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ],
}


# Loading the library takes longer than all else, so one process does both: a run that works and one that does not.
CODE = """
import sys
from specctl.cli.main import main
base = ["finetune", "--kind", "llama", "--target", sys.argv[1], "--dry-run", "--json"]
assert main([*base, "--data", "org/set", "--data", "org/set:test"]) == 0
sys.exit(main([*base, "--data", "org/set:validation"]))
"""


def test_splits_of_a_hub_data_set(make: Make, tmp_path: Path) -> None:
    """The split that is named, "train" by default; of one that is not there the error names those that are."""
    files = tmp_path / "files"
    files.mkdir()
    for split, rows in ROWS.items():
        (files / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with local_data_hub(files) as hub:
        command = [sys.executable, "-c", CODE, str(make(tiny.byte_tokenizer))]
        environment = hub.environment(tmp_path / "home")
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["rows"], report["kept"]) == (3, 2)
    assert report["skips"] == [{"id": "b", "line": 1, "reason": "has no turns"}]
    error = ran.stderr.splitlines()[-1]
    assert "org/set: no such file, and the hub data set org/set:validation cannot be had" in error
    assert "'train'" in error
    assert "'test'" in error
