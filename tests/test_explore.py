"""Tables against LanceDB and brute force; plots show the numbers that the tables hold, and leave nothing behind."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lancedb
import matplotlib.image
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from lancedb.table import LanceTable
from matplotlib.figure import Figure

import lance_ray_stream as lrs
from lance_ray_stream import explore
from lance_ray_stream.datasource import MAX_WINDOW_BYTES
from lance_ray_stream.display import facts_html, table_html
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError, LayoutError, MissingRowsError, NotEnoughRowsError, StateError
from lance_ray_stream.explore.locality import count_ranges, count_touched_bytes
from lance_ray_stream.plan import build_plan
from lance_ray_stream.provenance import Facts, adopt, describe
from lance_ray_stream.spec import StreamSpec, make_spec
from lance_ray_stream.state import StreamState, parse_state
from tests.oracle import oracle, oracle_rows
from tests.tables import make_table

ROWS, NUM_SPLITS, BATCH = 1003, 8, 48
CLUMPS = (1, 4, 16)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("explore"), ROWS, columns=["id", "label"])


@pytest.fixture(scope="module")
def plans(table: LanceTable) -> dict[int, EpochPlan]:
    return explore.plans_by_clump_size(table, CLUMPS, num_splits=NUM_SPLITS, shuffle_seed=3)


@pytest.fixture(scope="module")
def plan(plans: dict[int, EpochPlan]) -> EpochPlan:
    return plans[1]


# --- who -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_ownership_deals_every_split_once(num_workers: int) -> None:
    owners = explore.ownership(lrs.SplitLayout(24), [1, 2, 4], num_workers)
    for world_size in (1, 2, 4):
        lines = owners[owners["world_size"] == world_size]
        assert list(zip(lines["rank"], lines["worker"], strict=True)) == [
            (rank, worker) for rank in range(world_size) for worker in range(num_workers)
        ]
        splits = [s for line in lines.itertuples() for s in range(line.first_split, line.last_split + 1)]
        assert splits == list(range(24))
        assert set(lines["num_splits"]) == {24 // world_size // num_workers}


def test_ownership_is_that_of_lancedb(table: LanceTable, plan: EpochPlan) -> None:
    """The first cycle that LanceDB's dataset gives a rank is the first row of each split that the table names."""
    for line in explore.ownership(lrs.SplitLayout(NUM_SPLITS), [1, 2, 4, 8]).itertuples():
        received = oracle_rows(table, line.rank, line.world_size, num_splits=NUM_SPLITS, shuffle_seed=3)
        first_rows = [int(plan.row_ids(split)[0]) for split in range(line.first_split, line.last_split + 1)]
        assert received[: line.num_splits] == ids_of_rows(table, first_rows)


def ids_of_rows(table: LanceTable, row_ids: list[int]) -> list[int]:
    rows = table.search().select(["id"]).with_row_id(True).limit(ROWS).to_arrow()
    by_row_id = dict(zip(rows["_rowid"].to_pylist(), rows["id"].to_pylist(), strict=True))
    return [by_row_id[row_id] for row_id in row_ids]


def test_ownership_refuses_what_does_not_divide() -> None:
    with pytest.raises(LayoutError, match="World sizes that work"):
        explore.ownership(lrs.SplitLayout(8), [2, 3])
    with pytest.raises(LayoutError, match="num_workers that work here"):
        explore.ownership(lrs.SplitLayout(8), [8], num_workers=2)


@pytest.mark.parametrize("num_splits", [1, 7, 12, 48, 60])
def test_topologies_are_all_that_are_legal(num_splits: int) -> None:
    batch = 5 * num_splits
    listed = explore.topologies(lrs.SplitLayout(num_splits), global_batch_size=batch).set_index("world_size")
    assert list(listed.index) == [w for w in range(1, num_splits + 1) if num_splits % w == 0]
    for world_size, line in listed.iterrows():
        assert line["splits_per_rank"] == num_splits // world_size
        assert line["local_batch_size"] == batch // world_size
        assert line["cycles_per_step"] == 5
        workers = [n for n in range(1, num_splits + 1) if num_splits % (world_size * n) == 0]
        assert line["num_workers"] == ", ".join(map(str, workers))
    with pytest.raises(LayoutError, match="Nearest sizes that work"):
        explore.topologies(lrs.SplitLayout(7), global_batch_size=8)


