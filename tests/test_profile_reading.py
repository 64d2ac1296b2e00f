"""A profile's three classes of cell, and how they are read: tables of cells, monotone envelope, CUDA-graph padding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import cell, profile, write_yaml
from hypothesis import given
from hypothesis import strategies as st
from tuning import TU1

from specctl.errors import UsageError
from specctl.roofline.grid import EDGES, ROWS, batches_with_edges
from specctl.roofline.reading import DEVIATIONS, as_read, envelope
from specctl.schemas.profile import Profile, StepCell, read_either, read_profile
from specctl.shipped import shipped

LIMIT = 200_000


def read(value: dict[str, Any]) -> Profile:
    return as_read(Profile.model_validate(value))


def times(cells: list[Any]) -> dict[tuple[int, int], float]:
    return {(each.batch, each.q): each.ms for each in cells}


def of(*cells: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return profile({1: [1.0, 1.0]}, **changes) | {"steps": list(cells)}


def interpolated(batch: int, q: int, ms: float, spread: float = 0.0) -> dict[str, Any]:
    return cell(batch, q, ms, spread=spread) | {"source": "interpolated"}


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_table_is_the_cells_it_stands_for() -> None:
    table = {"source": "interpolated", "spread": 0.1, "q": [1, 2], "rows": [[1, 1024, 10, 11], [8, 1024, 12, None]]}
    found = Profile.model_validate(profile({1: [1.0, 1.0]}) | {"steps": table}).steps
    assert times(found) == {(1, 1): 10, (1, 2): 11, (8, 1): 12}
    assert [each.spread for each in found] == pytest.approx([1.0, 1.1, 1.2])
    assert {each.source for each in found} == {"interpolated"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colums": [1]}, "a table of cells has the keys q, rows, source, spread, found"),
        ({"rows": [[1, 1024, 10]]}, "a row of a table with 2 q has 4 numbers, found [1, 1024, 10]"),
        ({"rows": 3}, "in a table of cells q and rows are lists and spread is a number"),
        ({"rows": [[1, 1024, -10, 11]]}, "steps.0.ms is -10"),
        ({"rows": [[1, 1024, "10", 11]]}, "steps.0.ms is '10'"),
        ({"source": "guessed"}, "steps.0.source is 'guessed'"),
        ({"rows": [[1, 1024, 10, 11], [1, 1024, 10, 11]]}, "steps lists batch 1, q 1, context 1024 twice"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    table = {"source": "interpolated", "spread": 0.1, "q": [1, 2], "rows": [[1, 1024, 10, 11]]} | change
    file = write_yaml(tmp_path / "P.yaml", profile({1: [1.0, 1.0]}) | {"steps": table})
    with pytest.raises(UsageError) as raised:
        read_profile(file)
    assert said in str(raised.value)
    assert "P.yaml" in str(raised.value)


# -- envelope ----------------------------------------------------------------------------------------------------------


def test_noise_is_made_monotone_and_what_is_monotone_stays() -> None:
    rising = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 4.0]])
    assert (envelope(rising) == rising).all()
    assert envelope(np.array([[10.0, 9.0, 11.0]])).tolist() == [[9.5, 9.5, 11.0]]
    assert envelope(np.array([[10.0], [9.0]])).tolist() == [[9.5], [9.5]]
    gap = envelope(np.array([[10.0, np.nan, 9.0]]))
    assert np.isnan(gap[0, 1])
    assert gap[0, [0, 2]].tolist() == [9.5, 9.5]


@given(st.lists(st.lists(st.floats(1, 100), min_size=4, max_size=4), min_size=1, max_size=5))
def test_an_envelope_is_monotone_and_lies_within_the_values(rows: list[list[float]]) -> None:
    ms = np.array(rows)
    found = envelope(ms)
    assert (np.diff(found, axis=0) >= -1e-9).all()
    assert (np.diff(found, axis=1) >= -1e-9).all()
    assert ms.min() <= found.min() <= found.max() <= ms.max()


def test_a_cell_moves_by_no_more_than_its_spread_explains() -> None:
    """Cells fall from 10 to 9: with a spread they meet, without one the fall is what was measured."""
    found = times(read(of(interpolated(1, 1, 10.0, 0.5), interpolated(1, 2, 9.0, 0.5))).steps)
    assert found == {(1, 1): 9.5, (1, 2): 9.5}
    found = times(read(of(interpolated(1, 1, 10.0, 0.1), interpolated(1, 2, 9.0, 0.1))).steps)
    assert found == pytest.approx({(1, 1): 10 - DEVIATIONS * 0.1, (1, 2): 9 + DEVIATIONS * 0.1})
    exact = of(cell(1, 1, 10.0), cell(1, 2, 30.0), cell(2, 1, 10.0), cell(2, 2, 11.0))
    assert times(read(exact).steps) == {(1, 1): 10, (1, 2): 30, (2, 1): 10, (2, 2): 11}


def test_contexts_are_read_apart() -> None:
    cells = [interpolated(1, 1, 10.0, 5.0), interpolated(1, 1, 2.0, 5.0) | {"context": 4096}]
    assert [each.ms for each in read(of(*cells)).steps] == [10, 2]


def test_case_tu1s_profile_is_read_as_it_stands() -> None:
    assert read(TU1) == Profile.model_validate(TU1)


def test_raw_values_stay_in_the_file(tmp_path: Path) -> None:
    value = of(interpolated(1, 1, 10.0, 0.5), interpolated(1, 2, 9.0, 0.5))
    file = write_yaml(tmp_path / "P.yaml", value)
    text = file.read_text()
    raw = read_profile(file)
    assert as_read(raw) != raw
    assert times(raw.steps) == {(1, 1): 10, (1, 2): 9}
    assert file.read_text() == text


# -- padding -----------------------------------------------------------------------------------------------------------


def padded(unit: str, sizes: list[int], *cells: dict[str, Any], key: str = "steps") -> dict[tuple[int, int], float]:
    engine = {"name": "e", "graphs": {"unit": unit, "sizes": sizes}}
    return times(getattr(read(of(*cells, engine=engine)), key))


def test_a_step_is_padded_to_the_next_graph() -> None:
    """Of 2 at a time a graph of 4 is run, 5 are beyond the last one and run as they are."""
    cells = [interpolated(b, 1, ms) for b, ms in {1: 10.0, 2: 11.0, 4: 14.0, 5: 15.0}.items()]
    assert padded("sequences", [1, 4], *cells) == {(1, 1): 10, (2, 1): 14, (4, 1): 14, (5, 1): 15}


def test_tokens_are_rows_of_all_sequences() -> None:
    """3 sequences of 2 rows are 6 tokens, run as 8: as 4 sequences would be."""
    cells = [interpolated(b, q, 10.0 * b + q) for b in (1, 2, 3, 4) for q in (1, 2)]
    found = padded("tokens", [2, 4, 8], *cells)
    assert (found[3, 2], found[4, 2], found[1, 1], found[3, 1]) == (42, 42, 21, 41)


def test_what_lies_between_known_batches_is_drawn_as_a_line() -> None:
    cells = [interpolated(1, 3, 10.0), interpolated(4, 3, 16.0)]
    assert padded("tokens", [8], *cells)[1, 3] == pytest.approx(10 + (8 / 3 - 1) / 3 * 6)


def test_measured_steps_have_their_padding_in_them() -> None:
    cells = [cell(2, 1, 11.0), interpolated(4, 1, 14.0)]
    assert padded("sequences", [1, 4], *cells) == {(2, 1): 11, (4, 1): 14}


def test_nothing_is_known_beyond_the_largest_batch() -> None:
    assert padded("sequences", [8], interpolated(4, 1, 14.0)) == {(4, 1): 14}


@pytest.mark.parametrize("sizes", [[], [4, 1], [1, 1], [0]])
def test_sizes_of_graphs_rise(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        padded("tokens", sizes, interpolated(1, 1, 1.0))


# -- grids and files ---------------------------------------------------------------------------------------------------


def test_a_grid_has_both_sides_of_every_edge() -> None:
    batches = batches_with_edges()
    for q in ROWS:
        for edge in EDGES:
            assert {edge // q, edge // q + 1} <= set(batches)
            assert (edge // q) * q <= edge < (edge // q + 1) * q


SHIPPED = sorted(shipped("profiles").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_are_small_and_say_where_their_numbers_come_from(path: Path) -> None:
    assert path.stat().st_size < LIMIT
    found = read_either(path)
    assert found.provenance is not None
    assert found.sources
    assert all(source.package is None or source.licence for source in found.sources)
    if isinstance(found, Profile):
        assert {each.source for each in found.steps} == {"interpolated"}
        assert all(each.spread > 0 for each in found.steps)
        for cells in (as_read(found).steps, as_read(found).draft):
            _check_plausible(cells)


def _check_plausible(cells: list[Any]) -> None:
    """More rows or sequences never take less than three quarters."""
    by_place = {each.place: each for each in cells}
    lines: dict[tuple[str, int, int], list[StepCell]] = {}
    for (batch, q, context), each in sorted(by_place.items()):
        lines.setdefault(("q", batch, context), []).append(each)
        lines.setdefault(("batch", q, context), []).append(each)
    for line in lines.values():
        assert all(later.ms > 0.75 * earlier.ms for earlier, later in pairwise(line))
