"""POLICY.yaml: read strictly, looked up once a step, refused for a pair it was not made for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from conftest import Run
from fixtures import Make

from specctl.checkpoint import Checkpoint
from specctl.digest import tensors_sha
from specctl.errors import UsageError
from specctl.schemas.policy import read_policy

POLICY: dict[str, Any] = {
    "schema": "specctl.policy/1",
    "provenance": None,
    "target": {"name": "t", "digest": None},
    "draft": {"kind": "llama", "digest": None, "max_k": 8},
    "accept": {"method": "exact"},
    "at_k0": "follow",
    "k": [
        {"batch": [1, 4], "context": [1, 512], "k": 5, "confidence": None, "speedup": [1.1, 1.2, 1.3]},
        {"batch": [1, 4], "context": [513, None], "k": 3, "confidence": 0.4, "speedup": None},
        {"batch": [5, None], "context": [1, None], "k": 0, "confidence": None, "speedup": None},
    ],
}
PROMPT = "256,104,101,108,108,111"


def write(path: Path, *keys: Any, value: Any = None, drop: bool = False) -> Path:
    """The policy above with one value changed (or dropped), as a file."""
    policy = copy.deepcopy(POLICY)
    at: Any = policy
    for key in keys[:-1]:
        at = at[key]
    if drop:
        del at[keys[-1]]
    elif keys:
        at[keys[-1]] = value
    file = path / "policy.yaml"
    file.write_text(yaml.safe_dump(policy))
    return file


def test_cells_are_inclusive_ranges(tmp_path: Path) -> None:
    policy = read_policy(write(tmp_path))
    found = {(b, c): policy.lookup(b, c).k for b in (1, 4, 5, 99) for c in (0, 1, 512, 512.4, 513, 10**6)}
    assert found == {(b, c): 0 if b > 4 else 5 if c < 512.5 else 3 for b, c in found}
    assert policy.lookup(2, 600).confidence == 0.4
    assert policy.max_k == 5


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("k", 0, "draft_lenght"), 4, "draft_lenght is unknown"),
        (("acept",), {"method": "exact"}, "acept is unknown; did you mean accept?"),
        (("accept", "treshold"), 0.5, "accept.treshold is unknown; did you mean threshold?"),
        (("accept",), {"method": "threshold", "threshold": "0,75"}, "accept.threshold is '0,75'"),
        (("accept",), {"method": "threshold"}, "goes with a threshold"),
        (("accept",), {"method": "exact", "threshold": 0.5}, "goes without a threshold"),
        (("accept", "method"), "sloppy", "accept.method is 'sloppy'"),
        (("k", 0, "k"), -1, "k.0.k is -1"),
        (("k", 0, "k"), True, "k.0.k is True"),
        (("k", 0, "k"), 9, "more than the draft's max_k 8"),
        (("k", 1, "confidence"), 1.5, "k.1.confidence is 1.5"),
        (("k", 1, "confidence"), float("nan"), "k.1.confidence is nan"),
        (("k", 2, "batch"), [6, None], "batch ranges must follow each other"),
        (("k", 2, "batch"), [4, None], "batch ranges must follow each other"),
        (("k", 2, "batch"), [5, 8], "the last hi must be null"),
        (("k", 1, "context"), [514, None], "context (batch [1, 4]) ranges must follow"),
        (("k", 1, "context"), [513, 512], "is empty"),
        (("k",), [], "k is []"),
        (("schema",), "specctl.policy/2", "expected 'specctl.policy/1'"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, keys: tuple[Any, ...], value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=r"policy\.yaml: ") as error:
        read_policy(write(tmp_path, *keys, value=value))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keys", [("k",), ("draft",), ("k", 0, "k"), ("accept", "method"), ("schema",)])
def test_a_missing_key_is_named(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=f"key {'.'.join(map(str, keys))} is missing"):
        read_policy(write(tmp_path, *keys, drop=True))


@pytest.mark.parametrize(
    "text",
    ["", "- 1", "k: [", "!!python/object/apply:os.system ['true']", "\x00"],
    ids=["empty", "list", "bad", "code", "nul"],
)
def test_what_is_no_policy_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"policy\.yaml: "):
        read_policy(file)


def test_keys_that_disagree_are_named_without_the_document(tmp_path: Path) -> None:
    path = write(tmp_path, "k", 0, "batch", value=[2, None])
    with pytest.raises(UsageError) as caught:
        read_policy(path)
    assert "batch" in str(caught.value)
    assert "{" not in str(caught.value)


def test_an_unknown_key_is_told_those_of_its_own_object(tmp_path: Path) -> None:
    path = write(tmp_path, "draft_lenght", value=3)
    with pytest.raises(UsageError, match=r"key draft_lenght is unknown") as caught:
        read_policy(path)
    assert "torch" not in str(caught.value)


def test_generate_takes_k_from_the_policy_and_says_so(make: Make, run: Run, tmp_path: Path) -> None:
    target = make(tiny.llama, seed=1)
    draft = make(tiny.near, of=target)
    asked = ("generate", "--target", target, "--draft", draft, "--token-ids", PROMPT, "--max-tokens", 20, "--json")
    by_policy = run(*asked, "--policy", write(tmp_path))
    assert by_policy.code == 0, by_policy.err
    assert '"draft_length": null' in by_policy.out
    by_k = run(*asked, "--k", 5)
    assert '"draft_length": 5' in by_k.out
    pick = '"num_draft_tokens": '
    assert by_policy.out.count(pick) == by_k.out.count(pick)
    assert by_policy.out.split(pick)[-1].split(",")[0] == by_k.out.split(pick)[-1].split(",")[0]
    assert "bound to no draft" in by_policy.err
    assert '"draft_length": 3' in run(*asked).out  # the default, told


def test_a_policy_of_another_draft_is_refused(make: Make, run: Run, tmp_path: Path) -> None:
    target = make(tiny.llama, seed=1)
    draft = make(tiny.near, of=target)
    other = make(tiny.near, of=target, seed=8)
    asked = ("generate", "--target", target, "--draft", draft, "--token-ids", PROMPT, "--max-tokens", 4)
    shas = {path: tensors_sha(Checkpoint(path)) for path in (draft, other)}
    assert shas[draft] != shas[other]
    bound = write(tmp_path, "draft", "digest", value=shas[draft])
    assert run(*asked, "--policy", bound).code == 0
    refused = run(*asked, "--policy", write(tmp_path, "draft", "digest", value=shas[other]))
    assert refused.code == 2
    assert shas[other][:12] in refused.err
    kind = run(*asked, "--policy", write(tmp_path, "draft", "kind", value="ngram"))
    assert kind.code == 2
    assert "for a draft of kind ngram" in kind.err
    missing = run(*asked, "--policy", tmp_path / "none.yaml")
    assert missing.code == 2
