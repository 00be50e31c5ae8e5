"""Exact resume through Ray: on any world size, refused on any other stream, exchanged with LanceDB."""

from __future__ import annotations

import copy
import itertools
import json
import re
from datetime import timedelta

import lancedb
import numpy as np
import pytest
from lancedb.streaming import StreamingDataset

import lance_ray_stream as lrs
from lance_ray_stream.errors import LayoutError, StateError, StateMismatchError, VersionNotFoundError
from lance_ray_stream.table import _open_tables
from lance_ray_stream.testing import RayBackend, assert_exact_resume, assert_same_batches
from tests.probes import State, batches, configured, global_sets, in_steps, iterator, iterators, oracle, rows, take
from tests.tables import make_rows, make_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]
STREAM = "lance_ray_stream"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("db")


@pytest.fixture(scope="module")
def table(path):
    return make_table(path, 240)


@pytest.fixture(scope="module")
def dataset(table):
    return lrs.read_stream(table, num_splits=8)


@pytest.fixture(scope="module")
def steps(table) -> list[list[int]]:
    """The sorted ids of every step of an uninterrupted epoch, G=16."""
    return [sorted(step) for step in in_steps(oracle(table, 8), 16)]


@pytest.fixture(scope="module")
def saved(dataset) -> list[State]:
    """States of the four ranks of W=4 after each of 0..15 steps, as a file gives them back, by step."""
    states: list[list[State]] = [[] for _ in range(16)]
    for stream in iterators(dataset, 4):
        states[0].append(stream.state_dict())
        for step, _ in enumerate(stream.iter_batches(global_batch_size=16), start=1):
            states[step].append(stream.state_dict())
    for step, of_ranks in enumerate(states):
        assert all(state == of_ranks[0] for state in of_ranks), f"C14: step {step}: equal on all ranks"
        assert of_ranks[0]["samples_consumed_per_split"] == [step * 2] * 8, "C10: k*B / (S/W) rows of each split"
    return [json.loads(json.dumps(of_ranks[0], allow_nan=False)) for of_ranks in states]


def resumed(dataset, state: State, world_size: int) -> list[lrs.StreamIterator]:
    streams = iterators(dataset, world_size)
    for stream in streams:
        stream.load_state_dict(copy.deepcopy(state))
    return streams


# --- the same batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [0, 1, 7, 14])
def test_c10_c13_c14_the_rest_is_that_of_an_uninterrupted_run(dataset, steps, saved, step, world_size):
    """C10, C13, C14, C18: saved at W=4 after k steps, at the start, in the middle, with only the tail left."""
    streams = resumed(dataset, saved[step], world_size)
    assert global_sets([batches(stream, global_batch_size=16) for stream in streams]) == steps[step:]
    assert {stream.epoch for stream in streams} == {1}


def test_a_state_of_the_very_end_is_the_start_of_the_next_epoch(table, dataset, saved):
    for stream in resumed(dataset, saved[15], 2):
        assert stream.epoch == 1
        assert rows(stream) == oracle(table, 8, rank=stream.rank, world_size=2, epoch=1)


@pytest.mark.parametrize("step", [0, 7])
def test_c12_loaded_and_saved_at_once_is_the_same_state(dataset, saved, step):
    """C12; and loading twice is loading once."""
    stream = resumed(dataset, saved[step], 2)[1]
    assert stream.state_dict() == saved[step]
    stream.load_state_dict(saved[3])
    stream.load_state_dict(saved[step])
    assert stream.state_dict() == saved[step]


def test_c12_the_state_before_any_batch_is_the_start_of_its_epoch(table, dataset):
    """C12, C18: also of a later epoch, and it does not need the plan to have been built."""
    state = iterator(lrs.read_stream(table, num_splits=8, epoch=3)).state_dict()
    assert (state["epoch"], state["samples_consumed_per_split"]) == (3, [0] * 8)
    assert rows(resumed(dataset, state, 1)[0]) == oracle(table, 8, epoch=3)


