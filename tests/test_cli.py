"""The command line: what it prints is what the library computes, what is wrong is said in one line, exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.table import LanceTable

import lance_ray_stream as lrs
from lance_ray_stream import plan as plan_module
from lance_ray_stream import window_reader
from lance_ray_stream.backends import PlanBackend, Topology
from lance_ray_stream.cli import main, one_line
from lance_ray_stream.errors import LayoutError
from lance_ray_stream.plan import build_plan
from lance_ray_stream.row_order import PlannedRows
from lance_ray_stream.spec import make_spec
from lance_ray_stream.tags import protect
from tests.oracle import oracle_rows
from tests.tables import ids_of, make_table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from digits_data import write_digits  # noqa: E402

NUM_SPLITS, BATCH, SEED = 8, 48, 3


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only line on stderr."""
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("lance-ray-stream: error: ")
        return self.err.removeprefix("lance-ray-stream: error: ").strip()


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*argv: object) -> Result:
        code = main([str(arg) for arg in argv])
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, as the examples write them."""
    path = tmp_path_factory.mktemp("digits")
    write_digits(path)
    return path


@pytest.fixture(scope="module")
def digits(folder: Path) -> LanceTable:
    table = lancedb.connect(folder).open_table("digits")
    assert isinstance(table, LanceTable)
    return table


def save_state(
    path: Path, table: LanceTable, *, steps: int, epoch: int = 0, batch: int = BATCH, rank: int = 0, **options: Any
) -> Path:
    """The state of a rank of two after ``steps`` steps, as a trainer writes it."""
    spec = make_spec(table, num_splits=NUM_SPLITS, shuffle_seed=SEED, **options)
    runs = PlanBackend(spec).run(Topology(2), batch_size=batch // 2, epoch=epoch, steps=steps)
    return write(path, runs[rank].states[steps])


def write(path: Path, state: dict[str, Any]) -> Path:
    path.write_text(json.dumps(state))
    return path


def changed(path: Path, new: Path, **values: Any) -> Path:
    """A copy of a state with another provenance."""
    state = json.loads(path.read_text())
    state["lance_ray_stream"].update(values)
    return write(new, state)


@pytest.fixture
def state(tmp_path: Path, digits: LanceTable) -> Path:
    """After 5 of 30 steps of epoch 2."""
    return save_state(tmp_path / "stream.json", digits, steps=5, epoch=2, filter="label < 8")


# --- layout -----------------------------------------------------------------------------------------


def test_layout_lists_the_legal_topologies(cli: Cli) -> None:
    result = cli("layout", 48, "--global-batch-size", 4800, "--rows", 1_000_000, "--format", "json")
    found, layout = json.loads(result.out), lrs.SplitLayout(48)
    assert result.code == 0
    assert [line["world_size"] for line in found["topologies"]] == layout.world_sizes()
    for line in found["topologies"]:
        size = line["world_size"]
        assert line["local_batch"] == layout.local_batch_size(4800, size)
        assert line["splits_per_rank"] == len(layout.splits_of(0, size))
        for workers in range(1, 49):
            assert (workers in line["reader_workers"]) == (48 % (size * workers) == 0)
    assert (found["rows_per_split"], found["dropped_rows"]) == (20_833, 16)
    assert (found["steps"] - 1) * 4800 + found["last_step_rows"] == 48 * 20_833
    assert 0 < found["last_step_rows"] <= 4800


def test_layout_as_text_and_csv(cli: Cli) -> None:
    text = cli("layout", 12, "--global-batch-size", 24, "--rows", 100).out
    assert text.splitlines()[:3] == [
        "num_splits 12: 6 world sizes",
        "an epoch of 100 rows: 8 per split, 4 dropped",
        "4 steps of 24 rows",
    ]
    assert text.splitlines()[4:6] == [
        "world size  splits per rank  local batch  reader workers",
        "         1               12           24  1, 2, 3, 4, 6, 12",
    ]
    lines = list(csv.DictReader(io.StringIO(cli("layout", 12, "--rows", 100, "--format", "csv").out)))
    assert [int(line["world_size"]) for line in lines] == [1, 2, 3, 4, 6, 12]
    assert {line["dropped_rows"] for line in lines} == {"4"}
    assert json.loads(lines[1]["reader_workers"]) == [1, 2, 3, 6]


@pytest.mark.parametrize("num_workers", [None, 2])
def test_layout_of_unequal_groups(cli: Cli, num_workers: int | None) -> None:
    """Every world size, with the smallest and the largest of its ranks."""
    workers = [] if num_workers is None else ["--num-workers", num_workers]
    result = cli("layout", 48, "--uneven", "--global-batch-size", 480, *workers, "--format", "json")
    found, layout = json.loads(result.out), lrs.SplitLayout(48, uneven=True)
    assert found["uneven"] is True
    assert [line["world_size"] for line in found["topologies"]] == layout.world_sizes(num_workers or 1)
    for line in found["topologies"]:
        size = line["world_size"]
        assert line["splits_per_rank"] == sorted({len(layout.splits_of(rank, size)) for rank in range(size)})
        assert line["local_batch"] == sorted({layout.local_batch_size(480, size, rank) for rank in range(size)})
        if num_workers is None:
            layout.check(size, line["reader_workers_up_to"])
            with pytest.raises(LayoutError):
                layout.check(size, line["reader_workers_up_to"] + 1)
        else:
            assert line["reader_workers"] == [num_workers]
    text = cli("layout", 48, "--uneven", "--world-sizes", "5,7").out
    assert text.splitlines()[0] == "num_splits 48, uneven: 2 world sizes"


def test_layout_finds_the_smallest_number_of_splits(cli: Cli) -> None:
    assert cli("layout", "--world-sizes", "6,8").out.startswith("num_splits 24:")
    found = json.loads(cli("layout", "--world-sizes", "6,8", "--num-workers", 5, "--format", "json").out)
    assert found["num_splits"] == 120
    assert {line["reader_workers"] == [5] for line in found["topologies"]} == {True}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["layout"], "NUM_SPLITS, or --world-sizes"),
        (["layout", "0"], "num_splits must be at least 1"),
        (["layout", "x"], "invalid int value: 'x'; see lance-ray-stream layout --help"),
        (["layout", "48", "--world-sizes", "5"], "World sizes that work: 1, 2, 3, 4, 6"),
        (["layout", "--world-sizes", "6;8"], "expected integers such as 6,8, got '6;8'"),
        (["layout", "48", "--num-workers", "5"], "num_workers=5"),
        (["layout", "48", "--global-batch-size", "100"], "Nearest sizes that work: 96, 144"),
        (["plan", "data", "rows", "--num-splits", "8", "--algorithm", "dice"], "shuffle_algorithm must be one of"),
        (["layout", "48", "--uneven", "--world-sizes", "5,49"], "World sizes that work: 1 to 48"),
        (["layout", "48", "--uneven", "--num-workers", "49"], "48 are too few for world_size=1 with num_workers=49"),
        (["layout", "--uneven", "--world-sizes", "5,7"], "--uneven needs NUM_SPLITS"),
        (["layout", "48", "--rows", "40"], "40 rows are fewer than num_splits=48"),
        (["step", "data", "rows", "1", "--num-splits", "8"], "--global-batch-size"),
        (["plan", "data", "rows", "--version", "1", "--tag", "x"], "not allowed with"),
        (["plan", "data", "rows"], "--num-splits, or the --state"),
        (["plan", "/nowhere", "rows", "--num-splits", "8"], "no directory '/nowhere'"),
        (["plan", "memory://x", "rows", "--num-splits", "8"], "memory:// table exists in this process alone"),
        (["plan", "data", "rows", "--num-splits", "8", "--storage-option", "hunter2"], "expected NAME=VALUE"),
        (["state", "/nowhere.json"], "cannot read the state /nowhere.json: No such file"),
        (["state", "-", "-"], "only one of two"),
        (["state", "s.json", "--lenient"], "needs --table"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(cli: Cli, argv: list[str], says: str) -> None:
    result = cli(*argv)
    assert result.code == 2
    assert says in result.error
    assert "hunter2" not in result.error
    assert not result.out


@pytest.mark.parametrize("command", ["layout", "plan", "step", "verify", "state", "protected"])
def test_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str], command: str) -> None:
    from lance_ray_stream.cli.arguments import build_parser

    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    examples = re.findall(r"^  lance-ray-stream (.*)$", text.partition("examples:\n")[2], re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', example)]
        assert build_parser().parse_args(words).command == command


# --- plan and step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 3])
def test_plan_is_the_plan(cli: Cli, folder: Path, digits: LanceTable, epoch: int) -> None:
    options = ("--num-splits", 7, "--seed", SEED, "--epoch", epoch, "--clump-size", 4, "--filter", "label < 5")
    plan = build_plan(
        make_spec(digits, num_splits=7, shuffle_seed=SEED, shuffle_clump_size=4, filter="label < 5"), epoch
    )
    found = json.loads(cli("plan", folder, "digits", *options, "--format", "json").out)
    assert found["fingerprint"] == plan.fingerprint
    assert found["rows"] == plan.rows == digits.count_rows("label < 5")
    assert found["rows_per_split"] == plan.rows_per_split
    assert found["dropped_rows"] == plan.dropped_rows
    assert found["version"] == digits.version
    text = cli("plan", folder, "digits", *options).out
    for value in (plan.fingerprint, "label < 5", f"seed {SEED}, in clumps of 4", f"digits in {folder}"):
        assert value in text


def test_step_gives_the_rows_of_the_plan(cli: Cli, folder: Path, digits: LanceTable) -> None:
    plan = build_plan(make_spec(digits, num_splits=NUM_SPLITS, shuffle_seed=SEED), 1)
    options = ("--num-splits", NUM_SPLITS, "--seed", SEED, "--epoch", 1, "--columns", "id,label,image")
    for step in (0, 7, 29):
        asked = ("step", folder, "digits", step, "--global-batch-size", BATCH, *options)
        expected = plan.row_ids_of_step(step, BATCH).tolist()
        rows = json.loads(cli(*asked, "--format", "json").out)["step_rows"]
        lines = list(csv.DictReader(io.StringIO(cli(*asked, "--format", "csv").out)))
        assert [row["row_id"] for row in rows] == expected
        assert [int(line["row_id"]) for line in lines] == expected
        assert [row["id"] for row in rows] == ids_of(digits, np.array(expected))
        assert [int(line["id"]) for line in lines] == [row["id"] for row in rows]
        assert [json.loads(line["image"]) for line in lines] == [row["image"] for row in rows]
        for row in rows:
            assert plan.row_ids(row["split"])[row["index"]] == row["row_id"]
        text = cli(*asked).out.splitlines()
        assert text[0] == f"step {step} of epoch 1: {BATCH} rows"
        assert [int(line.split()[2]) for line in text[4:]] == expected


def test_step_by_rank_is_what_lancedb_gives_that_rank(cli: Cli, folder: Path, digits: LanceTable) -> None:
    asked: tuple[object, ...] = (
        "step",
        folder,
        "digits",
        4,
        "--num-splits",
        NUM_SPLITS,
        "--global-batch-size",
        BATCH,
        "--columns",
        "id",
    )
    asked += ("--world-size", 4, "--format", "json")
    all_ranks = json.loads(cli(*asked).out)["step_rows"]
    parts = []
    for rank in range(4):
        rows = json.loads(cli(*asked, "--rank", rank).out)["step_rows"]
        local = BATCH // 4
        expected = oracle_rows(digits, rank, 4, num_splits=NUM_SPLITS)[4 * local : 5 * local]
        assert [row["id"] for row in rows] == expected
        assert {row["rank"] for row in rows} == {rank}
        parts += rows
    assert parts == all_ranks


def test_last_step_may_be_shorter(cli: Cli, folder: Path) -> None:
    asked = ("--num-splits", NUM_SPLITS, "--global-batch-size", 1000, "--format", "json")
    assert len(json.loads(cli("step", folder, "digits", 1, *asked).out)["step_rows"]) == 440
    assert "there is no step 2" in cli("step", folder, "digits", 2, *asked).error


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rank", "1"], "--rank needs --world-size"),
        (["--rank", "4", "--world-size", "4"], "rank=4 is outside 0 .. 3"),
        (["--world-size", "3"], "World sizes that work: 1, 2, 4, 8"),
        (["--columns", "labl"], "did you mean 'label'"),
        (["--filter", "label <"], "filter 'label <'"),
    ],
)
def test_step_refuses_what_cannot_be(cli: Cli, folder: Path, argv: list[str], says: str) -> None:
    result = cli("step", folder, "digits", 0, "--num-splits", NUM_SPLITS, "--global-batch-size", BATCH, *argv)
    assert result.code == 2
    assert says in result.error


def test_step_of_a_state_needs_no_other_flags(cli: Cli, folder: Path, digits: LanceTable, state: Path) -> None:
    plan = build_plan(make_spec(digits, num_splits=NUM_SPLITS, shuffle_seed=SEED, filter="label < 8"), 2)
    asked = ("step", folder, "digits", 5, "--global-batch-size", BATCH, "--state", state, "--format", "json")
    found = json.loads(cli(*asked, "--columns", "label").out)
    assert [row["row_id"] for row in found["step_rows"]] == plan.row_ids_of_step(5, BATCH).tolist()
    assert max(row["label"] for row in found["step_rows"]) == 7
    assert (found["epoch"], found["shuffle_seed"], found["filter"]) == (2, SEED, "label < 8")
    assert json.loads(cli(*asked, "--epoch", 0).out)["fingerprint"] != found["fingerprint"]
    for flag in (["--seed", 0], ["--num-splits", 8], ["--filter", "id > 1"], ["--no-shuffle"], ["--version", 1]):
        assert f"{flag[0]} is known from --state" in cli(*asked, *flag).error


def test_state_gives_the_version(cli: Cli, tmp_path: Path) -> None:
    """G5: a table that has grown since is read as it was."""
    table = make_table(tmp_path, 240, columns=["id"])
    saved = save_state(tmp_path / "s.json", table, steps=1)
    before, pinned = json.loads(saved.read_text())["lance_ray_stream"]["fingerprint"], table.version
    table.add([{"id": 240 + i} for i in range(80)])
    found = json.loads(cli("plan", tmp_path, "rows", "--state", saved, "--format", "json").out)
    assert (found["fingerprint"], found["version"], found["rows"]) == (before, pinned, 240)
    latest = json.loads(cli("plan", tmp_path, "rows", "--num-splits", NUM_SPLITS, "--format", "json").out)
    assert latest["rows"] == 320


def test_step_of_a_moved_table_warns(cli: Cli, tmp_path: Path) -> None:
    table = make_table(tmp_path / "old", 240, columns=["id"])
    saved = save_state(tmp_path / "s.json", table, steps=1)
    (tmp_path / "old").rename(tmp_path / "new")
    result = cli("step", tmp_path / "new", "rows", 0, "--state", saved, "--global-batch-size", BATCH)
    assert result.code == 0
    assert result.err.startswith("lance-ray-stream: warning: The state differs in table")
    assert result.err.count("\n") == 1


def test_columns_of_any_type_and_name(cli: Cli, tmp_path: Path) -> None:
    """Names of a step's own columns, and values that JSON and CSV do not have."""
    days = [date(2024, 1, 1) + timedelta(days=i) for i in range(8)]
    data = pa.table(
        {
            "split": ["train"] * 8,
            "day": days,
            "raw": [b"\x00\xff"] * 8,
            "score": [float("nan"), float("inf"), *[0.5] * 6],
            "text": ['a,"b"\nc', None, *["x" * 100] * 6],
            "point": [{"x": i, "y": [i]} for i in range(8)],
        }
    )
    lancedb.connect(tmp_path).create_table("odd", data)
    asked: tuple[object, ...] = (
        "step",
        tmp_path,
        "odd",
        0,
        "--num-splits",
        2,
        "--no-shuffle",
        "--global-batch-size",
        8,
    )
    asked += ("--columns", ",".join(data.column_names))
    rows = sorted(json.loads(cli(*asked, "--format", "json").out)["step_rows"], key=lambda row: row["row_id"])
    lines = sorted(
        csv.DictReader(io.StringIO(cli(*asked, "--format", "csv").out)), key=lambda line: int(line["row_id"])
    )
    assert [row["odd.split"] for row in rows] == ["train"] * 8
    assert {row["split"] for row in rows} == {0, 1}
    assert [row["day"] for row in rows] == [line["day"] for line in lines] == [day.isoformat() for day in days]
    assert [row["raw"] for row in rows] == ["AP8="] * 8
    assert [row["score"] for row in rows] == ["NaN", "Infinity", *[0.5] * 6]
    assert [row["text"] for row in rows] == data["text"].to_pylist()
    assert [line["text"] for line in lines] == ['a,"b"\nc', "", *["x" * 100] * 6]
    assert [json.loads(line["point"]) for line in lines] == data["point"].to_pylist()
    text = cli(*asked).out.splitlines()
    assert len(text) == 12
    assert all("x" * 49 not in line for line in text)


