"""Versions that are protected for the time of a run: from clean-up, through failures and deaths of the run."""

from __future__ import annotations

import functools
import logging
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import pytest
import ray
from lancedb.table import LanceTable

import lance_ray_stream as lrs
from lance_ray_stream.errors import (
    InvalidArgumentError,
    MissingRowsError,
    ProtectionError,
    StateError,
    VersionNotFoundError,
)
from tests import train_loops
from tests.probes import iterator, oracle, rows
from tests.tables import make_rows, make_table
from tests.train_loops import fit
from tests.user_functions import OwnError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]


@pytest.fixture
def table(tmp_path) -> LanceTable:
    """Version 5, of 240 rows."""
    return make_table(tmp_path, 240)


@pytest.fixture
def dataset(table):
    return lrs.read_stream(table, num_splits=8)


def clean_up(path: Path) -> None:
    """What a maintenance job does, at its most thorough, after the table was written anew."""
    table = lancedb.connect(path).create_table("rows", make_rows(0, 300), mode="overwrite")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)


def protected(table: LanceTable) -> list[tuple[str, int]]:
    return [(kept.name, kept.version) for kept in lrs.protected_versions(table)]


# --- clean-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"filter": "label < 5"}, {"shuffle_algorithm": "indexed"}], ids=str)
def test_a_protected_version_is_read_to_the_end(tmp_path, table, options):
    """LanceDB refuses the clean-up and names the tag; planning and reading go on, here and in new processes."""
    dataset = lrs.read_stream(table, num_splits=8, **options)
    order = rows(iterator(dataset))
    with lrs.protect_version(dataset, "run-7"):
        with pytest.raises(RuntimeError, match=r"lance-ray-stream\.run-7\.v5"):
            clean_up(tmp_path)
        assert rows(iterator(dataset)) == order
        assert rows(iterator(lrs.read_stream(lrs.TableRef(str(tmp_path), "rows", version=5), num_splits=8, **options)))
    clean_up(tmp_path)
    with pytest.raises((VersionNotFoundError, MissingRowsError), match=r"'rows'.*version 5.*clean"):
        rows(iterator(dataset))


def test_a_version_that_is_gone_is_named_before_the_block(tmp_path, dataset, table):
    """And what an earlier run of the name left behind is still there: nothing has started that could need it."""
    clean_up(tmp_path)
    newest = lrs.read_stream(lrs.TableRef(str(tmp_path), "rows"), num_splits=8)
    with suppress(OwnError), lrs.protect_version(newest, "run-7", keep_on_error=True):
        raise OwnError
    left = protected(table)
    assert len(left) == 1
    with pytest.raises(VersionNotFoundError, match="version 5"), lrs.protect_version(dataset, "run-7"):
        pytest.fail("entered")
    assert protected(table) == left


# --- ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, OwnError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("keep", [False, True])
def test_the_end_of_the_block_releases(dataset, table, error, keep):
    with suppress(OwnError, KeyboardInterrupt, SystemExit), lrs.protect_version(dataset, "run-7", keep_on_error=keep):
        assert protected(table) == [("run-7", 5)]
        if error is not None:
            raise error
    assert protected(table) == ([("run-7", 5)] if keep and error else [])


def test_each_run_releases_its_own(dataset, table, caplog):
    """Two runs on one version; the second one is told of the first."""
    with lrs.protect_version(dataset) as first:
        assert not caplog.records
        with lrs.protect_version(dataset) as second:
            assert first != second
            assert protected(table) == sorted([(first, 5), (second, 5)])
            assert f"{first!r} (version 5)" in caplog.text
        assert protected(table) == [(first, 5)]
    assert protected(table) == []


def test_an_end_that_cannot_release_says_so_and_is_no_error(dataset, table, caplog):
    """A finished training must not fail at its very end, and an error of its own must not be hidden."""

    def lose_the_tag() -> None:
        lrs.unprotect_version(table, "run-7")
        raise OwnError

    with lrs.protect_version(dataset, "run-7"):
        lrs.unprotect_version(table, "run-7")
    with pytest.raises(OwnError), lrs.protect_version(dataset, "run-7"):
        lose_the_tag()
    assert caplog.text.count("'run-7' has ended; its protection of version 5 is not removed: cannot remove tag") == 2


