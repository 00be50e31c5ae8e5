"""The "indexed" order: a bijection, promised value by value, that passes for a random one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.permutation import (
    MAX_N,
    SMALL_N,
    ClumpedPermutation,
    IndexedOrder,
    KeyedPermutation,
    derive_key,
    permute,
    unpermute,
)

WORD = 2**64 - 1
# Around the borders of the construction: small and large domains, squares, powers of two, the largest n.
SOME_N = [1000, SMALL_N - 1, SMALL_N, SMALL_N + 1, 65**2 - 1, 65**2, 65**2 + 1, 8191, 8192, 8193, 65_536, 100_003]


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return KeyedPermutation(n, seed, epoch)(np.arange(n))


# Bijections


@pytest.mark.parametrize("n", [*range(1, 301), *SOME_N])
def test_every_value_comes_once_and_the_inverse_finds_it(n):
    order = KeyedPermutation(n, seed=n, epoch=1)
    values = order(np.arange(n))
    assert values.dtype == np.uint64
    assert np.array_equal(np.sort(values), np.arange(n))
    assert np.array_equal(order.inverse(values), np.arange(n))


@pytest.mark.parametrize("n", [SMALL_N + 1, 4225, 5000, 70_000])
def test_every_domain_of_the_network_is_a_bijection_for_many_keys(n):
    for seed in range(8):
        assert len(np.unique(whole(n, seed))) == n


@settings(max_examples=150, deadline=None)
@given(st.integers(1, MAX_N), st.integers(0, WORD), st.integers(0, WORD), st.data())
def test_the_inverse_undoes_any_size_and_key(n, seed, epoch, data):
    some = st.lists(st.one_of(st.integers(0, n - 1), st.sampled_from([0, n - 1])), min_size=1, max_size=50)
    indices = np.array(data.draw(some), dtype=np.uint64)
    order = KeyedPermutation(n, seed, epoch)
    values = order(indices)
    assert int(values.max()) < n
    assert np.array_equal(order.inverse(values), indices)
    assert np.array_equal(order(order.inverse(indices)), indices)
    assert len(np.unique(values)) == len(np.unique(indices))


def test_a_part_is_the_same_alone_and_among_others():
    """Blocks, shapes, repeats and dtypes change nothing."""
    order = KeyedPermutation(1_000_003, 5, 2)
    everything = order(np.arange(100_000))
    assert np.array_equal(order(np.arange(8_000, 9_000, dtype=np.int32)), everything[8_000:9_000])
    assert np.array_equal(order([[3, 3], [99_999, 0]]), everything[[[3, 3], [99_999, 0]]])
    assert order([]).shape == (0,)
    assert int(order(7)) == everything[7]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 64, 97])
def test_clumps_of_any_size_are_bijections_of_whole_clumps(n):
    for size in range(1, n + 3):
        for epoch in range(3):
            order = ClumpedPermutation(n, 1, epoch, size)
            values = order(np.arange(n)).astype(np.int64)
            assert sorted(values.tolist()) == list(range(n))
            assert np.array_equal(order.inverse(values), np.arange(n))
            starts = np.flatnonzero(values % min(n, size) == 0)
            clumps = np.split(values, starts[1:])
            assert starts[0] == 0
            assert all((np.diff(clump) == 1).all() for clump in clumps)
            assert len(clumps) == math.ceil(n / min(n, size))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, MAX_N), st.integers(1, 2**40), st.integers(0, WORD), st.data())
def test_clumps_of_large_orders_can_be_undone(n, size, seed, data):
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), dtype=np.uint64)
    order = ClumpedPermutation(n, seed, 0, size)
    assert np.array_equal(order.inverse(order(indices)), indices)
    assert np.array_equal(order(order.inverse(indices)), indices)


def test_the_short_clump_does_not_stay_at_the_end():
    places = {int(ClumpedPermutation(103, 0, epoch, 10).inverse(102)) for epoch in range(200)}
    # it ends after 0 to 10 full clumps
    assert places == {10 * clumps + 2 for clumps in range(11)}


# The promised order


def in_plain_integers(x: int, n: int, seed: int, epoch: int) -> int:
    """The construction once more, for one value, in Python's integers alone."""
    text = b"lance_ray_stream.permutation.1" + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.shake_256(text).digest(64)
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]

    def split_mix(key: int, output: int) -> int:
        z = (key + (output + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    if n <= 4096:
        return sorted(range(n), key=lambda value: split_mix(keys[0], value))[x]
    a = math.isqrt(n - 1) + 1
    b = (n + a - 1) // a
    while True:
        left, right = divmod(x, b)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + ((split_mix(key, right) >> 32) * a >> 32)) % a
            else:
                right = (right + ((split_mix(key, left) >> 32) * b >> 32)) % b
        x = left * b + right
        if x < n:
            return x


@pytest.mark.parametrize("n", [1, 2, 5, 100, SMALL_N, SMALL_N + 1, 4_300, 10**6, 2**32, 10**12 + 39, 2**62 + 1, 2**63])
def test_the_vectorised_arithmetic_is_the_documented_construction(n):
    for seed, epoch in [(0, 0), (WORD, 17), (42, WORD)]:
        indices = sorted({i * n // 30 for i in range(30)} | {n - 1})
        expected = [in_plain_integers(i, n, seed, epoch) for i in indices]
        assert KeyedPermutation(n, seed, epoch)(np.array(indices, dtype=np.uint64)).tolist() == expected


# (n, seed, epoch): the first eight values. If one of these changes, runs that are under way lose their order.
GOLDEN = {
    (1, 0, 0): [0],
    (2, 0, 0): [0, 1],
    (10, 0, 0): [7, 2, 6, 8, 4, 9, 0, 5],
    (10, 0, 1): [3, 1, 9, 6, 7, 0, 5, 8],
    (10, 1, 0): [0, 2, 8, 7, 1, 6, 9, 5],
    (4096, 7, 0): [1849, 2146, 2565, 2624, 640, 3026, 173, 935],
    (4097, 7, 0): [2423, 1584, 930, 1662, 168, 2950, 2268, 2735],
    (500000, 0, 0): [34010, 375329, 167054, 274591, 131258, 383620, 270905, 243831],
    (500000, 0, 1): [370326, 380398, 36109, 188943, 239051, 31077, 321088, 276319],
    (1000000000, 42, 3): [342572547, 89092736, 335734468, 900438025, 300391658, 289553427, 140900782, 129337315],
    (1099511627777, 9223372036854775807, 1000): [
        228710352173,
        148889959111,
        1086392049790,
        328799117760,
        1006346022144,
        427546880652,
        615201198173,
        547124939629,
    ],
    (9223372036854775808, 18446744073709551615, 18446744073709551615): [
        6400283744355923399,
        7406640734715586166,
        138798440339376347,
        391795211376110044,
        2734855972555885788,
        7910546186465102262,
        960105659592864260,
        508383144391864023,
    ],
}


@pytest.mark.parametrize("numbers", GOLDEN)
def test_the_order_is_the_promised_one(numbers):
    assert KeyedPermutation(*numbers)(np.arange(min(8, numbers[0]))).tolist() == GOLDEN[numbers]


def test_an_epoch_is_the_promised_one():
    """Splits, clumps and the fingerprint."""
    order = IndexedOrder(num_rows=1_000_003, num_splits=48, seed=42, epoch=3, clump_size=7)
    assert order.offsets(47, 20_825, 20_833).tolist() == [
        246884,
        246885,
        246886,
        246887,
        246888,
        246889,
        122192,
        122193,
    ]
    assert order.fingerprint == "ecf9b8b28a33c0c9"


@pytest.mark.timeout(120)
def test_another_process_makes_the_same_order():
    program = (
        "import json; from lance_ray_stream.permutation import IndexedOrder; "
        "order = IndexedOrder(num_rows=10**9, num_splits=48, seed=1, epoch=2); "
        "print(json.dumps([order.offsets(5, 0, 100).tolist(), order.fingerprint]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=environment, text=True)
    order = IndexedOrder(num_rows=10**9, num_splits=48, seed=1, epoch=2)
    assert json.loads(out.stdout) == [order.offsets(5, 0, 100).tolist(), order.fingerprint]


# Statistics: every figure is fixed by its seeds; numpy's own permutation has to pass the same test.


def z_of(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square of equally likely ``counts`` is off."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def ours(n: int):
    return lambda number: whole(n, seed=9, epoch=number).astype(np.int64)


def control(n: int):
    return lambda number: np.random.default_rng([9, number]).permutation(n)


BOTH = pytest.mark.parametrize("source", [ours, control])


@BOTH
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_rows_are_equally_likely(source, n):
    draw, codes = source(n), n ** np.arange(n)
    seen = np.unique([draw(number) @ codes for number in range(12_000)], return_counts=True)[1]
    assert len(seen) == math.factorial(n)
    assert abs(z_of(seen)) < 4


@BOTH
@pytest.mark.parametrize(
    ("n", "bins", "epochs"), [(16, 16, 4_000), (64, 32, 3_000), (5_000, 50, 300), (100_000, 50, 20)]
)
def test_a_row_is_equally_likely_at_every_place(source, n, bins, epochs):
    draw, grid = source(n), np.zeros((bins, bins))
    for epoch in range(epochs):
        np.add.at(grid, (np.arange(n) * bins // n, draw(epoch) * bins // n), 1)
    # rows and columns of the grid are full by construction: (bins - 1)**2 degrees of freedom
    expected = epochs * n / bins**2
    freedom = (bins - 1) ** 2
    # each epoch fills the grid without replacement; the factor is that of a permutation's variance
    chi_square = ((grid - expected) ** 2 / expected).sum() * (n - 1) / n
    assert abs(chi_square - freedom) / math.sqrt(2 * freedom) < 4


@BOTH
@pytest.mark.parametrize("n", [4_096, 4_099, 100_000])
def test_epochs_have_nothing_in_common(source, n):
    draw = source(n)
    orders = [draw(epoch) for epoch in range(12)]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            # rows in the same place: Poisson of mean 1
            assert (first == second).sum() <= 9
            assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(n) < 4.5
            # nor is one a shifted copy of the other
            assert np.bincount((first - second) % n, minlength=n).max() < 12


def test_neighbouring_seeds_epochs_and_their_exchange_have_nothing_in_common():
    """The pairs (seed, epoch) that a sum or a product of the two would mix up."""
    n = 20_000
    pairs = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (100_003, 0),
        (0, 100_003),
        (2, 0),
        (0, 2),
        (2**32, 0),
        (WORD, 1),
        (1, WORD),
    ]
    orders = [whole(n, *pair).astype(np.int64) for pair in pairs]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert (first == second).sum() <= 8
            assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(n) < 4.5


def test_keys_do_not_collide():
    keys = [derive_key(seed, epoch) for seed in range(150) for epoch in range(150)]
    keys += [derive_key(seed, 0) for seed in range(100_003, 100_003 * 50, 100_003)]
    assert len({word for key in keys for word in key}) == sum(map(len, keys))


@BOTH
@pytest.mark.parametrize("n", [4_000, 1_000_000])
def test_rows_that_follow_each_other_are_not_related(source, n):
    order = source(n)(3)
    for lag in (1, 2, 3, 48, 64, 1_000):
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        assert abs(correlation) * math.sqrt(n) < 4
    # the distance of successive rows, as of two that are drawn from all: density 2 (n - d) / n**2
    distance = np.abs(np.diff(order)) / n
    uniform = distance * (2 - distance)
    assert abs(z_of(np.histogram(uniform, bins=20, range=(0, 1))[0])) < 5


@BOTH
def test_batches_spread_over_the_table(source):
    """Within a batch: the gaps between neighbours of the table are those of a random sample."""
    n, batch = 1_000_000, 500
    rows = np.sort(source(n)(1).reshape(-1, batch), axis=1)
    gaps = np.diff(rows, axis=1).ravel() * batch / n
    # exponential, as far as the grain of the table lets it be
    uniform = 1 - (1 - gaps / batch) ** batch
    assert abs(z_of(np.histogram(uniform, bins=20, range=(0, 1))[0])) < 5
    # every tenth of the table has its share in every batch: hypergeometric
    share = np.apply_along_axis(lambda part: np.bincount(part * 10 // n, minlength=10), 1, rows)
    assert share.var() == pytest.approx(batch * 0.1 * 0.9, rel=0.05)
    assert share.min() > 15


@BOTH
def test_low_bits_of_the_rows_are_not_related_to_the_place(source):
    n = 2**20
    order = source(n)(0)
    for modulus in (2, 3, 16, 1_024):
        table = np.zeros((modulus, modulus))
        np.add.at(table, (np.arange(n) % modulus, order % modulus), 1)
        expected, freedom = n / modulus**2, (modulus - 1) ** 2
        chi_square = ((table - expected) ** 2 / expected).sum()
        assert (chi_square - freedom) / math.sqrt(2 * freedom) < 4.5


# Splits


@pytest.mark.parametrize("clump_size", [None, 1, 5, 16, 10_000])
@pytest.mark.parametrize("num_splits", [1, 2, 7, 48, 1_001])
def test_splits_are_equal_parts_without_repeats(num_splits, clump_size):
    """C05, C31, C33: every row once, but the surplus; and every row knows its place."""
    order = IndexedOrder(num_rows=1_001, num_splits=num_splits, seed=3, epoch=1, clump_size=clump_size)
    length = order.rows_per_split
    rows = np.concatenate([order.offsets(split, 0, length) for split in range(num_splits)])
    assert (length, order.dropped_rows) == divmod(1_001, num_splits)
    assert rows.dtype == np.uint64
    assert len(np.unique(rows)) == len(rows) == 1_001 - order.dropped_rows
    split, index = order.places(rows)
    assert np.array_equal(split, np.repeat(np.arange(num_splits), length))
    assert np.array_equal(index, np.tile(np.arange(length), num_splits))
    dropped = np.setdiff1d(np.arange(1_001), rows)
    assert [places.tolist() for places in order.places(dropped)] == [[-1] * len(dropped)] * 2


def test_any_part_of_a_split_and_any_places_are_the_same_rows():
    order = IndexedOrder(num_rows=10**9, num_splits=48, seed=3, epoch=1, clump_size=10)
    part = order.offsets(11, 5_000, 9_000)
    assert np.array_equal(order.offsets(11, 5_100, 5_200), part[100:200])
    cycles = np.arange(5_000, 9_000)
    assert np.array_equal(order.offsets_at(np.full(4_000, 11), cycles), part)
    window = order.offsets_at(np.arange(8, 12), cycles[:, None])
    assert window.shape == (4_000, 4)
    assert np.array_equal(window[:, 3], part)
    assert order.offsets(47, order.rows_per_split, order.rows_per_split).shape == (0,)


def test_the_surplus_is_another_one_in_each_epoch():
    surplus = set()
    for epoch in range(40):
        order = IndexedOrder(num_rows=1_007, num_splits=8, seed=0, epoch=epoch)
        surplus |= set(np.flatnonzero(order.places(np.arange(1_007))[0] < 0).tolist())
    # 40 times 7 rows of 1,007: about 245 different ones
    assert len(surplus) > 200


def test_without_shuffle_the_rows_stay_in_their_order():
    order = IndexedOrder(num_rows=103, num_splits=4, seed=3, epoch=5, clump_size=10, shuffle=False)
    assert [order.offsets(split, 0, 25).tolist() for split in range(4)] == np.arange(100).reshape(4, 25).tolist()
    assert order.places([0, 99, 100])[0].tolist() == [0, 3, -1]
    other = IndexedOrder(num_rows=103, num_splits=4, seed=9, epoch=0, shuffle=False)
    assert order.fingerprint == other.fingerprint


def test_the_fingerprint_tells_orders_apart():
    base: dict[str, Any] = {"num_rows": 10_000, "num_splits": 8, "seed": 0, "epoch": 0, "clump_size": 4}
    changes: list[dict[str, Any]] = [
        {},
        {"num_rows": 10_001},
        {"num_splits": 4},
        {"seed": 1},
        {"epoch": 1},
        {"seed": 1, "epoch": 1},
        {"clump_size": None},
        {"clump_size": 5},
        {"shuffle": False},
    ]
    prints = [IndexedOrder(**(base | change)).fingerprint for change in changes]
    assert len(set(prints)) == len(prints)
    assert IndexedOrder(**(base | {"clump_size": 1})).fingerprint == prints[6]


def test_numpy_integers_describe_the_same_order():
    order = IndexedOrder(num_rows=1_000, num_splits=8, seed=3, epoch=1, clump_size=4)
    same = IndexedOrder(
        num_rows=np.int32(1_000),
        num_splits=np.uint8(8),
        seed=np.int64(3),
        epoch=np.int16(1),
        clump_size=np.uint64(4),
    )
    assert same == order
    assert repr(same) == repr(order)
    assert same.fingerprint == order.fingerprint
    assert np.array_equal(same.offsets(np.int8(7), 0, 100), order.offsets(7, 0, 100))
    assert repr(KeyedPermutation(10, np.int64(1), 2)) == "KeyedPermutation(n=10, seed=1, epoch=2)"


def test_a_billion_rows_take_no_memory():
    tracemalloc.start()
    try:
        order = IndexedOrder(num_rows=10**9, num_splits=4_096, seed=0, epoch=0, clump_size=3)
        rows = order.offsets(4_095, 100_000, 165_536)
        assert order.fingerprint
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(rows)) == 65_536
    assert peak < 16 * rows.nbytes


# Impossible numbers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyedPermutation(0, 0, 0), "n must be at least 1, got 0"),
        (lambda: KeyedPermutation(MAX_N + 1, 0, 0), f"n must be at most {MAX_N}"),
        (lambda: KeyedPermutation(10, -1, 0), "seed must be at least 0"),
        (lambda: KeyedPermutation(10, 0, 2**64), "epoch must be at most"),
        (lambda: KeyedPermutation(10, 0.5, 0), "seed must be an integer"),  # type: ignore[arg-type]
        (lambda: KeyedPermutation(10, 0, 0)([9, 10]), r"indices must be in 0 \.\. 9, got values from 9 to 10"),
        (lambda: KeyedPermutation(10, 0, 0).inverse([-1]), "values must be in"),
        (lambda: permute([0.0], 10, derive_key(0, 0)), "indices must be integers"),
        (lambda: unpermute([True], 10, derive_key(0, 0)), "values must be integers"),
        (lambda: permute([0], 0, derive_key(0, 0)), "n must be at least 1"),
        (lambda: ClumpedPermutation(10, 0, 0, 0), "clump_size must be at least 1"),
        (lambda: ClumpedPermutation(10, 0, 0, 3)([10]), "indices must be in"),
        (lambda: indexed(num_splits=11), "num_splits=11 is more than num_rows=10"),
        (lambda: indexed(num_splits=0), "num_splits must be at least 1"),
        (lambda: indexed(clump_size=0), "clump_size must be at least 1"),
        (lambda: indexed().offsets(2, 0, 1), "split=2 is outside"),
        (lambda: indexed().offsets(0, 0, 6), r"indices 0 \.\. 6 are not in a split"),
        (lambda: indexed().offsets(0, 3, 2), r"indices 3 \.\. 2 are not in a split"),
        (lambda: indexed().offsets_at(np.array([2]), np.array([0])), "splits must be in"),
        (lambda: indexed().offsets_at(np.array([0]), np.array([5])), "indices must be in"),
        (lambda: indexed().places([10]), "offsets must be in"),
    ],
)
def test_impossible_numbers_are_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def indexed(**numbers: int) -> IndexedOrder:
    defaults: dict[str, Any] = {"num_rows": 10, "num_splits": 2, "seed": 0, "epoch": 0}
    return IndexedOrder(**(defaults | numbers))