# --- verify -----------------------------------------------------------------------------------------


def verdicts(result: Result) -> dict[str, str]:
    """Check -> "ok" or "FAILED"."""
    return {line.split()[1]: line.split()[0] for line in result.out.splitlines()[1:-1]}


@pytest.mark.parametrize(
    "options",
    [
        ["--num-workers", "1,2", "--steps", "0,7,30", "--global-batch-size", "48"],
        ["--filter", "label < 5", "--epoch", "2", "--clump-size", "4", "--steps", "3"],
        ["--no-shuffle", "--columns", "id", "--steps", "3", "--lancedb-rows", "100"],
    ],
)
def test_verify_passes_on_the_digits(cli: Cli, folder: Path, options: list[str]) -> None:
    result = cli("verify", folder, "digits", "--num-splits", NUM_SPLITS, "--world-sizes", "1,2,8", *options)
    assert result.out.splitlines()[-1] == "PASSED: all 4 checks"
    assert verdicts(result) == dict.fromkeys(["lancedb", "rows", "batches", "resume"], "ok")
    assert (result.code, result.err) == (0, "")


def test_verify_of_another_algorithm_compares_with_itself(cli: Cli, folder: Path) -> None:
    """G3 is about LanceDB's algorithm alone; the other guarantees hold for each."""
    asked = ["--num-splits", NUM_SPLITS, "--algorithm", "indexed", "--world-sizes", "1,4", "--steps", "0,7"]
    result = cli("verify", folder, "digits", *asked)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "PASSED: all 3 checks"
    assert verdicts(result) == dict.fromkeys(["rows", "batches", "resume"], "ok")