def test_the_caller_may_keep_and_change_states(dataset, saved):
    """A state is a copy, both ways."""
    mine = copy.deepcopy(saved[7])
    stream = iterator(dataset)
    stream.load_state_dict(mine)
    mine["samples_consumed_per_split"][0] = mine[STREAM]["version"] = 99
    assert stream.state_dict() == saved[7]
    stream.state_dict()["positions_consumed_per_split"].clear()
    assert stream.state_dict() == saved[7]


def test_resumed_many_times_on_changing_world_sizes_over_two_epochs(table, dataset):
    """G4: any number of times, in any epoch; saved by the last rank, loaded by all."""
    plan = [sorted(step) for epoch in range(2) for step in in_steps(oracle(table, 8, epoch=epoch), 16)]
    state, done = None, 0
    for world_size, num_steps in [(2, 4), (8, 5), (1, 6), (4, 3), (2, 12)]:
        streams = resumed(dataset, state, world_size) if state else iterators(dataset, world_size)
        received = [take(stream, num_steps, global_batch_size=16) for stream in streams]
        assert global_sets(received) == plan[done : done + num_steps]
        state, done = json.loads(json.dumps(streams[-1].state_dict())), done + num_steps


def test_c15_another_global_batch_size_after_the_resume(tmp_path):
    """C15: T(16), S=4: W=1, B=4 for one step, then W=2, B=4: no gap and no repeat."""
    dataset = lrs.read_stream(make_table(tmp_path, 16), num_splits=4)
    first = iterator(dataset)
    received = take(first, 1, batch_size=4)[0]
    parts = [batches(stream, batch_size=4) for stream in resumed(dataset, first.state_dict(), 2)]
    assert [list(map(len, part)) for part in parts] == [[4, 2], [4, 2]]
    assert sorted([*received, *itertools.chain(*parts[0], *parts[1])]) == list(range(16))


def test_c15_inside_a_cycle_unequal_rests_are_refused(tmp_path):
    """C15, G6, G7: T(16), S=8: after 4 rows rank 1 of 2 would have 4 rows more than rank 0; none is lost in silence."""
    dataset = lrs.read_stream(make_table(tmp_path, 16), num_splits=8)
    first = iterator(dataset)
    received = take(first, 1, batch_size=4)[0]
    state = first.state_dict()
    for world_size in (2, 4):
        with pytest.raises(LayoutError, match=rf"world_size={world_size} .*without this loss: 1\..*num_splits=8"):
            resumed(dataset, state, world_size)
    assert sorted([*received, *rows(resumed(dataset, state, 1)[0])]) == list(range(16))


def test_states_of_ranks_that_stopped_inside_a_cycle_are_merged(table, dataset):
    """No gap and no repeat after ``merge_state_dicts``; a single rank's state is not the global one there."""
    streams = iterators(dataset, 2)
    received = [take(stream, 1, batch_size=6)[0] for stream in streams]
    states = [json.loads(json.dumps(stream.state_dict())) for stream in streams]
    with pytest.raises(StateError, match=r"\[4, 5, 6, 7\]"):
        lrs.merge_state_dicts(states[:1])
    merged = lrs.merge_state_dicts(states)
    assert merged == lrs.merge_state_dicts(states[::-1])
    assert merged["samples_consumed_per_split"] == [2, 2, 1, 1] * 2
    for world_size in (1, 2):
        rest = [rows(stream) for stream in resumed(dataset, merged, world_size)]
        assert len(set(map(len, rest))) == 1, "G6"
        assert sorted(itertools.chain(*received, *rest)) == list(range(240))
    with pytest.raises(LayoutError, match=r"without this loss: 1, 2\."):
        resumed(dataset, merged, 4)


