"""Splits, ranks, reader workers and steps: the arithmetic of G1, G2 and G6."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lance_ray_stream import SplitLayout
from lance_ray_stream.errors import InvalidArgumentError, LayoutError

SETTINGS = settings(deadline=None)

COUNTS = st.integers(1, 240)


@SETTINGS
@given(COUNTS, COUNTS, COUNTS)
def test_ranks_and_workers_partition_the_splits(per_worker: int, world_size: int, num_workers: int) -> None:
    """C06, G1: contiguous groups, disjoint, nothing left over, whatever the numbers."""
    assume(per_worker * world_size * num_workers <= 5_000)
    layout = SplitLayout(per_worker * world_size * num_workers)
    groups = [layout.splits_of(rank, world_size) for rank in range(world_size)]
    assert list(itertools.chain(*groups)) == list(range(layout.num_splits))
    for rank, group in enumerate(groups):
        parts = [layout.splits_of(rank, world_size, worker, num_workers) for worker in range(num_workers)]
        assert list(itertools.chain(*parts)) == list(group)
        assert {len(part) for part in parts} == {per_worker}


@SETTINGS
@given(COUNTS, st.integers(1, 12), st.none() | COUNTS)
def test_world_sizes_are_those_that_pass_the_check(num_splits: int, num_workers: int, up_to: int | None) -> None:
    layout = SplitLayout(num_splits)
    legal = []
    for world_size in range(1, (up_to or num_splits) + 1):
        try:
            layout.check(world_size, num_workers)
        except LayoutError:
            continue
        legal.append(world_size)
    assert layout.world_sizes(num_workers, up_to) == legal


@SETTINGS
@given(st.lists(st.integers(1, 24), min_size=1, max_size=4), st.integers(1, 4))
def test_for_world_sizes_is_the_smallest_that_fits_all(sizes: list[int], num_workers: int) -> None:
    layout = SplitLayout.for_world_sizes(iter(sizes), num_workers=num_workers)
    for size in sizes:
        layout.check(size, num_workers)
    fits = (n for n in range(1, layout.num_splits) if all(n % (size * num_workers) == 0 for size in sizes))
    assert next(fits, None) is None


@SETTINGS
@given(st.integers(1, 24), st.integers(1, 5), st.integers(1, 5), st.data())
def test_g2_steps_partition_the_cycles(num_splits: int, cycles: int, steps: int, data: st.DataObject) -> None:
    """C01, G1, G2: a step is whole cycles; ranks share it, each in (cycle, split) order; no place repeats."""
    layout, size = SplitLayout(num_splits), cycles * num_splits
    world_size = data.draw(st.sampled_from(layout.world_sizes()))
    seen = []
    for step in range(steps):
        whole = layout.rows_of_step(step, size)
        assert whole.shape == (size, 2)
        assert whole.dtype == np.int64
        parts = [layout.rows_of_step(step, size, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert {len(part) for part in parts} == {layout.local_batch_size(size, world_size)}
        for rank, part in enumerate(parts):
            assert set(part[:, 0].tolist()) == set(layout.splits_of(rank, world_size))
            assert part.tolist() == sorted(part.tolist(), key=lambda place: place[::-1])
        together = [tuple(place) for part in parts for place in part.tolist()]
        assert sorted(together) == sorted(map(tuple, whole.tolist()))
        seen += together
    assert sorted(seen) == sorted(itertools.product(range(num_splits), range(cycles * steps)))


def test_c54_the_local_batch_size_follows_from_the_world_size() -> None:
    """C54."""
    layout = SplitLayout(12)
    assert {w: layout.local_batch_size(24, w) for w in layout.world_sizes()} == {
        1: 24, 2: 12, 3: 8, 4: 6, 6: 4, 12: 2,
    }  # fmt: skip
    with pytest.raises(LayoutError, match=r"world_size=5\b.* work: 1, 2, 3, 4, 6, 12\..* this world size: 10, 15\."):
        layout.local_batch_size(24, 5)
    with pytest.raises(LayoutError, match=r"global_batch_size=30\b.* sizes that work: 24, 36\."):
        layout.local_batch_size(30, 2)


@SETTINGS
@given(COUNTS, COUNTS, st.integers(1, 16), st.integers(1, 2_000))
def test_g7_a_refusal_lists_what_works(num_splits: int, world_size: int, num_workers: int, size: int) -> None:
    """Whatever a text offers in place of the refused number passes the check."""
    layout = SplitLayout(num_splits)
    try:
        layout.check(world_size, num_workers, size)
    except LayoutError as error:
        offers = offered(str(error))
    else:
        assert num_splits % (world_size * num_workers) == size % num_splits == 0
        return
    assert offers
    tries: dict[str, Callable[[int], Any]] = {
        "World sizes that work": lambda n: layout.check(n),
        "num_workers that work here": lambda n: layout.check(world_size, n),
        "num_splits that work for this world size": lambda n: SplitLayout(n).check(world_size),
        "num_splits that work for these": lambda n: SplitLayout(n).check(world_size, num_workers),
        "Nearest sizes that work": lambda n: layout.check_global_batch_size(n),
    }
    for name, numbers in offers.items():
        assert numbers, name
        for number in numbers:
            tries[name](number)


def offered(text: str) -> dict[str, list[int]]:
    """ "... . Name: 1, 2, ... 8. Name: 3." as {name: numbers}."""
    found = {}
    for sentence in text.replace("... ", "").rstrip(".").split(". "):
        name, colon, numbers = sentence.partition(": ")
        if colon:
            found[name] = [int(n) for n in numbers.split(", ")]
    return found


LAYOUT = SplitLayout(8)
CALLS: dict[str, Callable[[Any], Any]] = {
    "num_splits": SplitLayout,
    "world_size": lambda v: LAYOUT.check(v),
    "num_workers": lambda v: LAYOUT.check(2, v),
    "global_batch_size": lambda v: LAYOUT.check(2, 1, v),
    "up_to": lambda v: LAYOUT.world_sizes(up_to=v),
    "world_sizes": lambda v: SplitLayout.for_world_sizes([2, v]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, np.bool_(True), [2], b"2"])
def test_g7_impossible_numbers_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be "):
        CALLS[name](value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: SplitLayout(None), "num_splits must be an integer of at least 1, got None"),  # type: ignore[arg-type]
        (lambda: LAYOUT.splits_of(4, 4), r"rank=4 is outside 0 .. 3 \(world_size=4\)"),
        (lambda: LAYOUT.splits_of(-1, 4), r"rank=-1 is outside"),
        (lambda: LAYOUT.splits_of(0, 4, 2, 2), r"worker=2 is outside 0 .. 1 \(num_workers=2\)"),
        (lambda: LAYOUT.splits_of(1.0, 4), "rank must be an integer"),  # type: ignore[arg-type]
        (lambda: LAYOUT.rows_of_step(-1, 8), "step must be at least 0"),
        (lambda: LAYOUT.rows_of_step(0, 8, rank=2, world_size=2), "rank=2 is outside"),
        (lambda: SplitLayout.for_world_sizes([]), "name at least one"),
        (lambda: SplitLayout.for_world_sizes(6), "must be a list of integers, got 6"),  # type: ignore[arg-type]
        (lambda: SplitLayout.for_world_sizes("68"), "must be a list of integers"),  # type: ignore[arg-type]
    ],
)
def test_g7_what_is_out_of_range_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        call()


@pytest.mark.parametrize("world_size", [9, 16, 10**9])
def test_more_ranks_than_splits(world_size: int) -> None:
    with pytest.raises(LayoutError, match=rf"World sizes that work: 1, 2, 4, 8\..* world size: {world_size}\."):
        LAYOUT.check(world_size)


def test_numpy_integers_are_integers() -> None:
    layout = SplitLayout(np.int64(8))
    assert layout == SplitLayout(8)
    assert type(layout.num_splits) is int
    assert layout.splits_of(np.int32(1), np.int64(2)) == range(4, 8)