def test_verify_goes_on_from_a_state(cli: Cli, folder: Path, state: Path) -> None:
    result = cli("verify", folder, "digits", "--state", state, "--global-batch-size", BATCH, "--world-sizes", "2,4")
    assert result.code == 0
    assert result.out.splitlines()[-1] == "PASSED: all 5 checks"
    assert "fits the table: epoch 2, 30 of " in result.out
    assert "exact after steps 0, 1, 5, " in result.out


def test_verify_says_that_the_version_was_cleaned_away(cli: Cli, tmp_path: Path) -> None:
    """G5: by a state that names it, and by number."""
    table = make_table(tmp_path / "old", 240, columns=["id"])
    saved, pinned = save_state(tmp_path / "s.json", table, steps=1), table.version
    table.add([{"id": 240}])
    with pytest.warns(UserWarning, match="removes every version"):
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    # At another address no handle of this process is open.
    new = tmp_path / "new"
    (tmp_path / "old").rename(new)
    changed(saved, saved, table={"uri": str(new), "name": "rows", "namespace_path": []})
    for which in (["--state", saved], ["--version", pinned, "--num-splits", NUM_SPLITS]):
        result = cli("verify", new, "rows", *which)
        assert result.code == 1
        assert f"'rows' in '{new}' has no version {pinned}" in result.error
    assert cli("state", saved, "--table", new, "rows").code == 1
    assert cli("verify", new, "rows", "--num-splits", NUM_SPLITS, "--world-sizes", 2, "--steps", 1).code == 0