@pytest.mark.timeout(400)
def test_the_public_assertions_hold_with_transforms(path, table):
    """G2, G4: as a user proves it, with a transform, small windows of the user's epoch 1, all kinds of stops."""

    def double(batch):
        batch["twice"] = batch["id"] * 2
        return batch

    dataset = lrs.read_stream(table, num_splits=4, columns=["id", "label"]).map_batches(double, batch_size=9)
    assert_same_batches(dataset, world_sizes=[1, 4], global_batch_size=24, num_workers=[1, 2], key="id")
    assert_exact_resume(dataset, world_sizes=[1, 2], global_batch_size=56, steps=[0, 2, 4, 5], key="id", epoch=1)
    assert_exact_resume(RayBackend(dataset, key="id"), world_sizes=[2], global_batch_size=56, steps=[4], drop_last=True)


# --- refused ---------------------------------------------------------------------------------------


def another_version(path, table):
    return lrs.read_stream(lrs.TableRef(str(path), "rows", version=table.version - 1), num_splits=8)


CHANGES = {
    "table": lambda path, table: lrs.read_stream(make_table(path / "other", 240), num_splits=8),
    "version": another_version,
    "rows": another_version,
    "filter": lambda path, table: lrs.read_stream(table, num_splits=8, filter="id >= 0"),
    "columns": lambda path, table: lrs.read_stream(table, num_splits=8, columns=["id"]),
    "num_splits": lambda path, table: lrs.read_stream(table, num_splits=4),
    "shuffle": lambda path, table: lrs.read_stream(table, num_splits=8, shuffle=False),
    "shuffle_seed": lambda path, table: lrs.read_stream(table, num_splits=8, shuffle_seed=1),
    "shuffle_clump_size": lambda path, table: lrs.read_stream(table, num_splits=8, shuffle_clump_size=4),
}


@pytest.mark.parametrize("field", CHANGES)
def test_c17_a_state_of_another_stream_is_refused(tmp_path, field):
    """C17: one change at a time; the error names the field, and the stream is as if nothing had been loaded."""
    table = make_table(tmp_path, 240)
    stream = iterator(lrs.read_stream(table, num_splits=8))
    take(stream, 2, batch_size=16)
    state = stream.state_dict()
    other = iterator(CHANGES[field](tmp_path, table))
    before = other.state_dict()
    with pytest.raises(StateMismatchError, match=rf"\n  {field}: checkpoint has .*, this stream has .*\n"):
        other.load_state_dict(state)
    assert other.state_dict() == before
    assert len(rows(other)) == other.rows_per_epoch


def test_c17_every_difference_is_listed(path, table, saved):
    """C17, G7: not only the first one."""
    ref = lrs.TableRef(str(path), "rows", version=table.version - 1)
    other = iterator(
        lrs.read_stream(ref, num_splits=4, shuffle_seed=1, shuffle_clump_size=4, columns=["id"], filter="label > 1")
    )
    with pytest.raises(StateMismatchError) as caught:
        other.load_state_dict(saved[3])
    named = re.findall(r"\n  (\w+): checkpoint has", str(caught.value))
    expected = ["version", "filter", "columns", "num_splits", "shuffle_seed", "shuffle_clump_size"]
    assert named == expected


@pytest.mark.parametrize("change", ["epoch", "fingerprint"])
def test_c17_a_state_whose_plan_is_another_is_refused(dataset, saved, change):
    """C17: an epoch changed by hand, or rows that another release of lancedb would order differently."""
    state = copy.deepcopy(saved[3])
    if change == "epoch":
        state["epoch"] = 2
    else:
        state[STREAM]["fingerprint"] = "0" * 16
    stream = iterator(dataset)
    with pytest.raises(StateMismatchError, match=rf"fingerprint: .* for epoch {state['epoch']} \(packages then"):
        stream.load_state_dict(state)
    assert stream.epoch == 0