def test_costs_by_brute_force() -> None:
    candidates = [1, 5, 7, 16, 48, 100]
    listed = explore.costs(ROWS, candidates, global_batch_size=BATCH, up_to=20).set_index("num_splits")
    for number in candidates:
        line = listed.loc[number]
        used = max(rows for rows in range(ROWS + 1) if rows % number == 0)
        assert line["rows_per_split"] == used // number
        assert line["dropped_rows"] == ROWS - used
        assert line["dropped_percent"] == pytest.approx(100 * (ROWS - used) / ROWS)
        sizes = [w for w in range(1, 21) if number % w == 0]
        assert line["world_sizes"] == ", ".join(map(str, sizes))
        assert line["num_world_sizes"] == len(sizes)
        assert line["fits"] == (BATCH % number == 0)
        if line["fits"]:
            lengths = [min(BATCH, used - start) for start in range(0, used, BATCH)]
            assert (line["steps"], line["last_step_rows"]) == (len(lengths), lengths[-1])
        else:
            assert line[["steps", "last_step_rows"]].isna().all()
    assert "fits" not in explore.costs(ROWS, candidates)
    with pytest.raises(NotEnoughRowsError, match="there are 10"):
        explore.costs(10, [11])


# --- which rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_rows_of_step_are_those_that_lancedb_delivers(table: LanceTable, plan: EpochPlan, world_size: int) -> None:
    """Each rank's rows in its order, with their columns; the last, shorter step too."""
    local = BATCH // world_size
    expected = [
        oracle_rows(table, rank, world_size, num_splits=NUM_SPLITS, shuffle_seed=3) for rank in range(world_size)
    ]
    num_steps = -(-len(expected[0]) // local)
    assert len(expected[0]) % local, "the last step is meant to be a shorter one"
    for step in (0, 7, num_steps - 1):
        rows = explore.rows_of_step(
            plan, step, BATCH, world_size=world_size, source=table, columns=["label", "id", "_rowid"]
        )
        assert list(rows.columns) == ["rank", "cycle", "split", "row_id", "label", "id", "_rowid"]
        for rank in range(world_size):
            received = expected[rank][step * local : (step + 1) * local]
            assert rows[rows["rank"] == rank]["id"].tolist() == received
        assert (rows["label"] == rows["id"] % 7).all()
        assert (rows["_rowid"] == rows["row_id"]).all()
        assert all(plan.row_ids(line.split)[line.cycle] == line.row_id for line in rows.itertuples())


def test_rows_of_step_of_a_plan_alone(plan: EpochPlan) -> None:
    rows = explore.rows_of_step(plan, 2, BATCH)
    assert list(rows.columns) == ["rank", "cycle", "split", "row_id"]
    assert rows["row_id"].tolist() == plan.row_ids_of_step(2, BATCH).tolist()


def test_rows_of_step_refuses_what_it_cannot_answer(table: LanceTable, plan: EpochPlan, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="pass source="):
        explore.rows_of_step(plan, 0, BATCH, columns=["id"])
    with pytest.raises(InvalidArgumentError, match="source must be"):
        explore.rows_of_step(plan, 0, BATCH, columns=["id"], source="digits")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="there is no step 21"):
        explore.rows_of_step(plan, 21, BATCH)
    with pytest.raises(LayoutError):
        explore.rows_of_step(plan, 0, BATCH, world_size=3)
    with pytest.raises(MissingRowsError):
        explore.rows_of_step(plan, 0, BATCH, source=make_table(tmp_path, 50), columns=["id"])