def test_verify_says_that_data_is_gone(cli: Cli, tmp_path: Path) -> None:
    """G5: the version is there, a file of it is not."""
    make_table(tmp_path, 240, columns=["id"])
    next((tmp_path / "rows.lance" / "data").iterdir()).unlink()
    result = cli("verify", tmp_path, "rows", "--num-splits", NUM_SPLITS)
    assert result.code == 1
    assert "no longer exists; was the version cleaned up?" in result.error


def test_verify_says_what_is_wrong_with_a_state(cli: Cli, folder: Path, state: Path, tmp_path: Path) -> None:
    wrong = changed(state, tmp_path / "wrong.json", filter="label < 9")
    result = cli("verify", folder, "digits", "--state", wrong, "--world-sizes", 2, "--steps", 1)
    assert result.code == 1
    assert verdicts(result) == {"state": "FAILED"} | dict.fromkeys(["lancedb", "rows", "batches", "resume"], "ok")
    line = result.out.splitlines()[1]
    assert "The state belongs to another stream: rows: checkpoint has " in line
    assert "; fingerprint: checkpoint has " in line
    assert result.out.splitlines()[-1] == "FAILED: state (1 of 5 checks)"


def test_verify_refuses_a_filter_that_leaves_too_few_rows(cli: Cli, folder: Path, digits: LanceTable) -> None:
    result = cli("verify", folder, "digits", "--num-splits", 240, "--filter", "label = 8")
    rows = digits.count_rows("label = 8")
    assert result.code == 2
    assert f"has {rows} rows that pass the filter 'label = 8', fewer than num_splits=240" in result.error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--world-sizes", "1,3"], "World sizes that work: 1, 2, 4, 8"),
        (["--num-workers", "3"], "num_workers that work here: 1, 2, 4, 8"),
        (["--global-batch-size", "50"], "Nearest sizes that work: 48, 56"),
        (["--steps", "31", "--global-batch-size", "48"], "the epoch has 30 steps of 48 rows"),
        (["--lancedb-rows", "0"], "--lancedb-rows must be at least 1"),
    ],
)
def test_verify_refuses_numbers_before_it_runs(cli: Cli, folder: Path, options: list[str], says: str) -> None:
    result = cli("verify", folder, "digits", "--num-splits", NUM_SPLITS, *options)
    assert result.code == 2
    assert says in result.error
    assert not result.out


