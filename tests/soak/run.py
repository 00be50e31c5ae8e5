"""The run itself: a cluster of real nodes, an elastic trainer on it, and what happens to both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed
from tests.elastic_cluster import LocalCluster
from tests.faults import kill_actors
from tests.soak.reads import SoakTable, with_twice
from tests.soak.schedule import MAX_WORKERS, Event, Schedule
from tests.train_loops import Config, _load, _save, write_down, written

NUM_SPLITS = 24  # divides by 1, 2, 3, 4, 6 and 8; 5 and 7 need uneven=True
GLOBAL_BATCH_SIZE = 2 * NUM_SPLITS
ROWS = 101 * NUM_SPLITS
STEPS_PER_EPOCH = 51  # the last one of each epoch is short
CHECKPOINT_EVERY = 5  # steps
STEP_S = 0.1
# How many steps the run makes before something happens again.
STEPS_BETWEEN = 6


def train(config: Config) -> None:
    """Runs on every worker; writes down what it receives, with the start of the workers that it belongs to."""
    clock = {"begun": time.time()}
    feed.FIRST_WINDOW_ROWS, datasource.MAX_WINDOW_ROWS = 12, 48  # many reads, and so many that can be killed
    stream = lrs.get_stream()
    clock["stream"] = time.time()
    step = _load(stream)
    clock["state"] = time.time()
    attempt = [time.time()]
    torch.distributed.broadcast_object_list(attempt)
    fields = {"attempt": attempt[0], "world": stream.world_size, "pid": os.getpid()}
    while not is_over(config, stream, step):
        asked = time.time()
        for batch in stream.iter_torch_batches():
            write_down(config, stream.rank, **fields, time=time.time(), step=step, ids=batch["id"].tolist())
            if clock:
                clock |= {"first_batch_s": time.time() - asked}
                write_down(config | {"run": "starts"}, stream.rank, **fields, **clock)
                clock = {}
            time.sleep(STEP_S)
            torch.distributed.barrier()  # as the gradients of a model would
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                _save(stream, step)


def is_over(config: Config, stream: lrs.StreamIterator, step: int) -> bool:
    """Whether the run ends here: at the end of an epoch, when the file ``finish`` says so; the same on all ranks."""
    over = [stream.rank == 0 and step % STEPS_PER_EPOCH == 0 and Path(config["out"], "finish").exists()]
    torch.distributed.broadcast_object_list(over)
    return over[0]


def make_trainer(out: Path, *, uneven: bool, max_failures: int) -> lrs.ElasticTorchTrainer:
    """The trainer of the run; more failures than those that are made have another reason, and end it."""
    scaling: dict[str, Any] = {"num_workers": (1, MAX_WORKERS), "elastic_resize_monitor_interval_s": 0.5}
    dataset = lrs.read_stream(SoakTable(str(out), "rows"), num_splits=NUM_SPLITS, columns=["id"])
    return lrs.ElasticTorchTrainer(
        train,
        train_loop_config={"out": str(out), "run": "run"},
        scaling_config=ScalingConfig(**scaling, resources_per_worker={"slot": 1}),
        run_config=RunConfig(
            name="soak", storage_path=str(out / "storage"), failure_config=FailureConfig(max_failures=max_failures)
        ),
        datasets={"train": dataset.map_batches(with_twice)},
        dataset_config=lrs.StreamDataConfig(uneven=uneven, global_batch_size=GLOBAL_BATCH_SIZE, progress=False),
    )


def world_size_for(places: int, *, uneven: bool) -> int:
    """The number of workers that such a cluster trains on."""
    return lrs.SplitLayout(NUM_SPLITS, uneven=uneven).world_sizes(up_to=places)[-1]


class Soak:
    """Does to a run what a schedule says, each time when the run has come on since the last time.

    Args:
        out: a folder with the table; what happens is written there.
        end: when to give up, as ``time.monotonic()``.
    """

    def __init__(self, out: Path, *, uneven: bool, end: float) -> None:
        self._out, self._uneven, self._end = out, uneven, end
        self._nodes: list[Any] = []
        self._idle: list[Any] = []
        self._kills = 0
        self.happened: list[dict[str, Any]] = []

    def run(self, schedule: Schedule) -> None:
        """All of it, to the end of the epoch in which the last thing happened."""
        with LocalCluster(head_cpus=2) as self._cluster, ThreadPoolExecutor() as pool:
            self._nodes.append(self._cluster.add_node(schedule.first_places))
            trainer = make_trainer(self._out, uneven=self._uneven, max_failures=len(schedule.events))
            run = pool.submit(trainer.fit)
            try:
                self._until_it_goes_on(run, Event(kind="start", places=schedule.first_places), time.time(), 0.0)
                for event in schedule.events:
                    self._happen(run, event)
            finally:
                Path(self._out, "finish").touch()  # also where something was wrong: the thread has to come to its end
            run.result(timeout=max(1.0, self._end - time.monotonic()))

    def latest(self) -> list[dict[str, Any]]:
        """What the ranks of the latest attempt wrote when their first batch had come; all of them or none."""
        lines = lines_of(self._out, "starts")
        newest = max((line["attempt"] for line in lines), default=0.0)
        of_newest = sorted((li for li in lines if li["attempt"] == newest), key=lambda line: line["rank"])
        return of_newest if of_newest and len(of_newest) == of_newest[0]["world"] else []

    def _happen(self, run: Future[Result], event: Event) -> None:
        if event.kind == "leave idle":
            self._idle.append(self._cluster.add_node(0))
            time.sleep(2)  # some reads go there
        while not (before := self.latest()):
            self._look(run, "all ranks have begun")
        now = time.time()
        if event.kind == "join":
            self._nodes.append(self._cluster.add_node(event.places - self.happened[-1]["places"]))
        elif event.kind == "leave":
            self._cluster.remove_node(self._nodes.pop(event.node))
        elif event.kind == "leave idle":
            self._cluster.remove_node(self._idle.pop())
        elif event.kind == "kill worker":
            os.kill(before[int(event.rank * len(before))]["pid"], signal.SIGKILL)
        elif event.kind == "kill planner":
            kill_actors("PlannerProcess")
        elif event.kind == "kill reader":
            self._kills += 1
            Path(self._out, f"kill_reader_{self._kills}.wanted").touch()
            while not Path(self._out, f"kill_reader_{self._kills}.done").exists():
                self._look(run, "a reader was killed")
        # Who waits in a collective for a worker that is gone goes on for a step at most.
        newer_than = before[0]["attempt"] if event.kind == "kill worker" else 0.0
        self._until_it_goes_on(run, event, now, newer_than)

    def _until_it_goes_on(self, run: Future[Result], event: Event, happened: float, newer_than: float) -> None:
        """Wait for some steps on as many workers as there are places for, in a new attempt where one has to begin."""
        world = world_size_for(event.places, uneven=self._uneven)

        def goes_on() -> bool:
            latest = self.latest()
            if not latest or latest[0]["world"] != world or latest[0]["attempt"] <= newer_than:
                return False
            lines = written(self._out, "run")[0]
            since = [li for li in lines if li["attempt"] == latest[0]["attempt"] and li["time"] > happened]
            return len(since) >= STEPS_BETWEEN

        while not goes_on():
            self._look(run, f"{STEPS_BETWEEN} steps on {world} workers after {event.kind!r}")
        began = self.latest()
        first = min(line["time"] for line in written(self._out, "run")[0] if line["attempt"] == began[0]["attempt"])
        fields = {"kind": event.kind, "places": event.places, "world": world, "time": happened}
        if first > happened:  # the workers were started again
            fields |= {"attempt": began[0]["attempt"], "restart_s": first - happened, "waited": waited_for(began)}
        self.happened.append(fields)
        again = f", training again after {first - happened:.1f} s" if first > happened else ""
        print(f"{len(self.happened) - 1:3} {event.kind}: {world} workers{again}", flush=True)

    def _look(self, run: Future[Result], what: str) -> None:
        """A moment's wait for ``what``, in which the cluster counts its nodes."""
        if run.done():
            raise RuntimeError(f"the run ended before {what}: {run.result()}")
        if time.monotonic() > self._end:
            raise TimeoutError(f"time is up before {what}")
        self._cluster.look_again()
        time.sleep(0.2)


