"""Train on a cluster whose nodes come and go: two workers, then four, then two, over the same global batches.

1. A node with places for two workers: training starts.
2. A spot node with three more joins. Four workers train on: five could, but 12 splits cannot be dealt out to five.
3. The spot node is lost. Two workers go on from the latest checkpoint, to the end.
4. What every step trained on is compared with the plan of an undisturbed run.

To copy for your own training: ``train_loop`` and ``make_trainer``. The rest is the stage: a cluster on this machine,
a clock, and the comparison. On a real cluster nodes come and go by themselves, and ``trainer.fit()`` is all there is
to call.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from digits_data import write_digits
from lancedb.table import Table
from local_cluster import LocalCluster
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import prepare_model
from torch import nn
from train_digits import decode, load_checkpoint, make_net, save_checkpoint

import lance_ray_stream as lrs

NUM_SPLITS = 12  # works for 1, 2, 3, 4, 6 and 12 workers
GLOBAL_BATCH_SIZE = 96
STEPS_PER_EPOCH = 15  # 1440 rows
EPOCHS = 4
CHECKPOINT_EVERY = 8  # steps
STEP_S = 1.0  # what a step would take on one worker, if this were a big model

DATA = Path(__file__).resolve().parents[1] / ".data" / "digits"
RUN = DATA.with_name("elastic_run")  # checkpoints, and what happened


def train_loop() -> None:
    """Runs on every worker, each time that the workers are started."""
    torch.manual_seed(0)
    stream = lrs.get_stream()
    net = make_net()
    model = prepare_model(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    step = load_checkpoint(net, optimizer, stream)  # 0 without a checkpoint
    note(stream, "resume" if step else "start", step)

    for epoch in range(stream.epoch, EPOCHS):
        stream.set_epoch(epoch)
        for batch in stream.iter_torch_batches(global_batch_size=GLOBAL_BATCH_SIZE):
            time.sleep(STEP_S / stream.world_size)
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            note(stream, "step", step, ids=batch["id"].tolist())

            if step % CHECKPOINT_EVERY == 0:
                save_checkpoint(net, optimizer, stream, step, loss.item())
                note(stream, "checkpoint", step)
    note(stream, "end", step)


def make_trainer(dataset: ray.data.Dataset) -> lrs.ElasticTorchTrainer:
    """Like a ``TorchTrainer``. With GPUs: ``use_gpu=True`` in place of slots, and storage that all nodes reach."""
    elastic: dict[str, Any] = {"num_workers": (2, 6), "elastic_resize_monitor_interval_s": 1.0}
    return lrs.ElasticTorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(**elastic, resources_per_worker={"slot": 1}),
        run_config=RunConfig(
            name="train_elastic",
            storage_path=str(RUN),
            failure_config=FailureConfig(max_failures=3),  # lost nodes until the job gives up; -1: it never does
        ),
        datasets={"train": dataset},
        dataset_config=lrs.StreamDataConfig(progress=False),
    )


def note(stream: lrs.StreamIterator, kind: str, step: int, **more: Any) -> None:
    """Write down what happened on this rank."""
    write(f"rank_{stream.rank}", {"kind": kind, "step": step, "world_size": stream.world_size, **more})


def write(name: str, event: dict[str, Any]) -> None:
    """Add an event to a file of the run."""
    with open(RUN / f"{name}.jsonl", "a") as file:
        file.write(json.dumps({"time_s": time.time(), **event}) + "\n")


def events(name: str) -> list[dict[str, Any]]:
    """The events of a file of the run; a line that is being written is left out."""
    path = RUN / f"{name}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Timeline:
    """Prints what happens, with the time, the world size and the step, while a run goes on."""

    def __init__(self, cluster: LocalCluster, run: Future[Result]) -> None:
        self._cluster, self._run = cluster, run
        self._start = time.time()
        self._printed = 0
        self.latest: dict[str, Any] = {"step": 0, "world_size": 0}

    def until(self, reached: Callable[[dict[str, Any]], bool]) -> None:
        """Print rank 0's events until one of them is what is waited for, or the run is over."""
        while not self._run.done():
            for event in events("rank_0")[self._printed :]:
                self._printed += 1
                self.latest = event
                if event["kind"] != "checkpoint" and (event["kind"] != "step" or event["step"] % 5 == 0):
                    self.say(event["kind"])
                if reached(event):
                    return
            self._cluster.look_again()
            time.sleep(0.1)

    def say(self, what: str) -> None:
        """A line of the timeline."""
        workers = "■" * self.latest["world_size"]
        print(f"{time.time() - self._start:6.1f} s  {workers:<6}  step {self.latest['step']:3}  {what}", flush=True)