def test_storage_positions_rank_the_row_ids(plan: EpochPlan) -> None:
    positions = explore.storage_positions(plan)
    assert positions.shape == (NUM_SPLITS, ROWS // NUM_SPLITS)
    in_order = sorted(plan.ids.ravel().tolist())
    assert [in_order[place] for place in positions.ravel()] == plan.ids.ravel().tolist()


# --- what reading costs ----------------------------------------------------------------------------


def runs(row_ids: list[int]) -> int:
    present = set(row_ids)
    return sum(row_id - 1 not in present for row_id in present)


def blocks(row_ids: list[int], row_bytes: int, block_bytes: int) -> int:
    """Every byte of every row looked up."""
    return len(
        {
            (row_id >> 32, byte // block_bytes)
            for row_id in row_ids
            for byte in range((row_id & 0xFFFFFFFF) * row_bytes, (row_id & 0xFFFFFFFF) * row_bytes + row_bytes)
        }
    )


@pytest.mark.parametrize("row_bytes", [1, 30, 64, 100, 700])
@pytest.mark.parametrize("count", [0, 1, 2, 40, 200])
def test_counts_of_ranges_and_bytes_by_brute_force(row_bytes: int, count: int) -> None:
    rng = np.random.default_rng(count)
    places = rng.choice(400, size=count, replace=False)
    row_ids = ((places // 100).astype(np.uint64) << np.uint64(32)) + (places % 100).astype(np.uint64)
    assert count_ranges(row_ids) == runs(row_ids.tolist())
    touched = count_touched_bytes(row_ids, row_bytes=row_bytes, block_bytes=64)
    assert touched == 64 * blocks(row_ids.tolist(), row_bytes, 64)


@pytest.mark.parametrize("clump", CLUMPS)
def test_window_reads_by_brute_force(plans: dict[int, EpochPlan], clump: int) -> None:
    plan = plans[clump]
    reads = explore.window_reads(plan, row_bytes=20, world_size=2, rank=1, max_rows=64, block_bytes=256)
    assert reads["rows"].sum() == 4 * plan.rows_per_split, "every row of the rank once"
    next_cycle = 0
    for line in reads.itertuples():
        assert line.first_cycle == next_cycle
        next_cycle = line.last_cycle + 1
        row_ids = plan.ids[4:, line.first_cycle : next_cycle].ravel().tolist()
        assert (line.rows, line.ranges) == (len(row_ids), runs(row_ids))
        assert line.rows <= 64
        assert line.bytes_asked == 20 * line.rows
        assert line.bytes_touched == 256 * blocks(row_ids, 20, 256)
        assert line.amplification == line.bytes_touched / line.bytes_asked
        assert line.rows_per_range == line.rows / line.ranges
    assert next_cycle == plan.rows_per_split


def test_window_reads_are_cut_like_those_of_a_run(plan: EpochPlan) -> None:
    """A small first window, and no window of more bytes than a read task takes."""
    wide = explore.window_reads(plan, row_bytes=2**20)
    assert wide["rows"].max() == MAX_WINDOW_BYTES // 2**20
    assert explore.window_reads(plan, row_bytes=8)["rows"].tolist() == [1000]


def test_locality_sums_the_windows_of_all_ranks(plans: dict[int, EpochPlan]) -> None:
    options = {"row_bytes": 20, "max_rows": 64, "block_bytes": 256}
    summary = explore.locality(plans, world_size=4, **options).set_index("clump_size")
    for clump, plan in plans.items():
        ranks = [explore.window_reads(plan, world_size=4, rank=rank, **options) for rank in range(4)]
        for column in ("rows", "ranges", "bytes_asked", "bytes_touched"):
            assert summary.loc[clump, column] == sum(reads[column].sum() for reads in ranks)
        assert summary.loc[clump, "windows"] == sum(map(len, ranks))
    # what the table is for: clumps read longer runs and touch less
    assert summary["rows_per_range"].is_monotonic_increasing
    assert summary["amplification"].is_monotonic_decreasing
    assert summary.loc[16, "rows_per_range"] > 10


def test_shuffle_spread_by_brute_force(plans: dict[int, EpochPlan]) -> None:
    spread = explore.shuffle_spread(plans, BATCH)
    assert len(spread) == len(CLUMPS) * (ROWS // BATCH)
    for line in spread.itertuples():
        assert line.places == runs(plans[line.clump_size].row_ids_of_step(line.step, BATCH).tolist())
        assert line.places_per_row == line.places / BATCH
    assert spread.groupby("clump_size")["places"].mean().is_monotonic_decreasing


def test_a_clump_size_of_none_is_one(table: LanceTable, plan: EpochPlan) -> None:
    (size,) = plans = explore.plans_by_clump_size(table, [None], num_splits=NUM_SPLITS, shuffle_seed=3)
    assert (size, plans[size].fingerprint) == (1, plan.fingerprint)


# --- states ----------------------------------------------------------------------------------------


def state_of(spec: StreamSpec, *, epoch: int = 0, received: int = 0, planned: bool = True) -> dict[str, Any]:
    plan = build_plan(spec, epoch)
    assert spec.num_splits is not None
    return StreamState(
        num_splits=spec.num_splits,
        shuffle_seed=spec.shuffle_seed,
        epoch=epoch,
        position=np.full(spec.num_splits, received, dtype=np.int64),
        splits=range(spec.num_splits),
        provenance=describe(spec, Facts(rows=plan.rows, fingerprint=plan.fingerprint if planned else None)),
    ).to_dict()


@pytest.fixture(scope="module")
def spec(table: LanceTable) -> StreamSpec:
    return make_spec(table, num_splits=NUM_SPLITS, shuffle_seed=3)


def verdicts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, str]:
    compared = explore.compare_states(first, second)
    assert list(compared.columns) == ["field", "first", "second", "verdict"]
    return dict(zip(compared["field"], compared["verdict"], strict=True))


def test_states_of_one_stream_differ_in_their_place_alone(spec: StreamSpec) -> None:
    first, later = state_of(spec, received=6), state_of(spec, received=30)
    assert set(verdicts(first, first).values()) == {"same"}
    found = verdicts(first, later)
    assert {name for name, verdict in found.items() if verdict != "same"} == {"rows_received", "rows_per_split"}
    compared = explore.compare_states(first, later).set_index("field")
    assert compared.loc["rows_received", ["first", "second"]].tolist() == [48, 240]


def test_fingerprints_of_two_epochs_are_not_compared(spec: StreamSpec) -> None:
    found = verdicts(state_of(spec, epoch=0), state_of(spec, epoch=1))
    assert {name: verdict for name, verdict in found.items() if verdict != "same"} == {
        "epoch": "differs",
        "fingerprint": "not compared",
    }
    assert verdicts(state_of(spec, planned=False), state_of(spec))["fingerprint"] == "not compared"


@pytest.mark.parametrize(
    "change",
    [{"shuffle_seed": 4}, {"filter": "id < 900"}, {"num_splits": 4}, {"shuffle_clump_size": 4}, {"columns": ("id",)}],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_is_what_loading_refuses(spec: StreamSpec, change: dict[str, Any]) -> None:
    other = replace(spec, **change)
    first, second = state_of(spec), state_of(other)
    found = {name for name, verdict in verdicts(first, second).items() if verdict == "differs"}
    assert set(change) <= found
    with pytest.raises(ValueError, match=next(iter(change))):
        adopt(other, parse_state(first), strict=True)


def test_a_state_of_lancedb_is_compared_as_far_as_it_goes(table: LanceTable, spec: StreamSpec) -> None:
    theirs = oracle(table, 0, 1, num_splits=NUM_SPLITS, shuffle_seed=3).state_dict()
    found = verdicts(state_of(spec), theirs)
    assert found["num_splits"] == found["shuffle_seed"] == found["epoch"] == "same"
    assert found["version"] == "not compared"
    with pytest.raises(StateError):
        explore.compare_states(theirs, {"epoch": 0})


# --- a run -----------------------------------------------------------------------------------------


def elastic_run() -> list[explore.RunEvent]:
    """Two ranks to step 5 and a kill; four from step 3 to step 8; one rank to step 9."""

    def events(kind: Any, world_size: int, at: float, first: int, last: int) -> Iterator[explore.RunEvent]:
        yield explore.RunEvent(time_s=at, kind=kind, step=first, world_size=world_size)
        for step in range(first + 1, last + 1):
            at += 1
            yield explore.RunEvent(time_s=at, kind="step", step=step, world_size=world_size)
            if step % 3 == 0:
                yield explore.RunEvent(time_s=at, kind="checkpoint", step=step, world_size=world_size)

    return [
        *events("start", 2, 100, 0, 5),
        explore.RunEvent(time_s=105.5, kind="kill", step=5, world_size=2),
        *events("resume", 4, 110, 3, 8),
        *events("resume", 1, 120, 8, 9),
        explore.RunEvent(time_s=122, kind="end", step=9, world_size=1),
    ]


def test_attempts_of_a_run() -> None:
    expected = pd.DataFrame(
        {
            "world_size": [2, 4, 1],
            "start_s": [100, 110, 120],
            "end_s": [105.5, 115, 122],
            "first_step": [0, 3, 8],
            "last_step": [5, 8, 9],
            "steps": [5, 5, 1],
            "redone_steps": [0, 2, 0],
            "ended_by": ["kill", "resume", "end"],
        }
    )
    pd.testing.assert_frame_equal(explore.attempts(elastic_run()), expected, check_dtype=False)
    running = explore.attempts(elastic_run()[:3])
    assert running["ended_by"].tolist() == [""]


def test_events_that_are_no_run_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="kind must be one of"):
        explore.RunEvent(time_s=0, kind="died", step=0, world_size=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no events"):
        explore.attempts([])
    with pytest.raises(InvalidArgumentError, match="must be a start"):
        explore.plot_timeline(elastic_run()[1:])


# --- plots -----------------------------------------------------------------------------------------


def rendered(figure: Figure) -> np.ndarray:
    """The figure as an image of shape (height, width, 4)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    return matplotlib.image.imread(buffer)


def all_figures(plans: dict[int, EpochPlan]) -> dict[str, Figure]:
    plan = plans[1]
    return {
        "ownership": explore.plot_ownership(lrs.SplitLayout(24), [1, 2, 4, 8], num_workers=3),
        "raster": explore.plot_raster(plan, cycles=30, global_batch_size=BATCH, world_size=4),
        "step": explore.plot_step(plan, 3, BATCH),
        "spread": explore.plot_shuffle_spread(plans, BATCH),
        "locality": explore.plot_locality(plans, row_bytes=20, world_size=4),
        "timeline": explore.plot_timeline(elastic_run(), steps_per_epoch=4),
    }


def test_plots_are_labelled_and_leave_no_global_state(plans: dict[int, EpochPlan]) -> None:
    import matplotlib.pyplot as plt

    settings = dict(plt.rcParams)
    for name, figure in all_figures(plans).items():
        image = rendered(figure)
        assert image.shape[1] == 990, "the width of a notebook"
        assert len(np.unique(image.reshape(-1, 4), axis=0)) > 10, name
        assert figure.get_suptitle(), name
        bottom = [axes for axes in figure.axes if axes.get_xlabel()]
        assert bottom, name
        assert any(axes.get_ylabel() for axes in bottom), name
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == settings


def test_raster_shows_where_each_row_lies(plan: EpochPlan) -> None:
    (image,) = explore.plot_raster(plan).axes[0].images
    assert np.array_equal(np.asarray(image.get_array()), explore.storage_positions(plan))


def test_every_panel_of_a_step_shows_the_same_rows(plan: EpochPlan) -> None:
    figure = explore.plot_step(plan, 3, BATCH, world_sizes=[1, 2, 8])
    panels = [axes for axes in figure.axes if axes.get_title().startswith("W = ")]
    shown = [axes.images[0].get_array() for axes in panels]
    first = shown[0]
    assert len(shown) == 3
    assert first is not None
    for other in shown[1:]:
        assert np.array_equal(np.asarray(other), np.asarray(first))
    in_order = np.sort(plan.ids, axis=None)
    assert in_order[np.asarray(first).T.ravel()].tolist() == plan.row_ids_of_step(3, BATCH).tolist()


def test_numbers_in_a_step_are_the_order_of_arrival(plan: EpochPlan) -> None:
    figure = explore.plot_step(plan, 3, BATCH, world_sizes=[4])
    axes = figure.axes[0]
    numbers = {(round(t.get_position()[1]), round(t.get_position()[0])): int(t.get_text()) for t in axes.texts}
    rows = explore.rows_of_step(plan, 3, BATCH, world_size=4)
    for _, received in rows.groupby("rank"):
        places = list(zip(received["split"], received["cycle"], strict=True))
        assert [numbers[place] for place in places] == list(range(BATCH // 4))


def test_timeline_marks_every_kill_and_resume() -> None:
    figure = explore.plot_timeline(elastic_run())
    below = figure.axes[1]
    marks = {c.get_label(): np.asarray(c.get_offsets()).tolist() for c in below.collections}
    assert marks == {
        "checkpoint": [[3, 3], [13, 6], [21, 9]],
        "worker killed": [[5.5, 5]],
        "resumed": [[10, 3], [20, 8]],
    }
    again = [line for line in below.lines if line.get_label() == "steps done again"]
    assert [np.asarray(line.get_ydata()).tolist() for line in again] == [[3, 4, 5]]


def test_too_many_panels_are_refused(plan: EpochPlan) -> None:
    with pytest.raises(InvalidArgumentError, match="side by side"):
        explore.plot_step(plan, 0, BATCH, world_sizes=[1] * 7)


# --- what objects say of themselves ----------------------------------------------------------------


def test_html_is_escaped() -> None:
    assert "<b>" not in facts_html("t", {"a": "<b>x"}).split("</caption>")[1]
    assert "<i>" not in table_html("<i>", ["<i>"], [["<i>"]])


def test_layout_and_plan_in_a_notebook(plan: EpochPlan) -> None:
    html = lrs.SplitLayout(12)._repr_html_()
    assert all(f">{size}</td>" in html for size in (1, 2, 3, 4, 6, 12))
    assert "0 .. 5" in html
    html = plan._repr_html_()
    assert plan.fingerprint in html
    assert "1,003" in html
    assert f"{plan.row_ids(0)[0]}, {plan.row_ids(0)[1]}" in html


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_stream_in_a_notebook(table: LanceTable, ray_cluster: None) -> None:
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    stream = lrs.StreamDataConfig().configure({"train": dataset}, 2)[1]["train"]
    html = stream._repr_html_()  # type: ignore[attr-defined]
    assert "1 of 2" in html
    assert "4 .. 7 of 8" in html
    assert str(table.uri) not in html
    # the rows of a step can be looked up through the dataset as well
    plan = lrs.plan_epoch(dataset)
    rows = explore.rows_of_step(plan, 0, BATCH, source=dataset, columns=["id"])
    assert rows["id"].tolist() == oracle_rows(table, 0, 1, num_splits=NUM_SPLITS, shuffle_seed=0)[:BATCH]


@pytest.mark.parametrize("missing", ["matplotlib", "pandas"])
def test_a_missing_extra_is_named(missing: str) -> None:
    script = f"import sys; import lance_ray_stream; sys.modules[{missing!r}] = None; import lance_ray_stream.explore"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "pip install 'lance-ray-stream[explore]'" in done.stderr.splitlines()[-1]


def test_columns_of_the_table_never_replace_those_of_the_result(tmp_path: Path) -> None:
    table = lancedb.connect(tmp_path).create_table("clash", pa.table({"rank": [1, 2], "id": [3, 4]}))
    small = explore.plan(table, num_splits=2)
    with pytest.raises(InvalidArgumentError, match=r"\['rank'\] have names of columns of the result"):
        explore.rows_of_step(small, 0, 2, source=table, columns=["rank", "id"])
