"""What comes next, in which windows, and how much is left: against the definition, by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lance_ray_stream.position import (
    Window,
    advance,
    is_cycle_boundary,
    num_batches,
    rows_left,
    rows_of_window,
    rows_to_deliver,
    windows,
)

SETTINGS = settings(deadline=None)

EQUAL = st.builds(lambda splits, cycle: [cycle] * splits, st.integers(1, 8), st.integers(0, 20))
UNEQUAL = st.lists(st.integers(0, 20), min_size=1, max_size=8)
POSITIONS = (EQUAL | UNEQUAL).map(lambda position: np.array(position, dtype=np.int64))


def due(position: np.ndarray, num_rows: int) -> list[tuple[int, int]]:
    """The next places by the definition: (cycle, split) pairs with cycle >= position[split], the first ones."""
    last = int(position.max()) + num_rows + 1
    pairs = ((c, s) for c in range(int(position.min()), last) for s in range(len(position)) if c >= position[s])
    return list(itertools.islice(pairs, num_rows))


@SETTINGS
@given(POSITIONS, st.integers(0, 200))
def test_g1_advance_is_the_round_robin(position: np.ndarray, num_rows: int) -> None:
    """G1, and LanceDB's order of catching up from inside a cycle."""
    before = position.copy()
    expected = position.copy()
    for _, split in due(position, num_rows):
        expected[split] += 1
    after = advance(position, num_rows)
    assert after.tolist() == expected.tolist()
    assert after.dtype == np.int64
    assert (position == before).all()
    assert after is not position


@SETTINGS
@given(POSITIONS, st.lists(st.integers(0, 40), max_size=6))
def test_advancing_in_parts_is_advancing_at_once(position: np.ndarray, parts: list[int]) -> None:
    """Any batches, of any sizes, lead to the same position."""
    by_parts = position
    for part in parts:
        by_parts = advance(by_parts, part)
    assert by_parts.tolist() == advance(position, sum(parts)).tolist()


@SETTINGS
@given(POSITIONS, st.integers(0, 200), st.integers(-1, 40), st.integers(1, 60), st.integers(2, 5))
def test_windows_cover_exactly_what_is_asked(
    position: np.ndarray, num_rows: int, first_rows: int, max_rows: int, growth: int
) -> None:
    """Consecutive runs of whole cycles with exactly ``num_rows`` rows, each in the order of delivery."""
    sizes = {"first_rows": first_rows, "max_rows": max_rows, "growth": growth}
    cuts = list(windows(position, num_rows=num_rows, **sizes))
    assert cuts == list(windows(position.copy(), num_rows=num_rows, **sizes))
    assert sum(cut.num_rows for cut in cuts) == num_rows
    assert all(cut.num_rows > 0 for cut in cuts)
    assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]
    read = [place for cut in cuts for place in places(cut, position)]
    assert read == due(position, num_rows)
    widest = max(first_rows, max_rows, len(position))
    assert all(cut.num_rows <= widest for cut in cuts)


def places(window: Window, position: np.ndarray) -> list[tuple[int, int]]:
    split, cycle = rows_of_window(window, position)
    assert split.shape == cycle.shape == (window.num_rows,)
    assert split.dtype == cycle.dtype == np.int64
    return list(zip(cycle.tolist(), split.tolist(), strict=True))


@SETTINGS
@given(POSITIONS, st.integers(0, 15), st.integers(1, 15), st.data())
def test_rows_of_window_by_definition(position: np.ndarray, start: int, cycles: int, data: st.DataObject) -> None:
    stop = start + cycles
    inside = [(c, s) for c in range(start, stop) for s in range(len(position)) if c >= position[s]]
    num_rows = data.draw(st.integers(0, len(inside)))
    assert places(Window(start, stop, num_rows), position) == inside[:num_rows]


@pytest.mark.parametrize("position", [[0, 0, 0], [5, 2, 9]])
def test_windows_grow_from_a_small_first_one(position: list[int]) -> None:
    """The first batch comes early; later windows are wide, up to the limit."""
    rows = [cut.num_rows for cut in windows(np.array(position), num_rows=600, first_rows=6, max_rows=96)]
    assert rows[0] <= 6
    assert max(rows) == 96
    assert rows == [*sorted(rows[:-1]), rows[-1]]


@SETTINGS
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 12), st.data())
def test_g6_all_ranks_deliver_the_smallest_rest(
    world_size: int, per_rank: int, length: int, data: st.DataObject
) -> None:
    """G6: one number for all ranks, which each of them has, and one of them no row more."""
    position = np.array(data.draw(st.lists(st.integers(0, length), min_size=world_size * per_rank,
                                           max_size=world_size * per_rank)))  # fmt: skip
    rests = [
        sum(length - position[split] for split in range(rank * per_rank, (rank + 1) * per_rank))
        for rank in range(world_size)
    ]
    assert rows_to_deliver(position, world_size, length) == min(rests)
    assert rows_left(position, length) == sum(rests)


@SETTINGS
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_cycle_boundary_is_one_height(position: list[int]) -> None:
    assert is_cycle_boundary(np.array(position)) == (len(set(position)) == 1)


@SETTINGS
@given(st.integers(0, 100), st.integers(1, 30))
def test_c32_num_batches(num_rows: int, batch_size: int) -> None:
    """C32: the announced number of batches, dropping the last, shorter one or not."""
    sizes = [min(batch_size, num_rows - start) for start in range(0, num_rows, batch_size)]
    assert num_batches(num_rows, batch_size, drop_last=False) == len(sizes)
    assert num_batches(num_rows, batch_size, drop_last=True) == sizes.count(batch_size)
