"""Where a rank stands, and what it knows of the others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lance_ray_stream.cursor import Cursor
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.position import advance, rows_to_deliver

SETTINGS = settings(deadline=None)

LENGTH = 12


@st.composite
def runs(draw: st.DrawFn) -> tuple[SplitLayout, int, np.ndarray, list[int]]:
    """A layout, a legal world size, a start anywhere in an epoch, and batch sizes that all ranks can receive."""
    layout = SplitLayout(draw(st.integers(1, 12)))
    world_size = draw(st.sampled_from(layout.world_sizes()))
    heights = st.integers(0, LENGTH)
    equal = heights.map(lambda height: [height] * layout.num_splits)
    unequal = st.lists(heights, min_size=layout.num_splits, max_size=layout.num_splits)
    start = np.array(draw(equal | unequal), dtype=np.int64)
    left = rows_to_deliver(start, world_size, LENGTH)
    batches: list[int] = []
    while left and len(batches) < 6:
        batches.append(draw(st.integers(1, left)))
        left -= batches[-1]
    return layout, world_size, start, batches


def cursors(layout: SplitLayout, world_size: int, start: np.ndarray) -> list[Cursor]:
    ranks = [Cursor(layout, rank=rank, world_size=world_size, epoch=0) for rank in range(world_size)]
    for rank in ranks:
        rank.jump(3, start)
    return ranks


@SETTINGS
@given(runs())
def test_c14_ranks_in_step_agree_on_the_position(run: tuple[SplitLayout, int, np.ndarray, list[int]]) -> None:
    """C10, C14: each rank's projection of the others is what the others count, whatever the start and the batches."""
    layout, world_size, start, batches = run
    ranks = cursors(layout, world_size, start)
    counted = start.copy()
    for batch in batches:
        for rank in ranks:
            own = slice(rank.splits.start, rank.splits.stop)
            counted[own] = advance(counted[own], batch)
            rank.receive(batch)
        for rank in ranks:
            assert rank.epoch == 3
            assert rank.position().tolist() == counted.tolist()
            assert rank.rows_left(LENGTH) == rows_to_deliver(counted, world_size, LENGTH)
    assert max(counted) <= LENGTH


@SETTINGS
@given(runs(), st.integers(0, 6))
def test_settling_changes_where_reading_begins_and_nothing_else(
    run: tuple[SplitLayout, int, np.ndarray, list[int]], when: int
) -> None:
    """C19, G4: a break and a new iteration at any step, any number of times."""
    layout, world_size, start, batches = run
    for rank, settled in zip(cursors(layout, world_size, start), cursors(layout, world_size, start), strict=True):
        for number, batch in enumerate(batches):
            if number >= when:
                settled.settle()
                assert settled.received == 0
                assert settled.own_start().tolist() == settled.position()[list(settled.splits)].tolist()
            for cursor in (rank, settled):
                cursor.receive(batch)
            assert settled.position().tolist() == rank.position().tolist()
            assert save(settled) == save(rank)


@SETTINGS
@given(runs())
def test_c12_saved_and_resumed_is_the_same_state(run: tuple[SplitLayout, int, np.ndarray, list[int]]) -> None:
    """C12, C13: on every world size, also when the state was projected by another rank."""
    layout, world_size, start, batches = run
    for rank in cursors(layout, world_size, start):
        for batch in batches:
            rank.receive(batch)
        state = rank.save(shuffle_seed=0, provenance={})
        for other in layout.world_sizes():
            for resumed in [Cursor(layout, rank=number, world_size=other, epoch=0) for number in range(other)]:
                resumed.resume(state, rows_per_split=LENGTH + 1)
                assert save(resumed) == save(rank)
                resumed.settle()
                assert save(resumed) == save(rank)


def save(cursor: Cursor) -> tuple[int, list[int], range]:
    state = cursor.save(shuffle_seed=0, provenance={})
    return state.epoch, state.position.tolist(), state.splits


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    layout = SplitLayout(4)
    cursor = Cursor(layout, rank=1, world_size=2, epoch=5)
    cursor.receive(2 * LENGTH)
    resumed = Cursor(layout, rank=0, world_size=1, epoch=0)
    resumed.resume(cursor.save(shuffle_seed=0, provenance={}), rows_per_split=LENGTH)
    assert save(resumed) == (6, [0, 0, 0, 0], range(4))


def test_inside_a_cycle_a_rank_vouches_for_its_own_splits_only() -> None:
    """C14: at a cycle boundary for all, so that the states of all ranks are equal."""
    cursor = Cursor(SplitLayout(4), rank=1, world_size=2, epoch=0)
    assert save(cursor) == (0, [0, 0, 0, 0], range(4))
    cursor.receive(1)
    assert save(cursor) == (0, [1, 0, 1, 0], range(2, 4))
    cursor.receive(1)
    assert save(cursor) == (0, [1, 1, 1, 1], range(4))


def test_a_cursor_keeps_no_array_of_others() -> None:
    cursor = Cursor(SplitLayout(2), rank=0, world_size=1, epoch=0)
    position = np.array([3, 3])
    cursor.jump(1, position)
    position += 1
    cursor.position()[0] = 99
    assert cursor.position().tolist() == [3, 3]