def test_c17_a_table_that_was_made_again_is_refused(tmp_path):
    """C17: same name, same version number, other rows."""
    table = make_table(tmp_path, 240)
    stream = iterator(lrs.read_stream(table, num_splits=8))
    take(stream, 2, batch_size=16)
    lancedb.connect(tmp_path).drop_table("rows")
    again = make_table(tmp_path, 248)
    _open_tables._reset()  # as in the new process of a restart
    assert again.version == table.version
    with pytest.raises(StateMismatchError, match=r"rows: checkpoint has 240, this stream has 248"):
        iterator(lrs.read_stream(again, num_splits=8)).load_state_dict(stream.state_dict())


def test_c17_without_strict_what_cannot_change_the_order_is_a_warning(tmp_path, table, saved):
    """C17: another place of the same table, other columns; anything else is refused all the same."""
    moved = make_table(tmp_path, 240)
    dataset = lrs.read_stream(moved, num_splits=8, columns=["id"])
    with pytest.raises(StateMismatchError, match=r"strict=False"):
        iterator(dataset).load_state_dict(saved[7])
    stream = iterator(dataset)
    with pytest.warns(UserWarning, match="The state differs in") as caught:
        stream.load_state_dict(saved[7], strict=False)
    assert {str(w.message).split(":")[0] for w in caught} == {
        "The state differs in table",
        "The state differs in columns",
    }
    assert rows(stream) == oracle(table, 8)[7 * 16 :]
    with pytest.warns(UserWarning, match="table"), pytest.raises(StateMismatchError, match="shuffle_seed"):
        iterator(lrs.read_stream(moved, num_splits=8, shuffle_seed=9)).load_state_dict(saved[7], strict=False)


def _counts(counts: list[int]) -> State:
    return {"samples_consumed_per_split": counts, "positions_consumed_per_split": counts}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("epoch"), "no 'epoch'"),
        (lambda state: state.update(epoch=-1), "epoch"),
        (lambda state: state.update(samples_consumed_per_split=[1, 2]), "2 entries for num_splits=8"),
        (lambda state: state.update(samples_consumed_per_split="16"), "list"),
        (lambda state: state.update(_counts([31] * 8)), "more"),
        (lambda state: state["positions_consumed_per_split"].__setitem__(0, 3), "skipped"),
        (lambda state: state[STREAM].update(format=2), "format 2"),
        (lambda state: state[STREAM].pop("fingerprint"), "fingerprint"),
        (lambda state: state.update(pack_buffers={}), "packed"),
    ],
)
def test_a_malformed_state_is_refused(dataset, saved, change, message):
    state = copy.deepcopy(saved[3])
    change(state)
    stream = iterator(dataset)
    with pytest.raises(StateError, match=message):
        stream.load_state_dict(state)
    assert stream.state_dict()["samples_consumed_per_split"] == [0] * 8


# --- versions and seeds ----------------------------------------------------------------------------


def test_a_restart_follows_the_version_of_its_state(tmp_path):
    """G5: the table has grown since; a stream without an explicit version continues its own, for all epochs."""
    table = make_table(tmp_path, 240)
    ref = lrs.TableRef(str(tmp_path), "rows")
    stream = iterator(lrs.read_stream(ref, num_splits=8))
    take(stream, 2, batch_size=16)
    state = stream.state_dict()
    epochs = [oracle(table, 8, epoch=epoch) for epoch in range(2)]
    table.add(make_rows(240, 400))
    grown = lrs.read_stream(lrs.TableRef(str(tmp_path), "rows"), num_splits=8)
    later = configured(grown, 1)[0]
    assert later.rows_per_epoch == 400
    later.load_state_dict(state)
    assert later.rows_per_epoch == 240
    assert later.state_dict()[STREAM]["version"] == state[STREAM]["version"] == 5
    assert [rows(later) for _ in range(2)] == [epochs[0][32:], epochs[1]]


