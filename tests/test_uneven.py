"""Ranks with unequally many splits: the same global batches, and the same trained model, on any number of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.train import ScalingConfig

import lance_ray_stream as lrs
from lance_ray_stream.cursor import Cursor
from lance_ray_stream.elastic import legal_world_sizes
from lance_ray_stream.errors import InvalidArgumentError, LayoutError
from tests import train_loops
from tests.probes import in_steps, oracle
from tests.tables import make_table

SETTINGS = settings(deadline=None)

# (num_splits, world_size, num_workers) of which each reader worker gets a split
TOPOLOGIES = st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(1, 4)).filter(lambda t: t[0] >= t[1] * t[2])


@SETTINGS
@given(TOPOLOGIES)
def test_groups_are_contiguous_and_differ_by_at_most_one_split(topology: tuple[int, int, int]) -> None:
    num_splits, world_size, num_workers = topology
    layout = lrs.SplitLayout(num_splits, uneven=True)
    layout.check(world_size, num_workers)
    groups = [layout.splits_of(rank, world_size) for rank in range(world_size)]
    assert list(itertools.chain(*groups)) == list(range(num_splits))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    for rank, group in enumerate(groups):
        parts = [layout.splits_of(rank, world_size, worker, num_workers) for worker in range(num_workers)]
        assert list(itertools.chain(*parts)) == list(group)
        assert min(map(len, parts)) >= 1
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@SETTINGS
@given(TOPOLOGIES)
def test_where_splits_can_be_dealt_evenly_nothing_changes(topology: tuple[int, int, int]) -> None:
    num_splits, world_size, _ = topology
    even, uneven = lrs.SplitLayout(num_splits), lrs.SplitLayout(num_splits, uneven=True)
    assert uneven.world_sizes() == list(range(1, num_splits + 1))
    if world_size in even.world_sizes():
        for rank in range(world_size):
            assert even.splits_of(rank, world_size) == uneven.splits_of(rank, world_size)
            assert uneven.gradient_weight(rank, world_size) == 1
            assert even.local_batch_size(num_splits, world_size) == uneven.local_batch_size(
                num_splits, world_size, rank
            )


@SETTINGS
@given(TOPOLOGIES, st.integers(1, 4), st.data())
def test_weighted_means_of_ranks_are_the_mean_of_the_global_batch(
    topology: tuple[int, int, int], cycles: int, data: st.DataObject
) -> None:
    """What distributed data parallel does with the losses: their plain mean over ranks."""
    num_splits, world_size, _ = topology
    layout, size = lrs.SplitLayout(num_splits, uneven=True), cycles * num_splits
    losses = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(cycles, num_splits))
    sizes, weighted = [], []
    for rank in range(world_size):
        own = losses[:, layout.splits_of(rank, world_size)]
        sizes.append(layout.local_batch_size(size, world_size, rank))
        assert sizes[-1] == own.size == len(layout.rows_of_step(0, size, rank=rank, world_size=world_size))
        weighted.append(own.mean() * layout.gradient_weight(rank, world_size))
    assert sum(sizes) == size
    assert np.mean(weighted) == pytest.approx(losses.mean())


@SETTINGS
@given(TOPOLOGIES, st.integers(0, 9), st.lists(st.integers(1, 5), max_size=4))
def test_ranks_in_step_agree_on_the_position(topology: tuple[int, int, int], start: int, steps: list[int]) -> None:
    """Each rank receives whole cycles of its own group, and every rank's position is that of all."""
    num_splits, world_size, _ = topology
    layout, length = lrs.SplitLayout(num_splits, uneven=True), 40
    for rank in range(world_size):
        cursor = Cursor(layout, rank=rank, world_size=world_size, epoch=0)
        cursor.jump(2, np.full(num_splits, start))
        height = start
        for cycles in steps:
            cursor.receive(cycles * len(cursor.splits))
            height += cycles
            assert cursor.position().tolist() == [height] * num_splits
            assert cursor.rows_left(length) == (length - height) * len(cursor.splits)
            saved = cursor.save(shuffle_seed=0, provenance={})
            assert saved.splits == range(num_splits), "any rank's state is the state of all"