def run_elastic(trainer: lrs.ElasticTorchTrainer, cluster: LocalCluster) -> None:
    """Nodes join and leave while ``trainer.fit()`` runs in another thread."""
    with ThreadPoolExecutor() as pool:
        timeline = Timeline(cluster, pool.submit(trainer.fit))
        timeline.until(lambda event: event["step"] == 6)
        timeline.say("a spot node with three more places joins")
        spot_node = cluster.add_node(slots=3)
        timeline.until(lambda event: event["world_size"] == 4 and event["kind"] == "checkpoint")
        timeline.until(lambda event: event["step"] % CHECKPOINT_EVERY == 5)  # no checkpoint knows of these five steps
        timeline.say("the spot node is lost")
        cluster.remove_node(spot_node)
        write("nodes", {"kind": "kill", "step": events("rank_0")[-1]["step"], "world_size": 4})
        timeline.until(lambda event: event["kind"] == "end")
    for line in cluster.logged("stay unused")[:1]:
        print(f"\nIn the log: {line}")


def trained_ids() -> tuple[list[int], dict[int, list[int]]]:
    """The world sizes of the run, and step -> the sorted ids that it was trained on, by its latest attempt."""
    attempts: dict[tuple[int, int], dict[int, list[int]]] = {}
    for path in sorted(RUN.glob("rank_*.jsonl")):  # rank 0 first, which is in every attempt: in order of time
        began = (0, 0)
        for event in events(path.stem):
            if event["kind"] in ("start", "resume"):
                began = (event["step"], event["world_size"])
            elif event["kind"] == "step":
                attempts.setdefault(began, defaultdict(list))[event["step"]] += event["ids"]
    latest: dict[int, list[int]] = {}
    for steps in attempts.values():
        latest |= {step: sorted(ids) for step, ids in steps.items()}
    return [world_size for _, world_size in attempts], latest


def planned_ids(dataset: ray.data.Dataset, table: Table) -> dict[int, list[int]]:
    """Step -> the sorted ids of an undisturbed run, from the plan alone: nothing is streamed for it."""
    rows = table.search().with_row_id(True).select(["id"]).to_arrow()
    id_of_row = dict(zip(rows["_rowid"].to_pylist(), rows["id"].to_pylist(), strict=True))
    steps: dict[int, list[int]] = {}
    for epoch in range(EPOCHS):
        plan = lrs.plan_epoch(dataset, epoch)
        for step in range(STEPS_PER_EPOCH):
            row_ids = plan.row_ids_of_step(step, GLOBAL_BATCH_SIZE).tolist()
            steps[len(steps) + 1] = sorted(id_of_row[row_id] for row_id in row_ids)
    return steps


def main() -> int:
    """Run it all; the exit status is 0 if the world sizes were 2, 4, 2 and the batches the planned ones."""
    # The steps of this small job are short: let Ray Train look after its workers more often.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    # LanceDB warns of forks; Ray forks only to start other programs, so no harm is done.
    warnings.filterwarnings("ignore", message="lancedb fork support")
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    with LocalCluster() as cluster:
        cluster.add_node(slots=2)
        table, _ = write_digits(DATA)
        dataset = lrs.read_stream(table, num_splits=NUM_SPLITS, shuffle_seed=42).map_batches(decode)
        run_elastic(make_trainer(dataset), cluster)
        planned = planned_ids(dataset, table)
    world_sizes, trained = trained_ids()
    right = trained == planned
    print(f"\nWorld sizes: {world_sizes}. Steps: {len(trained)} of {len(planned)}.")
    print(f"{'Every' if right else 'NOT every'} global batch is that of an undisturbed run.")
    return 0 if right and world_sizes == [2, 4, 2] else 1


if __name__ == "__main__":
    sys.exit(main())
