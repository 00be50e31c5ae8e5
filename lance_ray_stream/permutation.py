"""Which row, as a formula: a keyed bijection of ``[0, n)`` in O(1) memory, and the ``"indexed"`` order built on it.

The order is promised across releases, platforms and numpy versions: it is made of unsigned 64-bit arithmetic and
SHAKE-256 alone, and a test holds its values. The construction is published:

* A generalised Feistel network with cycle-walking: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
  Domains", CT-RSA 2002. With ``a * b >= n``, both near the square root of n, a value is written as ``left * b +
  right``; in turn, each half is shifted, modulo its base, by a keyed function of the other. A result outside
  ``[0, n)`` goes through again until it is inside; as ``a * b < n + a``, hardly any has to.
* That function is SplitMix64: G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators",
  OOPSLA 2014. Half h gets output h of the generator whose seed is the key of the round, brought into the base by
  a multiplication: D. Lemire, "Fast Random Integer Generation in an Interval", ACM TOMACS 2019.
* The keys of the rounds are the SHAKE-256 (FIPS 202) of seed and epoch, 16 bytes: unlike a sum of the two, it gives
  no two pairs the same keys, nor related ones.

A Feistel network needs halves of some size: on a handful of values it prefers some permutations to others, measurably
even after 12 rounds. Up to ``SMALL_N`` values are therefore sorted by SplitMix64 outputs, which prefers none.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.layout import IntArray, check_int, check_member

UintArray = npt.NDArray[np.uint64]
Key = tuple[int, ...]

# All of these are part of the promised order.
SMALL_N = 4096
NUM_ROUNDS = 8
_KEY_LABEL = b"lance_ray_stream.permutation.1"
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

MAX_N = 2**63
# So many values at a time stay in the processor's cache.
_BLOCK = 8192
_NUM_SAMPLES = 64


def derive_key(seed: int, epoch: int) -> Key:
    """The keys of the rounds, one 64-bit integer each, for one epoch.

    Args:
        seed, epoch: each in ``[0, 2**64)``.

    Raises:
        InvalidArgumentError: one of them is not such an integer.
    """
    words = [_check_up_to("seed", seed, 2**64 - 1), _check_up_to("epoch", epoch, 2**64 - 1)]
    label = _KEY_LABEL + b"".join(word.to_bytes(8, "little") for word in words)
    digest = hashlib.shake_256(label).digest(8 * NUM_ROUNDS)
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(NUM_ROUNDS))


def permute(indices: npt.ArrayLike, n: int, key: Key) -> UintArray:
    """Where the keyed bijection of ``[0, n)`` sends each index.

    Args:
        indices: integers in ``[0, n)``, of any shape; they may repeat.
        n: 1 to 2**63.
        key: from :func:`derive_key`.

    Returns:
        uint64, of the shape of ``indices``.

    Raises:
        InvalidArgumentError: ``n`` is out of range, or an index is not in ``[0, n)``.
    """
    return _map(indices, n, key, inverse=False)


def unpermute(values: npt.ArrayLike, n: int, key: Key) -> UintArray:
    """The inverse of :func:`permute`: which index is sent to each value."""
    return _map(values, n, key, inverse=True)


@dataclass(frozen=True)
class KeyedPermutation:
    """A random order of ``[0, n)`` of which nothing is stored: any part of it can be computed, and its inverse.

    >>> order = KeyedPermutation(10**9, seed=0, epoch=3)
    >>> order.inverse(order([0, 1, 999_999_999])).tolist()
    [0, 1, 999999999]

    Attributes:
        n: 1 to 2**63.
        seed, epoch: each in ``[0, 2**64)``.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    n: int
    seed: int
    epoch: int
    _key: Key = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = derive_key(self.seed, self.epoch)
        _put(self, n=_check_up_to("n", self.n, MAX_N, minimum=1), seed=int(self.seed), epoch=int(self.epoch), _key=key)

    def __call__(self, indices: npt.ArrayLike) -> UintArray:
        """The values at ``indices``; see :func:`permute`."""
        return permute(indices, self.n, self._key)

    def inverse(self, values: npt.ArrayLike) -> UintArray:
        """The indices of ``values``; see :func:`unpermute`."""
        return unpermute(values, self.n, self._key)