def test_more_readers_than_splits_are_refused() -> None:
    layout = lrs.SplitLayout(8, uneven=True)
    with pytest.raises(LayoutError, match=r"8 are too few for world_size=3 with num_workers=3 .* 1 to 2"):
        layout.check(3, 3)
    with pytest.raises(InvalidArgumentError, match="name the rank"):
        layout.local_batch_size(16, 3)
    assert repr(layout) == "SplitLayout(num_splits=8, uneven=True)"


# --- On Ray ----------------------------------------------------------------------------------------

on_ray = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
CYCLES = 2
SPLITS, ROWS = 12, 12 * 11 + 5
SIZE = CYCLES * SPLITS


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_table(tmp_path_factory.mktemp("db"), ROWS)


def ranks_of(table: Any, world_size: int, **options: Any) -> list[lrs.StreamIterator]:
    config = lrs.StreamDataConfig(uneven=True, **options)
    shards = config.configure({"train": lrs.read_stream(table, num_splits=SPLITS)}, world_size)
    return [shard["train"] for shard in shards]  # type: ignore[misc]


def steps_of(ranks: list[lrs.StreamIterator], num_steps: int | None = None, **options: Any) -> list[list[int]]:
    """The sorted ids of each global batch, from all ranks in step."""
    steps = []
    loops = [iter(rank.iter_batches(**options)) for rank in ranks]
    for batches in itertools.islice(zip(*loops, strict=True), num_steps):
        steps.append(sorted(int(i) for batch in batches for i in batch["id"]))
    for loop in loops:
        loop.close()  # type: ignore[attr-defined]
    return steps


