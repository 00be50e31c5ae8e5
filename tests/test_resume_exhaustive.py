"""Exact resume, for every step and every ordered pair of topologies: the product that Ray would be too slow for."""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
from lancedb.streaming import StreamingDataset
from lancedb.table import LanceTable

from lance_ray_stream import SplitLayout, merge_state_dicts
from lance_ray_stream.errors import InvalidArgumentError, LayoutError, StateError, StateMismatchError
from lance_ray_stream.spec import make_spec
from lance_ray_stream.testing import PlanBackend, RankRun, Topology, assert_exact_resume, assert_same_batches
from tests.oracle import oracle, oracle_rows, take
from tests.tables import make_table

NUM_WORKERS = (1, 2, 4)
SEED = 7


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> LanceTable:
    """T(240)."""
    return make_table(tmp_path_factory.mktemp("exhaustive"), 240, columns=["id"])


def backend_of(table: LanceTable, num_splits: int, **options: Any) -> PlanBackend:
    """Narrow windows, so that an epoch has several of every size."""
    spec = make_spec(table, num_splits=num_splits, shuffle_seed=SEED)
    return PlanBackend(spec, key="id", first_rows=16, max_rows=64, **options)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


def rest_of(keys: list[list[Any]], position: list[int], splits: range) -> list[Any]:
    """What is left of some splits by the definition of G1: cycle by cycle, in each the splits ascending."""
    return [keys[split][cycle] for cycle in range(len(keys[0])) for split in splits if cycle >= position[split]]


def rows_of(run: RankRun) -> list[Any]:
    return list(itertools.chain.from_iterable(run.batches))


