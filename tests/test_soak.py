"""The soak's own parts: that what happens is what was promised, and that its verdict sees a fault when there is one."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lance_ray_stream import SplitLayout
from tests.soak import verdict
from tests.soak.schedule import KINDS, MAX_WORKERS, make_schedule

# --- What happens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_has_all_that_was_promised(seed):
    """Nodes join six times and leave six times, eight kills and two of the planner; 1 to 8 workers."""
    schedule = make_schedule(seed, times=6)
    counts = Counter(event.kind for event in schedule.events)
    assert [counts[kind] for kind in KINDS] == [6, 4, 2, 4, 4, 2]
    assert set(schedule.places()) == set(range(1, MAX_WORKERS + 1))
    nodes = [schedule.first_places]
    for event in schedule.events:
        if event.kind == "join":
            nodes.append(event.places - sum(nodes))
            assert nodes[-1] >= 1
        elif event.kind == "leave":
            del nodes[event.node]
        assert event.places == sum(nodes)
        assert 0 <= event.rank < 1


def test_a_schedule_is_drawn_from_its_seed():
    assert make_schedule(3, times=6) == make_schedule(3, times=6)
    assert make_schedule(3, times=6) != make_schedule(4, times=6)
    assert len(make_schedule(0, times=1).events) == 5, "a short one"


# --- The verdict -----------------------------------------------------------------------------------

LAYOUT = SplitLayout(6, uneven=True)
STEPS_PER_EPOCH, EPOCHS = 4, 2
ROWS_PER_EPOCH = 6 * 2 * STEPS_PER_EPOCH
# (epoch, step, cycle, split) -> id: another order in each epoch
IDS = np.stack([np.random.default_rng(epoch).permutation(ROWS_PER_EPOCH) for epoch in range(EPOCHS)]).reshape(-1, 2, 6)

Lines = list[dict[str, Any]]


def lines_of(attempt: float, world: int, steps: range) -> Lines:
    """What the ranks of one attempt write down when nothing is wrong."""
    lines = []
    for step, rank in itertools.product(steps, range(world)):
        splits = LAYOUT.splits_of(rank, world)
        ids = IDS[step][:, splits.start : splits.stop].ravel().tolist()
        lines.append({"attempt": attempt, "world": world, "rank": rank, "step": step, "ids": ids})
    return lines


@pytest.fixture
def lines() -> Lines:
    """Three attempts: the second does step 2 again, the third begins in the second epoch and does step 4 again."""
    whole = [*lines_of(10.0, 2, range(3)), *lines_of(20.0, 4, range(2, 6)), *lines_of(30.0, 1, range(4, 8))]
    cut_short = [line for line in whole if (line["attempt"], line["step"], line["rank"]) != (20.0, 5, 3)]
    return cut_short[::-1]  # in no order: each rank has its own file


def problems(lines: Lines) -> list[str]:
    return verdict.problems(
        verdict.attempts_of(lines),
        planned=lambda step: IDS[step],
        splits_of=LAYOUT.splits_of,
        num_steps=EPOCHS * STEPS_PER_EPOCH,
        steps_per_epoch=STEPS_PER_EPOCH,
    )


def test_a_run_that_was_disturbed_and_is_right(lines):
    assert problems(lines) == []
    attempts = verdict.attempts_of(lines)
    assert [(a.world, a.first_step, a.last_step) for a in attempts] == [(2, 0, 2), (4, 2, 5), (1, 4, 7)]
    assert verdict.ends(attempts, 8) == [2, 4, 8]


def find(lines: Lines, attempt: float, step: int, rank: int) -> dict[str, Any]:
    return next(line for line in lines if (line["attempt"], line["step"], line["rank"]) == (attempt, step, rank))


def repeat_a_row(lines: Lines) -> None:
    line = find(lines, 30.0, 6, 0)
    line["ids"][0] = line["ids"][1]


def lose_a_row(lines: Lines) -> None:
    find(lines, 10.0, 1, 1)["ids"].pop()


def lose_the_part_of_a_rank(lines: Lines) -> None:
    lines.remove(find(lines, 20.0, 3, 2))


def lose_the_last_step(lines: Lines) -> None:
    lines.remove(find(lines, 30.0, 7, 0))


def begin_too_late(lines: Lines) -> None:
    lines.remove(find(lines, 30.0, 4, 0))
    lines[:] = [line for line in lines if (line["attempt"], line["step"]) not in {(20.0, 4), (20.0, 5)}]


def begin_too_early(lines: Lines) -> None:
    lines += lines_of(30.0, 1, range(2, 4))
    lines += lines_of(25.0, 1, range(3, 4))


def deliver_a_step_twice(lines: Lines) -> None:
    lines.append(copy.deepcopy(find(lines, 20.0, 2, 0)))


def swap_two_ranks(lines: Lines) -> None:
    one, other = find(lines, 10.0, 0, 0), find(lines, 10.0, 0, 1)
    one["ids"], other["ids"] = other["ids"], one["ids"]


def change_the_order(lines: Lines) -> None:
    find(lines, 10.0, 0, 0)["ids"].reverse()


def change_what_is_done_again(lines: Lines) -> None:
    find(lines, 10.0, 2, 0)["ids"][0] = 999


def change_a_step_that_was_cut_short(lines: Lines) -> None:
    find(lines, 20.0, 5, 0)["ids"][0] = 999


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (repeat_a_row, "epoch 1: 1 rows too many"),
        (lose_a_row, "epoch 0: 1 rows missing"),
        (lose_the_part_of_a_rank, "attempt 1: step 3 counts, but only ranks"),
        (lose_the_last_step, "attempt 2: step 7 counts, but only ranks []"),
        (begin_too_late, "attempt 1: step 4 counts, but only ranks []"),
        (begin_too_early, "step 2 counted before"),
        (deliver_a_step_twice, "attempt 1: rank 0 received step 2 twice"),
        (swap_two_ranks, "step 0: rank 1 of 2 received other rows"),
        (change_the_order, "step 0: rank 0 of 2 received other rows"),
        (change_what_is_done_again, "attempt 0: step 2: another global batch"),
        (change_a_step_that_was_cut_short, "attempt 1: step 5: rank 0 of 4 received other rows"),
    ],
)
def test_a_planted_fault_is_found(lines, fault: Callable[[Lines], None], says):
    fault(lines)
    found = problems(lines)
    assert any(says in problem for problem in found), found


def test_a_run_that_received_nothing_is_not_right():
    assert problems([]) == [
        "8 steps do not count in any attempt, the first is 0",
        f"epoch 0: {ROWS_PER_EPOCH} rows missing, such as id 0",
        f"epoch 1: {ROWS_PER_EPOCH} rows missing, such as id 0",
    ]