KILLED = """
import os, signal, sys
import ray
import lance_ray_stream as lrs

ray.init(address=sys.argv[1], log_to_driver=False)
with lrs.protect_version(lrs.read_stream(lrs.TableRef(sys.argv[2], "rows"), num_splits=8), "run-7"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_behind(tmp_path, table, caplog):
    """Reported by the next run and removed by one call; under the same name taken over, with the version it needs."""
    address = ray.get_runtime_context().gcs_address
    killed = subprocess.run([sys.executable, "-c", KILLED, address, str(tmp_path)], check=False, cwd=Path.cwd())
    assert killed.returncode == -signal.SIGKILL
    assert protected(table) == [("run-7", 5)]
    table.add(make_rows(240, 250))
    grown = lrs.read_stream(table, num_splits=8)

    with lrs.protect_version(grown, "run-8"):
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "'run-7' (version 5)" in record.getMessage()
        assert "lance_ray_stream.unprotect_version(table, 'run-7')" in record.getMessage()
    assert protected(table) == [("run-7", 5)]

    caplog.clear()
    with lrs.protect_version(grown, "run-7"):
        assert protected(table) == [("run-7", 5), ("run-7", 6)]
        assert "an earlier run 'run-7' left version 5 protected" in caplog.text
        with pytest.raises(RuntimeError, match=r"lance-ray-stream\.run-7\.v5"):
            clean_up(tmp_path)
    assert protected(table) == []


def test_what_was_left_behind_is_removed_by_one_call(tmp_path, dataset, table):
    for run in ("run-7", "run-8"):
        with suppress(OwnError), lrs.protect_version(dataset, run, keep_on_error=True):
            raise OwnError
    table.tags.create("mine", 3)
    removed = lrs.unprotect_version(lrs.TableRef(str(tmp_path), "rows"), "run-7")
    assert removed == [lrs.ProtectedVersion(name="run-7", version=5, tag="lance-ray-stream.run-7.v5")]
    assert sorted(table.tags.list()) == ["lance-ray-stream.run-8.v5", "mine"]
    with pytest.raises(InvalidArgumentError, match=r"'run-7' protects no version of table 'rows'.*do: 'run-8'"):
        lrs.unprotect_version(table, "run-7")


# --- what is protected ------------------------------------------------------------------------------


def test_a_state_names_the_version_that_is_read(tmp_path, dataset, table):
    """A restarted job whose table has grown reads the version of its state: both are protected."""
    stream = iterator(dataset)
    next(iter(stream.iter_batches(batch_size=16)))
    state, rest = stream.state_dict(), rows(stream)
    table.add(make_rows(240, 250))
    grown = lrs.read_stream(table, num_splits=8)
    for given in (state, [state]):
        with lrs.protect_version(grown, "run-7", state=given):
            assert protected(table) == [("run-7", 5), ("run-7", 6)]
    with lrs.protect_version(grown, "run-7", state=state):
        with pytest.raises(RuntimeError, match=r"run-7\.v5"):
            clean_up(tmp_path)
        again = iterator(grown)
        again.load_state_dict(state)
        assert rows(again) == rest
    assert protected(table) == []


def test_states_that_name_nothing_to_protect(tmp_path, dataset, table):
    other = lrs.read_stream(make_table(tmp_path, 24, name="other"), num_splits=4)
    third = lrs.read_stream(make_table(tmp_path, 24, name="third"), num_splits=4)
    state = iterator(dataset).state_dict()
    lancedbs = {key: value for key, value in state.items() if key != "lance_ray_stream"}
    wrong: Any
    for wrong, says in [
        (lancedbs, "names no version"),
        ({"epoch": 0}, "num_splits"),
        ("state.json", "A state is a dictionary"),
        (state, r'"name": "rows".*which no stream reads.*"other".*"third"'),
    ]:
        with pytest.raises(StateError, match=says), lrs.protect_version({"a": other, "b": third}, state=wrong):
            pytest.fail("entered")
    assert not protected(table)


def test_the_datasets_of_a_trainer(tmp_path, dataset, table):
    """All streams of all tables, each version once; other datasets are none of this."""
    small = make_table(tmp_path, 24, name="small")
    datasets: dict[str, Any] = {
        "train": dataset.map_batches(train_loops.with_twice),
        "again": lrs.read_stream(lrs.TableRef(str(tmp_path), "rows"), num_splits=4),
        "old": lrs.read_stream(lrs.TableRef(str(tmp_path), "rows", version=3), num_splits=4),
        "eval": lrs.read_stream(small, num_splits=4),
        "plain": ray.data.range(3),
    }
    with lrs.protect_version(datasets, "run-7"):
        assert protected(table) == [("run-7", 3), ("run-7", 5)]
        assert protected(small) == [("run-7", 5)]
    assert not protected(table) + protected(small)
    for nothing in ({"plain": datasets["plain"]}, {}, table, None):
        with pytest.raises(InvalidArgumentError, match="read_stream"), lrs.protect_version(nothing):  # type: ignore[arg-type]
            pytest.fail("entered")


LONG = "x" * 129
NO_NAMES = [("run 7", "'run-7' would do"), (".a", "'a'"), (LONG, "x"), ("ü", ""), (7, "")]


@pytest.mark.parametrize(("name", "hint"), [*NO_NAMES, ("a/b", "'a-b'"), ("a..b", "'a-b'"), ("", "")])
def test_names_that_no_tag_can_have(dataset, name, hint):
    with pytest.raises(InvalidArgumentError, match=rf"name must be up to 128 letters.*{hint}"):
        lrs.protect_version(dataset, name).__enter__()


@pytest.mark.parametrize("name", ["run-7", "a.b.v3", "_a-", "x" * 128, "v5"])
def test_names_come_back(dataset, table, name):
    with lrs.protect_version(dataset, name):
        assert protected(table) == [(name, 5)]


# --- storage ----------------------------------------------------------------------------------------


def test_storage_that_cannot_be_written(tmp_path, dataset, table):
    """As with credentials that may only read: said before the block; what was protected until then is released."""
    closed = make_table(tmp_path, 24, name="closed")
    (tmp_path / "closed.lance" / "_refs").mkdir()
    (tmp_path / "closed.lance" / "_refs" / "tags").write_text("in the way of the tags' folder")
    datasets = {"train": dataset, "eval": lrs.read_stream(closed, num_splits=4)}
    with (
        pytest.raises(ProtectionError, match=r"cannot protect table 'closed'.*version 5.*credentials that may write"),
        lrs.protect_version(datasets, "run-7"),
    ):
        pytest.fail("entered")
    assert not protected(table)


def open_in(path: str, name: str) -> Any:
    return lancedb.connect_namespace("dir", {"root": path}).open_table(name)


def test_a_table_of_a_factory(tmp_path, table):
    """A namespace, too, is reached through its factory."""
    factory = functools.partial(open_in, str(tmp_path))
    ref = lrs.TableRef("namespace://dir", "rows", connection_factory=factory)
    with lrs.protect_version(lrs.read_stream(ref, num_splits=8), "run-7"):
        assert protected(table) == [("run-7", 5)]
        assert lrs.protected_versions(ref) == lrs.protected_versions(table)
    assert not protected(table)


# --- a trainer --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_controller")
def test_a_trainer_whose_table_is_cleaned_up(tmp_path, table, dataset):
    """Two epochs on two workers; between them a maintenance job comes by."""
    with lrs.protect_version({"train": dataset}, "run-7"):
        fit(train_loops.clean_up_after_an_epoch, tmp_path, {"train": dataset}, num_workers=2, run="clean")
    lines = train_loops.written(tmp_path, "clean")
    assert "lance-ray-stream.run-7.v5" in lines[0][0]["refused"]
    for epoch in range(2):
        for rank, of_rank in lines.items():
            assert of_rank[epoch]["ids"] == oracle(table, 8, rank=rank, world_size=2, epoch=epoch)
    clean_up(tmp_path)
    assert len(table.list_versions()) == 1