def test_verify_notices_an_order_that_is_not_lancedbs(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G3: a planner with another seed rule is found out, and only by the check that is about it."""
    monkeypatch.setattr(plan_module, "EPOCH_PRIME", 7)
    result = cli("verify", folder, "digits", "--num-splits", 8, "--epoch", 1, "--world-sizes", 2, "--steps", 1)
    assert result.code == 1
    assert verdicts(result) == {"lancedb": "FAILED", "rows": "ok", "batches": "ok", "resume": "ok"}
    assert "StreamingDataset delivers other rows, from row 0 on: missing rows " in result.out


def test_verify_notices_rows_that_are_read_in_another_order(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1, G2: a reader that turns its windows around is found out."""
    real = window_reader.read_window

    def backwards(*args: Any, **options: Any) -> pa.Table:
        rows = real(*args, **options)
        return rows.take(pa.array(range(rows.num_rows - 1, -1, -1)))

    monkeypatch.setattr("lance_ray_stream.backends.read_window", backwards)
    result = cli("verify", folder, "digits", "--num-splits", 8, "--world-sizes", "1,2", "--steps", 1)
    assert result.code == 1
    assert verdicts(result) == {"lancedb": "ok", "rows": "ok", "batches": "FAILED", "resume": "ok"}
    assert "world_size=1, num_workers=1, step 0, rank 0: " in result.out


def test_verify_compares_where_lancedbs_epoch_ends(digits: LanceTable, folder: Path) -> None:
    """G3: a plan that stops too early has the right rows, but not all of them."""
    from lance_ray_stream.cli.arguments import build_parser
    from lance_ray_stream.cli.stream import stream_of
    from lance_ray_stream.cli.verify import Trial, check_lancedb

    arguments: Namespace = build_parser().parse_args(["verify", str(folder), "digits", "--num-splits", "8"])
    stream = stream_of(arguments)
    plan = build_plan(stream.spec, 0)
    trial = Trial(
        stream=stream,
        plan=plan,
        world_sizes=[1],
        num_workers=[1],
        global_batch_size=BATCH,
        num_steps=30,
        steps=[1],
        lancedb_rows=plan.ids.size,
        ray=False,
        strict=True,
    )
    assert check_lancedb(trial) == "all 1,440 rows of the epoch in the order of StreamingDataset"
    short = replace(plan, rows_per_split=plan.rows_per_split - 1, order=PlannedRows(plan.ids[:, :-1]))
    with pytest.raises(AssertionError, match="goes on after the plan's 1432 rows"):
        check_lancedb(replace(trial, plan=short, lancedb_rows=short.ids.size))


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_verify_through_ray(cli: Cli, ray_cluster: None, folder: Path, digits: LanceTable) -> None:
    asked = ["--num-splits", 4, "--world-sizes", "1,2", "--global-batch-size", 720, "--steps", 1]
    result = cli("verify", folder, "digits", "--ray", *asked, "--columns", "label")
    assert result.code == 0, result
    assert result.out.splitlines()[-1] == "PASSED: all 4 checks"
    ds = lrs.read_stream(digits, num_splits=4, epoch=1)
    found = json.loads(
        cli(
            *("step", folder, "digits", 1, "--num-splits", 4, "--epoch", 1, "--global-batch-size", 720),
            *("--format", "json"),
        ).out
    )
    assert [row["row_id"] for row in found["step_rows"]] == lrs.plan_epoch(ds).row_ids_of_step(1, 720).tolist()


# --- state ------------------------------------------------------------------------------------------


def facts(text: str) -> dict[str, str]:
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines() if "  " in line)


