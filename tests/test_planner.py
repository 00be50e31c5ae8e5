"""The planner: each rank gets its own part of one plan."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from typing import Any

import numpy as np
import pytest
import ray
from lancedb.table import LanceTable

import lance_ray_stream as lrs
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.plan import build_plan
from lance_ray_stream.planner import LocalPlanner, PlannerActor, PublishedPlan
from lance_ray_stream.spec import make_spec
from tests.faults import living_actors, wait_until
from tests.probes import ControllerOfRun, CountedPlans, count_plans
from tests.tables import make_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("db"), 2_100, columns=["id"])


@pytest.mark.parametrize("algorithm", ["lancedb", "indexed"])
def test_what_a_rank_gets_does_not_grow_with_the_number_of_ranks(table, algorithm):
    """C44: 8 splits of its own, whatever there is beside them."""
    sizes = []
    for world_size in (1, 8, 64):
        spec = make_spec(table, num_splits=8 * world_size, shuffle_algorithm=algorithm)
        own = SplitLayout(8 * world_size).splits_of(world_size - 1, world_size)
        sizes.append(len(ray.cloudpickle.dumps(LocalPlanner().plan(spec, 0, own))))
    assert max(sizes) < sizes[0] + 16, "but for the digits of larger numbers"
    assert max(sizes) < 4_000


@pytest.mark.parametrize("filter", [None, "id % 3 = 0"])
@pytest.mark.parametrize("algorithm", ["lancedb", "indexed"])
def test_eight_ranks_get_the_parts_of_one_plan(table, algorithm, filter):
    """C70: built once, by an actor: who asks again gets the very arrays that it got before."""
    spec = make_spec(table, num_splits=16, shuffle_algorithm=algorithm, filter=filter)
    groups = [SplitLayout(16).splits_of(rank, 8) for rank in range(8)]
    planner, expected = PlannerActor.start(), build_plan(spec, 1)
    plans = [planner.plan(spec, 1, group) for group in groups]
    assert [planner.plan(spec, 1, group) for group in groups] == plans
    assert {(p.fingerprint, p.rows, p.rows_per_split) for p in plans} == {
        (expected.fingerprint, expected.rows, expected.rows_per_split)
    }
    index, split = np.meshgrid(np.arange(expected.rows_per_split), np.arange(2))
    for group, plan in zip(groups, plans, strict=True):
        found = plan.rows_to_fetch().fetch().at(split.ravel(), index.ravel())
        assert found.tolist() == expected.order.at(split.ravel() + group.start, index.ravel()).tolist()


def test_a_part_of_a_part_has_the_right_rows(table):
    """Splits are counted from the whole plan's first one."""
    whole = LocalPlanner().plan(make_spec(table, num_splits=12), 0, range(12))
    half = whole.part(range(6, 12))
    assert _rows(half.part(range(7, 9))) == _rows(whole)[7:9]


def test_what_the_workers_need_that_begin_again_before_the_end_of_an_epoch_is_kept(table, monkeypatch):
    """Two plans: of the epoch that is asked for, and of the one that is nearest to it."""
    built = count_plans(monkeypatch)
    planner, spec = LocalPlanner(), make_spec(table, num_splits=4)
    for epoch in (0, 1, 2, 1, 2, 0, 1, 7, 1):
        planner.plan(spec, epoch, range(4))
    assert built == [0, 1, 2, 0, 7]


def test_streams_of_one_planner_do_not_drive_each_other_out(tmp_path):
    """Four streams of a trainer, two epochs each, in one process."""
    make_table(tmp_path, 40, columns=["id"])
    table = CountedPlans(str(tmp_path), "rows")
    planner = PlannerActor.start()
    for seed, epoch in itertools.product([*range(4), *range(4)], range(2)):
        spec = make_spec(table, num_splits=4, shuffle_seed=seed)
        plan = planner.of_stream(f"stream {seed}").plan(spec, epoch, range(4))
        assert plan.fingerprint == build_plan(spec, epoch).fingerprint
    in_planner = [pid for pid in table.builders() if pid != os.getpid()]
    assert len(in_planner) == 8
    assert len(set(in_planner)) == 1


def test_a_config_keeps_a_planner_only_in_the_controller_of_a_run():
    """Not in the user's own object, which may serve many runs; nor where a copy is sent to no actor."""
    config = lrs.StreamDataConfig()
    for copied in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(copy.deepcopy(config)))):
        assert copied._planner.actor is None

    controller: Any = ray.remote(num_cpus=0)(ControllerOfRun)
    for_run = controller.remote(copy.deepcopy(config))
    first, second = ray.get(for_run.planners_of_two_starts.remote())
    assert first is not None
    assert first == second
    of_user = controller.remote(config)
    assert ray.get(of_user.planners_of_two_starts.remote()) == [None, None]
    del for_run
    wait_until(lambda: first not in living_actors(), timeout_s=30)


def _rows(plan: PublishedPlan) -> list[list[int]]:
    assert plan.row_ids is not None
    return [ids.tolist() for ids in ray.get(list(plan.row_ids))]
