"""States: their form, what is refused, and what merges (G7, C14, C17, C20)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lancedb.streaming import StreamingDataset

from lance_ray_stream import SplitLayout, merge_state_dicts
from lance_ray_stream.cursor import Cursor
from lance_ray_stream.errors import StateError, StateMismatchError
from lance_ray_stream.position import advance
from lance_ray_stream.state import IDENTITY_FIELDS, PROVENANCE, StreamState, differences, parse_state, refuse

SETTINGS = settings(deadline=None)

PROOF: dict[str, Any] = {
    "table": {"uri": "s3://bucket/db", "name": "rows"},
    "version": 17,
    "filter": None,
    "columns": ["id", "text"],
    "shuffle": True,
    "shuffle_clump_size": None,
    "shuffle_algorithm": "lancedb",
    "rows": 500_000,
    "fingerprint": "0123456789abcdef",
    "packages": {"lancedb": "0.40.0"},
}


def make_state(position: list[int], splits: range | None = None, **changes: Any) -> StreamState:
    values: dict[str, Any] = {
        "num_splits": len(position),
        "shuffle_seed": 42,
        "epoch": 3,
        "position": np.array(position, dtype=np.int64),
        "splits": splits or range(len(position)),
        "provenance": PROOF,
    }
    return StreamState(**values | changes)


def lancedb_state(position: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "shuffle_seed": 42,
        "num_splits": len(position),
        "epoch": 3,
        "samples_consumed_per_split": position,
        "positions_consumed_per_split": list(position),
    } | changes


# --- form -----------------------------------------------------------------------------------------

SPLITS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 2**40), min_size=n, max_size=n),
        st.integers(0, n - 1).flatmap(lambda a: st.builds(range, st.just(a), st.integers(a + 1, n))),
    )
)


@SETTINGS
@given(SPLITS, st.integers(0, 10**9), st.integers(0, 2**63 - 1), st.booleans())
def test_round_trip_through_json(counts: tuple[list[int], range], epoch: int, seed: int, with_proof: bool) -> None:
    position, splits = counts
    if not with_proof:
        splits = range(len(position))
    proof = PROOF if with_proof else None
    state = make_state(position, splits, epoch=epoch, shuffle_seed=seed, provenance=proof)
    written = state.to_dict()
    text = json.dumps(written, allow_nan=False)
    assert json.loads(text) == written
    read = parse_state(json.loads(text))
    assert read.to_dict() == written
    assert (read.epoch, read.shuffle_seed, read.num_splits) == (epoch, seed, len(position))
    assert read.position.tolist() == position
    assert read.position.dtype == np.int64
    assert read.splits == splits
    assert read.provenance == proof


def test_a_state_is_a_superset_of_lancedbs() -> None:
    """G3: the keys and values that StreamingDataset.load_state_dict and merge_state_dicts read."""
    ours, theirs = make_state([2, 1]).to_dict(), lancedb_state([2, 1])
    assert {key: ours[key] for key in theirs} == theirs
    assert set(ours) - set(theirs) == {PROVENANCE}
    assert StreamingDataset.merge_state_dicts([ours, ours]) == ours


def test_a_state_is_the_callers_to_change() -> None:
    state = make_state([1, 1])
    first = state.to_dict()
    first["samples_consumed_per_split"][0] = 99
    first[PROVENANCE]["table"]["name"] = "other"
    first[PROVENANCE]["columns"].append("x")
    assert state.to_dict()["samples_consumed_per_split"] == [1, 1]
    assert state.to_dict()["positions_consumed_per_split"] == [1, 1]
    assert state.to_dict()[PROVENANCE]["table"]["name"] == "rows"
    assert state.to_dict()[PROVENANCE]["columns"] == ["id", "text"]


@pytest.mark.parametrize("num_splits", [8, 256])
def test_c20_size_depends_on_splits_alone(num_splits: int) -> None:
    """C20: a thousand times the rows are a few digits more; 256 splits are a few kilobytes."""
    small, large = (
        len(json.dumps(make_state([rows] * num_splits, provenance=PROOF | {"rows": rows}).to_dict()))
        for rows in (1_000, 1_000_000_000)
    )
    assert large - small <= 6 * (2 * num_splits + 1)
    assert large < 8_192


def test_lancedbs_older_forms() -> None:
    """One count for all splits, and no positions."""
    state = lancedb_state([7, 7, 7], samples_consumed_per_split=7)
    del state["positions_consumed_per_split"]
    assert parse_state(state).position.tolist() == [7, 7, 7]
    state = lancedb_state([1, 2], positions_consumed_per_split=None)
    assert parse_state(state).position.tolist() == [1, 2]


# --- malformed ------------------------------------------------------------------------------------

REMOVED = object()


def malformed() -> list[Any]:
    cases: dict[str, tuple[list[Any], str]] = {
        "num_splits": ([REMOVED, 0, -8, 8.0, "8", None, True, [8]], "num_splits"),
        "shuffle_seed": ([REMOVED, 1.5, "42", None, False], "shuffle_seed"),
        "epoch": ([REMOVED, -1, 3.0, "3", None, True], "epoch"),
        "samples_consumed_per_split": (
            [REMOVED, None, "1122", {"0": 1}, 1.0, True, [1, 1], [1] * 5]
            + [[1, 1, 1, last] for last in (-1, 1.0, None, True, "1", 10**30, [1])],
            "samples_consumed_per_split",
        ),
        "positions_consumed_per_split": ([[1, 1], "1122", [1, 1, 1, -1], [1, 1, 1, "1"]], "positions_consumed"),
        "pack_buffers": ([{}, None], "pack_sequences"),
        PROVENANCE: ([[], "x", 7, {}, {"format": 2}, {"format": "1"}, {"format": 1}], PROVENANCE),
    }
    return [
        pytest.param(key, value, text, id=f"{key}-{number}")
        for key, (values, text) in cases.items()
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(("key", "value", "text"), malformed())
def test_g7_malformed_states_are_refused_by_key(key: str, value: Any, text: str) -> None:
    state = make_state([1, 1, 1, 1]).to_dict() | {key: value}
    if value is REMOVED:
        del state[key]
    with pytest.raises(StateError, match=text):
        parse_state(state)


@pytest.mark.parametrize("state", [None, [], "{}", 7, json.dumps(make_state([1]).to_dict())])
def test_g7_what_is_no_dictionary_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="A state is a dictionary"):
        parse_state(state)


@pytest.mark.parametrize(
    "splits", [None, 4, "04", [0], [0, 1, 2], [0, 5], [-1, 2], [2, 2], [3, 1], [0.0, 2.0], ["0", "2"], [True, 2]]
)
def test_g7_malformed_splits_are_refused(splits: Any) -> None:
    state = make_state([1, 1, 1, 1]).to_dict()
    state[PROVENANCE]["splits"] = splits
    with pytest.raises(StateError, match="'splits' must be"):
        parse_state(state)


@pytest.mark.parametrize("field", sorted(set(IDENTITY_FIELDS) - {"num_splits", "shuffle_seed"}))
def test_g7_an_incomplete_proof_is_refused(field: str) -> None:
    """A field that is missing would not be compared: silence where G7 wants a check."""
    state = make_state([1, 1]).to_dict()
    del state[PROVENANCE][field]
    with pytest.raises(StateError, match=f"has no {field}"):
        parse_state(state)


def test_rows_that_were_skipped_are_refused() -> None:
    """LanceDB's on_transform_error="skip" has no counterpart here."""
    with pytest.raises(StateError, match="skipped"):
        parse_state(lancedb_state([3, 3], positions_consumed_per_split=[5, 3]))