def test_state_is_shown(cli: Cli, state: Path, folder: Path, digits: LanceTable) -> None:
    saved = json.loads(state.read_text())
    length = digits.count_rows("label < 8") // NUM_SPLITS
    found = facts(cli("state", state, "--global-batch-size", BATCH).out)
    assert found["epoch"] == "2"
    assert found["position"] == f"30 of {length} rows of each split ({100 * 30 / length:.1f}%)"
    assert found["steps"] == f"5 of {-(-length * NUM_SPLITS // BATCH)} done"
    assert found["table"] == f"digits in {folder}"
    assert found["filter"] == "label < 8"
    assert found["shuffle"] == f"seed {SEED}"
    assert found["fingerprint"] == saved["lance_ray_stream"]["fingerprint"]


def test_state_inside_a_cycle_and_at_the_end(cli: Cli, tmp_path: Path, digits: LanceTable) -> None:
    inside = save_state(tmp_path / "inside.json", digits, steps=3, batch=46, rank=1)
    found = facts(cli("state", inside, "--global-batch-size", BATCH).out)
    assert found["position"].startswith("17 to 18 of 180 rows of each split")
    assert found["position"].endswith("inside a cycle")
    assert found["steps"] == "inside step 2 of 30"
    assert found["counted"].startswith("only splits 4 to 7; merge")
    end = save_state(tmp_path / "end.json", digits, steps=30)
    found = facts(cli("state", end, "--global-batch-size", BATCH).out)
    assert found["position"].endswith("(100.0%), the end: loads as the start of epoch 1")
    assert found["steps"] == "30 of 30 done"


def test_state_from_standard_input(cli: Cli, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(state.read_text()))
    assert cli("state", "-").out == cli("state", state).out


def test_two_states_of_one_stream(cli: Cli, state: Path, tmp_path: Path, digits: LanceTable) -> None:
    same = cli("state", state, state)
    assert (same.code, same.out.splitlines()[-1]) == (0, "SAME STREAM, at the same position")
    later = save_state(tmp_path / "later.json", digits, steps=6, epoch=2, filter="label < 8")
    result = cli("state", state, later)
    assert (result.code, result.out.splitlines()[-1]) == (0, "SAME STREAM, at another position")
    assert [line.split()[0] for line in result.out.splitlines() if line.endswith("moved")] == ["position"]
    next_epoch = save_state(tmp_path / "next.json", digits, steps=5, epoch=3, filter="label < 8")
    result = cli("state", state, next_epoch)
    assert (result.code, result.out.splitlines()[-1]) == (0, "SAME STREAM, at another position")
    assert [line.split()[0] for line in result.out.splitlines() if "not compared" in line] == ["fingerprint"]