@pytest.mark.parametrize("num_splits", [8, 12])
@pytest.mark.parametrize("cycles", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_c01_every_topology_delivers_the_same_batches(table, num_splits, cycles, drop_last) -> None:
    """C01, C07, G1, G2, G6."""
    assert_same_batches(
        backend_of(table, num_splits),
        world_sizes=SplitLayout(num_splits).world_sizes(),
        global_batch_size=cycles * num_splits,
        num_workers=NUM_WORKERS,
        drop_last=drop_last,
    )


@pytest.mark.parametrize("num_splits", [8, 12])
@pytest.mark.parametrize("cycles", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_c13_resume_at_every_step_on_every_topology(table, num_splits, cycles, drop_last) -> None:
    """C10, C12, C13, C14, C18, G4: also at step 0, with only the tail left, and at the very end."""
    assert_exact_resume(
        backend_of(table, num_splits),
        world_sizes=SplitLayout(num_splits).world_sizes(),
        global_batch_size=cycles * num_splits,
        num_workers=NUM_WORKERS if cycles == 3 else (1,),
        epoch=cycles,
        drop_last=drop_last,
    )


def test_c07_reader_workers_that_read_the_table(table) -> None:
    """C07, C13 with rows that come from the table, by 1, 2 and 4 reader workers."""
    backend = backend_of(table, 8, read=True)
    options: dict[str, Any] = {"world_sizes": [1, 2], "global_batch_size": 48, "num_workers": NUM_WORKERS}
    assert_same_batches(backend, **options)
    assert_exact_resume(backend, steps=[0, 2, 5], **options)


@pytest.mark.parametrize("num_splits", [8, 12])
@pytest.mark.parametrize(("rows", "batch_size"), [(96, 3), (96, 7), (240, 50)])
def test_c10_stop_inside_a_cycle_and_go_on_exactly(tmp_path, num_splits, rows, batch_size) -> None:
    """C10, C12, C15, C18: each rank from its own state, then all from the merged one, on every world size."""
    backend = backend_of(make_table(tmp_path, rows, columns=["id"]), num_splits)
    keys, layout = backend.keys(0), SplitLayout(num_splits)
    for world_size in layout.world_sizes():
        whole = backend.run(Topology(world_size), batch_size=batch_size, epoch=0)
        assert sorted(itertools.chain(*map(rows_of, whole))) == list(range(rows))
        for step in range(len(whole[0].batches)):
            states = [through_json(run.states[step]) for run in whole]
            own = backend.run(Topology(world_size), batch_size=batch_size, state=states[-1])
            for before, after in zip(whole, own, strict=True):
                assert after.batches == before.batches[step:]
                assert after.states[0] == states[-1]  # C12
            merged = merge_state_dicts(states)
            position = merged["positions_consumed_per_split"]
            received = set(itertools.chain(*(rows_of(replace(run, batches=run.batches[:step])) for run in whole)))
            assert sum(position) == len(received)
            assert position == merge_state_dicts(states[::-1])["positions_consumed_per_split"]
            for other in layout.world_sizes():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of unequal rests; test_resume.py has that
                    runs = backend.run(Topology(other), batch_size=batch_size, state=merged, strict=False)
                check_rest(runs, keys, position, layout, received)
                assert all(run.states[0] == merged for run in runs)  # C12


def check_rest(
    runs: list[RankRun], keys: list[list[Any]], position: list[int], layout: SplitLayout, received: set[Any]
) -> None:
    """Every rank goes on in order, without gap or repeat, and all stop at the smallest rest (G6)."""
    groups = [layout.splits_of(rank, len(runs)) for rank in range(len(runs))]
    rests = [rest_of(keys, position, group) for group in groups]
    smallest = min(map(len, rests))
    for run, rest in zip(runs, rests, strict=True):
        assert rows_of(run) == rest[:smallest]
    assert len({tuple(map(len, run.batches)) for run in runs}) == 1
    delivered = list(itertools.chain(*map(rows_of, runs)))
    assert len(set(delivered)) == len(delivered)
    assert not received.intersection(delivered)


@pytest.mark.parametrize(("batch_size", "step", "before", "after"), [(3, 5, 2, 4), (7, 2, 4, 1), (7, 3, 2, 8)])
def test_c15_same_rest_as_lancedb_after_its_own_merge(table, batch_size, step, before, after) -> None:
    """G3 inside a cycle: after each side's own merge, ours are the oracle's rows (as many as all ranks have)."""
    options: dict[str, Any] = {"num_splits": 8, "shuffle_seed": SEED}
    backend = backend_of(table, 8)
    ours = backend.run(Topology(before), batch_size=batch_size, epoch=0, steps=step)
    theirs = []
    for rank, run in enumerate(ours):
        dataset = oracle(table, rank, before, **options)
        assert take(dataset, batch_size * step) == rows_of(run)
        theirs.append(dataset.state_dict())
    merged, oracle_state = (
        merge_state_dicts([run.states[-1] for run in ours]),
        StreamingDataset.merge_state_dicts(theirs),
    )
    assert merge_state_dicts(theirs) == oracle_state  # LanceDB's own states merge by its rule
    assert {name: merged[name] for name in oracle_state} == oracle_state
    rests = [oracle_rows(table, rank, after, oracle_state, **options) for rank in range(after)]
    unequal = len(set(map(len, rests))) > 1
    with pytest.warns(UserWarning, match="unequally many rows left") if unequal else contextlib.nullcontext():
        runs = backend.run(Topology(after), batch_size=batch_size, state=merged, strict=False)
    assert [rows_of(run) for run in runs] == [rest[: min(map(len, rests))] for rest in rests]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_our_state_continues_in_lancedb(table, world_size) -> None:
    """Saved here at W=4, loaded by StreamingDataset: it goes on at the exact row."""
    backend = backend_of(table, 8)
    run = backend.run(Topology(4), batch_size=4, epoch=2, steps=9)[0]
    state = through_json(run.states[-1])
    rests = backend.run(Topology(world_size), batch_size=16 // world_size, state=state)
    for rank, rest in enumerate(rests):
        found = oracle_rows(table, rank, world_size, state, num_splits=8, shuffle_seed=SEED, epoch=2)
        assert found == rows_of(rest)
        assert len(found) == (240 - 9 * 16) // world_size


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_lancedb_state_continues_here(table, world_size) -> None:
    """Saved by StreamingDataset at W=4, loaded here: one warning, and the exact row."""
    options: dict[str, Any] = {"num_splits": 8, "shuffle_seed": SEED, "epoch": 2}
    datasets = [oracle(table, rank, 4, **options) for rank in range(4)]
    received = [take(dataset, 36) for dataset in datasets]
    state = through_json(StreamingDataset.merge_state_dicts([dataset.state_dict() for dataset in datasets]))
    backend = backend_of(table, 8)
    with pytest.warns(UserWarning, match="no 'lance_ray_stream' part"):
        rests = backend.run(Topology(world_size), batch_size=16 // world_size, state=state)
    assert sorted(itertools.chain(*received, *map(rows_of, rests))) == list(range(240))
    for rank, rest in enumerate(rests):
        assert rows_of(rest) == oracle_rows(table, rank, world_size, state, **options)


@pytest.mark.parametrize("num_splits", [2, 4, 8, 16])
def test_c15_the_batch_size_changes_on_the_way(tmp_path, num_splits) -> None:
    """C15: T(16), one step of 4 rows at W=1, then 4 rows on each of W=2: no gap and no repeat.

    Inside a cycle (S=8, 16) the new ranks' rests differ: refused, or with strict=False the surplus of the longer
    one is left out, as the last rows of its order, with a warning that counts them.
    """
    backend = backend_of(make_table(tmp_path, 16, columns=["id"]), num_splits)
    keys, layout = backend.keys(0), SplitLayout(num_splits)
    first = backend.run(Topology(1), batch_size=4, epoch=0, steps=1)
    state = through_json(first[0].states[1])
    position = state["samples_consumed_per_split"]
    if num_splits <= 4:
        runs = backend.run(Topology(2), batch_size=4, state=state)
    else:
        with pytest.raises(LayoutError, match="last 4 of the epoch's 12 rows would not be delivered"):
            backend.run(Topology(2), batch_size=4, state=state)
        with pytest.warns(UserWarning, match="last 4 of the epoch's 12 rows would not be delivered"):
            runs = backend.run(Topology(2), batch_size=4, state=state, strict=False)
    check_rest(runs, keys, position, layout, set(rows_of(first[0])))
    rests = [len(rest_of(keys, position, layout.splits_of(rank, 2))) for rank in range(2)]
    left_out = 12 - sum(len(rows_of(run)) for run in runs)
    assert left_out == max(rests) - min(rests)
    assert left_out == (0 if num_splits <= 4 else 4)


def test_a_filter_counts_no_difference_before_it_was_planned(table) -> None:
    """A state that was saved before the rows of a filter were counted loads as well (C12, C18)."""
    spec = make_spec(table, num_splits=4, shuffle_seed=SEED, filter="id < 100")
    backend = PlanBackend(spec, key="id")
    state = backend.run(Topology(2), batch_size=4, epoch=0, steps=0)[0].states[0]
    state["lance_ray_stream"] |= {"rows": None, "fingerprint": None}
    runs = backend.run(Topology(2), batch_size=4, state=state)
    assert sum(len(rows_of(run)) for run in runs) == 100


@pytest.mark.parametrize(
    ("change", "field"),
    [({"shuffle_seed": 8}, "shuffle_seed"), ({"num_splits": 4}, "num_splits"), ({"shuffle": False}, "shuffle")],
)
def test_c17_a_state_of_another_stream_is_refused(table, change, field) -> None:
    options: dict[str, Any] = {"num_splits": 8, "shuffle_seed": SEED}
    state = backend_of(table, 8).run(Topology(2), batch_size=8, epoch=0, steps=1)[0].states[-1]
    with pytest.raises(StateMismatchError, match=field):
        PlanBackend(make_spec(table, **options | change)).run(Topology(2), batch_size=8, state=state)


def test_a_position_beyond_the_epoch_is_refused(table) -> None:
    state = backend_of(table, 8).run(Topology(2), batch_size=8, epoch=0, steps=1)[0].states[-1]
    state["samples_consumed_per_split"] = state["positions_consumed_per_split"] = [31] * 8
    with pytest.raises(StateError, match="more rows"):
        backend_of(table, 8).run(Topology(2), batch_size=8, state=state)


# --- the harness itself: an assertion that cannot fail proves nothing ---------------------------------


class FaultyBackend(PlanBackend):
    """Rank 1 of two ranks goes wrong in one way, from the moment it resumes if ``resumed``."""

    def __init__(self, fault: str, backend: PlanBackend, *, resumed: bool) -> None:
        super().__init__(backend.spec, key="id")
        self.fault = fault
        self.resumed = resumed

    def run(self, topology: Topology, **options: Any) -> list[RankRun]:
        runs = super().run(topology, **options)
        if topology.world_size != 2 or (options.get("state") is not None) != self.resumed:
            return runs
        batches, states = runs[1].batches, runs[1].states
        if self.fault == "order" and len(batches) > 1:
            batches[1].reverse()
        elif self.fault == "repeat" and len(batches) > 1:
            batches[1] = [*batches[1][1:], batches[1][1]]
        elif self.fault == "other" and len(batches) > 1:
            batches[1] = runs[0].batches[1]
        elif self.fault == "short":
            del batches[-1:]
        elif self.fault == "long":
            batches.append([-1])
        elif self.fault == "count":
            states[1:] = [state | {"samples_consumed_per_split": [0] * 8} for state in states[1:]]
        elif self.fault == "state":
            states[1:] = [state | {"epoch": 9} for state in states[1:]]
        return runs


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("order", r"world_size=2, num_workers=1, step 1, rank 1: the right rows in another order, from row 0"),
        ("repeat", r"step 1, rank 1: missing rows \d+; repeated rows \d+$"),
        ("other", r"step 1, rank 1: missing rows \d.*; unexpected rows \d"),
        ("short", r"rank 1: delivered 14 batches instead of 15$"),
        ("count", r"rank 1: after 1 steps the state counts \[0, 0.* instead of 2$"),
        ("long", r"rank 1: delivered 16 batches instead of 15$"),
    ],
)
def test_a_wrong_batch_is_named(table, fault, text) -> None:
    backend = FaultyBackend(fault, backend_of(table, 8), resumed=False)
    with pytest.raises(AssertionError, match=text):
        assert_same_batches(backend, world_sizes=[1, 2], global_batch_size=16)


@pytest.mark.parametrize(
    ("fault", "resumed", "text"),
    [
        ("order", True, r"saved after 0 steps with world_size=1, num_workers=1, resumed with world_size=2.* step 1"),
        ("short", True, r"saved after 0 steps .* rank 1: delivered 14 batches instead of 15"),
        ("state", False, r"saved after 1 steps with world_size=2.*: the state of rank 1 differs"),
    ],
)
def test_a_wrong_resume_is_named(table, fault, resumed, text) -> None:
    backend = FaultyBackend(fault, backend_of(table, 8), resumed=resumed)
    with pytest.raises(AssertionError, match=text):
        assert_exact_resume(backend, world_sizes=[1, 2], global_batch_size=16)


def test_impossible_requests_are_refused(table) -> None:
    backend = backend_of(table, 8)
    with pytest.raises(LayoutError, match=r"World sizes that work: 1, 2, 4, 8"):
        assert_same_batches(backend, world_sizes=[1, 3], global_batch_size=16)
    with pytest.raises(LayoutError, match=r"Nearest sizes that work: 8, 16"):
        assert_same_batches(backend, world_sizes=[1, 2], global_batch_size=12)
    with pytest.raises(InvalidArgumentError, match="Nothing to compare"):
        assert_same_batches(backend, world_sizes=[8], num_workers=[2], global_batch_size=16)
    with pytest.raises(InvalidArgumentError, match="the epoch has 15 steps"):
        assert_exact_resume(backend, world_sizes=[1], global_batch_size=16, steps=[16])
    with pytest.raises(InvalidArgumentError, match="name at least one"):
        assert_same_batches(backend, world_sizes=[], global_batch_size=16)
    with pytest.raises(InvalidArgumentError, match="num_splits=None"):
        PlanBackend(make_spec(table, num_splits=None))


def test_a_key_must_tell_rows_apart(tmp_path) -> None:
    spec = make_spec(make_table(tmp_path, 32), num_splits=4)
    for key, text in [("label", "does not identify rows"), ("vector", "nested"), ("nope", "no column")]:
        with pytest.raises(InvalidArgumentError, match=text):
            PlanBackend(spec, key=key).keys(0)
    assert_same_batches(PlanBackend(spec, key="text"), world_sizes=[1, 4], global_batch_size=8)
    assert_same_batches(PlanBackend(spec), world_sizes=[1, 4], global_batch_size=8)
