"""Who: the arithmetic between splits, ranks, reader workers and global batches. No I/O, no Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lance_ray_stream.display import show_range, table_html
from lance_ray_stream.errors import InvalidArgumentError, LayoutError

IntArray = npt.NDArray[np.int64]


def check_int(name: str, value: object, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """``value`` as an ``int`` in ``[minimum, maximum]``; numpy integers pass, bools and floats do not.

    Raises:
        InvalidArgumentError: naming the argument, the value and what is expected.
    """
    bounds = [f"at least {minimum}"] * (minimum is not None) + [f"at most {maximum}"] * (maximum is not None)
    expected = " and ".join(bounds)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        of = f" of {expected}" if bounds else ""
        raise InvalidArgumentError(f"{name} must be an integer{of}, got {value!r} ({type(value).__name__}).")
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        raise InvalidArgumentError(f"{name} must be {expected}, got {value}.")
    return int(value)


@dataclass(frozen=True)
class SplitLayout:
    """How ``num_splits`` splits are dealt to ranks, to their reader workers, and to global batches.

    Rank r of ``world_size`` W owns the contiguous split group ``[r*S//W, (r+1)*S//W)`` of S = ``num_splits``;
    its reader worker w owns the w-th contiguous part of that group, cut by the same rule.

    Args:
        num_splits: S.
        uneven: whether groups may differ by one split, which makes every world size up to ``num_splits`` legal. If
            not, ``num_splits`` has to be a multiple of the world size, and of its reader workers.

    >>> layout = SplitLayout(48)
    >>> layout.splits_of(rank=1, world_size=8)
    range(6, 12)
    >>> layout.world_sizes()
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    >>> [len(SplitLayout(48, uneven=True).splits_of(rank, world_size=5)) for rank in range(5)]
    [9, 10, 9, 10, 10]

    Raises:
        InvalidArgumentError: if ``num_splits`` is not a positive integer.
    """

    num_splits: int
    uneven: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_splits", check_int("num_splits", self.num_splits, minimum=1))

    def __repr__(self) -> str:
        return f"SplitLayout(num_splits={self.num_splits}{', uneven=True' if self.uneven else ''})"

    def _repr_html_(self) -> str:
        sizes = self.world_sizes()
        groups = ((size, self.num_splits // size, show_range(self.splits_of(0, size))) for size in sizes[:16])
        title = f"{self!r}: {len(sizes)} legal world sizes"
        return table_html(title, ("world size", "splits per rank", "splits of rank 0"), groups)

    @classmethod
    def for_world_sizes(cls, world_sizes: Iterable[int], *, num_workers: int = 1) -> SplitLayout:
        """The smallest layout that is legal for every one of ``world_sizes`` (their least common multiple).

        >>> SplitLayout.for_world_sizes([6, 8])
        SplitLayout(num_splits=24)
        """
        if not isinstance(world_sizes, Iterable) or isinstance(world_sizes, (str, bytes)):
            raise InvalidArgumentError(f"world_sizes must be a list of integers, got {world_sizes!r}.")
        sizes = [check_int("world_sizes", size, minimum=1) for size in world_sizes]
        if not sizes:
            raise InvalidArgumentError("world_sizes is empty: name at least one number of ranks.")
        return cls(math.lcm(*sizes) * check_int("num_workers", num_workers, minimum=1))

    def splits_of(self, rank: int, world_size: int, worker: int | None = None, num_workers: int = 1) -> range:
        """The splits of ``rank``, or of one of its reader workers if ``worker`` is given.

        Raises:
            InvalidArgumentError: if ``rank`` or ``worker`` is out of range.
            LayoutError: if the splits cannot be dealt evenly.
        """
        self.check(world_size, num_workers)
        check_member("rank", rank, "world_size", world_size)
        group = _part(range(self.num_splits), rank, world_size)
        if worker is None:
            return group
        check_member("worker", worker, "num_workers", num_workers)
        return _part(group, worker, num_workers)

    def is_even(self, world_size: int) -> bool:
        """Whether all ranks have equally many splits."""
        return self.num_splits % world_size == 0

    def gradient_weight(self, rank: int, world_size: int) -> float:
        """What a rank multiplies its mean loss by, so that the mean over ranks is the mean over the global batch.

        A rank with k of S splits has k/S of every global batch. Distributed data parallel takes the mean over W ranks,
        which gives each of them 1/W; so the weight is ``k * W / S``: 1 where groups are equal.

        >>> [SplitLayout(48, uneven=True).gradient_weight(rank, 5) for rank in range(5)]
        [0.9375, 1.0416666666666667, 0.9375, 1.0416666666666667, 1.0416666666666667]
        """
        return len(self.splits_of(rank, world_size)) * world_size / self.num_splits

    def world_sizes(self, num_workers: int = 1, up_to: int | None = None) -> list[int]:
        """Every legal world size, ascending: those with ``num_splits % (world_size * num_workers) == 0``.

        With ``uneven``, those that give every reader worker a split.
        """
        num_workers = check_int("num_workers", num_workers, minimum=1)
        if self.uneven:
            most = self.num_splits // num_workers
            limit = most if up_to is None else min(most, check_int("up_to", up_to, minimum=1))
            return list(range(1, limit + 1))
        if self.num_splits % num_workers:
            return []
        per_worker = self.num_splits // num_workers
        limit = per_worker if up_to is None else min(per_worker, check_int("up_to", up_to, minimum=1))
        return [size for size in _divisors(per_worker) if size <= limit]

    def check(self, world_size: int, num_workers: int = 1, global_batch_size: int | None = None) -> None:
        """Refuse numbers for which the guarantees G2 and G6 cannot hold.

        Raises:
            InvalidArgumentError: if a number is not a positive integer.
            LayoutError: naming the numbers that do not divide, and the nearest ones that work.
        """
        world_size = check_int("world_size", world_size, minimum=1)
        num_workers = check_int("num_workers", num_workers, minimum=1)
        if global_batch_size is not None:
            self.check_global_batch_size(global_batch_size)
        if self.uneven:
            self._check_enough(world_size, num_workers)
            return
        if self.num_splits % world_size:
            raise LayoutError(
                f"num_splits={self.num_splits} cannot be dealt evenly to world_size={world_size}. "
                f"World sizes that work: {_listed(self.world_sizes())}. "
                f"num_splits that work for this world size: {_multiples(world_size, self.num_splits)}. "
                "StreamDataConfig(uneven=True) makes every world size legal."
            )
        if self.num_splits % (world_size * num_workers):
            group = self.num_splits // world_size
            raise LayoutError(
                f"num_splits={self.num_splits} over world_size={world_size} gives {group} splits per rank, "
                f"which num_workers={num_workers} reader workers cannot share evenly. "
                f"num_workers that work here: {_listed(_divisors(group))}. "
                f"num_splits that work for these: {_multiples(world_size * num_workers, self.num_splits)}."
            )

    def _check_enough(self, world_size: int, num_workers: int) -> None:
        if self.num_splits < world_size * num_workers:
            raise LayoutError(
                f"num_splits={self.num_splits} are too few for world_size={world_size} with num_workers={num_workers} "
                f"reader workers each: every one needs a split. World sizes that work: 1 to "
                f"{self.num_splits // num_workers}."
            )

    def check_global_batch_size(self, global_batch_size: int) -> int:
        """``global_batch_size`` if it is a multiple of ``num_splits``, so that a step is whole cycles.

        Raises:
            LayoutError: naming the nearest sizes that work.
        """
        size = check_int("global_batch_size", global_batch_size, minimum=1)
        if size % self.num_splits:
            raise LayoutError(
                f"global_batch_size={size} is not a multiple of num_splits={self.num_splits}, so a step "
                "would not be whole cycles and would differ between world sizes. "
                f"Nearest sizes that work: {_multiples(self.num_splits, size)}."
            )
        return size

    def local_batch_size(self, global_batch_size: int, world_size: int, rank: int | None = None) -> int:
        """Rows of one step on one rank, after all checks: its splits' share of ``global_batch_size``.

        Args:
            rank: which one; may be left out where all have the same.

        Raises:
            InvalidArgumentError: without ``rank`` where ranks have unequally many splits.
            LayoutError: if the numbers do not fit, listing those that do.
        """
        self.check(world_size, global_batch_size=global_batch_size)
        if rank is None and not self.is_even(world_size):
            raise InvalidArgumentError(
                f"With num_splits={self.num_splits} over world_size={world_size}, local batches differ between ranks: "
                "name the rank."
            )
        return global_batch_size // self.num_splits * len(self.splits_of(rank or 0, world_size))

    def rows_of_step(
        self, step: int, global_batch_size: int, *, rank: int | None = None, world_size: int = 1
    ) -> IntArray:
        """The places in the plan that step ``step`` reads.

        Args:
            step: the step of the epoch, from 0.
            global_batch_size: rows of a step over all ranks.
            rank: only the rows of this rank of ``world_size``; all of them if None.

        Returns:
            int64, shape (rows, 2): the pairs (split, index) in cycle-major order, which is the order in
            which a rank receives them.
        """
        step = check_int("step", step, minimum=0)
        self.check(world_size, global_batch_size=global_batch_size)
        splits = range(self.num_splits) if rank is None else self.splits_of(rank, world_size)
        cycles = global_batch_size // self.num_splits
        index, split = np.meshgrid(np.arange(step * cycles, (step + 1) * cycles), np.asarray(splits), indexing="ij")
        # two (cycles, splits) grids -> (cycles * splits, 2)
        return np.stack([split.ravel(), index.ravel()], axis=1).astype(np.int64)


def check_member(name: str, value: int, total_name: str, total: int) -> int:
    """``value`` if it is one of ``0 .. total - 1``, else an ``InvalidArgumentError``."""
    value = check_int(name, value)
    if not 0 <= value < total:
        raise InvalidArgumentError(f"{name}={value} is outside 0 .. {total - 1} ({total_name}={total}).")
    return value


def _part(splits: range, member: int, of: int) -> range:
    """The ``member``-th of ``of`` contiguous parts, which differ by at most one split."""
    return splits[member * len(splits) // of : (member + 1) * len(splits) // of]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiples(base: int, near: int) -> str:
    below = near // base * base
    return _listed([size for size in (below, below + base) if size > 0])


def _listed(numbers: list[int], at_most: int = 16) -> str:
    if not numbers:
        return "none"
    shown = ", ".join(map(str, numbers[:at_most]))
    return shown if len(numbers) <= at_most else f"{shown}, ... {numbers[-1]}"
