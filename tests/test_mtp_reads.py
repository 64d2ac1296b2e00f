"""With one drafted token a step, nothing is read from the device between a verdict and the next proposal.

The stand-in for a device: whatever a model's output has touched is a tensor of a class of its own, which notes when the
host asks it for a number. What the host knows by itself (lengths, pages, rows) are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import tiny
import tiny_mtp
import torch
from decoding import engine, model, mtp_draft, outputs
from fixtures import Make

from specctl.checkpoint import Checkpoint
from specctl.drafts.head import Carry
from specctl.engine import engine as engine_module
from specctl.engine.engine import Engine
from specctl.engine.scheduler import DraftLength
from specctl.models import load
from specctl.sampling.params import SamplingParams

T = torch.Tensor
WAITS = {T.tolist, T.item, T.__bool__, T.__int__, T.__float__, T.__index__, T.cpu, T.numpy, T.nonzero, torch.nonzero}
WAITS |= {T.masked_select, torch.masked_select, torch.equal, T.unique, torch.unique}
EVENTS: list[str] = []


class OnDevice(torch.Tensor):
    """Notes whatever makes the host wait for a number."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = func is T.to and "cpu" in map(str, args[1:]) and not (kwargs or {}).get("non_blocking")
        picked = func is T.__getitem__ and isinstance(args[1], T) and args[1].dtype == torch.bool
        if func in WAITS or copied or picked:
            EVENTS.append("read")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments).as_subclass(OnDevice)


def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        EVENTS.append(name)
        return function(*arguments, **more)

    return call


@pytest.fixture
def watched(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Engine]:
    """An engine with draft length k whose events are noted."""

    def build(k: int) -> Engine:
        path = make(tiny_mtp.mtp, of=make(tiny.llama, seed=1, num_hidden_layers=1))
        target = load(Checkpoint(path), torch.float64, torch.device("cpu"))
        monkeypatch.setattr(target.model.embed_tokens, "forward", on_device(target.model.embed_tokens.forward))
        drafter = mtp_draft(path)
        monkeypatch.setattr(drafter.model, "_target", (target,))
        e = engine(target, drafter, lambda batch, context: DraftLength(k))
        e._drafting.carry = Carry(*(t.as_subclass(OnDevice) for t in (e.carry.logits_LV, e.carry.fed_LD)))
        monkeypatch.setattr(engine_module, "verify", noted("verify", engine_module.verify))
        monkeypatch.setattr(drafter, "draft", noted("draft", drafter.draft))
        monkeypatch.setattr(drafter, "catch_up", noted("follow", drafter.catch_up))
        EVENTS.clear()
        return e

    return build


def steps(e: Engine, **params: Any) -> list[list[str]]:
    """The events of every step that drafts, from its verdict to the next one, for three texts."""
    for index in range(3):
        e.add([tiny.BOS, 5, 6, index], SamplingParams(max_tokens=12, ignore_eos=True, **params))
    e.step()
    EVENTS.clear()
    while e.num_running == 3:
        e.step()
    found, at = [], [i for i, event in enumerate(EVENTS) if event == "verify"]
    for start, stop in pairwise(at):
        found.append(EVENTS[start + 1 : stop])
    assert len(found) > 5
    return found


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_one_token_a_step_waits_for_nothing(watched: Callable[[int], Engine], params: dict[str, Any]) -> None:
    for events in steps(watched(1), **params):
        assert events[:2] == ["follow", "draft"]
        assert events.count("draft") == 1
        assert "read" in events  # the text has to be told some time


@pytest.mark.parametrize(("k", "params"), [(1, {"repetition_penalty": 1.3}), (2, {})])
def test_what_depends_on_the_tokens_waits_for_them(
    watched: Callable[[int], Engine], k: int, params: dict[str, Any]
) -> None:
    """The stand-in can tell: a penalty looks at the text, and a longer block is drafted when its place is known."""
    for events in steps(watched(k), **params):
        assert events[0] == "follow"
        assert "read" in events[: events.index("draft")]


def test_what_is_drawn_ahead_is_what_would_have_been_drawn(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while texts come, end and are dropped in between."""
    path = make(tiny_mtp.mtp, of=make(tiny.llama, seed=1, num_hidden_layers=1))
    found = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr("specctl.engine.drafting.Drafting.look_ahead", lambda *arguments: None)
        e = engine(model(path), mtp_draft(path), 1, max_sequences=3, chunk=8, pages=9, seed=4)
        requests = []
        for i in range(9):
            params = SamplingParams(max_tokens=5 + 3 * (i % 4), ignore_eos=True, temperature=float(i % 3))
            requests.append(([tiny.BOS, *range(i, 3 * i)], params))
        dropped = e.add([tiny.BOS, 9], SamplingParams(max_tokens=30, ignore_eos=True))
        ids = [e.choices(e.add(*request)) for request in requests]
        for _ in range(4):
            e.step()
        e.abort(dropped)
        while e.has_work:
            e.step()
        found.append((outputs(ids), e.stats.speculation.as_dict()))
    assert found[0] == found[1]