# --- differences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", IDENTITY_FIELDS)
def test_c17_each_difference_is_named_with_both_values(field: str) -> None:
    saved = make_state([1, 1]).identity()
    assert set(saved) == set(IDENTITY_FIELDS)
    assert differences(saved, saved) == {}
    found = differences(saved, saved | {field: "changed"})
    assert found == {field: f"checkpoint has {saved[field]!r}, this stream has 'changed'"}
    with pytest.raises(StateMismatchError, match=f"{field}: checkpoint has") as refused:
        refuse(found)
    assert ("strict=False" in str(refused.value)) == (field in {"table", "columns"})


def test_c17_all_differences_are_listed_at_once() -> None:
    saved = make_state([1, 1]).identity()
    with pytest.raises(StateMismatchError) as refused:
        refuse(differences(saved, dict.fromkeys(saved, "changed")))
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == list(IDENTITY_FIELDS)
    refuse({})


@pytest.mark.parametrize("field", ["rows", "fingerprint"])
def test_what_only_a_plan_tells_is_no_difference_before_there_is_one(field: str) -> None:
    saved = make_state([1, 1]).identity()
    assert differences(saved | {field: None}, saved) == differences(saved, saved | {field: None}) == {}


# --- merge ----------------------------------------------------------------------------------------