def test_two_states_of_two_streams(cli: Cli, state: Path, tmp_path: Path) -> None:
    """G7: every difference is named."""
    other = changed(state, tmp_path / "other.json", version=9, filter=None, columns=["id"], fingerprint="0")
    result = cli("state", state, other)
    assert result.code == 1
    assert result.out.splitlines()[-1] == "DIFFERENT STREAMS: version, filter, columns, fingerprint"
    marked = [line.split()[0] for line in result.out.splitlines() if line.endswith("DIFFERS")]
    assert marked == ["version", "filter", "columns", "fingerprint"]


def test_a_state_of_lancedb(cli: Cli, state: Path, tmp_path: Path, folder: Path, digits: LanceTable) -> None:
    saved = json.loads(save_state(tmp_path / "own.json", digits, steps=5).read_text())
    del saved["lance_ray_stream"]
    foreign = write(tmp_path / "lancedb.json", saved)
    assert "LanceDB's StreamingDataset" in facts(cli("state", foreign).out)["origin"]
    assert cli("state", state, foreign).out.splitlines()[-1].startswith("NOTHING DIFFERS, at another position; ")
    result = cli("state", foreign, "--table", folder, "digits")
    assert result.code == 0
    assert "cannot be checked" in result.err or "it is one of LanceDB's StreamingDataset" in result.err
    step = cli("step", folder, "digits", 0, "--state", foreign, "--global-batch-size", 8, "--filter", "label > 1")
    assert step.code == 0


def test_state_fits_a_table(cli: Cli, state: Path, folder: Path) -> None:
    result = cli("state", state, "--table", folder, "digits")
    assert result.code == 0
    assert result.out.splitlines()[-1] == f"FITS: {state} is a state of digits in {folder}, version 1"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"version": 7}, "has no version 7"),
        ({"rows": 1}, "rows: checkpoint has 1, this stream has "),
        ({"fingerprint": "0"}, "fingerprint: checkpoint has '0'"),
        ({"columns": ["nothing"]}, "has no column 'nothing'"),
        ({"filter": "id < 3"}, "fewer than num_splits"),
        ({"shuffle_algorithm": "dice"}, "shuffle_algorithm"),
        ({"table": {"uri": "/old", "name": "digits", "namespace_path": []}}, "table: checkpoint has "),
    ],
)
def test_state_does_not_fit(cli: Cli, state: Path, tmp_path: Path, folder: Path, values: Any, says: str) -> None:
    """G7: exit code 1 and one line with the reason."""
    result = cli("state", changed(state, tmp_path / "other.json", **values), "--table", folder, "digits")
    assert result.code == 1
    assert says in result.error


def test_state_beyond_the_end_does_not_fit(cli: Cli, state: Path, folder: Path) -> None:
    saved = json.loads(state.read_text())
    saved["samples_consumed_per_split"] = saved["positions_consumed_per_split"] = [10_000] * NUM_SPLITS
    result = cli("state", write(state, saved), "--table", folder, "digits")
    assert result.code == 1
    assert "belongs to another table, version or filter" in result.error


def test_another_address_of_the_table_can_be_accepted(cli: Cli, state: Path, tmp_path: Path, folder: Path) -> None:
    old = {"uri": "/old", "name": "digits", "namespace_path": []}
    result = cli("state", changed(state, tmp_path / "old.json", table=old), "--table", folder, "digits", "--lenient")
    assert result.code == 0
    assert "warning: The state differs in table" in result.err
    assert "FITS: " in result.out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_splits": 8}', "not json"])
def test_malformed_states_are_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    result = cli("state", path)
    assert result.code == 2
    assert str(path) in result.error


# --- protected --------------------------------------------------------------------------------------


def test_protected_versions_are_listed_and_removed(cli: Cli, tmp_path: Path) -> None:
    """Names are shown whole: a part of one could not be removed. Other tags are not the library's."""
    table = make_table(tmp_path, 40)
    assert cli("protected", tmp_path, "rows") == (0, "no run protects a version of this table\n", "")
    ref, long = lrs.TableRef(str(tmp_path), "rows"), "n" * 100
    table.tags.create("mine", 2)
    for name, version in (("run-7", 3), ("run-7", 5), (long, 5)):
        protect(ref.with_version(version), name)
    lines = cli("protected", tmp_path, "rows").out.splitlines()
    assert [line.split() for line in lines] == [
        ["run", "version", "tag"],
        [long, "5", f"lance-ray-stream.{long}.v5"],
        ["run-7", "3", "lance-ray-stream.run-7.v3"],
        ["run-7", "5", "lance-ray-stream.run-7.v5"],
    ]
    listed = json.loads(cli("protected", tmp_path, "rows", "--format", "json").out)
    assert listed["protected"][1] == {"name": "run-7", "version": 3, "tag": "lance-ray-stream.run-7.v3"}
    assert cli("protected", tmp_path, "rows", "--remove", "run-7").out == (
        "version 3 is no longer protected by run 'run-7'\nversion 5 is no longer protected by run 'run-7'\n"
    )
    assert sorted(table.tags.list()) == [f"lance-ray-stream.{long}.v5", "mine"]
    again = cli("protected", tmp_path, "rows", "--remove", "run-7")
    assert again.code == 2
    assert f"'run-7' protects no version of table 'rows' in '{tmp_path}'. Runs that do: '{long}'" in again.error