def test_an_explicit_version_is_not_given_up(tmp_path):
    """G7: named by number, by tag, or by the handle that was checked out: each refuses the state of another."""
    table = make_table(tmp_path, 240)
    state = iterator(lrs.read_stream(table, num_splits=8)).state_dict()
    table.tags.create("old", 3)
    for version in (3, "old"):
        stream = iterator(lrs.read_stream(lrs.TableRef(str(tmp_path), "rows", version=version), num_splits=8))
        with pytest.raises(StateMismatchError, match=r"version: checkpoint has 5, this stream has 3"):
            stream.load_state_dict(state)
    same = iterator(lrs.read_stream(lrs.TableRef(str(tmp_path), "rows", version=5), num_splits=8))
    same.load_state_dict(state)


def test_a_state_whose_version_was_cleaned_up(tmp_path):
    """G5: an error that names the version, and nothing is loaded."""
    table = make_table(tmp_path, 240)
    ref = lrs.TableRef(str(tmp_path), "rows")
    stream = iterator(lrs.read_stream(ref, num_splits=8))
    take(stream, 1, batch_size=16)
    state = stream.state_dict()
    table.delete("id < 40")
    with pytest.warns(UserWarning, match="removes every version"):
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    later = iterator(lrs.read_stream(ref, num_splits=8))  # this process has both versions open
    with pytest.raises(VersionNotFoundError, match=r"'rows'.* version 5"):
        later.load_state_dict(state)
    assert len(rows(later)) == 200


def test_a_seed_that_was_drawn_is_kept_in_the_state(table):
    """``shuffle_seed=None``: two runs differ, a restart takes the seed of its state, in later epochs too."""
    streams = [iterator(lrs.read_stream(table, num_splits=8, shuffle_seed=None)) for _ in range(2)]
    first = take(streams[0], 2, batch_size=16)
    state = streams[0].state_dict()
    seeds = [stream.state_dict()["shuffle_seed"] for stream in streams]
    assert len(set(seeds)) == 2
    assert list(itertools.chain(*first)) == oracle(table, 8, shuffle_seed=seeds[0])[:32]
    streams[1].load_state_dict(state)
    assert [rows(streams[1]) for _ in range(2)] == [rows(streams[0]) for _ in range(2)]


# --- exchange with LanceDB -------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [32, 37])
def test_a_state_of_streaming_dataset_goes_on_here(table, dataset, num_rows):
    """Section 5: with one warning; at a cycle boundary and inside a cycle."""
    theirs = StreamingDataset(table, num_splits=8, columns=["id"])
    received = [row["id"] for row in itertools.islice(theirs, num_rows)]
    state = json.loads(json.dumps(theirs.state_dict()))
    stream = iterator(dataset)
    with pytest.warns(UserWarning, match="StreamingDataset") as caught:
        stream.load_state_dict(state)
    assert len(caught) == 1
    assert received + rows(stream) == oracle(table, 8)


def test_a_state_of_streaming_dataset_with_another_seed_is_refused(table, dataset):
    state = StreamingDataset(table, num_splits=8, shuffle_seed=7).state_dict()
    with pytest.warns(UserWarning, match="StreamingDataset"), pytest.raises(StateMismatchError, match="shuffle_seed"):
        iterator(dataset).load_state_dict(state)


def test_a_state_goes_on_in_streaming_dataset(table, saved):
    """Section 5: the state of four ranks goes on in LanceDB's loader on two."""
    state = saved[7]
    for rank in range(2):
        theirs = StreamingDataset(table, num_splits=8, columns=["id"], rank=rank, world_size=2)
        theirs.load_state_dict(state)
        assert [row["id"] for row in theirs] == oracle(table, 8, rank=rank, world_size=2)[7 * 8 :]


def test_row_ids_of_a_step_are_those_that_were_delivered(table):
    """The plan names the rows of every step before anything is read."""
    dataset = lrs.read_stream(table, num_splits=8, columns=["_rowid"])
    plan = lrs.plan_epoch(dataset)
    streams = iterators(dataset, 2)
    received = [[b["_rowid"] for b in stream.iter_batches(global_batch_size=16)] for stream in streams]
    for step, parts in enumerate(zip(*received, strict=True)):
        assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(plan.row_ids_of_step(step, 16)))