@dataclass(frozen=True)
class ClumpedPermutation:
    """A random order of ``[0, n)`` in which clumps of neighbours stay together, ascending.

    Clump j is ``[j * c, (j + 1) * c)`` with ``c = clump_size``. If c does not divide n the last clump is short, by
    ``gap`` values. The inverse of the clumps' order says where the short one ends; whatever comes after it comes
    ``gap`` indices early. With these added back all clumps are equally long, and one division by c tells the place of
    the clump and the place inside it. So the map is O(1) and a bijection for every n and c.

    Attributes:
        n, seed, epoch: as in :class:`KeyedPermutation`, which this is for clumps of 1.
        clump_size: at least 1; more than n is one clump.
    """

    n: int
    seed: int
    epoch: int
    clump_size: int = 1
    _clumps: KeyedPermutation = field(init=False, repr=False, compare=False)
    _gap: int = field(init=False, repr=False, compare=False)
    _short_end: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n = _check_up_to("n", self.n, MAX_N, minimum=1)
        size = min(n, check_int("clump_size", self.clump_size, minimum=1))
        clumps = KeyedPermutation(-(-n // size), self.seed, self.epoch)
        gap = -n % size
        short_end = (int(clumps.inverse([clumps.n - 1])[0]) + 1) * size - gap
        _put(self, n=n, clump_size=size, seed=clumps.seed, epoch=clumps.epoch)
        _put(self, _clumps=clumps, _gap=gap, _short_end=short_end)

    def __call__(self, indices: npt.ArrayLike) -> UintArray:
        """The values at ``indices``: uint64, of the same shape."""
        padded = _check_values("indices", indices, self.n)
        if self.clump_size == 1:
            return self._clumps(padded)
        padded = padded + np.where(padded >= self._short_end, np.uint64(self._gap), np.uint64(0))
        place, inside = np.divmod(padded, np.uint64(self.clump_size))
        values: UintArray = self._clumps(place) * np.uint64(self.clump_size) + inside
        return values

    def inverse(self, values: npt.ArrayLike) -> UintArray:
        """The indices of ``values``: uint64, of the same shape."""
        checked = _check_values("values", values, self.n)
        if self.clump_size == 1:
            return self._clumps.inverse(checked)
        clump, inside = np.divmod(checked, np.uint64(self.clump_size))
        padded = self._clumps.inverse(clump) * np.uint64(self.clump_size) + inside
        indices: UintArray = padded - np.where(padded >= self._short_end, np.uint64(self._gap), np.uint64(0))
        return indices


@dataclass(frozen=True, kw_only=True)
class IndexedOrder:
    """One epoch in O(1) memory: which of N rows, counted from 0, is at (split s, index i)?

    The rows are shuffled into one sequence; split s is its s-th contiguous part. The surplus rows at the end of the
    sequence are dropped: other ones in each epoch.

    Attributes:
        num_rows: N, 1 to 2**63.
        num_splits: S, at most N.
        seed, epoch: each in ``[0, 2**64)``.
        clump_size: rows that stay together, as in :class:`ClumpedPermutation`; ``None`` is 1.
        shuffle: ``False`` leaves the rows in their order; seed, epoch and clump size then change nothing.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    num_rows: int
    num_splits: int
    seed: int
    epoch: int
    clump_size: int | None = None
    shuffle: bool = True
    _sequence: ClumpedPermutation = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = _check_up_to("num_rows", self.num_rows, MAX_N, minimum=1)
        clump_size = None if self.clump_size is None else check_int("clump_size", self.clump_size, minimum=1)
        sequence = ClumpedPermutation(rows, self.seed, self.epoch, clump_size or 1)
        splits = check_int("num_splits", self.num_splits, minimum=1)
        if splits > rows:
            raise InvalidArgumentError(
                f"num_splits={splits} is more than num_rows={rows}, so splits would be empty. Use "
                f"num_splits of at most {rows}."
            )
        _put(self, num_rows=rows, num_splits=splits, clump_size=clump_size)
        _put(self, seed=sequence.seed, epoch=sequence.epoch, _sequence=sequence)

    @property
    def rows_per_split(self) -> int:
        """L, the rows of each split."""
        return self.num_rows // self.num_splits

    @property
    def dropped_rows(self) -> int:
        """The surplus of the epoch, ``num_rows % num_splits``."""
        return self.num_rows % self.num_splits

    def offsets(self, split: int, start: int, stop: int) -> UintArray:
        """The rows of ``split`` at indices ``start`` to ``stop - 1``: uint64, shape (stop - start,).

        Raises:
            InvalidArgumentError: there is no such split, or there are no such indices.
        """
        check_member("split", split, "num_splits", self.num_splits)
        if not 0 <= check_int("start", start) <= check_int("stop", stop) <= self.rows_per_split:
            raise InvalidArgumentError(
                f"indices {start} .. {stop} are not in a split: it has rows 0 .. {self.rows_per_split - 1}."
            )
        first = int(split) * self.rows_per_split
        return self._rows(np.arange(first + int(start), first + int(stop), dtype=np.uint64))

    def offsets_at(self, splits: IntArray, indices: IntArray) -> UintArray:
        """The rows at the given places.

        Args:
            splits, indices: integers, shape (rows,) each, or shapes that broadcast.

        Returns:
            uint64, shape (rows,).

        Raises:
            InvalidArgumentError: a place is outside the plan.
        """
        split = _check_values("splits", splits, self.num_splits)
        index = _check_values("indices", indices, self.rows_per_split)
        return self._rows(split * np.uint64(self.rows_per_split) + index)

    def places(self, offsets: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Where the given rows are: split and index, int64, both -1 for a row that the epoch drops.

        Raises:
            InvalidArgumentError: there is no such row.
        """
        rows = _check_values("offsets", offsets, self.num_rows)
        position = self._sequence.inverse(rows) if self.shuffle else rows
        split, index = np.divmod(position, np.uint64(self.rows_per_split))
        kept = split < self.num_splits
        return np.where(kept, split.astype(np.int64), -1), np.where(kept, index.astype(np.int64), -1)

    @property
    def fingerprint(self) -> str:
        """Digest of the numbers and of rows sampled all over the epoch, the same on every platform; O(1)."""
        rows = self.rows_per_split * self.num_splits
        samples = min(rows, _NUM_SAMPLES)
        positions = np.array([i * rows // samples for i in range(samples)], dtype=np.uint64)
        order = (self._sequence.clump_size, self.seed, self.epoch) if self.shuffle else ()
        digest = hashlib.blake2b(repr(("indexed", self.num_rows, self.num_splits, *order)).encode(), digest_size=8)
        digest.update(self._rows(positions).astype("<u8").tobytes())
        return digest.hexdigest()

    def _rows(self, positions: UintArray) -> UintArray:
        return self._sequence(positions) if self.shuffle else positions


def _map(values: npt.ArrayLike, n: int, key: Key, *, inverse: bool) -> UintArray:
    n = _check_up_to("n", n, MAX_N, minimum=1)
    asked = _check_values("values" if inverse else "indices", values, n)
    if n <= SMALL_N:
        return _small_tables(n, key)[inverse][asked.astype(np.intp)]
    flat, result = asked.reshape(-1), np.empty(asked.size, dtype=np.uint64)
    for start in range(0, len(flat), _BLOCK):
        result[start : start + _BLOCK] = _walk(flat[start : start + _BLOCK], n, key, inverse)
    return result.reshape(asked.shape)


@lru_cache(maxsize=8)
def _small_tables(n: int, key: Key) -> tuple[UintArray, UintArray]:
    """The bijection of a small domain and its inverse; outputs of SplitMix64 never tie."""
    order = np.argsort(_split_mix(np.arange(n, dtype=np.uint64), key[0])).astype(np.uint64)
    return order, np.argsort(order).astype(np.uint64)


def _walk(values: UintArray, n: int, key: Key, inverse: bool) -> UintArray:
    """Through the network until every value is in ``[0, n)`` again."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    values = _feistel(values, a, b, key, inverse)
    outside = np.flatnonzero(values >= n)
    while len(outside):
        again = _feistel(values[outside], a, b, key, inverse)
        values[outside] = again
        outside = outside[again >= n]
    return values


def _feistel(values: UintArray, a: int, b: int, key: Key, inverse: bool) -> UintArray:
    """A bijection of ``[0, a * b)``, or its inverse: the same rounds backwards."""
    left: UintArray = values // np.uint64(b)
    right: UintArray = values - left * np.uint64(b)
    rounds = range(len(key))
    for i in reversed(rounds) if inverse else rounds:
        half, other, base = (right, left, b) if i % 2 else (left, right, a)
        # 32 bits of the output, times a base of at most 32 bits: no overflow
        shift = _split_mix(other, key[i])
        shift >>= 32
        shift *= base
        shift >>= 32
        half += base - shift if inverse else shift
        # modulo base, as half < 2 * base: the difference of a smaller half wraps around to a large number
        np.minimum(half, half - base, out=half)
    left *= b
    left += right
    return left


def _split_mix(outputs: UintArray, seed: int) -> UintArray:
    """The given outputs, counted from 0, of SplitMix64 with this seed."""
    z: UintArray = outputs * np.uint64(_GAMMA)
    z += (seed + _GAMMA) % 2**64
    z ^= z >> 30
    z *= _MIX_1
    z ^= z >> 27
    z *= _MIX_2
    z ^= z >> 31
    return z


def _check_values(name: str, values: npt.ArrayLike, n: int) -> UintArray:
    """``values`` as uint64, if they are integers in ``[0, n)``."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(array.shape, dtype=np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} must be integers, got an array of {array.dtype}.")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= n:
        raise InvalidArgumentError(f"{name} must be in 0 .. {n - 1}, got values from {low} to {high}.")
    checked: UintArray = array.astype(np.uint64)
    return checked


def _check_up_to(name: str, value: object, maximum: int, *, minimum: int = 0) -> int:
    number = check_int(name, value, minimum=minimum)
    if number > maximum:
        raise InvalidArgumentError(f"{name} must be at most {maximum}, got {number}.")
    return number


def _put(described: object, **values: object) -> None:
    """Set checked values of a frozen dataclass while it is made."""
    for name, value in values.items():
        object.__setattr__(described, name, value)