class TestOnRay:
    pytestmark = on_ray

    @pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (5, 2), (7, 1)])
    def test_g2_the_same_global_batches_on_any_number_of_ranks(self, table, world_size, num_workers) -> None:
        reference = [sorted(step) for step in in_steps(oracle(table, SPLITS), SIZE)]
        ranks = ranks_of(table, world_size, num_workers=num_workers, global_batch_size=SIZE)
        for rank in ranks:
            assert rank.local_batch_size() == CYCLES * len(rank.splits)
            assert len(rank.iter_batches()) == len(reference)
        assert steps_of(ranks) == reference, "also the last, short step"
        assert {rank.epoch for rank in ranks} == {1}

    def test_g4_a_state_goes_on_where_it_was_on_any_other_number(self, table) -> None:
        reference = [sorted(step) for step in in_steps(oracle(table, SPLITS), SIZE)]
        for stop, (before, after) in enumerate([(5, 7), (7, 4), (4, 5), (1, 11)], start=1):
            ranks = ranks_of(table, before)
            assert steps_of(ranks, stop, global_batch_size=SIZE) == reference[:stop]
            states = [rank.state_dict() for rank in ranks]
            assert all(state == states[0] for state in states)
            others = ranks_of(table, after)
            for rank in others:
                rank.load_state_dict(states[-1])
            assert steps_of(others, global_batch_size=SIZE) == reference[stop:]

    def test_drop_last_leaves_the_short_step_out_on_every_rank(self, table) -> None:
        reference = [sorted(step) for step in in_steps(oracle(table, SPLITS), SIZE)]
        ranks = ranks_of(table, 5, global_batch_size=SIZE)
        assert steps_of(ranks, drop_last=True) == reference[:-1]
        assert {rank.epoch for rank in ranks} == {1}

    def test_what_would_end_ranks_at_different_steps_is_refused(self, table) -> None:
        rank = ranks_of(table, 5)[0]
        with pytest.raises(LayoutError, match="global_batch_size="):
            rank.iter_batches(batch_size=4)
        with pytest.raises(LayoutError, match="global_batch_size="):
            next(rank.iter_rows())
        even = ranks_of(table, 4)[0]
        assert len(next(iter(even.iter_batches(batch_size=4)))["id"]) == 4, "equal groups take what they always take"

    def test_a_state_from_inside_a_cycle_is_refused_with_the_sizes_that_take_it(self, table) -> None:
        even = ranks_of(table, 4)[0]
        next(iter(even.iter_batches(batch_size=4)))
        state = lrs.merge_state_dicts([even.state_dict(), *self._other_states(table)])
        for strict in (True, False):
            with pytest.raises(LayoutError, match=r"unequally many splits.*without this loss: 1, 2, 4\."):
                ranks_of(table, 5)[0].load_state_dict(state, strict=strict)

    @staticmethod
    def _other_states(table: Any) -> list[dict[str, Any]]:
        others = ranks_of(table, 4)[1:]
        for rank in others:
            next(iter(rank.iter_batches(batch_size=4)))
        return [rank.state_dict() for rank in others]

    def test_an_elastic_trainer_takes_any_size(self, table) -> None:
        datasets = {"train": lrs.read_stream(table, num_splits=SPLITS)}
        scaling = ScalingConfig(num_workers=(3, 64))  # type: ignore[arg-type]
        for num_workers, most in ((1, 12), (2, 6)):
            config = lrs.StreamDataConfig(uneven=True, num_workers=num_workers)
            assert legal_world_sizes(datasets, config, scaling) == list(range(3, most + 1))

    def test_an_illegal_global_batch_size_is_refused_at_construction(self, table) -> None:
        datasets = {"train": lrs.read_stream(table, num_splits=SPLITS), "eval": lrs.read_stream(table, num_splits=8)}
        scaling = ScalingConfig(num_workers=(1, 4))  # type: ignore[arg-type]
        config = lrs.StreamDataConfig(global_batch_size=36)
        with pytest.raises(LayoutError, match="global_batch_size=36 is not a multiple of num_splits=8"):
            legal_world_sizes(datasets, config, scaling)
        with pytest.raises(LayoutError, match="global_batch_size=36 is not a multiple of num_splits=8"):
            config.configure(datasets, 1)
        each = lrs.StreamDataConfig(global_batch_size={"train": 36, "eval": 16})
        assert legal_world_sizes(datasets, each, scaling) == [1, 2, 4]
        shards = each.configure(datasets, 2)[0]
        assert [shards[name].local_batch_size() for name in ("train", "eval")] == [18, 8]  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgumentError, match="'trian'; the streams of the trainer are 'train', 'eval'"):
            lrs.StreamDataConfig(global_batch_size={"trian": 36}).configure(datasets, 1)

    @pytest.mark.timeout(600)
    @pytest.mark.usefixtures("quick_controller")
    def test_the_same_model_on_1_3_and_5_ranks(self, tmp_path) -> None:
        """48 splits do not divide by 5; the last step of each epoch is short."""
        table = make_table(tmp_path, 48 * 7, columns=["id", "vector"])
        trained: dict[int, list[float]] = {}
        for world_size in (1, 3, 5):
            train_loops.fit(
                train_loops.train_a_model,
                tmp_path / str(world_size),
                {"train": lrs.read_stream(table, num_splits=48)},
                num_workers=world_size,
                run="model",
                dataset_config=lrs.StreamDataConfig(uneven=True, global_batch_size=96),
            )
            lines = train_loops.written(tmp_path / str(world_size), "model")
            assert len(lines) == world_size
            parameters = [line["parameters"] for (line,) in lines.values()]
            assert all(of_rank == parameters[0] for of_rank in parameters)
            assert [line["steps"] for (line,) in lines.values()] == [8] * world_size
            trained[world_size] = parameters[0]
        assert np.ptp(trained[1]) > 0.05, "it learned something"
        for world_size in (3, 5):
            np.testing.assert_allclose(trained[world_size], trained[1], rtol=1e-5, atol=1e-6)
