"""C50: trainers that hold all CPUs of the cluster are fed all the same, or told at once what is missing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.data import ExecutionOptions, ExecutionResources
from ray.util.placement_group import placement_group, remove_placement_group

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed, resources
from lance_ray_stream.errors import StreamUsageError
from lance_ray_stream.ray_internals import cluster
from tests import train_loops
from tests.conftest import NUM_LOGICAL_CPUS
from tests.faults import Holder, nap, wait_until
from tests.oracle import oracle_rows
from tests.probes import configured, iterator, rows
from tests.tables import make_table
from tests.user_functions import double, widen

TRAINERS_HOLD_EVERYTHING = """
import sys, tempfile
import lancedb, ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import lance_ray_stream as lrs

def train_loop(config):
    stream = lrs.get_stream()
    received = [i for batch in stream.iter_torch_batches(global_batch_size=8) for i in batch["id"].tolist()]
    with open(f"{config['folder']}/received_{stream.rank}", "w") as file:
        file.write(" ".join(map(str, received)))

folder = sys.argv[1]
with tempfile.TemporaryDirectory(prefix="lrs") as temp_dir:
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=2**28,
             _temp_dir=temp_dir)
    ds = lrs.read_stream(lancedb.connect(folder).open_table("rows"), num_splits=4, columns=["id"])
    TorchTrainer(
        train_loop,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2),  # a CPU each, as Ray Train asks for by default
        run_config=RunConfig(name="run", storage_path=folder),
        datasets={"train": ds.map_batches(lambda batch: batch)},
        dataset_config=lrs.StreamDataConfig(progress=False),
    ).fit()
    ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.timeout(280)
def test_c50_two_trainers_on_two_cpus(tmp_path: Path) -> None:
    """C50: ray.init(num_cpus=2), W=2 at one CPU each: it runs, in order, and says that it reads slowly."""
    table = make_table(tmp_path, 240)
    run = subprocess.run(
        [sys.executable, "-c", TRAINERS_HOLD_EVERYTHING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "The 2 trainers leave 0 CPUs of the cluster" in run.stdout + run.stderr
    for rank in range(2):
        received = [int(i) for i in Path(tmp_path, f"received_{rank}").read_text().split()]
        assert received == oracle_rows(table, rank, 2, None, num_splits=4, shuffle_seed=0)


class Doubled:
    def __call__(self, batch):
        return double(batch)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("transform", "needs"),
    [
        (lambda ds: ds.map_batches(Doubled, concurrency=1), r"MapBatches\(Doubled\) needs 1"),
        (lambda ds: ds.map_batches(double, num_cpus=2), r"MapBatches\(double\) needs 2"),
    ],
    ids=["actors", "named CPUs"],
)
def test_c50_what_cannot_run_fails_at_once(ray_cluster, tmp_path, monkeypatch, transform, needs) -> None:
    """Never an endless wait: the operator, the CPUs needed and left, and the way out."""
    monkeypatch.setattr(resources, "cpus_left", lambda world_size: 0.0)
    dataset = transform(lrs.read_stream(make_table(tmp_path, 40), num_splits=4))
    stream = lrs.StreamDataConfig(progress=False).configure({"train": dataset}, 1)[0]["train"]
    with pytest.raises(StreamUsageError, match=rf"leave 0 CPUs.*'train' {needs}.*resources_per_worker"):
        next(iter(stream.iter_batches(batch_size=8)))


@pytest.mark.ray
def test_cpus_left_counts_the_cluster_where_no_trainer_runs(ray_cluster) -> None:
    assert resources.cpus_left(4) == ray.cluster_resources()["CPU"]


# --- Others that hold all CPUs ---------------------------------------------------------------------


def hold_by_an_actor(num_cpus: int = NUM_LOGICAL_CPUS) -> Callable[[], None]:
    holder: Any = ray.remote(Holder).options(num_cpus=num_cpus).remote()
    assert ray.get(holder.is_there.remote())
    return lambda: ray.kill(holder)


def hold_by_a_placement_group() -> Callable[[], None]:
    """As another trainer does."""
    group = placement_group([{"CPU": 1}] * NUM_LOGICAL_CPUS)
    assert group.wait(60)
    return lambda: remove_placement_group(group)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.5)
    monkeypatch.setattr(cluster, "_WARN_AFTER_S", 1.0)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_table(tmp_path_factory.mktemp("db"), 240, columns=["id"])


