"""An elastic run on a cluster whose nodes come and go: ``python -m tests.elastic_cluster FOLDER``.

A process of its own, because a process can be connected to one Ray only. The run waits at some steps until the nodes
have changed, so its course does not depend on how fast anything is:

1. a node for two workers: 2 ranks;
2. one more place, three in all: still 2 ranks, because 8 splits cannot be dealt out to 3;
3. one more place: 4 ranks, from the latest checkpoint;
4. the node of the last place is lost: 2 ranks, from the latest checkpoint, to the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from local_cluster import LocalCluster as LocalCluster  # for tests.soak, too
from ray.train import FailureConfig, RunConfig, ScalingConfig

import lance_ray_stream as lrs
from tests.probes import CountedPlans
from tests.train_loops import Config, _load, _save, _wait_until_saved, with_twice, write_down, written

NUM_SPLITS = 8
GLOBAL_BATCH_SIZE = 16
ROWS = 240
STEPS_PER_EPOCH = ROWS // GLOBAL_BATCH_SIZE
EPOCHS = 2
GROW_AT, SHRINK_AT = 6, 18  # steps; a checkpoint is made after every fourth


def train(config: Config) -> None:
    """Runs on every worker; writes down all that it receives, and which start of the workers it belongs to."""
    stream = lrs.get_stream()
    step = _load(stream)
    attempt = [time.time()]
    torch.distributed.broadcast_object_list(attempt)
    for epoch in range(stream.epoch, EPOCHS):
        stream.set_epoch(epoch)
        for batch in stream.iter_torch_batches(global_batch_size=GLOBAL_BATCH_SIZE):
            fields = {"attempt": attempt[0], "world": stream.world_size, "step": step, "epoch": epoch}
            write_down(config, stream.rank, **fields, ids=batch["id"].tolist())
            torch.distributed.barrier()  # as the gradients of a model would
            step += 1
            if step % 4 == 0:
                _save(stream, step)
            if step in (GROW_AT, SHRINK_AT):
                wait_at(config, step, stream.rank)


def wait_at(config: Config, step: int, rank: int) -> None:
    """Wait until the run may pass a step; say so once the latest checkpoint counts, or a restart may not know of it."""
    if rank == 0:
        _wait_until_saved(step // 4 * 4)
        flag(config, "at", step).touch()
    while not flag(config, "pass", step).exists():
        time.sleep(0.05)


def flag(config: Config, name: str, step: int) -> Path:
    """A file by which the run and the one who changes the nodes tell each other how far they are."""
    return Path(config["out"], f"{name}_{step}")


def attempts(out: Path) -> list[list[dict[str, Any]]]:
    """For each start of the workers, in order, the lines that its ranks wrote."""
    lines = [line for of_rank in written(out, "run").values() for line in of_rank]
    return [[line for line in lines if line["attempt"] == start] for start in sorted({li["attempt"] for li in lines})]


def make_trainer(config: Config) -> lrs.ElasticTorchTrainer:
    """The trainer of the run; a lost node is not the end of it."""
    out = Path(config["out"])
    scaling: dict[str, Any] = {"num_workers": (2, 8), "elastic_resize_monitor_interval_s": 0.5}
    dataset = lrs.read_stream(CountedPlans(str(out), "rows"), num_splits=NUM_SPLITS, columns=["id"])
    return lrs.ElasticTorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(**scaling, resources_per_worker={"slot": 1}),
        run_config=RunConfig(
            name="run", storage_path=str(out / "storage"), failure_config=FailureConfig(max_failures=2)
        ),
        datasets={"train": dataset.map_batches(with_twice)},
        dataset_config=lrs.StreamDataConfig(),
    )


def main(out: Path) -> None:
    """Run it, and write down what the cluster logged about places that stay unused."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # steps take milliseconds: look more often
    config = {"out": str(out), "run": "run"}
    with LocalCluster() as cluster, ThreadPoolExecutor() as pool:
        cluster.add_node(slots=2)
        run = pool.submit(make_trainer(config).fit)

        def wait_for(what: Callable[[], Any]) -> None:
            while not what():
                if run.done():
                    raise RuntimeError(f"the run ended early: {run.result()}")
                cluster.look_again()
                time.sleep(0.2)

        wait_for(flag(config, "at", GROW_AT).exists)
        cluster.add_node(slots=1)
        wait_for(lambda: cluster.logged("room for 3 workers"))
        last = cluster.add_node(slots=1)
        wait_for(lambda: len(attempts(out)) == 2)
        flag(config, "pass", GROW_AT).touch()
        wait_for(flag(config, "at", SHRINK_AT).exists)
        cluster.remove_node(last)
        wait_for(lambda: len(attempts(out)) == 3)
        flag(config, "pass", SHRINK_AT).touch()
        run.result()
        (out / "unused.json").write_text(json.dumps(cluster.logged("stay unused")))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
