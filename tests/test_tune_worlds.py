"""Worlds whose best draft length is known because they were made that way: what specctl tune finds in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from handmade import cell, profile, write_json, write_yaml
from tuning import told

from specctl.schemas.policy import PolicyFile, read_policy

Step = Callable[[int, int, int], float]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
K_MAX = 7
FADING = (0.85, 0.66, 0.5, 0.37, 0.27, 0.2, 0.14)


@dataclass(frozen=True)
class World:
    """step(batch, rows, context) and draft(batch), in milliseconds; overhead: of every draft step."""

    step: Step
    draft: Callable[[int], float] = lambda batch: 0.2
    survival: Sequence[float] = FADING
    overhead: float = 0.0
    contexts: Sequence[int] = (1024,)
    batches: Sequence[int] = field(default=BATCHES)

    def speed(self, batch: int, context: int, k: int) -> float:
        """Tokens a millisecond: the definition, written again."""
        tokens = 1 + sum(self.survival[:k])
        return tokens / (self.step(batch, k + 1, context) + k * (self.draft(batch) + self.overhead))

    def best(self, batch: int, context: int) -> int:
        return max(range(K_MAX + 1), key=lambda k: self.speed(batch, context, k))

    def loss(self, batch: int, context: int, k: int) -> float:
        return 1 - self.speed(batch, context, k) / self.speed(batch, context, self.best(batch, context))

    def profile(self, noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
        """Its cells, each off by a random share of itself, and saying so."""
        random = np.random.default_rng(seed)

        def one(batch: int, q: int, ms: float, context: int) -> dict[str, Any]:
            seen = ms * (1 + noise * random.standard_normal())
            return cell(batch, q, float(seen), context, noise * ms)

        steps = [
            one(b, q, self.step(b, q, c), c) for b in self.batches for c in self.contexts for q in range(1, K_MAX + 2)
        ]
        drafts = [one(b, 1, self.draft(b), c) for b in self.batches for c in self.contexts]
        over = {"base": 0.0, "spec": 0.0, "per_draft_step": self.overhead, "tree": None}
        return profile({1: [1.0]}) | {"steps": steps, "draft": drafts, "overheads_ms": over}


@pytest.fixture
def find(run: Run, tmp_path: Path) -> Callable[..., tuple[PolicyFile, dict[str, Any]]]:
    def tuned(world: World, **noise: Any) -> tuple[PolicyFile, dict[str, Any]]:
        file = write_yaml(tmp_path / "P.yaml", world.profile(**noise))
        seen = write_json(tmp_path / "A.json", {"survival": list(world.survival), "drafts": 10**7})
        out = tmp_path / "Y.yaml"
        ran = run("tune", "--profile", file, "--acceptance", seen, "--output", out, "--json", "--force")
        return read_policy(out), told(ran)

    return tuned


def cliffs(batch: int, q: int, context: int) -> float:
    """Flat but for jumps after 64, 128 and 256 tokens."""
    return 10 + sum(jump for edge, jump in ((64, 6.0), (128, 12.0), (256, 20.0)) if batch * q > edge)


def experts(batch: int, q: int, context: int) -> float:
    """Of 256 experts every token reads 8: what a step reads grows with its tokens until it reads them all."""
    return 3 + 30 * (1 - (1 - 8 / 256) ** (batch * q)) + 0.01 * batch * q


WORLDS = {
    "token cliffs": World(cliffs),
    "K = 0 everywhere": World(lambda b, q, c: 10.0 * q),
    "K = 0 at high batch": World(lambda b, q, c: max(10.0, 0.16 * b * q)),
    "experts": World(experts, draft=lambda b: 0.8),
    "long contexts pay again": World(
        lambda b, q, c: max(9.0, 0.1 * b * q) + b * c * 4e-5, draft=lambda b: 1.5, contexts=(256, 2048, 65536)
    ),
    "the draft is too dear": World(lambda b, q, c: 10.0, draft=lambda b: 9.0),
    "overhead by draft step": World(lambda b, q, c: 10 + 0.05 * b * q, overhead=2.0),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_best_length_of_a_made_world_is_found(find: Any, name: str) -> None:
    """At every place of the profile the very length; under the policy, whose ranges are joined, within a hundredth."""
    world = WORLDS[name]
    policy, value = find(world)
    for place in value["places"]:
        assert place["best_k"] == world.best(place["batch"], place["context"])
    for batch in world.batches:
        for context in world.contexts:
            assert world.loss(batch, context, policy.lookup(batch, context).k) < 0.0101


def test_what_the_worlds_are_for() -> None:
    """Each has the trait that it is named for."""
    ks = {name: [[world.best(b, c) for b in world.batches] for c in world.contexts] for name, world in WORLDS.items()}
    assert set(ks["K = 0 everywhere"][0]) == set(ks["the draft is too dear"][0]) == {0}
    high = ks["K = 0 at high batch"][0]
    assert (high[0] > 0, high[-1]) == (True, 0)
    long = ks["long contexts pay again"]
    assert (long[0][-1], long[-1][-1] > 0) == (0, True)
    assert max(ks["overhead by draft step"][0]) < max(ks["token cliffs"][0])
    assert any(b * (world_k + 1) in (64, 128, 256) for b, world_k in zip(BATCHES, ks["token cliffs"][0], strict=True))
    one, middle = ks["experts"][0][0], ks["experts"][0][3]
    assert one > middle or ks["experts"][0][-1] > middle  # between, more tokens read more experts


def test_between_profiled_batches_an_edge_is_where_its_tokens_are(find: Any) -> None:
    """Cells at powers of two only: batch 42 checks two tokens of each in 126, batch 43 would need 129."""
    world = WORLDS["token cliffs"]
    policy, _ = find(world)
    lost = {b: world.loss(b, 1024, policy.lookup(b, 1024).k) for b in range(1, 129)}
    assert max(lost.values()) < 0.0101
    assert [policy.lookup(b, 1024).k for b in (42, 43)] == [world.best(b, 1024) for b in (42, 43)]
    assert world.best(42, 1024) != world.best(43, 1024)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", range(3))
def test_with_noise_in_the_cells_the_choice_loses_little(find: Any, name: str, seed: int) -> None:
    """Half a percent on every cell, as a careful profile has."""
    world = WORLDS[name]
    _, value = find(world, noise=0.005, seed=seed)
    for place in value["places"]:
        assert world.loss(place["batch"], place["context"], place["k"]) < 0.01


def test_speculation_is_on_only_where_even_the_low_end_is_a_gain(find: Any) -> None:
    """Two percent to be gained: on where cells are sharp, off where they are not."""
    world = World(lambda b, q, c: 10 + 6.15 * (q > 1) + 20 * (q > 2), draft=lambda b: 0.2, survival=(0.67, *[0.01] * 6))
    assert world.best(1, 1024) == 1
    sharp, _ = find(world, noise=1e-4)
    vague, value = find(world, noise=0.05)
    assert (sharp.lookup(1, 9).k, vague.lookup(1, 9).k) == (1, 0)
    assert all(not cell.k for cell in vague.k)
    assert value["places"][0]["speedup"][0] == 1


def test_neighbours_are_joined_where_that_loses_less_than_a_hundredth(find: Any) -> None:
    """A cost that rises evenly makes K fall by one every few batches; the policy has fewer ranges than that."""
    world = World(lambda b, q, c: 10 + 0.06 * b * q)
    policy, value = find(world)
    exact = {b: world.best(b, 1024) for b in range(1, 129)}
    changes = sum(exact[b] != exact[b + 1] for b in range(1, 128))
    assert len(policy.k) < changes + 1
    assert all(world.loss(b, 1024, policy.lookup(b, 1024).k) < 0.0101 for b in exact)
    assert value["ways"][-2]["loss"] < 0.0101