def waited_for(starts: list[dict[str, Any]]) -> dict[str, float]:
    """What the slowest rank waited for data after a start: seconds for its stream, its state, its first batch."""
    parts = {
        "stream": [line["stream"] - line["begun"] for line in starts],
        "state": [line["state"] - line["stream"] for line in starts],
        "first batch": [line["first_batch_s"] for line in starts],
    }
    return {part: max(seconds) for part, seconds in parts.items()}


def lines_of(out: Path, run: str) -> list[dict[str, Any]]:
    """What all ranks wrote down, each line with its rank."""
    return [{"rank": rank, **line} for rank, lines in written(out, run).items() for line in lines]


def planned_batches(out: Path) -> Callable[[int], np.ndarray]:
    """Step of the run -> ids of its global batch in the order of delivery, from the plan alone."""
    table = SoakTable(str(out), "rows")
    rows = table.open().search().select(["id"]).with_row_id(True).limit(2**31).to_arrow()
    id_of = dict(zip(rows["_rowid"].to_pylist(), rows["id"].to_pylist(), strict=True))
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    plans: dict[int, lrs.EpochPlan] = {}
    known: dict[int, np.ndarray] = {}

    def batch(step: int) -> np.ndarray:
        if step not in known:
            epoch, in_epoch = divmod(step, STEPS_PER_EPOCH)
            if epoch not in plans:
                plans[epoch] = lrs.plan_epoch(dataset, epoch)
            row_ids = plans[epoch].row_ids_of_step(in_epoch, GLOBAL_BATCH_SIZE)
            ids = np.array([id_of[row_id] for row_id in row_ids.tolist()])
            known[step] = ids.reshape(-1, NUM_SPLITS)  # (cycles, num_splits)
        return known[step]

    return batch