# --- the program ------------------------------------------------------------------------------------


def test_debug_shows_the_traceback(cli: Cli) -> None:
    asked = ("plan", "/nowhere", "rows", "--num-splits", 8)
    assert "Traceback" not in cli(*asked).err
    result = cli(*asked, "--debug")
    assert result.code == 2
    assert result.err.startswith("Traceback")
    assert result.err.splitlines()[-1].startswith("lance-ray-stream: error: cannot open table")


def test_g8_errors_keep_secrets(cli: Cli, tmp_path: Path) -> None:
    secret = "hunter2hunter2"
    uri = f"s3://user:{secret}@127.0.0.1/bucket"
    result = cli(
        *("plan", uri, "rows", "--num-splits", 8, "--storage-option", f"aws_secret_access_key={secret}"),
        *("--storage-option", "endpoint=http://127.0.0.1:9", "--storage-option", "allow_http=true"),
        *("--storage-option", "region=x", "--storage-option", "aws_access_key_id=someone"),
        *("--storage-option", "client_max_retries=0", "--storage-option", "timeout=1s"),
    )
    assert result.code == 2
    assert secret not in result.out + result.err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "one"),
        ("list:\n  a: 1\n  b: 2\nThen this.", "list: a: 1; b: 2. Then this."),
        ("first\nsecond", "first. second"),
    ],
)
def test_messages_of_many_lines_become_one(text: str, line: str) -> None:
    assert one_line(text) == line


HELP_SCRIPT = """
import sys
from lance_ray_stream.cli import main
main(["layout", "48"])
heavy = {"lancedb", "pyarrow", "ray", "torch", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""


def test_arithmetic_imports_neither_lancedb_nor_ray() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_SCRIPT], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("num_splits 48: 10 world sizes\n")


def test_as_a_program(tmp_path: Path) -> None:
    """Exit codes and streams; a reader that has seen enough is no error."""
    command = [sys.executable, "-m", "lance_ray_stream", "layout"]
    done = subprocess.run([*command, "7", "--world-sizes", "2"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lance-ray-stream: error: num_splits=7 cannot be dealt evenly to world_size=2.")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*command, "48"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_is_declared() -> None:
    declared = re.search(r'^lance-ray-stream = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert pkgutil.resolve_name(declared[1]) is main


@pytest.mark.parametrize(("world_sizes", "num_workers", "refused"), [("1,8", "2", 2), ("1,2", "1,3", 3)])
def test_verify_refuses_what_it_could_not_run(
    cli: Cli, folder: Path, digits: LanceTable, world_sizes: str, num_workers: str, refused: int
) -> None:
    """A verdict speaks of what was run: nothing that was named is left out in silence."""
    asked = ["--num-splits", 8, "--world-sizes", world_sizes, "--num-workers", num_workers]
    result = cli("verify", folder, "digits", *asked)
    assert result.code == 2
    assert f"num_workers={refused}" in result.error


def test_a_step_larger_than_the_epoch_is_the_epoch(cli: Cli, folder: Path, digits: LanceTable) -> None:
    """Without an array of the size that was asked for."""
    huge = ["--num-splits", 8, "--global-batch-size", 8 * 10**12]
    result = cli("step", folder, "digits", 0, *huge, "--format", "csv")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1 + 1440


def test_a_state_inside_a_cycle_fits_some_world_sizes(cli: Cli, state: Path, tmp_path: Path, folder: Path) -> None:
    """FITS is asked before a job is queued: it says on how many ranks the job can go on."""
    saved = json.loads(state.read_text())
    position = saved["samples_consumed_per_split"]
    assert len(position) == 8
    position[:4] = [position[0] + 1] * 2 + [position[0]] * 2
    saved["positions_consumed_per_split"] = position
    inside = write(tmp_path / "inside.json", saved)
    result = cli("state", inside, "--table", folder, "digits")
    assert result.code == 0
    assert result.out.splitlines()[-1].endswith("; saved inside a cycle, it loads on world sizes 1 only")