@st.composite
def stopped(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int]]:
    """The states of all ranks after one number of rows, and the position that they counted together."""
    layout = SplitLayout(draw(st.sampled_from([4, 6, 8, 12])))
    world_size = draw(st.sampled_from(layout.world_sizes()))
    start = np.array(draw(st.lists(st.integers(0, 3), min_size=layout.num_splits, max_size=layout.num_splits)))
    if draw(st.booleans()):
        start[:] = start[0]
    received = draw(st.integers(1, 30))
    counted, states = start.copy(), []
    for rank in range(world_size):
        cursor = Cursor(layout, rank=rank, world_size=world_size, epoch=3)
        cursor.jump(3, start)
        cursor.receive(received)
        own = slice(cursor.splits.start, cursor.splits.stop)
        counted[own] = advance(start[own], received)
        states.append(json.loads(json.dumps(cursor.save(shuffle_seed=42, provenance=PROOF).to_dict())))
    return states, counted.tolist()


@SETTINGS
@given(stopped(), st.randoms())
def test_merged_from_all_ranks_is_exact(run: tuple[list[dict[str, Any]], list[int]], random: Any) -> None:
    """C13, C15: in any order of the states, and again from what was merged."""
    states, counted = run
    merged = merge_state_dicts(states)
    assert merged["samples_consumed_per_split"] == merged["positions_consumed_per_split"] == counted
    assert "splits" not in merged[PROVENANCE]
    random.shuffle(states)
    assert merge_state_dicts(states) == merged
    assert merge_state_dicts([merged]) == merge_state_dicts([*states, merged]) == merged


@SETTINGS
@given(stopped(), st.data())
def test_a_missing_rank_is_named(run: tuple[list[dict[str, Any]], list[int]], data: st.DataObject) -> None:
    """Inside a cycle no rank can stand for another; at a cycle boundary each can."""
    states, counted = run
    gone = data.draw(st.sampled_from(range(len(states))))
    rest = states[:gone] + states[gone + 1 :]
    if not rest:
        return
    if len(set(counted)) == 1:
        assert merge_state_dicts(rest) == merge_state_dicts(states)
        return
    per_rank = len(counted) // len(states)
    missing = list(range(gone * per_rank, (gone + 1) * per_rank))
    with pytest.raises(StateError, match=rf"rank of splits \[{', '.join(map(str, missing))}\]"):
        merge_state_dicts(rest)


def rank_states(*received: int) -> list[dict[str, Any]]:
    """One state for each rank of four splits, each after its own number of rows."""
    states = []
    for rank, rows in enumerate(received):
        cursor = Cursor(SplitLayout(4), rank=rank, world_size=len(received), epoch=3)
        cursor.receive(rows)
        states.append(cursor.save(shuffle_seed=42, provenance=PROOF).to_dict())
    return states


@pytest.mark.parametrize("received", [(2, 4), (4, 2), (2, 3), (3, 2)])
def test_states_of_different_steps_are_refused(received: tuple[int, int]) -> None:
    """At a cycle boundary a state speaks for all ranks: two that disagree would leave a gap or a repeat."""
    with pytest.raises(StateError, match="not saved at the same step"):
        merge_state_dicts(rank_states(*received))


def test_rank_zeros_older_state_next_to_a_newer_one_is_refused() -> None:
    with pytest.raises(StateError, match="not saved at the same step"):
        merge_state_dicts([rank_states(1, 1)[0], *rank_states(3, 3)])


