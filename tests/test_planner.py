"""The planner: each rank gets its own part of one plan."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from lancedb.table import LanceTable

from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.plan import build_plan
from lance_ray_stream.planner import LocalPlanner, PlannerActor, PublishedPlan
from lance_ray_stream.spec import make_spec
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


def _rows(plan: PublishedPlan) -> list[list[int]]:
    assert plan.row_ids is not None
    return [ids.tolist() for ids in ray.get(list(plan.row_ids))]
