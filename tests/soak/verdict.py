"""Whether what the workers received is what an undisturbed run receives, and a table of how it went."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# A global batch in the order of delivery, shape (cycles, num_splits).
Planned = Callable[[int], np.ndarray]
# (rank, world_size) -> its splits.
SplitsOf = Callable[[int, int], range]
MAX_PROBLEMS = 20


@dataclass(kw_only=True)
class Attempt:
    """What the workers received from one start to the next.

    Attributes:
        start: when, in seconds of the clock; the attempt's name, too.
        world: the number of workers.
        batches: step -> rank -> the ids that it received, in order.
        repeated: (step, rank) that came again in the same attempt.
    """

    start: float
    world: int
    batches: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    repeated: list[tuple[int, int]] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        """The step that it began at."""
        return min(self.batches)

    @property
    def last_step(self) -> int:
        """The last one that any rank received its part of."""
        return max(self.batches)


def attempts_of(lines: Iterable[dict[str, Any]]) -> list[Attempt]:
    """The attempts in order, from lines of all ranks; each has attempt, world, rank, step, ids."""
    found: dict[float, Attempt] = {}
    for line in lines:
        attempt = found.setdefault(line["attempt"], Attempt(start=line["attempt"], world=line["world"]))
        ranks = attempt.batches[line["step"]]
        if line["rank"] in ranks:
            attempt.repeated.append((line["step"], line["rank"]))
        ranks[line["rank"]] = line["ids"]
    return sorted(found.values(), key=lambda attempt: attempt.start)


def ends(attempts: Sequence[Attempt], num_steps: int) -> list[int]:
    """For each attempt the step that it counts up to: where the next one began, from a checkpoint."""
    return [*(attempt.first_step for attempt in attempts[1:]), num_steps][: len(attempts)]


def problems(
    attempts: Sequence[Attempt], *, planned: Planned, splits_of: SplitsOf, num_steps: int, steps_per_epoch: int
) -> list[str]:
    """Every difference between the attempts and an undisturbed run of so many steps; none if all is well."""
    found = list(_wrong_batches(attempts, planned, splits_of))
    history: dict[int, list[int]] = {}
    for number, (attempt, end) in enumerate(zip(attempts, ends(attempts, num_steps), strict=True)):
        for step in range(attempt.first_step, end):
            ranks = attempt.batches.get(step, {})
            if len(ranks) < attempt.world:
                found.append(f"attempt {number}: step {step} counts, but only ranks {sorted(ranks)} received it")
            if step in history:
                found.append(f"attempt {number}: step {step} counted before")
            history[step] = list(itertools.chain(*ranks.values()))
    missing = sorted(set(range(num_steps)) - set(history))
    if missing:
        found.append(f"{len(missing)} steps do not count in any attempt, the first is {missing[0]}")
    for first in range(0, num_steps, steps_per_epoch):
        steps = range(first, min(first + steps_per_epoch, num_steps))
        expected = Counter(int(i) for step in steps for i in planned(step).ravel())
        received = Counter(i for step in steps for i in history.get(step, []))
        for what, rows in (("missing", expected - received), ("too many", received - expected)):
            if rows:
                epoch = first // steps_per_epoch
                found.append(f"epoch {epoch}: {rows.total()} rows {what}, such as id {min(rows)}")
    return found


def _wrong_batches(attempts: Sequence[Attempt], planned: Planned, splits_of: SplitsOf) -> Iterator[str]:
    """Also of steps that were done again, and of those that not every rank came to."""
    for number, attempt in enumerate(attempts):
        for step, rank in attempt.repeated:
            yield f"attempt {number}: rank {rank} received step {step} twice"
        for step, ranks in sorted(attempt.batches.items()):
            batch = planned(step)
            for rank, ids in sorted(ranks.items()):
                splits = splits_of(rank, attempt.world)
                if ids != batch[:, splits.start : splits.stop].ravel().tolist():
                    yield f"attempt {number}: step {step}: rank {rank} of {attempt.world} received other rows: {ids}"
            whole = sorted(itertools.chain(*ranks.values()))
            if len(ranks) == attempt.world and whole != sorted(batch.ravel().tolist()):
                yield f"attempt {number}: step {step}: another global batch than the reference"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [list(header), *([f"{c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
