"""Real ``TorchTrainer`` runs with real workers: order, ends, death and rebirth."""

from __future__ import annotations

from typing import Any

import pytest
import ray

import lance_ray_stream as lrs
from tests import train_loops
from tests.probes import global_sets, in_steps, oracle
from tests.tables import make_table
from tests.train_loops import fit

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster", "quick_controller"), pytest.mark.timeout(600)]


def test_streams_beside_each_other_and_beside_a_plain_dataset(tmp_path):
    """C03, C04, C06, C30, C60, C61: prefetch 8 and a slow collate function; a collective in every step; two epochs."""
    table = make_table(tmp_path, 1001)
    small = make_table(tmp_path, 48, name="small")
    datasets = {
        "train": lrs.read_stream(table, num_splits=8).map_batches(train_loops.with_twice),
        "eval": lrs.read_stream(small, num_splits=4, shuffle=False),
        "plain": ray.data.range(100, override_num_blocks=4),
        "columns": lrs.read_stream(small, num_splits=4),
        "vectors": lrs.read_stream(small, num_splits=4, columns=["vector", "id"]),
    }
    fit(train_loops.read_everything, tmp_path, datasets, num_workers=2, run="all")
    lines = train_loops.written(tmp_path, "all")
    assert sorted(lines) == [0, 1]
    for rank, (*epochs, columns) in lines.items():
        for epoch, line in enumerate(epochs):
            assert line["ids"] == oracle(table, 8, rank=rank, world_size=2, epoch=epoch)
            assert line["ends"] == [[7, 14]] * 71 + [[3, 6]]
            assert line["announced"] == 72
            assert line["eval"] == oracle(small, 4, rank=rank, world_size=2, shuffle=False)
        assert len(epochs) == 2
        assert "'text' (string)" in columns["refused"]
        assert "columns=" in columns["refused"]
        assert "map_batches" in columns["refused"]
        assert columns["refused_before_the_first_step"]
        assert columns["types"] == ["torch.float32", [5, 4], "torch.int32"]
        assert columns["first_values"] == columns["vector_ids"] == oracle(small, 4, rank=rank, world_size=2)[:5]
    for of_ranks in zip(*lines.values(), strict=True):
        if "ids" in of_ranks[0]:
            ids = [set(line["ids"]) for line in of_ranks]
            assert not ids[0] & ids[1], "C06: disjoint"
            assert len(ids[0] | ids[1]) == 1000, "C33: one surplus row"
            assert sum(line["plain"] for line in of_ranks) == 100, "a plain dataset keeps Ray's own behaviour"


def test_c52_a_killed_worker_and_other_world_sizes(tmp_path):
    """C10, C13, C52: a worker dies at step 6 and the run restarts from step 4; then 4 workers go on, then 2."""
    table = make_table(tmp_path, 240)
    datasets = {"train": lrs.read_stream(table, num_splits=8).map_batches(train_loops.with_twice)}
    clean = [sorted(step) for epoch in range(2) for step in in_steps(oracle(table, 8, epoch=epoch), 16)]
    loop = train_loops.train_with_checkpoints
    options: dict[str, Any] = {"epochs": 2, "global_batch_size": 16, "kill_at": 6}

    fit(loop, tmp_path, datasets, num_workers=2, run="two", max_failures=1, stop_at=10, **options)
    lines = train_loops.written(tmp_path, "two")
    assert (tmp_path / "killed").exists()
    assert [line["step"] for line in lines[1]] == [*range(6), *range(4, 10)]
    restarts = [[line["step"] for line in of_rank].index(4, 5) for of_rank in lines.values()]
    assert lines[0][restarts[0]]["step"] == lines[1][restarts[1]]["step"] == 4
    assert _sets(lines, since=restarts) == clean[4:10]
    assert _sets(lines, until=6) == clean[:6]

    fit(loop, tmp_path, datasets, num_workers=4, run="four", stop_at=20, **options)
    lines = train_loops.written(tmp_path, "four")
    assert sorted(lines) == [0, 1, 2, 3]
    assert [line["step"] for line in lines[3]] == list(range(8, 20))
    assert _sets(lines) == clean[8:20]

    fit(loop, tmp_path, datasets, num_workers=2, run="two_again", stop_at=None, **options)
    lines = train_loops.written(tmp_path, "two_again")
    assert [(line["step"], line["epoch"]) for line in lines[0]] == [(step, 1) for step in range(20, 30)]
    assert _sets(lines) == clean[20:]


def _sets(lines: dict[int, list[dict[str, Any]]], since: list[int] | None = None, until: int | None = None):
    """Step -> sorted ids of all ranks, of the lines ``[since of the rank, until)``."""
    starts = since or [0] * len(lines)
    return global_sets([[line["ids"] for line in lines[rank][starts[rank] : until]] for rank in sorted(lines)])


def test_local_mode(tmp_path):
    """Ray Train without workers hands out the bare dataset; ``get_stream()`` makes it one rank's stream."""
    table = make_table(tmp_path, 240)
    datasets = {"train": lrs.read_stream(table, num_splits=8).map_batches(train_loops.with_twice)}
    fit(train_loops.read_in_local_mode, tmp_path, datasets, num_workers=0, run="local")
    (line,) = train_loops.written(tmp_path, "local")[0]
    assert line["ids"] == oracle(table, 8)
    assert line["state"]["samples_consumed_per_split"] == [8] * 8
    assert line["same"]
    assert line["world_size"] == 1


def test_an_illegal_world_size_reaches_the_caller(tmp_path):
    """C54: as the text that lists what works."""
    datasets = {"train": lrs.read_stream(make_table(tmp_path, 240), num_splits=8)}
    with pytest.raises(Exception, match=r"num_splits=8 .*world_size=3.*1, 2, 4, 8"):
        fit(train_loops.read_nothing, tmp_path, datasets, num_workers=3, run="three")
    assert not train_loops.written(tmp_path, "three")