def test_g7_states_of_different_runs_are_refused_with_all_differences() -> None:
    ours = make_state([1, 1]).to_dict()
    other = make_state([1, 1], epoch=4, shuffle_seed=43, provenance=PROOF | {"version": 18, "filter": "x > 1"})
    with pytest.raises(StateError) as refused:
        merge_state_dicts([ours, ours, other.to_dict()])
    text = str(refused.value)
    assert "State 0 and state 2" in text
    for name in ("epoch: 3 and 4", "shuffle_seed: ", "version: ", "filter: "):
        assert f"\n  {name}" in text
    assert text.count("\n") == 4
    with pytest.raises(StateError, match="num_splits"):
        merge_state_dicts([ours, make_state([1, 1, 1]).to_dict()])
    with pytest.raises(StateError, match=f"{PROVENANCE}: one of them"):
        merge_state_dicts([ours, lancedb_state([1, 1])])


@pytest.mark.parametrize("states", [[], None, {}, "x", 7, make_state([1]).to_dict(), iter([])])
def test_g7_nothing_to_merge(states: Any) -> None:
    with pytest.raises(StateError, match="needs a list with the state of every rank"):
        merge_state_dicts(states)


def test_g7_a_malformed_state_among_good_ones() -> None:
    with pytest.raises(StateError, match="has no 'epoch'"):
        merge_state_dicts([make_state([1]).to_dict(), {"num_splits": 1, "shuffle_seed": 0}])


def test_merge_keeps_what_any_rank_knows_of_the_plan() -> None:
    unplanned = make_state([1, 0], provenance=PROOF | {"rows": None, "fingerprint": None}).to_dict()
    planned = make_state([1, 0]).to_dict()
    for states in itertools.permutations([unplanned, planned]):
        assert merge_state_dicts(states) == planned


@SETTINGS
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=4))
def test_lancedbs_states_merge_by_its_rule(positions: list[list[int]]) -> None:
    states = [lancedb_state(position) for position in positions]
    assert merge_state_dicts(states) == StreamingDataset.merge_state_dicts(states)


def test_merging_changes_no_state() -> None:
    states = rank_states(3, 3)
    before = json.dumps(states)
    merged = merge_state_dicts(states)
    merged[PROVENANCE]["table"]["name"] = "other"
    assert json.dumps(states) == before


CHECKS: list[Callable[[StreamState], Any]] = [lambda s: s.position, lambda s: s.identity(), lambda s: s.to_dict()]


@pytest.mark.parametrize("look", CHECKS)
def test_parsing_keeps_the_callers_dictionary(look: Callable[[StreamState], Any]) -> None:
    written = make_state([2, 1], range(1)).to_dict()
    before = json.dumps(written)
    look(parse_state(written))
    assert json.dumps(written) == before


def test_states_of_different_steps_inside_a_cycle_do_not_merge() -> None:
    """Each rank counts its own splits; what the other projected shows that they were not in step."""
    layout = SplitLayout(4)
    early, late = (Cursor(layout, rank=rank, world_size=2, epoch=0) for rank in range(2))
    early.receive(3)
    late.receive(9)
    states = [cursor.save(shuffle_seed=0, provenance=PROOF).to_dict() for cursor in (early, late)]
    with pytest.raises(StateError, match="not saved at the same step"):
        merge_state_dicts(states)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("table", {"uri": 5, "name": 7}),
        ("table", {"uri": "db", "name": "rows", "namespace_path": [1]}),
        ("version", True),
        ("filter", 7),
        ("columns", "id"),
        ("columns", [1]),
        ("shuffle", 1),
        ("shuffle_clump_size", 0),
        ("shuffle_algorithm", None),
        ("rows", "many"),
        ("rows", -1000),
        ("rows", 1000.0),
        ("fingerprint", 12),
        ("packages", ["a"]),
        ("packages", {"ray": 2.6}),
    ],
)
def test_a_malformed_field_of_the_proof_is_named(field: str, value: object) -> None:
    """Not a raw error later, from whoever reads it first."""
    state = make_state([2, 1], provenance=PROOF | {field: value}).to_dict()
    with pytest.raises(StateError, match=f"Malformed state: {field} must be"):
        parse_state(state)
