"""Real ``TorchTrainer`` runs that fail: whose error the caller sees, how soon, and that all is free again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorDiedError

import lance_ray_stream as lrs
from tests import train_loops
from tests.faults import (
    InUse,
    fail_late,
    forget_controller,
    free_placement_groups,
    kill_actors,
    wait_until,
    wait_until_free,
)
from tests.probes import global_sets, in_steps, oracle
from tests.tables import make_table
from tests.train_loops import fit
from tests.user_functions import OwnError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster", "quick_controller"), pytest.mark.timeout(240)]


@pytest.mark.parametrize("where", ["transform", "collate function", "training function"])
def test_c51_an_error_reaches_the_caller_and_all_is_free(tmp_path, where):
    """C51: within a minute, with its own type and text, while other ranks wait in a collective."""
    dataset = lrs.read_stream(make_table(tmp_path, 240), num_splits=8)
    if where == "transform":
        dataset = dataset.map_batches(fail_late)
    wait_until_free(before := InUse.now())
    begun = time.monotonic()
    with pytest.raises(ray.train.WorkerGroupError, match="cannot handle") as failure:
        fit(train_loops.fail_somewhere, tmp_path, {"train": dataset}, num_workers=2, run="failing", where=where)
    assert time.monotonic() - begun < 60
    assert any(isinstance(error, OwnError) for error in failure.value.worker_failures.values())
    forget_controller()
    wait_until_free(before)


def test_a_controller_that_is_killed_and_a_new_fit(tmp_path):
    """Ray does not restart it: ``fit()`` fails, all goes; the next one begins at the checkpoint."""
    table = make_table(tmp_path, 240)
    clean = [sorted(step) for step in in_steps(oracle(table, 8), 16)]
    datasets = {"train": lrs.read_stream(table, num_splits=8)}
    wait_until_free(before := InUse.now())
    with ThreadPoolExecutor() as pool:
        run = pool.submit(fit, train_loops.train_until_told, tmp_path, datasets, num_workers=2, run="killed")
        wait_until(lambda: all(Path(tmp_path, f"waiting_{rank}").exists() for rank in range(2)), timeout_s=90)
        kill_actors("TrainController")
        with pytest.raises(ActorDiedError):
            run.result(timeout=60)
    free_placement_groups()
    wait_until_free(before)
    Path(tmp_path, "go").touch()
    fit(train_loops.train_until_told, tmp_path, datasets, num_workers=2, run="again")
    lines = train_loops.written(tmp_path, "again")
    assert [line["step"] for line in lines[0]] == list(range(4, 15))
    assert global_sets([[line["ids"] for line in lines[rank]] for rank in sorted(lines)]) == clean[4:]