@pytest.fixture
def order(table: Any) -> list[int]:
    return oracle_rows(table, 0, 1, None, num_splits=4, shuffle_seed=0)


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("ray_cluster", "impatient")
class TestOthersHoldAllCpus:
    @pytest.mark.parametrize("hold", [hold_by_an_actor, hold_by_a_placement_group])
    def test_reads_do_without_and_say_so(self, table, order, hold) -> None:
        let_go = hold()
        try:
            stream = iterator(lrs.read_stream(table, num_splits=4).map_batches(double))
            with pytest.warns(UserWarning, match=r"Actors and placement groups.* leave 0 of the cluster's 8 CPUs"):
                assert rows(stream) == order
        finally:
            let_go()

    def test_what_cannot_do_without_is_an_error_soon(self, table) -> None:
        let_go = hold_by_an_actor()
        try:
            stream = iterator(lrs.read_stream(table, num_splits=4).map_batches(Doubled, concurrency=1))
            begun = time.monotonic()
            with (
                pytest.warns(UserWarning, match="read by one task"),
                pytest.raises(
                    StreamUsageError,
                    match=r"leave 0 of the cluster's 8 CPUs on any node.*MapBatches\(Doubled\) needs 1",
                ),
            ):
                rows(stream)
            assert time.monotonic() - begun < 30
        finally:
            let_go()

    def test_in_mid_epoch_after_a_pause(self, table, order, monkeypatch) -> None:
        """A trainer may pause; CPUs that others took meanwhile are done without, from the next row on."""
        monkeypatch.setattr(feed, "FIRST_WINDOW_ROWS", 8)
        monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 8)
        dataset = lrs.read_stream(table, num_splits=4).map_batches(widen)
        dataset.context.execution_no_progress_timeout_s = 1  # Ray's own limit, of half an hour
        limits = ExecutionResources.for_limits(object_store_memory=4_000_000)  # a few windows of half a megabyte
        config = lrs.StreamDataConfig(progress=False, execution_options=ExecutionOptions(resource_limits=limits))
        (stream,) = configured(dataset, 1, config)
        loop = iter(stream.iter_batches(batch_size=8))
        received = next(loop)["id"].tolist()
        time.sleep(3)
        let_go = hold_by_an_actor()
        try:
            with pytest.warns(UserWarning, match="Actors and placement groups"):
                received += [i for batch in loop for i in batch["id"].tolist()]
        finally:
            let_go()
        assert received == order

    def test_tasks_that_end_are_waited_for(self, table, order, caplog) -> None:
        """Also for longer than an actor would be; with one line that says so."""
        busy = [ray.remote(nap).remote(4) for _ in range(NUM_LOGICAL_CPUS)]
        ray.wait(busy, timeout=0.5)
        assert rows(iterator(lrs.read_stream(table, num_splits=4))) == order
        lines = [record.getMessage() for record in caplog.records if "No rows have come" in record.getMessage()]
        assert len(lines) == 1
        assert "ReadLanceStream needs 1, and the cluster has 0 free CPUs; on one node, 8 are held by no" in lines[0]
        assert ray.get(busy) == [None] * NUM_LOGICAL_CPUS

    def test_nodes_that_may_come_are_waited_for(self, table, order, caplog, autoscaler) -> None:
        """Reads ask for CPUs, or the autoscaler would start no node for them."""
        let_go = hold_by_an_actor()
        with ThreadPoolExecutor() as pool:
            run = pool.submit(rows, iterator(lrs.read_stream(table, num_splits=4)))
            try:
                wait_until(lambda: "tasks to end or for new nodes" in caplog.text, timeout_s=30)
                assert not run.done()
            finally:
                let_go()
            assert run.result(timeout=60) == order


@pytest.fixture
def autoscaler() -> Iterator[None]:
    """What an autoscaler reports to the cluster when it starts: ten nodes of eight CPUs are allowed."""
    from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig  # type: ignore[attr-defined]

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    group = NodeGroupConfig(resources={"CPU": 8}, max_count=10)
    client.report_cluster_config(ClusterConfig(node_group_configs=[group]).SerializeToString())
    yield
    client.report_cluster_config(ClusterConfig().SerializeToString())


# --- Ranks among each other ------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("ray_cluster", "quick_controller")
def test_a_rank_that_stops_does_not_starve_the_others(tmp_path: Path) -> None:
    """Its reads do not keep their CPUs while they wait for it: three trainers share the one that is left."""
    table = make_table(tmp_path, 3 * 1024, columns=["id"])
    dataset = lrs.read_stream(table, num_splits=6).map_batches(widen)
    dataset.context.target_max_block_size = 65_536  # many blocks to a task, as a transform that decodes has
    let_go = hold_by_an_actor(NUM_LOGICAL_CPUS - 4)
    try:
        train_loops.fit(train_loops.rank_0_stops, tmp_path, {"train": dataset}, num_workers=3, run="stops")
    finally:
        let_go()
    lines = train_loops.written(tmp_path, "stops")
    for rank in range(3):
        assert lines[rank][-1]["ids"] == oracle_rows(table, rank, 3, None, num_splits=6, shuffle_seed=0)
