"""Seconds of a restart: from the death of a worker to the first batch after it, and how much of it is the data side.

One run of Ray Train for each way of planning, over a table that takes a while to plan: with a planner that outlives the
workers, as it is, and with a new one at each start. A worker kills itself after each of the first checkpoints. What is
timed on the data side is what a rank waits for: its stream, its state with the plan, its first batch; the slowest rank
counts.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lance_ray_stream as lrs
from benchmarks import common
from lance_ray_stream.planner import PlannerOfRun

KEPT, ANEW = "plans kept", "planned anew"
STEPS = 5


def train(config: dict[str, Any]) -> None:
    """A few steps and a checkpoint; then rank 1 is killed, except in the last attempt."""
    clock = {"begun": time.time()}
    stream = lrs.get_stream()
    clock["stream"] = time.time()
    done = _load(stream)
    clock["state"] = time.time()
    for step, _ in enumerate(stream.iter_torch_batches(global_batch_size=config["batch"]), start=1):
        clock.setdefault("batch", time.time())
        if step == STEPS:
            break
    _save(stream, done + 1)
    Path(config["out"], f"{done}_{stream.rank}.json").write_text(json.dumps(clock))
    if done == config["kills"]:
        return
    if stream.rank == 1:
        while len(ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)) <= done:
            time.sleep(0.05)
        Path(config["out"], f"{done}.killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)  # until the other one's death ends this one too


def _save(stream: lrs.StreamIterator, done: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "state.json").write_text(json.dumps({"done": done, "stream": stream.state_dict()}))
        ray.train.report({}, checkpoint=None if stream.rank else Checkpoint.from_directory(folder))


def _load(stream: lrs.StreamIterator) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = json.loads(Path(folder, "state.json").read_text())
    stream.load_state_dict(saved["stream"])
    return int(saved["done"])


class NotKept(PlannerOfRun):
    """So that each start of the workers begins a planner of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannerOfRun:
        return PlannerOfRun()


def restarts(uri: str, args: Any, *, kept: bool) -> dict[str, list[float]]:
    """What each restart of one run took, by part."""
    config = lrs.StreamDataConfig(progress=False)
    if not kept:
        config._planner = NotKept()
    dataset = lrs.read_stream(common.open_table(uri), num_splits=args.splits)
    with common.scratch() as out:
        TorchTrainer(
            train,
            train_loop_config={"out": out, "batch": args.batch, "kills": args.repeats},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="restart", storage_path=out, failure_config=FailureConfig(max_failures=-1)),
            datasets={"train": dataset},
            dataset_config=config,
        ).fit()
        found: dict[str, list[float]] = {"whole": [], "stream": [], "state": [], "batch": [], "data": []}
        for attempt in range(1, args.repeats + 1):
            clocks = [json.loads(Path(out, f"{attempt}_{rank}.json").read_text()) for rank in range(2)]
            killed = float(Path(out, f"{attempt - 1}.killed").read_text())
            found["whole"].append(max(clock["batch"] for clock in clocks) - killed)
            found["data"].append(max(clock["batch"] - clock["begun"] for clock in clocks))
            for before, part in (("begun", "stream"), ("stream", "state"), ("state", "batch")):
                found[part].append(max(clock[part] - clock[before] for clock in clocks))
    return found


def main(argv: list[str] | None = None) -> None:
    """Parse, run, print."""
    args = common.parser(__doc__, rows=5_000_000, row_bytes=8, splits=48, batch=4_800, repeats=3, cpus=4).parse_args(
        argv
    )
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    print(common.machine())
    with common.scratch() as directory:
        uri = common.make_table(directory, rows=args.rows, row_bytes=args.row_bytes)
        with common.local_ray(args.cpus):
            found = {name: restarts(uri, args, kept=name == KEPT) for name in (KEPT, ANEW)}
    rows = []
    for name, parts in found.items():
        share = statistics.median(d / w for d, w in zip(parts["data"], parts["whole"], strict=True))
        rows.append([name, *(statistics.median(parts[part]) for part in parts), f"{share:.0%}"])
    common.print_table(
        f"A restart on 2 workers, {args.rows:,} rows in {args.splits} splits, seconds, median of {args.repeats}",
        ("planner", "death to first batch", "stream", "state, plan", "first batch", "data side", "share"),
        rows,
    )


if __name__ == "__main__":
    main()
