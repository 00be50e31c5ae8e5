"""C50: trainers that hold all CPUs of the cluster are fed all the same, or told at once what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray

import lance_ray_stream as lrs
from lance_ray_stream import resources
from lance_ray_stream.errors import StreamUsageError
from tests.oracle import oracle_rows
from tests.tables import make_table
from tests.user_functions import double

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
